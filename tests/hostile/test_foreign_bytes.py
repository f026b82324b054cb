"""Foreign and broken values under our keys: a typed error, no hang, no huge allocation, and no further damage.

Only what the data model fixes is forged: the keys, the fields of the record, that rows are packed, that a header says
what parts there are. Reading operations must change nothing. A take that meets a round it can't read has been
granted by then: that round must stay listed and complete under its token.
"""

from __future__ import annotations

import contextlib
import math

import msgpack
import numpy as np
import pytest
from support.memory import limited_memory
from support.servers import contents

import redisacc
from redisacc._admin import garbage as _collecting

# The fewest servers that show the difference: old versions word their errors differently.
pytestmark = [pytest.mark.forges, pytest.mark.servers("valkey", "redis62")]

RECORD = "redisacc:{w}"


@pytest.fixture(autouse=True)
def little_memory():
    """An allocation of gigabytes, because a forged length says so, is an error here and not a slow machine."""
    with limited_memory(3 * 2**30):
        yield


TYPED = (redisacc.CorruptDataError, redisacc.AccumulatorNotFoundError, redisacc.SchemaMismatchError)


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
    acc = make("float32", shape, "w", worker="ann", in_place_limit=limit)
    acc.set_global_step(7)
    made = Operations(acc, sparse)
    for _ in range(2):
        made.apply()
    return made


def expect(call, client, *errors):
    """The call must fail with a typed error and leave the database as it is."""
    before = contents(client)
    with pytest.raises(errors or TYPED):
        call()
    assert contents(client) == before


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
    # A record has it only if gradients may be late.
    "max_staleness": {None},
    "duplicates": set(),
    "takes": set(),
    # A record has it only if a loss was noticed.
    "losses": {None},
    "wanted": set(),
    "round_shape": set(),
    "incarnation": set(),
}


@pytest.mark.servers("valkey")
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", GARBAGE, ids=repr)
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
            assert held_in(after) == held_in(before)
            break
        assert after == before or not failed
        before = after
    assert failures


def held_in(found):
    """All gradients in a database, in whatever round."""
    return sorted(str(value) for key, value in found.items() if b":sums" in key or b":part" in key)


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


def cut(row):
    return row[:-1]


ROWS = {
    "empty": lambda row: b"",
    "cut short": cut,
    "cut within its count": lambda row: row[:5],
    "too long": lambda row: row + b"\0",
    "text": lambda row: b"text",
    "of another width": lambda row: row[:8] + row[12:],
}


@pytest.mark.parametrize("how", ROWS)
def test_rows_that_are_no_rows(real_client, open_dense, open_sparse, how):
    for make, shape, grad in (
        (open_dense, [600], (np.ones(600, np.float32),)),
        (open_sparse, [9, 2], ([0, 1, 2], np.ones((3, 2), np.float32))),
    ):
        acc = make("float32", shape, "w", in_place_limit=10**9)
        acc.apply_grad(*grad)
        sums = f"{RECORD}:sums"
        row = real_client.hget(sums, "1")
        assert len(row) > 8
        real_client.hset(sums, "1", ROWS[how](row))
        expect(acc.peek, real_client, redisacc.CorruptDataError)
        # Nothing is added to broken sums.
        expect(lambda acc=acc, grad=grad: acc.apply_grad(*grad), real_client, redisacc.CorruptDataError)
        assert_take_keeps_the_round(acc, real_client)
        acc.delete()


def assert_take_keeps_the_round(acc, client):
    """A take of an unreadable round must fail and keep the round."""
    step, count = acc.global_step(), acc.num_accumulated()
    before = contents(client)
    with pytest.raises(redisacc.CorruptDataError):
        acc.take_grad(1, timeout=5)
    after = contents(client)
    assert held_in(after) == held_in(before)
    listed = [(one.global_step, one.num_accumulated) for one in acc.info().unacknowledged]
    if after != before:
        assert listed == [(step, count)]
        assert (acc.global_step(), acc.num_accumulated()) == (step + 1, 0)


INDICES = [
    b"x",
    b"",
    b"-1",
    b"1.5",
    b"01",
    b" 1",
    b"9223372036854775808",
    b"9" * 30,
    b"9" * 5000,
    "٣".encode(),
    b"\xff",
]


@pytest.mark.parametrize("index", INDICES, ids=lambda index: repr(index[:20]))
def test_foreign_fields_among_the_rows(real_client, open_dense, open_sparse, index):
    for make, shape, grad in (
        (open_dense, [600], (np.ones(600, np.float32),)),
        (open_sparse, [None, 2], ([0, 1, 2], np.ones((3, 2), np.float32))),
    ):
        acc = make("float32", shape, "w", in_place_limit=10**9)
        acc.apply_grad(*grad)
        sums = f"{RECORD}:sums"
        real_client.hset(sums, index, real_client.hget(sums, "1"))
        expect(acc.peek, real_client, redisacc.CorruptDataError)
        assert_take_keeps_the_round(acc, real_client)
        acc.delete()


def test_counts_of_rows_that_can_not_be(real_client, open_dense, open_sparse):
    for make, shape, grad in (
        (open_dense, [600], (np.ones(600, np.float32),)),
        (open_sparse, [9, 2], ([0, 1, 2], np.ones((3, 2), np.float32))),
    ):
        for count in (0, 2**63, 2**64 - 1):
            acc = make("float32", shape, "w", in_place_limit=10**9)
            acc.apply_grad(*grad)
            row = real_client.hget(f"{RECORD}:sums", "1")
            real_client.hset(f"{RECORD}:sums", "1", count.to_bytes(8, "little") + row[8:])
            expect(acc.peek, real_client, redisacc.CorruptDataError)
            assert_take_keeps_the_round(acc, real_client)
            acc.delete()


def test_a_row_that_counts_more_gradients_than_the_round(real_client, open_sparse):
    acc = open_sparse("float32", [9, 2], "w", in_place_limit=10**9)
    acc.apply_grad([1], [[1.0, 2.0]])
    row = real_client.hget(f"{RECORD}:sums", "1")
    real_client.hset(f"{RECORD}:sums", "1", (5).to_bytes(8, "little") + row[8:])
    # One gradient cannot count five times for an index.
    expect(acc.peek, real_client, redisacc.CorruptDataError)
    acc.delete()


def test_sums_of_integers_that_are_none(real_client, open_dense):
    for value in (0.5, float("nan"), float("inf"), 1e300):
        acc = open_dense("int32", [1], "w", in_place_limit=10**9)
        acc.apply_grad([3])
        row = real_client.hget(f"{RECORD}:sums", "0")
        real_client.hset(f"{RECORD}:sums", "0", row[:8] + np.array([value], "<f8").tobytes())
        expect(acc.peek, real_client, redisacc.CorruptDataError)
        assert_take_keeps_the_round(acc, real_client)
        acc.delete()


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


def test_one_of_many_rows_is_missing(real_client, open_dense):
    acc = open_dense("float32", [600], "w", in_place_limit=10**9)
    acc.apply_grad(np.ones(600, np.float32))
    real_client.hdel(f"{RECORD}:sums", "1")
    expect(acc.peek, real_client, redisacc.CorruptDataError)
    assert_take_keeps_the_round(acc, real_client)


@pytest.fixture
def buffered(client, open_dense, open_sparse):
    """Accumulators with two buffered gradients, one after the other, and the contents of the buffered hash."""

    def each():
        for make, shape, grad in (
            (open_dense, [600], (np.ones(600, np.float32),)),
            (open_sparse, [9, 2], ([0, 1, 2], np.ones((3, 2), np.float32))),
        ):
            acc = make("float32", shape, "w", in_place_limit=0)
            acc.apply_grad(*grad)
            acc.apply_grad(*grad)
            entries = client.hgetall(f"{RECORD}:buffered")
            assert len(entries) == 2
            identity = sorted(entries)[0]
            order, _, header = entries[identity].partition(b" ")
            yield acc, identity, order, msgpack.unpackb(header)
            acc.delete()

    return each


@pytest.mark.parametrize(
    "entry",
    [b"", b"x", b"0", b"0 ", b"0 \xc1", b"0 \xff" * 9, b"\x80", b"0 \x93\x01", b"-1 \x80", b"0 \x80", b"0 \x90"],
)
def test_headers_that_are_none(client, buffered, entry):
    for acc, identity, _, _ in buffered():
        client.hset(f"{RECORD}:buffered", identity, entry)
        expect(acc.peek, client, redisacc.CorruptDataError)
        assert_take_keeps_the_round(acc, client)


# What may stand where a list of sizes, a number or a text belongs.
MISFITS = (
    None,
    "x",
    -1,
    10**18,
    [],
    [[]],
    ["x"],
    [-1],
    [2**63 - 1],
    [2**62, 2**62],
    [0] * 5,
    {},
    1.5,
    True,
)


def forgeries(header):
    """Headers that do not match the data."""
    for field in header:
        without = dict(header)
        del without[field]
        yield without
        for value in MISFITS:
            if value != header[field]:
                yield {**header, field: value}
    ((dtype, shape),) = header["sections"]
    for misfit in MISFITS:
        yield {**header, "sections": [misfit]}
        yield {**header, "sections": [[misfit, shape]]}
        yield {**header, "sections": [[dtype, misfit]]}
    for sections in ([[dtype]], [[dtype, shape, shape]], [[dtype, shape]] * 2, [["float64", shape]]):
        yield {**header, "sections": sections}
    for forged in ([shape[0] + 1, *shape[1:]], shape * 2, [float(dim) for dim in shape], [2**40, *shape[1:]], [0]):
        yield {**header, "sections": [[dtype, forged]]}
    # This one has no parts, because it is inline.
    nbytes = 4 * math.prod(shape) + (8 * shape[0] if len(shape) == 2 else 0)
    for parts in ([nbytes], [nbytes - 1], [0, nbytes], [-1, nbytes + 1], [float(nbytes)], [1] * 100_000):
        yield {**header, "parts": parts}
    yield {**header, "gradients": 2}


def test_forged_headers(client, buffered):
    for acc, identity, order, header in buffered():
        forged = list(forgeries(header))
        assert len(forged) > 100
        for one in forged:
            client.hset(f"{RECORD}:buffered", identity, order + b" " + msgpack.packb(one))
            expect(acc.peek, client, redisacc.CorruptDataError)
        assert_take_keeps_the_round(acc, client)


BOMBS = {
    "deep": b"\x91" * 200_000,
    "long array": b"\xdd\xff\xff\xff\xff",
    "long map": b"\xdf\xff\xff\xff\xff",
    "long text": b"\xdb\xff\xff\xff\xff",
    "extension": b"\xc9\xff\xff\xff\xff\x01",
    "unhashable key": b"\x81\x90\x01",
    "bad text": b"\x81\xa1\xff\x01",
    "time": b"\xd7\xff\xff\xff\xff\xff\xff\xff\xff\xff",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_headers_that_are_bombs(client, buffered, bomb):
    for acc, identity, order, _ in buffered():
        client.hset(f"{RECORD}:buffered", identity, order + b" " + BOMBS[bomb])
        expect(acc.peek, client, redisacc.CorruptDataError)
        assert_take_keeps_the_round(acc, client)


PARTS = {
    "missing": None,
    "empty": lambda part: b"",
    "cut short": cut,
    "too long": lambda part: part + b"x",
}


@pytest.mark.usefixtures("force_parts")
@pytest.mark.parametrize("how", PARTS)
def test_parts_that_are_not_what_they_were(client, buffered, how):
    for acc, _, _, _ in buffered():
        key = sorted(key for key in client.scan_iter() if b":part:" in key)[-1]
        if PARTS[how] is None:
            client.delete(key)
        else:
            client.set(key, PARTS[how](client.get(key)))
        expect(acc.peek, client, redisacc.CorruptDataError)
        assert_take_keeps_the_round(acc, client)


@pytest.mark.parametrize("how", PARTS)
def test_small_ones_that_are_not_what_they_were(client, buffered, how):
    for acc, identity, _, _ in buffered():
        if PARTS[how] is None:
            client.hdel(f"{RECORD}:inline", identity)
        else:
            client.hset(f"{RECORD}:inline", identity, PARTS[how](client.hget(f"{RECORD}:inline", identity)))
        expect(acc.peek, client, redisacc.CorruptDataError)
        assert_take_keeps_the_round(acc, client)


def test_small_ones_in_a_key_of_another_type(client, buffered):
    for acc, _, _, _ in buffered():
        client.delete(f"{RECORD}:inline")
        client.set(f"{RECORD}:inline", "x")
        expect(acc.peek, client, redisacc.CorruptDataError)
        with pytest.raises(redisacc.CorruptDataError):
            acc.take_grad(2, timeout=1)
        assert acc.global_step() == 0
        assert acc.num_accumulated() == 2


@pytest.mark.usefixtures("force_parts")
def test_parts_of_another_type(client, buffered):
    for acc, _, _, _ in buffered():
        key = sorted(key for key in client.scan_iter() if b":part:" in key)[-1]
        client.delete(key)
        client.rpush(key, "x")
        expect(acc.peek, client, redisacc.CorruptDataError)
        assert_take_keeps_the_round(acc, client)


@pytest.mark.parametrize("indices", [[-1, 0, 1], [1, 1, 2], [2, 1, 0], [0, 1, 9], [0, 1, 2**63 - 1]])
@pytest.mark.parametrize("way", ["inline", "in parts"])
def test_forged_indices_of_a_buffered_gradient(request, client, open_sparse, indices, way):
    if way == "in parts":
        request.getfixturevalue("force_parts")
    acc = open_sparse("float32", [9, 2], "w", in_place_limit=0)
    acc.apply_grad([0, 1, 2], np.ones((3, 2), np.float32))
    true, forged = np.arange(3).tobytes(), np.array(indices, "<i8").tobytes()
    if way == "inline":
        ((identity, data),) = client.hgetall(f"{RECORD}:inline").items()
        assert data.startswith(true)
        client.hset(f"{RECORD}:inline", identity, forged + data[len(true) :])
    else:
        (key,) = client.scan_iter(f"{RECORD}:part:*")
        data = client.get(key)
        assert data.startswith(true)
        client.set(key, forged + data[len(true) :])
    expect(acc.peek, client, redisacc.CorruptDataError)
    assert_take_keeps_the_round(acc, client)


def test_a_buffered_gradient_that_is_not_listed(client, buffered):
    for acc, identity, _, _ in buffered():
        client.hdel(f"{RECORD}:buffered", identity)
        # The count says two.
        before = contents(client)
        if len(acc.shape) == 1:
            expect(acc.peek, client, redisacc.CorruptDataError)
        assert contents(client) == before


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
    expect(ops.apply, client, redisacc.StaleSequenceError)


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


@pytest.mark.parametrize("levels", [400, 5000])
def test_headers_that_are_deep_or_long(client, buffered, levels):
    for acc, identity, _, _ in buffered():
        for packed in (b"\x91" * levels, b"\x81\xa1a" * levels, b"\xdd\x00\x10\x00\x00" + b"\x01" * 2**20):
            client.hset(f"{RECORD}:buffered", identity, b"0 " + packed)
            expect(acc.peek, client, redisacc.CorruptDataError)


def test_a_listing_of_names_that_is_none(client, open_dense):
    client.set("redisacc:names", "not a set")
    with pytest.raises(redisacc.CorruptDataError):
        open_dense("float32", [1], "w")
    assert client.get("redisacc:names") == b"not a set"


@pytest.mark.parametrize("limit", [0, 10**9])
def test_a_server_that_is_out_of_memory(real_client, open_dense, limit):
    acc = open_dense("float32", [1], "w", in_place_limit=limit)
    try:
        real_client.config_set("maxmemory", 1)
        with pytest.raises(redisacc.ServerError, match="maxmemory"):
            acc.apply_grad([1.0])
    finally:
        real_client.config_set("maxmemory", 0)
    assert acc.num_accumulated() == 0
    assert acc.apply_grad([1.0])
    assert acc.num_accumulated() == 1
