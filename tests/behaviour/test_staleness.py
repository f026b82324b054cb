"""Gradients that are late: by how many steps they may be, and what a round says about it."""

import collections

import pytest
from support.selection import REAL

LOWEST, HIGHEST = -(2**63), 2**63 - 1


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
