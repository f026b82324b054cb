"""All parsers, without a server: for any input a typed error or a result, and quickly."""

import socket
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import redis
from support.memory import limited_memory
from support.searching import searching
from support.strategies import NUMBER_TEXTS, REPLIES, TEXTS, headers, structures

import redisacc
from redisacc._arrays import dtypes
from redisacc._arrays.spec import AccumulatorSpec, described_by
from redisacc._arrays.trees import difference, parse_structure
from redisacc._clock import running_time
from redisacc._format import buffered as buffered_format
from redisacc._format import entries, in_place
from redisacc._format import stored_text as _shapes
from redisacc._format.keys import Keys
from redisacc._format.record import FIELDS, FORMAT, Record
from redisacc._wire import sockets
from redisacc._wire.faults import FAULTS

KEYS = Keys("w")


@pytest.fixture
def search(pytestconfig):
    return searching(pytestconfig)


@pytest.fixture(autouse=True)
def little_memory():
    """An allocation of gigabytes, because a forged length says so, is an error here and not a slow machine."""
    with limited_memory(2 * 2**30):
        yield


def spec_of(dtype, kind):
    """What an accumulator was created as: dense with rows of one element, sparse with indices below 5, or both."""
    if kind == "tree":
        spec = {"d": (dtype, (2,)), "s": redisacc.Sparse(dtype, (5, 2))}
        return AccumulatorSpec.of_tree(*described_by(spec), reduction_type="MEAN", missing="skip", chunk=1)
    shape = (5, None) if kind == "sparse" else None
    return AccumulatorSpec.of_array(kind, dtypes.TABLE[dtype], shape, reduction_type="MEAN", chunk=1)


def typed(call, *errors):
    """Returns the result, or None after a typed error."""
    try:
        return call()
    except (redisacc.RedisAccError, *errors):
        return None


@pytest.mark.slow(keep="dense")
@pytest.mark.parametrize("kind", ["dense", "sparse", "tree"])
def test_headers(search, kind):
    shape = () if kind == "tree" else (2,)

    def one(identity, entry):
        found = typed(lambda: buffered_format.parse(KEYS, {identity: entry}, spec_of("float32", kind), shape))
        for buffered in found or ():
            # A parser that trusts it allocates that much memory.
            assert buffered.nbytes <= 2**63
            assert all(length > 0 for length in buffered.lengths)
        number = buffered_format.number_of_parts(entry)
        assert number is None or number >= 0

    search(one, st.one_of(st.just(b"ab-1"), TEXTS), headers(), examples=40)


TREE_FIELDS = [b"sparse:s:0", b"sparse:s:4", b"present:0", b"present:1"]


@pytest.mark.slow(keep="float32")
@pytest.mark.parametrize("dtype", ["float32", "int32", "complex128"])
def test_rows(search, dtype):
    kind = dtypes.TABLE[dtype]
    width = kind.in_place_dtype.itemsize * kind.components

    def row(count, numbers):
        return count.to_bytes(8, "little") + b"".join(numbers)

    rows = st.builds(
        row,
        st.sampled_from([0, 1, 2, 3, 2**53, 2**63, 2**64 - 1]),
        st.lists(st.binary(min_size=width, max_size=width), min_size=1, max_size=3),
    )
    totals = st.one_of(TEXTS, st.tuples(NUMBER_TEXTS, NUMBER_TEXTS).map(b" ".join), st.sampled_from([b"1 1", b"2 2"]))

    def one(fields, total):
        fields = {**fields, b"total": total}
        for of, shape in (("dense", (2,)), ("sparse", (1,)), ("tree", ())):
            spec = spec_of(dtype, of)
            round_sum = spec.empty_sum(shape, where="w")
            unpacked = typed(lambda spec=spec, shape=shape: in_place.unpack(fields, spec, shape, "w"))
            if unpacked is not None:
                round_sum.add(unpacked)
            typed(lambda spec=spec, round_sum=round_sum: spec.result(round_sum, 2))

    dense = [f"dense:{dtype}:{number}".encode() for number in (0, 1)]
    fields = st.dictionaries(
        st.one_of(st.sampled_from(dense), st.sampled_from([b"0", b"1", b"4", *TREE_FIELDS]), TEXTS),
        st.one_of(rows, TEXTS),
        max_size=3,
    )
    search(one, fields, totals, examples=40)


def test_structures(search):
    right = spec_of("float32", "tree")

    def one(value):
        text = typed(value.decode, UnicodeDecodeError)
        parsed = None if text is None else typed(lambda: AccumulatorSpec.parse(text, reduction_type="SUM"), ValueError)
        if parsed is not None:
            # Whatever is accepted is what redisacc writes, and an accumulator can be opened with it.
            assert parsed.schema["tree"] == text
            structure, described = described_by(parsed.tree)
            assert AccumulatorSpec.of_tree(structure, described, reduction_type="SUM").schema == parsed.schema
            assert parsed.empty_sum((), where="w").number == 0
        if text is not None:
            wanted = right.schema["tree"]
            typed(lambda: difference(parse_structure(text), parse_structure(wanted)), ValueError)

    search(one, st.one_of(structures(), TEXTS), examples=100)


def test_records(search):
    right = {
        "format": FORMAT.encode(), "global_step": b"0", "kind": b"dense", "dtype": b"float32", "shape": b"[2]",
        "reduction_type": b"SUM", "incarnation": b"x", "round_shape": b"[2]",
    }  # fmt: skip

    def one(reply, changed):
        typed(lambda: Record(KEYS, reply))
        fields = [changed.get(name, right.get(name, b"0")) for name in FIELDS]
        record = typed(lambda: Record(KEYS, fields))
        if record is not None:
            assert -(2**63) <= record.global_step < 2**63

    changed = st.dictionaries(st.sampled_from(FIELDS), st.one_of(st.none(), TEXTS), max_size=3)
    search(one, REPLIES, changed, examples=40)


def test_shapes_takers_rounds_and_workers(search):
    def one(name, text):
        typed(lambda: entries.parse_taken(KEYS, name, text))
        typed(lambda: entries.parse_waiting(KEYS, name, text))
        typed(lambda: entries.parse_workers({name: text}, "w"))
        typed(lambda: _shapes.parse_shape(text.decode(errors="replace")), ValueError)
        shape = typed(lambda: _shapes.round_shape_of(KEYS.record, text.decode(errors="replace")))
        if shape is not None:
            # numpy accepts it, and so does code that computes its size.
            np.broadcast_to(np.float64(0), shape)

    search(one, TEXTS, TEXTS, examples=50)


@pytest.mark.parametrize(
    "text", [f"[{2**62},4]", f"[0,{2**62},4]", "[1,-1]", "[01]", "unknown", "[" + "1," * 300 + "1]"]
)
def test_no_round_has_this_shape(text):
    assert _shapes.round_shape_of(KEYS.record, "[2,3]") == (2, 3)
    with pytest.raises(redisacc.CorruptDataError, match=r"round_shape holds"):
        _shapes.round_shape_of(KEYS.record, text)


# The framing is the server's own and trusted not to announce more than it sends; what it frames is not.
RESP = st.one_of(
    st.binary(max_size=60).filter(lambda data: not {*b"*%~>|"} & {*data}),
    st.lists(
        st.sampled_from(
            [
                *(
                    b"$",
                    b"*2",
                    b"+",
                    b"-",
                    b":",
                    b"_",
                    b"#t",
                    b",1.5",
                    b"(9",
                    b"~1",
                    b">1",
                    b"=5",
                    b"!3",
                    b"$-1",
                    b"*-1",
                ),
                *(b"$3\r\nabc", b"$99999999999999999999", b"$" + b"9" * 5000, b"$5\r\nab", b"-OOM x", b"-LOADING x"),
                *(b"-NOSCRIPT x", b"-", b"\r\n", b"\n", b"3", b"abc", b"-1", b"$4\r\nabcd"),
            ]
        ),
        max_size=8,
    ).map(b"\r\n".join),
)


class Wanted:
    """Strings of these lengths."""

    lanes = 1

    def __init__(self, *lengths):
        self._lengths = list(lengths)

    def wanted(self):
        return [SimpleNamespace(key=str(number), lane=0) for number in range(len(self._lengths))]

    def begin(self, arrival, length):
        if length != self._lengths[0]:
            raise redisacc.CorruptDataError("another length")
        return memoryview(bytearray(length))

    def missing(self, arrival):
        raise redisacc.CorruptDataError("missing")

    def finish(self, arrival):
        self._lengths.pop(0)

    def more(self):
        return []


def test_replies_on_the_wire(search):
    def one(data, whole):
        data += b"\r\n" if whole else b""
        for what in ("exchange", "fetch"):
            ours, theirs = socket.socketpair()
            connection = redis.UnixDomainSocketConnection(path="nowhere")
            connection._sock = ours
            try:
                theirs.sendall(data)
                theirs.shutdown(socket.SHUT_WR)
                fast = sockets.SocketConnection(connection, ours)
                deadline = running_time() + 5
                try:
                    if what == "exchange":
                        fast.exchange([("PING",), ("PING",)], deadline)
                    else:
                        fast.fetch(Wanted(3, 4), deadline)
                except (*FAULTS, OSError, redisacc.RedisAccError):
                    # Errors that a node or a transport treats as a broken connection, or as a refusal.
                    pass
                assert running_time() < deadline
            finally:
                connection._sock = None
                ours.close()
                theirs.close()

    search(one, RESP, st.booleans(), examples=50)
