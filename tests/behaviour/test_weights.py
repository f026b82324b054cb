"""Gradients of different weights: sums, means, what a round says about them, and what is refused."""

import numpy as np
import pytest
from support.selection import REAL

import redisacc

# Those of the normal numbers of float32.
LEAST, MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127


def test_compacting_uses_the_weight_of_the_step_at_which_it_succeeds(proxy, open_dense, client):
    acc = open_dense(
        "float64",
        [64],
        "w",
        redis=proxy.where,
        limits=redisacc.Limits(in_place=0, buffer=1200),
        staleness=redisacc.Staleness(3, weight="inverse_sqrt"),
        reduction_type="SUM",
    )
    acc.set_global_step(1)
    for _ in range(2):
        acc.apply_grad(np.ones(64), 1)
    # Another process moves the step while the third is added to the first two.
    other = open_dense("float64", [64], "w", reduction_type="SUM", redis=client)
    proxy.before("HSCAN", lambda: proxy.before("commit", lambda: other.set_global_step(4)))
    acc.apply_grad(np.ones(64), 1)
    assert other.global_step() == 4
    info = acc.info()
    assert (info.buffered < 3, info.total_weight, info.staleness) == (True, 2.5, {0: 2, 3: 1})
    assert set(acc.take_grad(3)) == {2.5}


@pytest.mark.parametrize("limit", [None, 0])
def test_weights_beyond_the_bounds_are_refused_by_the_server(open_dense, client, limit):
    acc = open_dense(
        "float64",
        [1],
        "w",
        limits=redisacc.Limits(in_place=limit),
        staleness=redisacc.Staleness(3, weight="inverse_sqrt"),
    )
    acc.set_global_step(3)
    acc.apply_grad([1.0], 3, weight=MOST)
    before = client.hgetall("redisacc:{w}")
    with pytest.raises(
        redisacc.InvalidArgumentError, match=r"cannot be counted: its weight would be 1e\+35 and the total"
    ):
        acc.apply_grad([1.0], 3, weight=1e35)
    with pytest.raises(redisacc.InvalidArgumentError, match=r"its weight would be 5\.877471754111438e-39 and"):
        acc.apply_grad([1.0], 0, weight=LEAST)
    assert client.hgetall("redisacc:{w}") == before
    acc.apply_grad([1.0], 3, weight=LEAST)
    assert acc.take_grad(2).tolist() == [1]


def test_integers_have_no_weights(open_dense, open_tree):
    for name in ("int8", "uint32", "int64", "qint8"):
        acc, tree = open_dense(name, [1]), open_tree({"w": ("float32", ()), "n": (name, ())})
        for apply in (
            lambda acc=acc: acc.apply_grad([1], weight=0.5),
            lambda tree=tree: tree.apply_grad({"w": 1.0, "n": None}, weight=2),
        ):
            with pytest.raises(redisacc.InvalidArgumentError, match=f"weight must be 1 for gradients of {name}, not"):
                apply()
        with pytest.raises(redisacc.InvalidArgumentError, match=r"staleness\.weight must be 'constant' for gradients"):
            open_dense(name, [1], staleness=redisacc.Staleness(1, weight="inverse_sqrt"))


@pytest.mark.every_server
def test_a_take_waits_for_a_weight(open_dense_stored, background, until, durations):
    acc = open_dense_stored("float32", [1], "w")
    # Nothing but the gradients wakes the taker.
    durations(poll_every=3600.0)
    take = background(acc.take_grad, min_weight=2.5, timeout=60)
    until(lambda: acc.info().waiting)
    (waiting,) = acc.info().waiting
    assert (waiting.num_required, waiting.min_weight) == (1, 2.5)
    for weight in (1.0, 0.5, 0.5):
        acc.apply_grad([3.0], weight=weight)
    assert acc.info().waiting
    acc.apply_grad([3.0], weight=0.5)
    assert take.result().tolist() == [3]
    # The next take asks for neither more nor less than it says.
    acc.apply_grad([1.0], 1)
    assert acc.take_grad(1, timeout=1).tolist() == [1]


def test_a_take_needs_all_that_it_asks_for(open_dense):
    acc = open_dense("float32", [1], worker="ann")
    acc.apply_grad([1.0], weight=3)
    message = (
        r"a take of 2 with a weight of 2 timed out after .* s: 1 of 2 gradients, with a weight of 3 of 2, had arrived"
    )
    with pytest.raises(redisacc.TakeTimeoutError, match=message) as caught:
        acc.take_grad(2, min_weight=2, timeout=0)
    assert (caught.value.min_weight, caught.value.total_weight) == (2, 3)
    acc.apply_grad([1.0], weight=0.5)
    with pytest.raises(redisacc.TakeTimeoutError, match=r"2 of 2 gradients, with a weight of 3.5 of 4, had arrived"):
        acc.take_grad(2, min_weight=4, timeout=0)
    assert acc.take_grad(2, min_weight=3.5, timeout=0).tolist() == [1]
    with pytest.raises(redisacc.InvalidArgumentError, match="num_required is missing"):
        acc.take_grad(None)


def test_sums_of_weights_that_are_rounded_suffice(open_dense):
    acc = open_dense("float32", [1])
    for _ in range(10):
        acc.apply_grad([1.0], weight=0.1)
    assert acc.info().total_weight < 1
    assert acc.take_grad(min_weight=1, timeout=0).tolist() == pytest.approx([1])


def test_a_weight_that_cannot_be_reached(open_dense):
    ann, bob = (open_dense("float32", [1], "w", once_per_worker=True, worker=name) for name in ("ann", "bob"))
    hopeless = "so the weight cannot be reached unless more workers join"

    def timed_out():
        with pytest.raises(redisacc.TakeTimeoutError) as caught:
            ann.take_grad(min_weight=1, timeout=0)
        return str(caught.value)

    ann.apply_grad([1.0], weight=0.5)
    assert hopeless in timed_out()
    bob.apply_grad([1.0], weight=0.5)
    ann.take_grad(min_weight=1, timeout=0)
    # Bob may still come.
    ann.apply_grad([1.0], 1, weight=0.5)
    assert hopeless not in timed_out()


def test_an_event_says_the_weight(open_dense):
    acc = open_dense("float32", [1], worker="ann")
    with acc.events(timeout=5) as events:
        acc.apply_grad([1.0], weight=1e-5)
        acc.apply_grad([1.0])
        heard = [next(events) for _ in range(2)]
    assert [event.details.get("weight") for event in heard] == ["1e-05", None]
    assert [event.who for event in heard] == ["ann", "ann"]


def test_a_forged_total(open_dense_stored, client):
    """It is a weight, and only the gradients tell that it is wrong."""
    acc = open_dense_stored("float32", [1], "forged")
    for weight in (1.0, 0.5):
        acc.apply_grad([1.0], weight=weight)
    client.hset("redisacc:{forged}", "total_weight", "2.25")
    for call in (acc.peek, lambda: acc.take_grad(2, timeout=0)):
        with pytest.raises(redisacc.CorruptDataError, match=r"add up to 1\.5, but the total weight was .* 2\.25"):
            call()


@pytest.mark.servers(*REAL)
def test_records_and_rounds_without_weights_still_work(open_sparse, client):
    """A round that an earlier version began: nothing in it knows of weights."""
    acc = open_sparse("float32", [9, 1], "old")
    acc.apply_grad([1, 2], [[2.0], [4.0]])
    row = client.hget("redisacc:{old}:sums", "1")
    assert (len(row), client.hget("redisacc:{old}:sums", "total")) == (12, b"1 2")
    acc.apply_grad([2, 3], [[8.0], [1.0]], weight=3)
    # Rows that no gradient of another weight has touched remain as they were.
    assert client.hget("redisacc:{old}:sums", "1") == row
    assert len(client.hget("redisacc:{old}:sums", "2")) == 20
    assert client.hget("redisacc:{old}:sums", "total") == b"2 4 4"
    assert acc.take_grad(2)[1].ravel().tolist() == [2, 7, 1]
