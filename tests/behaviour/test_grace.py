"""Takes with a grace: what ends it, when it begins, and who remembers that."""

import pytest

import redisacc

RECORD = "redisacc:{w}"
HOUR = 3600


@pytest.fixture
def began(client):
    """Returns when the grace of the round began, in milliseconds of the server's clock; 0 if it has not."""
    return lambda: int(client.hget(RECORD, "grace_began_ms") or 0)


def times_out(acc, *args, **options):
    with pytest.raises(redisacc.TakeTimeoutError) as failure:
        acc.take_grad(*args, timeout=0, **options)
    return str(failure.value)


@pytest.mark.every_server
def test_time_ends_it(open_dense, durations, background, until):
    # Nothing but the end of the grace wakes the taker.
    durations(poll_every=10.0 * HOUR)
    acc = open_dense("float32", [1])
    take = background(acc.take_grad, 1, most=9, grace=0.2)
    until(lambda: acc.info().waiting)
    acc.apply_grad([1.0])
    assert take.result().tolist() == [1.0]


@pytest.mark.every_server(storage="in_place")
def test_a_take_that_starts_again_does_not_start_the_grace_again(open_dense_stored, client, began):
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
    client.hset(RECORD, "grace_began_ms", at - 2 * HOUR * 1000)
    with second.take(2, most=4, grace=HOUR, timeout=0) as taken:
        assert taken.num_accumulated == 3


def test_a_clock_that_was_set_back_does_not_prolong_it(open_dense, began, client):
    acc = open_dense("float32", [1], "w")
    acc.apply_grad([1.0])
    times_out(acc, 1, grace=HOUR)
    client.hset(RECORD, "grace_began_ms", began() + 10**9)
    assert acc.take_grad(1, grace=0.1, timeout=60).tolist() == [1.0]
