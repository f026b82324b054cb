"""Takes with a grace: what ends it, when it begins, and who remembers that."""

from __future__ import annotations

import pytest

import redisacc

RECORD = "redisacc:{w}"
HOUR = 3600


@pytest.fixture
def began(client):
    """Returns when the grace of the round began, in milliseconds of the server's clock; 0 if it has not."""
    return lambda: int(client.hget(RECORD, "grace_began_ms") or 0)


@pytest.fixture
def hours_later(client, began):
    """Lets the grace have begun hours earlier."""

    def change():
        assert began() > 0
        client.hset(RECORD, "grace_began_ms", began() - 2 * HOUR * 1000)

    return change


def times_out(acc, *args, **options):
    with pytest.raises(redisacc.TakeTimeoutError) as failure:
        acc.take_grad(*args, timeout=0, **options)
    return str(failure.value)


@pytest.mark.every_server
def test_the_last_gradient_ends_it(open_dense_stored, background, until, began):
    acc = open_dense_stored("float32", [1], "w", reduction_type="SUM")
    take = background(acc.take_grad, 2, most=4, grace=HOUR)
    until(lambda: acc.info().waiting)
    for value in (1.0, 2.0):
        acc.apply_grad([value])
    until(began)
    acc.apply_grad([3.0])
    assert take.running
    acc.apply_grad([4.0])
    assert take.result().tolist() == [10.0]
    assert began() == 0


@pytest.mark.every_server(storage="in_place")
def test_time_ends_it(open_dense_stored, open_sparse_stored, open_tree_stored, durations, background, until):
    # Nothing but the end of the grace wakes the takers.
    durations(poll_every=10.0 * HOUR)
    dense, sparse = open_dense_stored("float32", [1]), open_sparse_stored("float32", [9, 1])
    tree = open_tree_stored({"w": ("float32", (1,))})
    takes = [
        background(dense.take_grad, 1, grace=0.2),
        background(sparse.take_indexed_slices_grad, 1, most=9, grace=0.2),
        background(tree.take_grad, 1, grace=0.2),
    ]
    until(lambda: all(acc.info().waiting for acc in (dense, sparse, tree)))
    dense.apply_grad([1.0])
    sparse.apply_grad([3], [[2.0]])
    tree.apply_grad({"w": [3.0]})
    one, slices, leaves = [take.result() for take in takes]
    assert (one.tolist(), slices.values.tolist(), leaves["w"].tolist()) == ([1.0], [[2.0]], [3.0])
    sparse.apply_grad([3], [[2.0]], local_step=1)
    assert sparse.take_grad(1, grace=0.01)[1].tolist() == [[2.0]]


def test_without_a_grace_nothing_is_stored(open_dense, client):
    acc = open_dense("float32", [1], "w")
    times_out(acc, 2)
    for _ in range(2):
        acc.apply_grad([1.0])
    assert {b"grace_count", b"grace_began_ms"}.isdisjoint(client.hkeys(RECORD))
    acc.take_grad(2)
    for options in ({"grace": 0}, {"grace": 0, "most": 5}, {"grace": HOUR, "most": 1}):
        times_out(acc, 1, **options)
        step = acc.global_step()
        acc.apply_grad([1.0], step)
        assert acc.take_grad(1, **options).tolist() == [1.0]
    assert {b"grace_count", b"grace_began_ms"}.isdisjoint(client.hkeys(RECORD))


@pytest.mark.every_server(storage="in_place")
def test_a_take_that_starts_again_does_not_start_the_grace_again(open_dense_stored, client, began, hours_later):
    first, second = (open_dense_stored("float32", [1], "w", worker=name) for name in ("first", "second"))
    for _ in range(2):
        first.apply_grad([1.0])
    said = times_out(first, 2, most=4, grace=HOUR)
    assert "a take of 2, or up to 4 within 3600 s timed out" in said
    assert "2 of 2 gradients had arrived" in said
    assert "s of the grace were left" in said
    at = began()
    times_out(second, 2, most=4, grace=HOUR)
    first.apply_grad([1.0])
    times_out(second, 2, grace=HOUR)
    assert began() == at
    # A taker that died while it waited is passed over.
    client.zadd(f"{RECORD}:queue", {"t": 1})
    client.hset(f"{RECORD}:takers", "t", b"2..4+3600000 1 dead")
    hours_later()
    with second.take(2, most=4, grace=HOUR, timeout=0) as taken:
        assert taken.num_accumulated == 3


def test_a_clock_that_was_set_back_does_not_prolong_it(open_dense, began, client):
    acc = open_dense("float32", [1], "w")
    acc.apply_grad([1.0])
    times_out(acc, 1, grace=HOUR)
    client.hset(RECORD, "grace_began_ms", began() + 10**9)
    assert acc.take_grad(1, grace=0.1, timeout=60).tolist() == [1.0]


def test_takers_are_served_in_order_of_arrival(open_dense, background, until, began):
    first, second = (open_dense("float32", [1], "w", worker=name) for name in ("first", "second"))
    with_grace = background(first.take_grad, 1, most=3, grace=HOUR)
    until(lambda: len(first.info().waiting) == 1)
    plain = background(second.take_grad, 1)
    until(lambda: len(first.info().waiting) == 2)
    ahead, behind = first.info().waiting
    assert (ahead.taker, ahead.num_required, ahead.most, ahead.grace) == ("first", 1, 3, HOUR)
    assert (behind.taker, behind.num_required, behind.most, behind.grace) == ("second", 1, None, 0)
    for _ in range(2):
        first.apply_grad([1.0])
    until(began)
    assert with_grace.running
    assert plain.running
    first.close()
    assert plain.result().tolist() == [1.0]
    with pytest.raises(redisacc.CancelledError):
        with_grace.result()


def test_any_number_may_come(open_dense, background, until):
    acc = open_dense("float32", [1], "w", worker="chief")
    take = background(acc.take_grad, 1, grace=HOUR)
    until(lambda: acc.info().waiting)
    (waiting,) = acc.info().waiting
    assert (waiting.num_required, waiting.most, waiting.grace) == (1, None, HOUR)
    acc.delete()
    with pytest.raises(redisacc.NotFoundError, match="accumulator"):
        take.result()


INVALID = [
    ({"most": 3}, "needs a grace"),
    ({"most": 1, "grace": 1}, r"most must be in \[2, "),
    ({"most": 2.0, "grace": 1}, "most must be an integer"),
    ({"most": 2**63, "grace": 1}, "most must be in"),
    ({"most": True, "grace": 1}, "most must be an integer"),
    *(
        ({"grace": value}, r"grace must be a number of seconds in \[0, 604800\]")
        for value in (-1, -1e-300, float("nan"), float("inf"), 604801, 10**400, "1", True, [1], 1j)
    ),
]


def test_invalid_ones(open_dense, open_sparse, open_tree):
    dense, sparse, tree = (
        open_dense("float32", [1]),
        open_sparse("float32", [1]),
        open_tree({"w": ("float32", (1,))}),
    )
    before = [acc.info() for acc in (dense, sparse, tree)]
    for options, message in INVALID:
        for acc in (dense, sparse, tree):
            with pytest.raises(redisacc.InvalidArgumentError, match=message):
                acc.take_grad(2, timeout=0, **options)
            with pytest.raises(redisacc.InvalidArgumentError, match=message), acc.take(2, timeout=0, **options):
                pass
        with pytest.raises(redisacc.InvalidArgumentError, match=message):
            sparse.take_indexed_slices_grad(2, timeout=0, **options)
    assert [acc.info() for acc in (dense, sparse, tree)] == before


def test_the_largest_ones(open_dense):
    acc = open_dense("float32", [1], "w")
    acc.apply_grad([1.0])
    times_out(acc, 1, most=2**63 - 1, grace=604800)
    times_out(acc, 2**63 - 1, most=2**63 - 1, grace=604800)
    times_out(acc, 2**63 - 1, grace=604800)


def test_forged_takers(open_dense, client):
    acc = open_dense("float32", [1], "w")
    texts = (b"1..", b"1..2", b"1..2+", b"1..+3", b"1..x+3", b"..2+3", b"1..2+3+4", b"1..-2+3")
    for step, text in enumerate(texts):
        client.zadd(f"{RECORD}:queue", {"t": 1})
        client.hset(f"{RECORD}:takers", "t", text + b" 1 somebody")
        with pytest.raises(redisacc.CorruptDataError, match="redisacc did not write"):
            acc.info()
        acc.apply_grad([1.0], step)
        # Its lease is over, so the next taker passes it over.
        assert acc.take_grad(1, timeout=60).tolist() == [1.0]


@pytest.mark.parametrize("field", ["grace_count", "grace_began_ms"])
def test_a_forged_record(open_dense, client, field):
    acc = open_dense("float32", [1], "w")
    acc.apply_grad([1.0])
    for value in (b"", b"x", b"-1", b"1.5", b"9" * 16):
        client.hset(RECORD, field, value)
        before = client.hgetall(RECORD)
        with pytest.raises(redisacc.CorruptDataError, match=field):
            acc.take_grad(1, timeout=0, grace=1)
        assert client.hgetall(RECORD) == before
