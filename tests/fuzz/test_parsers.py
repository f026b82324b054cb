"""All that parses, without a server: whatever it is given, a typed error or a result, and in no time."""

from __future__ import annotations

import socket
import time
from collections import deque

import hypothesis.strategies as st
import numpy as np
import pytest
import redis
from strategies import NUMBER_TEXTS, REPLIES, TEXTS, headers

import redisacc
from redisacc import _dtypes, _info, _parked, _rounds, _shapes, _sums, _taking, _totals, _wire
from redisacc._clients import Client
from redisacc._events import Hub, Wake, _Channel
from redisacc._keys import Keys
from redisacc._scripts import Request, Schema, Scripts

KEYS = Keys("w")
FIELDS = st.dictionaries(TEXTS, TEXTS, max_size=5)


def typed(call, *errors):
    """The result, or None where a typed error said that there is none."""
    try:
        return call()
    except (redisacc.RedisAccError, *errors):
        return None


@pytest.mark.parametrize("sparse", [False, True])
def test_headers(search, sparse):
    def one(identity, entry):
        found = typed(
            lambda: _parked.parse(
                KEYS, {identity: entry}, dtype=_dtypes.TABLE["float32"], sparse=sparse, round_shape=(2,)
            )
        )
        for parked in found or ():
            # Whoever believes it sets so much memory aside.
            assert parked.nbytes <= 2**63
            assert all(length > 0 for length in parked.lengths)
        number = _parked.number_of_parts(entry)
        assert number is None or number >= 0

    search(one, st.one_of(st.just(b"ab-1"), TEXTS), headers(), examples=40)


@pytest.mark.parametrize("dtype", ["float32", "int32", "complex128"])
def test_rows(search, dtype):
    kind = _dtypes.TABLE[dtype]
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
        dense = _totals.DenseTotal(kind, (2,), chunk=1, where="w")
        sparse = _totals.SparseTotal(kind, (1,), bound=5, where="w")
        for each in (dense, sparse):
            typed(lambda each=each: each.add_sums(fields))
            typed(lambda each=each: each.result("MEAN", 2))

    fields = st.dictionaries(st.one_of(st.sampled_from([b"0", b"1", b"4"]), TEXTS), st.one_of(rows, TEXTS), max_size=3)
    search(one, fields, totals, examples=40)


def test_records(search):
    right = {
        "global_step": b"0", "kind": b"dense", "dtype": b"float32", "shape": b"[2]", "reduction_type": b"SUM",
        "incarnation": b"x", "round_shape": b"[2]",
    }  # fmt: skip

    def one(reply, changed):
        typed(lambda: _info.Record(KEYS, reply))
        fields = [changed.get(name, right.get(name, b"0")) for name in _info.Record.FIELDS]
        record = typed(lambda: _info.Record(KEYS, fields))
        if record is not None:
            assert -(2**63) <= record.global_step < 2**63

    changed = st.dictionaries(st.sampled_from(_info.Record.FIELDS), st.one_of(st.none(), TEXTS), max_size=3)
    search(one, REPLIES, changed, examples=40)


def test_shapes_takers_rounds_and_workers(search):
    def one(name, text):
        typed(lambda: _info.parse_taken(KEYS, name, text))
        typed(lambda: _info._waiting(KEYS, name, text))
        typed(lambda: _rounds.parse_workers({name: text}, "w"))
        typed(lambda: _shapes.parse_shape(KEYS, text.decode(errors="replace")))
        shape = typed(lambda: _shapes.round_shape_of(KEYS, text.decode(errors="replace")))
        if shape is not None:
            # numpy takes it, and so does whoever asks how large it would be.
            np.broadcast_to(np.float64(0), shape)

    search(one, TEXTS, TEXTS, examples=50)


class Replaying:
    """A link that replies what it is told, however often it is asked."""

    def __init__(self, reply):
        self._reply = reply

    def call(self, *command, **options):
        return self._reply

    def pipeline(self, commands, **options):
        return [self._reply for _ in commands]

    def run(self, *args, **options):
        return self.run_and_read(*args, **options)[0]

    def prepare(self, script, keys, args, *, after=()):
        return after

    def repeat(self, call, *, patience=1.0):
        return self.run_and_read(None, (), (), after=call)

    def run_and_read(self, script, keys, args, *, before=(), after=(), patience=1.0):
        # As the real one checks.
        if not isinstance(self._reply, list) or not self._reply:
            raise redisacc.CorruptDataError("no reply of a script")
        items = [item if isinstance(item, bytes) else str(item).encode() for item in self._reply]
        return items, [self._reply for _ in after]


def test_replies_of_scripts(search):
    request = Request(Client(0), 1, "w", 0, (2,))
    schema = Schema("1", "dense", "float32", "[2]", "SUM")

    def one(reply):
        scripts = Scripts(Replaying(reply), KEYS, incarnation="x", min_replicas=1)
        for call in (
            lambda: scripts.open(incarnation="x", schema=schema, chunk=1, lease_ms=0, parked_limit=0),
            lambda: scripts.apply(request, _sums.Packed(b"0", b"1234", 4), _dtypes.TABLE["float32"]),
            lambda: scripts.park(request, gradient="g", header=b"h", data=b"d", lengths=[], stage=()),
            scripts.take(token="t", client=Client(0), sequence=1, num_required=1, lease_ms=1, taker="w"),
            lambda: scripts.settle(client=Client(0), sequence=1, worker="w"),
            lambda: scripts.leave(token="t", replicated=True),
            lambda: scripts.acknowledge(token="t", parts=(), more=False),
            lambda: scripts.recover(old="o", token="t", taker="w"),
            lambda: scripts.set_global_step(client=Client(0), sequence=1, worker="w", new_global_step=1),
            lambda: scripts.delete(finish=True),
        ):
            typed(call)
        # The cursor is always the same one: it must not be followed for ever.
        if not (
            isinstance(reply, list) and reply and isinstance(reply[0], (int, bytes)) and not isinstance(reply[0], bool)
        ):
            typed(lambda: _rounds.scan(Replaying(reply), "w"))

    search(one, st.one_of(REPLIES, st.lists(TEXTS, min_size=1, max_size=12)), examples=40)


def test_events(search):
    class Nobody:
        pass

    def one(text, message):
        wait = _taking.Wait.__new__(_taking.Wait)
        wait.num_required = 3
        wait._heard, wait.wake, wait._look_now = deque(), Wake(), False
        wait.on_event(text[:1024].decode(errors="replace"))
        assert len(wait._heard) <= 2
        link = Nobody()
        hub = Hub(link)
        heard = []
        hub._channels["c"] = _channel(heard)
        hub._hand_out(message)
        hub._hand_out([b"message", b"c", text])
        assert heard
        assert len(heard[-1]) <= 1024

    words = st.lists(
        st.sampled_from([b"taken", b"applied", b"count=2", b"count=9" * 9, b"parked=" + b"x" * 99, b"step=1"])
    )
    search(one, st.one_of(TEXTS, words.map(b" ".join)), REPLIES, examples=40)


def _channel(heard):
    channel = _Channel()
    channel.listeners.append(heard.append)
    return channel


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

    def __init__(self, *lengths):
        self._lengths = list(lengths)

    def wanted(self):
        return [str(number) for number in range(len(self._lengths))]

    def expected(self):
        return memoryview(bytearray(self._lengths[0]))

    def begin(self, length):
        if length != self._lengths[0]:
            raise redisacc.CorruptDataError("another length")
        return self.expected()

    def finish(self):
        self._lengths.pop(0)


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
                wire = _wire.Plain(connection, ours)
                give_up = time.monotonic() + 5
                try:
                    if what == "exchange":
                        wire.exchange([("PING",), ("PING",)], give_up)
                    else:
                        wire.fetch(Wanted(3, 4), give_up)
                except (redis.RedisError, OSError, redisacc.RedisAccError):
                    # What a link takes for a broken connection, or for a refusal.
                    pass
                assert time.monotonic() < give_up
            finally:
                connection._sock = None
                ours.close()
                theirs.close()

    search(one, RESP, st.booleans(), examples=50)


def test_packed_gradients_come_back(search):
    def one(values):
        gradient = _parked.Gradient(np.array(values, np.float32))
        packed = _sums.pack(gradient, _dtypes.TABLE["float32"], 2)
        assert bytes(packed.rows) == gradient.values.tobytes()

    search(one, st.lists(st.floats(width=32), max_size=9), examples=50)
