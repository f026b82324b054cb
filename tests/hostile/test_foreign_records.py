"""Foreign and broken values in the record of an accumulator and under its other keys: a typed error, no further damage.

Only what the data model fixes is forged. Reading operations must change nothing. What rounds hold is forged in
test_foreign_rounds.py, and parameters in test_foreign_parameters.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json

import msgpack
import numpy as np
import pytest
from foreign import RECORD, SPEC, Round, gradients_in, refused
from support.selection import thorough
from support.servers import contents

import redisacc
from redisacc._admin import garbage as _collecting
from redisacc._data.tree import structure as trees
from redisacc._format.keys import Keys
from redisacc._handles.existing import open_existing
from redisacc._protocol.scripts.runner import StaleSequenceError

# The fewest servers that show the difference: old versions word their errors differently.
pytestmark = [pytest.mark.forges, pytest.mark.servers("valkey", "redis62"), pytest.mark.usefixtures("little_memory")]


TYPED = (redisacc.CorruptDataError, redisacc.NotFoundError, redisacc.InvalidArgumentError)


class Operations:
    """All operations on one accumulator, of either kind, each of them harmless where it succeeds at nothing."""

    def __init__(self, acc, sparse):
        self.acc = acc
        self.sparse = sparse

    def apply(self):
        grad = ([1, 3], np.ones((2, 2), np.float32)) if self.sparse else (np.ones(600, np.float32),)
        return self.acc.apply_grad(*grad, local_step=7)

    def reads(self):
        return {
            "num_accumulated": self.acc.num_accumulated,
            "global_step": self.acc.global_step,
            "info": self.acc.info,
            "peek": self.acc.peek,
        }

    def writes(self):
        return {
            "apply": self.apply,
            "set_global_step": lambda: self.acc.set_global_step(7),
            "take": lambda: self.acc.take_grad(1, timeout=0),
        }


@pytest.fixture(params=["dense-in_place", "sparse-buffered"])
def ops(request, open_dense, open_sparse):
    sparse = request.param.startswith("sparse")
    make, shape, limit = (open_sparse, [9, 2], 0) if sparse else (open_dense, [600], 10**9)
    acc = make("float32", shape, "w", worker="ann", limits=redisacc.Limits(in_place=limit))
    acc.set_global_step(7)
    made = Operations(acc, sparse)
    for _ in range(2):
        made.apply()
    return made


def expect(call, client, *errors):
    """The call must fail with a typed error and leave the database as it is."""
    refused(call, client, ".", errors or TYPED)


def put_other_type(client, key):
    client.delete(key)
    client.rpush(key, "not ours")


@pytest.mark.parametrize("kind", ["string", "list", "set", "zset", "stream"])
def test_a_record_of_another_type(ops, client, kind):
    client.delete(RECORD)
    {
        "string": lambda: client.set(RECORD, "text"),
        "list": lambda: client.rpush(RECORD, "text"),
        "set": lambda: client.sadd(RECORD, "text"),
        "zset": lambda: client.zadd(RECORD, {"text": 1}),
        "stream": lambda: client.xadd(RECORD, {"text": "x"}),
    }[kind]()
    for call in {**ops.reads(), **ops.writes()}.values():
        expect(call, client, redisacc.CorruptDataError)
    for kind in (redisacc.ConditionalAccumulator, redisacc.SparseConditionalAccumulator):
        expect(lambda kind=kind: kind("float32", [9, 2], "w", redis=client), client, redisacc.CorruptDataError)


def test_a_foreign_hash_in_place_of_the_record(ops, client):
    client.delete(RECORD)
    client.hset(RECORD, mapping={"name": "somebody", "age": "44"})
    for call in {**ops.reads(), **ops.writes()}.values():
        expect(call, client)
    for kind in (redisacc.ConditionalAccumulator, redisacc.SparseConditionalAccumulator):
        expect(lambda kind=kind: kind("float32", [9, 2], "w", redis=client), client, redisacc.CorruptDataError)


GARBAGE = [None, b"", b"x", b"-1", b"1.5", b"1e3", b" 1", b"9" * 40, b"\xff\xfe\x00", b"{}" * 3000]
# field → values that are right there although they look like garbage
FIELDS = {
    "global_step": {b"-1"},
    "num_accumulated": set(),
    "applied": set(),
    "stale": set(),
    "repeated": set(),
    "once_per_worker": set(),
    # A record has these two only if they matter.
    "order": {None},
    "staleness": {None},
    "duplicates": set(),
    "takes": set(),
    # A record has it only if a loss was noticed.
    "losses": {None},
    "wanted": set(),
    "round_shape": set(),
    "incarnation": set(),
}


@pytest.mark.slow(keep="sparse")
@pytest.mark.servers("valkey")
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", thorough(GARBAGE, usual=[None, b"x", b"9" * 40, b"\xff\xfe\x00"]), ids=repr)
def test_garbage_in_a_field_of_the_record(ops, client, field, value):
    if value in FIELDS[field]:
        return
    if value is None:
        client.hdel(RECORD, field)
    else:
        client.hset(RECORD, field, value)
    failures = 0
    before = contents(client)
    for call in {**ops.reads(), **ops.writes()}.values():
        failed = False
        try:
            call()
        except (*TYPED, redisacc.InvalidArgumentError):
            # A shape that isn't that of our gradients is a refusal like any other.
            failed = True
            failures += 1
        after = contents(client)
        if f"{RECORD}:taken".encode() in after:
            # The round was granted before its wrong shape could be noticed: it is kept.
            assert gradients_in(after) == gradients_in(before)
            break
        assert after == before or not failed
        before = after
    assert failures


@pytest.mark.slow(keep="None|x")
@pytest.mark.servers("valkey")
@pytest.mark.parametrize("field", ["kind", "dtype", "shape", "reduction_type", "format", "chunk", "lease_ms"])
@pytest.mark.parametrize("value", GARBAGE, ids=repr)
def test_garbage_in_what_an_accumulator_was_created_as(open_dense, client, field, value):
    acc = open_dense("float32", [2], "w")
    acc.apply_grad([1.0, 2.0])
    if value is None:
        client.hdel(RECORD, field)
    else:
        client.hset(RECORD, field, value)
    before = contents(client)
    # Opening always reads it.
    with pytest.raises(TYPED):
        redisacc.ConditionalAccumulator("float32", [2], "w", redis=client)
    assert contents(client) == before
    # An open handle may go on without looking at it; nothing but a typed error may come of it.
    for call in (acc.info, acc.peek, acc.num_accumulated, lambda: acc.apply_grad([1.0, 2.0])):
        try:
            call()
        except TYPED:
            assert contents(client) == before


@pytest.mark.parametrize("created", [b"9" * 15, b"-1", b"x", None])
def test_garbage_in_the_time_of_creation(open_dense, client, created):
    acc = open_dense("float32", [2], "w")
    assert client.hexists(RECORD, "created_ms")
    if created is None:
        client.hdel(RECORD, "created_ms")
    else:
        client.hset(RECORD, "created_ms", created)
    expect(acc.info, client, redisacc.CorruptDataError)


@pytest.mark.parametrize("key", ["sums", "buffered", "workers", "sessions", "queue", "takers", "taken"])
def test_another_type_under_each_key(ops, client, key):
    if key in ("sums", "buffered") and not client.exists(f"{RECORD}:{key}"):
        return
    put_other_type(client, f"{RECORD}:{key}")
    before = contents(client)
    failures = 0
    for call in {**ops.reads(), **ops.writes()}.values():
        try:
            call()
        except redisacc.CorruptDataError:
            failures += 1
            assert contents(client) == before
        else:
            # It doesn't touch that key, and may have done its work.
            before = contents(client)
    assert failures
    assert client.lrange(f"{RECORD}:{key}", 0, -1) == [b"not ours"]


def test_missing_sums(ops, client):
    # The count says 2, and nothing is there: evicted, or removed by hand.
    for key in ("sums", "buffered"):
        client.delete(f"{RECORD}:{key}")
    for shape in (None, b"[1000000000000]", b"[9223372036854775807,2]"):
        if shape:
            client.hset(RECORD, "round_shape", shape)
        if ops.sparse and shape is None:
            # Two gradients without rows would look the same.
            continue
        if ops.sparse:
            with contextlib.suppress(redisacc.CorruptDataError):
                ops.acc.peek()
        else:
            expect(ops.acc.peek, client, redisacc.CorruptDataError)


@pytest.mark.parametrize("count", [b"x", b"-1", b"1.5", b"", b"9" * 30, b"\xff"])
def test_garbage_among_the_workers(ops, client, count):
    client.hset(f"{RECORD}:workers", "ann", count)
    for call in (ops.acc.peek, ops.acc.info, ops.apply):
        expect(call, client, redisacc.CorruptDataError)


ENTRIES = [
    b"",
    b"x",
    b"9",
    b"-1 applied 0 0 0 0 0 w",
    b"1e3 applied 0 0 0 0 0 w",
    b"\xff" * 40,
    b"9" * 40 + b" applied 0 0 0 0 0 w",
]
ENTRIES += [b"1 applied 0 0", b"1 applied x 0 0 0 0 w", b"1 exploded 0 0 0 x 0 w"]


@pytest.mark.parametrize("entry", ENTRIES, ids=repr)
def test_garbage_in_the_entries_of_clients(ops, client, entry):
    clients = f"{RECORD}:sessions"
    for field in client.hkeys(clients):
        client.hset(clients, field, entry)
    for call in (ops.apply, lambda: ops.acc.set_global_step(7)):
        expect(call, client, redisacc.CorruptDataError)
    # A session that isn't listed there may continue.
    assert ops.acc.num_accumulated() == 2


def test_an_entry_that_repeats_our_sequence_number_with_a_garbled_outcome(ops, client):
    clients = f"{RECORD}:sessions"
    (field,) = client.hkeys(clients)
    number = int(client.hget(clients, field).split(b" ", 1)[0])
    client.hset(clients, field, b"%d exploded 7 2 0 1 0 w" % (number + 1))
    with pytest.raises(redisacc.CorruptDataError):
        ops.apply()
    assert ops.acc.num_accumulated() == 2
    client.hset(clients, field, b"%d applied 7 2 0 1 0 w" % (number + 10))
    # The server has seen later requests of this session.
    expect(ops.apply, client, StaleSequenceError)


def test_garbage_in_the_queue(ops, client):
    # Tokens without a taker: they have no lease, and are passed over.
    client.zadd(f"{RECORD}:queue", {"nobody": 0, "\x00\xff": 1, "x" * 1000: 2})
    client.hset(f"{RECORD}:takers", mapping={"\x00\xff": "garbage", "other": ""})
    with contextlib.suppress(redisacc.CorruptDataError):
        ops.acc.info()
    assert ops.acc.take_grad(1, timeout=5) is not None


@pytest.mark.parametrize(
    "taker", [b"", b"x", b"1", b"1 x ann", b"x 99999999999999 ann", b"9" * 30 + b" 1 ann", b"\xff\xfe"]
)
def test_garbage_about_a_taker_does_not_block_the_others(ops, client, taker):
    client.zadd(f"{RECORD}:queue", {"dead": 0})
    client.hset(f"{RECORD}:takers", "dead", taker)
    with contextlib.suppress(redisacc.CorruptDataError):
        ops.acc.info()
    assert ops.acc.take_grad(1, timeout=5) is not None


TAKEN = [
    b"",
    b"x",
    b"granted",
    b"granted x 1 1 [2] w",
    b"granted 0 x 1 [2] w",
    b"granted 0 1 x [2] w",
    b"granted 0 1 1 x w",
]
TAKEN += [b"granted 0 1 1 [-1] w", b"granted 0 1 1 [99999999999999] w", b"exploded 0 1 1 [2] w", b"\xff" * 30]
TAKEN += [b"granted 0 1 999999999999999999 [2] w", b"granted 0 1 1 unknown w", b"granted 0 1 1  w"]


@pytest.mark.parametrize("entry", TAKEN, ids=repr)
def test_garbage_among_the_taken_rounds(ops, client, entry):
    client.hset(f"{RECORD}:taken", "token", entry)
    before = contents(client)
    failures = 0
    for call in (ops.acc.info, lambda: ops.acc.recover().__enter__(), lambda: ops.acc.recover("token").__enter__()):
        try:
            call()
        except redisacc.CorruptDataError:
            failures += 1
    # A round of sparse gradients without rows may have any shape of row, and needs no data.
    assert failures or (ops.sparse and b"[99" in entry)
    # At most handed to another taker: everything that belongs to it is still there, and the accumulator works.
    after = contents(client)
    assert len(after[f"{RECORD}:taken".encode()]) == 1
    handed = (f"{RECORD}:taken".encode(), f"{RECORD}:recovered".encode())
    assert {key: value for key, value in after.items() if key not in handed} == {
        key: value for key, value in before.items() if key not in handed
    }
    assert ops.apply()
    assert ops.acc.take_grad(1) is not None


@pytest.mark.parametrize("state", ["granted", "acknowledged"])
def test_a_taken_round_without_a_token_is_not_the_current_one(ops, client, state):
    client.hset(f"{RECORD}:taken", "", f"{state} 0 1 1 [2] w")
    before = contents(client)

    def collect():
        for leftover in _collecting.find_garbage(ops.acc._transport):
            _collecting.remove_garbage(ops.acc._transport, leftover)

    for call in (lambda: ops.acc.recover().__enter__(), collect, ops.acc.info):
        with contextlib.suppress(redisacc.CorruptDataError):
            call()
    after = contents(client)
    for there in (before, after):
        there.pop(f"{RECORD}:taken".encode(), None)
        there.pop(f"{RECORD}:recovered".encode(), None)
    assert after == before
    assert ops.apply()
    assert ops.acc.take_grad(1) is not None


def test_what_is_corrupt_can_be_deleted(ops, client):
    put_other_type(client, f"{RECORD}:workers")
    for identity in client.hkeys(f"{RECORD}:buffered"):
        client.hset(f"{RECORD}:buffered", identity, b"garbage")
    client.hset(RECORD, "num_accumulated", "many")
    ops.acc.delete()
    left = [key for key in client.scan_iter() if b":staged:" not in key]
    assert left == []


@pytest.mark.parametrize("key", ["sums", "buffered", "inline", "workers", "sessions", "queue", "takers", "taken"])
def test_other_types_can_be_deleted(ops, client, key):
    put_other_type(client, f"{RECORD}:{key}")
    ops.acc.delete()
    left = {field for field in client.scan_iter() if b":part:" not in field and b":staged:" not in field}
    assert left == set()


# None is the shape of any array, and the first two would exhaust a parser that recurses.
SHAPES = [
    "[" * 4000,
    "[" * 10_000,
    "[1," * 3000,
    "[" + "1," * 300 + "1]",
    "[" + "1," * 99 + "1]",
    "[" + "9" * 5000 + "]",
]


@pytest.mark.servers("valkey")
@pytest.mark.parametrize("text", SHAPES, ids=range(len(SHAPES)))
def test_shapes_that_are_deep_or_long(ops, client, text):
    client.hset(RECORD, "round_shape", text)
    expect(ops.acc.info, client, redisacc.CorruptDataError)
    expect(ops.acc.peek, client, redisacc.CorruptDataError)
    with pytest.raises(redisacc.CorruptDataError):
        ops.acc.take_grad(1, timeout=0)
    # The round may have been granted before its shape was read, but it is kept.
    held = [key for key in contents(client) if key.endswith((b":sums", b":inline"))]
    assert held
    with pytest.raises(redisacc.CorruptDataError), ops.acc.recover():
        pass
    assert len([key for key in contents(client) if key.endswith((b":sums", b":inline"))]) == len(held)
    if text.count(",") != 99:
        # More dimensions may be declared than an array can have.
        client.hset(RECORD, "shape", text)
        expect(ops.acc.info, client, redisacc.CorruptDataError)
    ops.acc.delete()
    assert client.exists(RECORD) == 0


def test_a_listing_of_names_that_is_none(client, open_dense):
    client.set("redisacc:names", "not a set")
    with pytest.raises(redisacc.CorruptDataError):
        open_dense("float32", [1], "w")
    assert client.get("redisacc:names") == b"not a set"


@pytest.mark.parametrize("limit", [0, 10**9])
def test_a_server_that_is_out_of_memory(real_client, open_dense, limit):
    acc = open_dense("float32", [1], "w", limits=redisacc.Limits(in_place=limit))
    try:
        real_client.config_set("maxmemory", 1)
        with pytest.raises(redisacc.ServerError, match="maxmemory"):
            acc.apply_grad([1.0])
    finally:
        real_client.config_set("maxmemory", 0)
    assert acc.num_accumulated() == 0
    assert acc.apply_grad([1.0])
    assert acc.num_accumulated() == 1


# The structure

RIGHT = '{"d":"float32 [2,2]","i":"int32 [3]","s":"sparse float32 [9,2]"}'
STRUCTURES = {
    "missing": None,
    "empty": b"",
    "binary": b"\xff\xfe\x00",
    "escape": b'{"\x1b]0;pwn\x07pwn":"float32 []"}',
    "escaped escape": b'{"\\u001b[31mpwn":"float32 []"}',
    "no JSON": b"{" * 3000,
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "65 levels": b"[" * 65 + b'"float32 []"' + b"]" * 65,
    "number": b"7",
    "null": b"null",
    "no leaf": b"{}",
    "duplicate keys": b'{"d":"float32 [2,2]",' + RIGHT[1:].encode(),
    "spaces": RIGHT.replace(",", ", ").encode(),
    "unknown dtype": RIGHT.replace("int32", "int31").encode(),
    "unknown dimension": RIGHT.replace("[3]", "[-1]").encode(),
    "huge": RIGHT.replace("[3]", "[9223372036854775807]").encode(),
    "too many dimensions": RIGHT.replace("[3]", f"[{'1,' * 200}1]").encode(),
    "lone surrogate": b'["\\ud800"]',
    "a leaf named like a node": b'{"d":"a dict"}',
    "many leaves": json.dumps(["float32 []"] * 100_001, separators=(",", ":")).encode(),
}


@pytest.mark.parametrize("case", STRUCTURES)
def test_a_forged_structure(opened, client, open_tree, case):
    acc = opened("tree", "in_place")
    assert client.hget(RECORD, "tree") == RIGHT.encode()
    if STRUCTURES[case] is None:
        client.hdel(RECORD, "tree")
    else:
        client.hset(RECORD, "tree", STRUCTURES[case])
    refused(lambda: open_existing(Keys("w"), redis=client), client)
    refused(
        lambda: open_tree(SPEC, "w"),
        client,
        match="w",
        error=(redisacc.CorruptDataError, redisacc.InvalidArgumentError),
    )
    # A handle that was opened before does not look at it again.
    assert acc.take_grad(2)["i"].tolist() == [1, 2, 3]
    acc.delete()


def test_a_structure_that_is_too_long(opened, client, monkeypatch):
    opened("tree", "in_place")
    monkeypatch.setattr(trees, "LONGEST_STRUCTURE", len(RIGHT))
    open_existing(Keys("w"), redis=client).close()
    monkeypatch.setattr(trees, "LONGEST_STRUCTURE", len(RIGHT) - 1)
    refused(lambda: open_existing(Keys("w"), redis=client), client, f"structure of a tree has {len(RIGHT)} characters")


def test_another_structure_of_the_same_name(opened, client):
    """Whoever opens the forged tree cannot read the gradients of the true one."""
    acc = opened("tree", "buffered_inline")
    client.hset(RECORD, "tree", RIGHT.replace("[3]", "[4]"))
    other = open_existing(Keys("w"), redis=client)
    refused(other.peek, client)
    client.hset(RECORD, "tree", RIGHT)
    assert acc.take_grad(2)["i"].tolist() == [1, 2, 3]
    other.close()


@pytest.mark.parametrize("value", [None, b"", b"one", b"\x1b[31m", b"zero\n", b"x" * 10_000])
def test_garbage_in_missing(opened, client, open_tree, value):
    acc = opened("tree", "in_place")
    if value is None:
        client.hdel(RECORD, "missing")
    else:
        client.hset(RECORD, "missing", value)
    for call in (
        lambda: open_existing(Keys("w"), redis=client),
        lambda: open_tree(SPEC, "w", mean=redisacc.Mean(missing="skip")),
    ):
        refused(call, client, match="missing", error=(redisacc.CorruptDataError, redisacc.InvalidArgumentError))
    acc.delete()


@pytest.mark.parametrize("kind", [b"dense", b"sparse", b"Tree", b"tree\n"])
def test_another_kind(opened, client, open_tree, kind):
    acc = opened("tree", "in_place")
    client.hset(RECORD, "kind", kind)
    refused(lambda: open_existing(Keys("w"), redis=client), client)
    refused(
        lambda: open_tree(SPEC, "w", mean=redisacc.Mean(missing="skip")),
        client,
        match="kind",
        error=redisacc.RedisAccError,
    )
    acc.delete()


def test_an_array_whose_record_says_that_it_is_a_tree(client, open_dense):
    dense = open_dense("float32", [2], "array")
    client.hset("redisacc:{array}", mapping={"kind": "tree", "shape": "1 leaf", "tree": '["float32 [2]"]'})
    dense.apply_grad([1, 2])
    forged = open_existing(Keys("array"), redis=client)
    refused(forged.peek, client, match=r"redisacc:\{array\}")
    forged.close()
    client.hset("redisacc:{array}", mapping={"kind": "dense", "shape": "[2]", "tree": ""})
    dense.delete()


# What is unusual and right


@pytest.mark.parametrize("parts", [[76], [16, 60], [8, 24, 44], [32, 3, 41], [31, 45], [36, 40], [1] * 76])
def test_a_gradient_that_is_cut_elsewhere_is_read_all_the_same(opened, client, parts):
    acc = opened("tree", "buffered_parts")
    expected = acc.peek().gradient
    held = Round(client, acc)
    for number, field in enumerate(held.ids):
        keys = [f"{RECORD}:part:{field.decode()}:{part}" for part in range(2)]
        data = b"".join(client.mget(keys))
        client.delete(*keys)
        for part, (start, stop) in enumerate(itertools.pairwise(np.cumsum([0, *parts]).tolist())):
            client.set(f"{RECORD}:part:{field.decode()}:{part}", data[start:stop])
        held.write_header({**held.header, "parts": parts}, number)
    found = acc.take_grad(2, timeout=5)
    assert found["d"].tolist() == expected["d"].tolist() == [[1, 1], [1, 1]]
    assert found["s"].values.tolist() == expected["s"].values.tolist()
    acc.delete()


def test_a_header_that_promises_too_much(opened, client):
    acc = opened("int8", "buffered_inline")
    held = Round(client, acc)
    held.write_header({**held.header, "sections": [["int8", [2**40]]]})
    client.hset(RECORD, "round_shape", f"[{2**40}]")
    refused(acc.peek, client, r"redisacc:{w}:")


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int64"])
def test_an_encoding_where_nothing_is_encoded(open_dense, client, dtype):
    acc = open_dense(dtype, [600], "w", limits=redisacc.Limits(in_place=0))
    acc.apply_grad(np.ones(600, acc.dtype))
    ((identity, entry),) = client.hgetall(f"{RECORD}:buffered").items()
    header = {**msgpack.unpackb(entry.partition(b" ")[2]), "sections": [["int8", [600]]]}
    client.hset(f"{RECORD}:buffered", identity, b"0 " + msgpack.packb(header))
    before = contents(client)
    with pytest.raises(
        redisacc.CorruptDataError, match="it stores elements as 'int8', and this version of redisacc reads"
    ):
        acc.peek()
    assert contents(client) == before


def test_any_bytes_in_blocks_are_numbers(open_dense, client):
    """-128 is no step that redisacc writes, but a number like any other. The padding of the last block is ignored."""
    acc = open_dense("float32", [600], "w", limits=redisacc.Limits(in_place=0), encoding="int8")
    acc.apply_grad(np.ones(600, np.float32))
    ((identity, data),) = client.hgetall(f"{RECORD}:inline").items()
    block = np.array([0.5], "<f4").tobytes() + b"\x80" * 256
    client.hset(f"{RECORD}:inline", identity, block * (len(data) // len(block)))
    assert (acc.take_grad(1) == -64).all()
