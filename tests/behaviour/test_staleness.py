"""Gradients that are late: by how many steps they may be, and what a round says about it."""

from __future__ import annotations

import collections

import pytest
from support.selection import REAL

import redisacc

LOWEST, HIGHEST = -(2**63), 2**63 - 1


@pytest.mark.every_server
def test_a_gradient_may_be_late(open_dense_stored):
    acc = open_dense_stored("float32", [2], "late", staleness=2, reduction_type="SUM")
    acc.set_global_step(10)
    outcomes = [acc.apply_grad([1.0, 1.0], step).outcome for step in (7, 8, 9, 10, 11, 8)]
    assert outcomes == ["stale", "applied", "applied", "applied", "applied", "applied"]
    info = acc.info()
    assert (info.max_staleness, info.staleness, info.stale) == (2, {0: 2, 1: 1, 2: 2}, 1)
    assert acc.peek().staleness == {0: 2, 1: 1, 2: 2}
    with acc.take(5) as taken:
        assert taken.staleness == {0: 2, 1: 1, 2: 2}
        assert taken.gradient.tolist() == [5, 5]
        assert [found.staleness for found in acc.info().unacknowledged] == [taken.staleness]
    assert acc.info().staleness == acc.peek().staleness == {}
    # The step is 11 now, so 9 is still accepted.
    assert not acc.apply_grad([1.0, 1.0], 8)
    assert acc.apply_grad([1.0, 1.0], 9)
    assert acc.info().staleness == {2: 1}


def test_without_it_the_rule_is_tensorflows_and_nothing_more_is_stored(open_dense_stored, client):
    acc = open_dense_stored("float32", [2], "now", worker="ann")
    acc.set_global_step(1)
    assert not acc.apply_grad([1.0, 1.0], 0)
    acc.apply_grad([1.0, 1.0], 1)
    assert acc.info().staleness == acc.peek().staleness == {0: 1}
    assert {b"max_staleness", b"staleness"}.isdisjoint(client.hkeys("redisacc:{now}"))
    with acc.take(1) as taken:
        assert taken.staleness == {0: 1}
        (entry,) = client.hvals("redisacc:{now}:taken")
        assert len(entry.split(b" ")) == 6


STEPS = [
    (0, [-3, -1, 0, HIGHEST], [-4, LOWEST]),
    (2, [-1, 0, 1, 2, 3], [-2, -5]),
    (-5, [-8, -5, 0], [-9, LOWEST]),
    (10, [7, 8, 9, 10, 100], [6, -7]),
    (10**9 + 1, [10**9 - 2, 10**9], [10**9 - 3, -(10**9)]),
    (-(10**9) + 1, [-(10**9) - 2, -(10**9)], [-(10**9) - 3]),
    (2**53 + 2, [2**53 - 1, 2**53, 2**53 + 1], [2**53 - 2, 0]),
    (HIGHEST, [HIGHEST - 3, HIGHEST], [HIGHEST - 4, 0, LOWEST]),
    (LOWEST, [LOWEST, 0, HIGHEST], []),
    (LOWEST + 2, [LOWEST, LOWEST + 2], []),
]


def test_steps_are_compared_exactly(open_dense):
    for step, accepted, refused in STEPS:
        acc = open_dense("float32", [1], staleness=3)
        acc.set_global_step(step)
        for local_step in refused:
            assert acc.apply_grad([1.0], local_step).outcome == "stale", local_step
        for local_step in accepted:
            assert acc.apply_grad([1.0], local_step), local_step
        expected = collections.Counter(max(step - local_step, 0) for local_step in accepted)
        assert acc.info().staleness == dict(sorted(expected.items()))


def test_large_gradients_may_be_late(open_dense):
    # They ask first, and reserve a place.
    acc = open_dense("float32", [1_200_000], staleness=1, reduction_type="SUM")
    acc.set_global_step(2)
    gradient = [1.0] * 1_200_000
    assert [acc.apply_grad(gradient, step).outcome for step in (0, 1)] == ["stale", "applied"]
    assert acc.info().staleness == {1: 1}


def test_every_opener_agrees(open_dense):
    open_dense("float32", [1], "k", staleness=3)
    assert open_dense("float32", [1], "k").info().max_staleness == 3
    assert open_dense("float32", [1], "k", staleness=3).info().max_staleness == 3
    for other in (0, 4):
        with pytest.raises(redisacc.InvalidArgumentError, match=rf"its staleness\.most is 3, not {other}"):
            open_dense("float32", [1], "k", staleness=other)
    open_dense("float32", [1], "plain")
    assert open_dense("float32", [1], "plain", staleness=0).info().max_staleness == 0
    with pytest.raises(redisacc.InvalidArgumentError, match=r"its staleness\.most is 0, not 1"):
        open_dense("float32", [1], "plain", staleness=1)


def test_invalid_limits(open_dense, open_tree):
    for value in (-1, 1001, 2**63, 1.0, float("nan"), "1", True, [1]):
        with pytest.raises(redisacc.InvalidArgumentError, match="staleness must be"):
            open_dense("float32", [1], staleness=value)
        with pytest.raises(redisacc.InvalidArgumentError, match="staleness must be"):
            open_tree({"w": ("float32", (1,))}, staleness=value)


@pytest.mark.servers(*REAL)
def test_many_different_ones(open_dense):
    acc = open_dense("float32", [1], staleness=1000)
    acc.set_global_step(0)
    for late in (*range(0, 1001, 4), 1000, 0, 999):
        acc.apply_grad([1.0], -late)
    info = acc.info()
    assert info.staleness[1000] == info.staleness[0] == 2
    assert len(info.staleness) == 252
    with acc.take(1) as taken:
        assert taken.staleness == info.staleness


FORGED = {
    "read": (b"", b"x", b"0", b"0:", b"0:1", b"0:3", b"4:2", b"0:1,0:1", b"0:0,1:2", b"0:2,", b"0:2:1"),
    "taken": (b"", b"0:2 [1] x", b"0:2\n", b"9" * 30001),
    "added to": (b"0:x", b"0:", b"0:1.5", b"0:" + b"9" * 16, b"0:-1"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_record(open_dense, client, what):
    acc = open_dense("float32", [1], "forged", staleness=3)
    for _ in range(2):
        acc.apply_grad([1.0])
    calls = {
        "read": (acc.info, acc.peek, acc.num_accumulated),
        "taken": (lambda: acc.take_grad(2, timeout=0),),
        "added to": (lambda: acc.apply_grad([1.0]),),
    }
    for text in FORGED[what]:
        client.hset("redisacc:{forged}", "staleness", text)
        before = client.hgetall("redisacc:{forged}")
        for call in calls[what]:
            with pytest.raises(redisacc.CorruptDataError, match="staleness"):
                call()
        assert client.hgetall("redisacc:{forged}") == before
