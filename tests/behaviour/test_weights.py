"""Gradients of different weights: sums, means, what a round says about them, and what is refused."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from support import model
from support.selection import REAL

import redisacc

# Those of the normal numbers of float32.
LEAST, MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
WEIGHTS = [0.1, 1.0, 3.0, 0.7, 1e-3, 1.0, 12345.678]
TREE = {"a": ("float32", (2,)), "b": ("float64", ()), "s": redisacc.Sparse("float32", (9, 2))}


@pytest.mark.fixed("encoding")
@pytest.mark.every_server
def test_a_mean_is_numpys_to_the_last_bit(open_dense_stored):
    rng = np.random.default_rng(7)
    for dtype in (*model.FLOATS, *model.COMPLEX):
        acc, oracle = open_dense_stored(dtype, [19]), model.Dense(dtype, (19,))
        for weight in WEIGHTS:
            gradient = model.numbers(rng, dtype, (19,))
            assert acc.apply_grad(gradient, weight=weight)
            oracle.apply(gradient, 0, "w", weight=weight)
        expected = oracle.peek().gradient
        model.assert_same(acc.peek().gradient, expected)
        model.assert_same(acc.take_grad(len(WEIGHTS)), expected)


@pytest.mark.every_server
def test_a_round_says_its_total_weight(open_dense_stored, client):
    acc = open_dense_stored("float32", [2], "w")
    acc.apply_grad([1.0, 2.0])
    assert (acc.peek().total_weight, acc.info().total_weight) == (1, 1)
    # What all weights of 1 need is stored, and nothing more.
    assert client.hget("redisacc:{w}", "total_weight") is None
    acc.apply_grad([3.0, 4.0], weight=0.5)
    acc.apply_grad([5.0, 6.0], weight=1)
    assert client.hget("redisacc:{w}", "total_weight") == b"2.5"
    info = acc.info()
    assert (info.num_accumulated, info.total_weight, acc.peek().total_weight) == (3, 2.5, 2.5)
    with acc.take(3) as taken:
        assert (taken.num_accumulated, taken.total_weight) == (3, 2.5)
        assert taken.gradient.tolist() == [np.float32(7.5) / np.float32(2.5), np.float32(10) / np.float32(2.5)]
        assert [left.total_weight for left in acc.info().unacknowledged] == [2.5]
    assert client.hget("redisacc:{w}", "total_weight") is None
    assert acc.info().total_weight == 0


@pytest.mark.every_server
def test_a_sparse_row_is_divided_by_the_weights_of_those_that_held_it(open_sparse_stored):
    for rows, by, divisors in (
        ("index", "weights", [1.5, 2.5, 1]),
        ("index", "count", [2, 2, 1]),
        ("round", "weights", [7.5] * 3),
        ("round", "count", [4] * 3),
    ):
        acc = open_sparse_stored("float32", [9, 1], mean=redisacc.Mean(rows=rows, by=by))
        acc.apply_grad([5, 1, 1], [[8.0], [1.0], [2.0]])
        acc.apply_grad([1, 2], [[4.0], [8.0]], weight=0.5)
        acc.apply_grad([], np.empty((0, 1)), weight=4)
        acc.apply_grad([2], [[2.0]], weight=2)
        indices, values, _ = acc.take_grad(4)
        assert indices.tolist() == [1, 2, 5]
        assert values.ravel().tolist() == (np.float32([5, 8, 8]) / np.float32(divisors)).tolist()


def test_a_leaf_is_divided_by_the_weights_of_those_that_have_it(open_tree_stored):
    for missing, by, (a, b, s) in (
        ("zero", "weights", [3.25] * 3),
        ("zero", "count", [3] * 3),
        ("skip", "weights", [1.25, 2.25, 3]),
        ("skip", "count", [2, 2, 2]),
    ):
        acc = open_tree_stored(TREE, mean=redisacc.Mean(missing=missing, by=by))
        acc.apply_grad({"a": [1.0, 2.0], "b": None, "s": ([1], [[1.0, 1.0]])})
        acc.apply_grad({"a": [8.0, 8.0], "b": 3.0, "s": None}, weight=0.25)
        acc.apply_grad({"a": None, "b": 5.0, "s": ([1, 2], [[2.0, 4.0], [4.0, 8.0]])}, weight=2)
        found = acc.take_grad(3)
        np.testing.assert_array_equal(found["a"], np.float32([3, 4]) / np.float32(a))
        assert found["b"] == 10.75 / b
        np.testing.assert_array_equal(found["s"].values, np.float32([[5, 9], [8, 16]]) / np.float32(s))


STALE = [
    ("inverse_sqrt", [1, 1 / math.sqrt(2), 1 / math.sqrt(3)]),
    ((1, 0.5, 0.125), [1, 0.5, 0.125]),
    (np.array([0.5, 4, 1]), [0.5, 4, 1]),
]


@pytest.mark.every_server
def test_staleness_changes_weights(open_dense_stored):
    for given, factors in STALE:
        acc = open_dense_stored("float64", [2], staleness=redisacc.Staleness(2, weight=given))
        acc.set_global_step(10)
        total, weight = np.zeros(2), 0.0
        for number, (step, own) in enumerate([(10, 1.0), (9, 3.0), (8, 0.5), (12, 2.0), (9, 1.0)]):
            gradient = np.array([1.0, number])
            acc.apply_grad(gradient, step, weight=own)
            effective = own * factors[max(10 - step, 0)]
            total += effective * gradient
            weight += effective
        info = acc.info()
        assert info.staleness_weight == ("inverse_sqrt" if isinstance(given, str) else tuple(map(float, given)))
        assert info.total_weight == weight
        assert not acc.apply_grad([1.0, 1.0], 7)
        assert acc.take_grad(5).tolist() == (total / weight).tolist()


def test_compacting_uses_the_weight_of_the_step_at_which_it_succeeds(proxy, open_dense, client):
    acc = open_dense(
        "float64",
        [64],
        "w",
        redis=proxy.where,
        limits=redisacc.Limits(in_place=0, buffer=1200),
        staleness=redisacc.Staleness(1, weight=[1, 0.5]),
        reduction_type="SUM",
    )
    acc.set_global_step(1)
    for _ in range(2):
        acc.apply_grad(np.ones(64), 1)
    # Another process moves the step while the third is added to the first two.
    other = open_dense("float64", [64], "w", reduction_type="SUM", redis=client)
    proxy.before("HSCAN", lambda: proxy.before("commit", lambda: other.set_global_step(2)))
    acc.apply_grad(np.ones(64), 1)
    assert other.global_step() == 2
    info = acc.info()
    assert (info.buffered < 3, info.total_weight, info.staleness) == (True, 2.5, {0: 2, 1: 1})
    assert set(acc.take_grad(3)) == {2.5}


def test_every_opener_agrees(open_dense, open_sparse):
    open_dense("float32", [1], "k", staleness=redisacc.Staleness(1, weight=[1, 0.5]), mean=redisacc.Mean(by="count"))
    info = open_dense("float32", [1], "k").info()
    assert (info.staleness_weight, info.normalize) == ((1, 0.5), "count")
    open_dense("float32", [1], "k", staleness=redisacc.Staleness(1, weight=(1.0, 0.5)), mean=redisacc.Mean(by="count"))
    for options, message in (
        ({"staleness": redisacc.Staleness(1, weight=[1, 0.25])}, "its staleness.weight is 1,0.5, not 1,0.25"),
        ({"staleness": redisacc.Staleness(1, "constant")}, "its staleness.weight is 1,0.5, not constant"),
        ({"mean": redisacc.Mean(by="weights")}, "its mean.by is count, not weights"),
    ):
        with pytest.raises(redisacc.InvalidArgumentError, match=message):
            open_dense("float32", [1], "k", **options)
    open_sparse("float32", [3], "plain")
    assert (
        open_sparse(
            "float32", [3], "plain", mean=redisacc.Mean(by="weights"), staleness=redisacc.Staleness(0, "constant")
        )
        .info()
        .normalize
    )


INVALID = [
    *(0, -1.0, math.nan, math.inf, 1j),
    # A subnormal number, and those below and beyond the numbers of float32, and of floats.
    *(5e-324, 1e-39, 1e39, 10**400),
    *("1", b"1", True, None, [1.0], np.array([1.0]), np.ones((2, 2)), np.array(True), object()),
]


def test_an_invalid_weight_changes_nothing(open_dense, open_sparse, open_tree, client):
    accs = [open_dense("float32", [1], "d"), open_sparse("float32", [3], "s"), open_tree({"w": ("float32", ())}, "t")]
    before = [client.hgetall(acc.accumulator_ref) for acc in accs]
    dense, sparse, tree = accs
    for value in INVALID:
        for apply in (
            lambda value=value: dense.apply_grad([1.0], weight=value),
            lambda value=value: sparse.apply_grad([1], [1.0], weight=value),
            lambda value=value: sparse.apply_indexed_slices_grad(redisacc.IndexedSlices([1.0], [1]), weight=value),
            lambda value=value: tree.apply_grad({"w": 1.0}, weight=value),
            lambda value=value: dense.as_encoded([1.0], weight=value),
        ):
            with pytest.raises(redisacc.InvalidArgumentError, match="weight must be a number in"):
                apply()
        if value is not None:
            for wait in (
                lambda value=value: dense.take_grad(1, min_weight=value),
                lambda value=value: tree.take(min_weight=value).__enter__(),
            ):
                with pytest.raises(redisacc.InvalidArgumentError, match="min_weight must be a number in"):
                    wait()
    assert [client.hgetall(acc.accumulator_ref) for acc in accs] == before


def test_numbers_of_every_kind_are_weights(open_dense):
    acc, total = open_dense("float32", [1]), 0.0
    for value in (2, 0.5, np.float32(0.5), np.int8(3), Fraction(1, 4), np.array(0.5), np.float16(2)):
        acc.apply_grad([1.0], weight=value)
        total += float(value)
        assert acc.info().total_weight == total


@pytest.mark.parametrize("limit", [None, 0])
def test_weights_beyond_the_bounds_are_refused_by_the_server(open_dense, client, limit):
    acc = open_dense(
        "float64", [1], "w", limits=redisacc.Limits(in_place=limit), staleness=redisacc.Staleness(1, weight=[1, 1e-20])
    )
    acc.set_global_step(1)
    acc.apply_grad([1.0], 1, weight=MOST)
    before = client.hgetall("redisacc:{w}")
    with pytest.raises(
        redisacc.InvalidArgumentError, match=r"cannot be counted: its weight would be 1e\+35 and the total"
    ):
        acc.apply_grad([1.0], 1, weight=1e35)
    with pytest.raises(redisacc.InvalidArgumentError, match="its weight would be 1e-50 and"):
        acc.apply_grad([1.0], 0, weight=1e-30)
    assert client.hgetall("redisacc:{w}") == before
    acc.apply_grad([1.0], 1, weight=LEAST)
    assert acc.take_grad(2).tolist() == [1]


def test_integers_have_no_weights(open_dense, open_tree):
    for name in ("int8", "uint32", "int64", "qint8"):
        acc = open_dense(name, [1])
        with pytest.raises(redisacc.InvalidArgumentError, match=f"weight must be 1 for gradients of {name}, not 0.5"):
            acc.apply_grad([1], weight=0.5)
        acc.apply_grad([1], weight=1)
        assert acc.take_grad(1, min_weight=1).tolist() == [1]
        with pytest.raises(redisacc.InvalidArgumentError, match=r"staleness\.weight must be 'constant' for gradients"):
            open_dense(name, [1], staleness=redisacc.Staleness(1, weight=[1, 1]))
        tree = open_tree({"w": ("float32", ()), "n": (name, ())})
        with pytest.raises(redisacc.InvalidArgumentError, match=f"weight must be 1 for gradients of {name}"):
            tree.apply_grad({"w": 1.0, "n": None}, weight=2)


RULES = [
    (
        {"staleness": redisacc.Staleness(1, weight="linear")},
        "staleness.weight must be 'constant', 'inverse_sqrt' or",
    ),
    ({"staleness": redisacc.Staleness(1, weight=0.5)}, "staleness.weight must be"),
    ({"staleness": redisacc.Staleness(1, weight=b"constant")}, "staleness.weight must be"),
    ({"staleness": redisacc.Staleness(1, weight=True)}, "staleness.weight must be"),
    ({"staleness": redisacc.Staleness(1, weight=np.ones((2, 2)))}, "staleness.weight must be"),
    ({"staleness": redisacc.Staleness(0, [1, 1])}, "needs a staleness.most"),
    ({"staleness": redisacc.Staleness(0, weight="inverse_sqrt")}, "needs a staleness.most"),
    ({"staleness": redisacc.Staleness(1, weight=[1])}, "2 together, not 1"),
    ({"staleness": redisacc.Staleness(1, weight=[1, 1, 1])}, "2 together, not 3"),
    ({"staleness": redisacc.Staleness(1, weight=[])}, "2 together, not 0"),
    ({"staleness": redisacc.Staleness(1, weight=[1, 0])}, r"staleness\.weight\[1\] must be a number in"),
    ({"staleness": redisacc.Staleness(1, weight=[1, math.nan])}, r"staleness\.weight\[1\]"),
    ({"staleness": redisacc.Staleness(1, weight=["1", 1])}, r"staleness\.weight\[0\]"),
    ({"staleness": redisacc.Staleness(1, weight=[[1], 1])}, r"staleness\.weight\[0\]"),
    ({"mean": redisacc.Mean(by="number")}, "mean.by must be 'weights' or 'count', not 'number'"),
    ({"mean": redisacc.Mean(by=True)}, "mean.by must be"),
]


def test_invalid_rules(open_dense, open_tree):
    for options, message in RULES:
        with pytest.raises(redisacc.InvalidArgumentError, match=message):
            open_dense("float32", [1], **options)
        with pytest.raises(redisacc.InvalidArgumentError, match=message):
            open_tree({"w": ("float32", ())}, **options)


@pytest.mark.every_server
def test_a_take_waits_for_a_weight(open_dense_stored, background, until):
    acc = open_dense_stored("float32", [1], "w")
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
    acc = open_dense("float32", [1], "w", once_per_worker=True, worker="ann")
    acc.apply_grad([1.0], weight=0.5)
    with pytest.raises(redisacc.TakeTimeoutError, match="so the weight cannot be reached unless more workers join"):
        acc.take_grad(min_weight=1, timeout=0)
    other = open_dense("float32", [1], "w", worker="bob")
    other.apply_grad([1.0], weight=0.5)
    acc.take_grad(min_weight=1, timeout=0)
    # Bob may still come.
    acc.apply_grad([1.0], 1, weight=0.5)
    with pytest.raises(redisacc.TakeTimeoutError) as caught:
        acc.take_grad(min_weight=1, timeout=0)
    assert "cannot be reached" not in str(caught.value)


def test_a_grace_begins_when_there_is_enough_weight(open_dense, client):
    acc = open_dense("float32", [1], "w")
    acc.apply_grad([1.0])
    with pytest.raises(redisacc.TakeTimeoutError):
        acc.take_grad(2, min_weight=4, most=5, grace=600, timeout=0)
    fields = "grace_count", "grace_weight", "wanted", "wanted_weight", "grace_began_ms"
    assert client.hmget("redisacc:{w}", fields) == [b"2", b"4", b"2", b"4", b"0"]
    acc.apply_grad([1.0])
    assert client.hget("redisacc:{w}", "grace_began_ms") == b"0"
    acc.apply_grad([1.0], weight=2)
    began = client.hget("redisacc:{w}", "grace_began_ms")
    assert int(began) > 0
    acc.apply_grad([1.0], weight=2)
    assert client.hget("redisacc:{w}", "grace_began_ms") == began
    with pytest.raises(redisacc.TakeTimeoutError, match=r"of the grace were left"):
        acc.take_grad(2, min_weight=4, most=5, grace=600, timeout=0)
    acc.apply_grad([1.0])
    assert acc.take_grad(2, min_weight=4, most=5, grace=600, timeout=0).tolist() == [1]
    with pytest.raises(redisacc.TakeTimeoutError):
        acc.take_grad(2, grace=600, timeout=0)
    assert client.hmget("redisacc:{w}", fields[:4]) == [b"2", None, b"2", None]


def test_an_event_says_the_weight(open_dense):
    acc = open_dense("float32", [1], worker="ann")
    with acc.events(timeout=5) as events:
        acc.apply_grad([1.0], weight=1e-5)
        acc.apply_grad([1.0])
        heard = [next(events) for _ in range(2)]
    assert [event.details.get("weight") for event in heard] == ["1e-05", None]
    assert [event.who for event in heard] == ["ann", "ann"]


FORGED = [b"", b"0", b"-1", b"nan", b"inf", b"1e999", b"0x10", b"1e-40", b"3 ", b"1" * 25]


def test_a_forged_total(open_dense_stored, client):
    acc = open_dense_stored("float32", [1], "forged")
    for weight in (1.0, 0.5):
        acc.apply_grad([1.0], weight=weight)
    before = client.hgetall("redisacc:{forged}")
    # ExpectedGradients reserve a place before anything is decided.
    del before[b"places"]
    for text in FORGED:
        client.hset("redisacc:{forged}", "total_weight", text)
        for call in (acc.peek, acc.info, lambda: acc.apply_grad([1.0]), lambda: acc.take_grad(2, timeout=0)):
            with pytest.raises(redisacc.CorruptDataError, match=r"total.weight"):
                call()
        assert {**before, b"total_weight": text}.items() <= client.hgetall("redisacc:{forged}").items()
    # It is a weight, and only the gradients tell that it is wrong.
    client.hset("redisacc:{forged}", "total_weight", "2.25")
    for call in (acc.peek, lambda: acc.take_grad(2, timeout=0)):
        with pytest.raises(redisacc.CorruptDataError, match=r"add up to 1\.5, but the total weight was .* 2\.25"):
            call()


def test_a_total_that_is_gone(open_dense_stored, client):
    acc = open_dense_stored("float32", [1], "forged")
    acc.apply_grad([1.0], weight=0.5)
    client.hdel("redisacc:{forged}", "total_weight")
    with pytest.raises(redisacc.CorruptDataError, match="the total weight was counted to be 1"):
        acc.peek()
    acc.delete()


def test_a_forged_rule(open_dense, client):
    acc = open_dense("float32", [1], "forged", staleness=redisacc.Staleness(1, weight=[1, 0.5]))
    acc.set_global_step(1)
    for text in (b"linear", b"1", b"1,2,3", b"1,x", b"1,-1", b"1,0", b"", b"1;2"):
        client.hset("redisacc:{forged}", "staleness_weight", text)
        with pytest.raises(redisacc.CorruptDataError, match="staleness_weight"):
            acc.info()
        if text != b"1,2,3":
            with pytest.raises(redisacc.CorruptDataError, match="staleness_weight"):
                acc.apply_grad([1.0], 0)


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
