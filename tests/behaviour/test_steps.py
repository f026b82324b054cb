"""The global step: what it accepts, what moves it, and its extremes."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import redisacc

LAST = 2**63 - 1
# Beyond 2**53 Lua's numbers have gaps; 10**k and its neighbours have texts of different lengths.
EXTREMES = [2**53, -(2**53), 10**15, -(10**15), 10**18, -(10**18), 99, -10, 0, -1]


def test_a_gradient_of_an_older_step_is_dropped(open_dense_stored):
    acc = open_dense_stored("float32", [2])
    acc.set_global_step(5)
    result = acc.apply_grad([1.0, 1.0], local_step=4)
    assert not result
    assert (result.outcome, result.global_step, result.num_accumulated) == ("stale", 5, 0)
    assert acc.num_accumulated() == 0
    assert acc.info().stale == 1
    assert acc.info().applied == 0


def test_a_take_moves_the_step_by_one_and_empties_the_accumulator(open_dense_stored):
    acc = open_dense_stored("float32", [1])
    acc.set_global_step(41)
    acc.apply_grad([1.0], local_step=41)
    acc.take_grad(1)
    assert acc.global_step() == 42
    assert acc.num_accumulated() == 0
    assert not acc.apply_grad([1.0], local_step=41)
    assert acc.apply_grad([1.0], local_step=42)


def test_a_lower_step_is_set_with_a_warning(open_dense, caplog):
    acc = open_dense("float32", [1], name="weights")
    with caplog.at_level(logging.WARNING, logger="redisacc"):
        acc.set_global_step(7)
        acc.set_global_step(7)
        acc.set_global_step(8)
        assert not caplog.records
        acc.set_global_step(3)
    (record,) = caplog.records
    assert record.name == "redisacc"
    assert "3" in record.getMessage()
    assert acc.global_step() == 3
    assert acc.apply_grad([1.0], local_step=3)


def test_no_digit_of_a_step_is_lost(open_dense):
    acc = open_dense("float32", [1])
    for at in [step + more for step in EXTREMES for more in (-1, 0, 1)]:
        acc.set_global_step(at)
        assert acc.global_step() == acc.info().global_step == at
        assert not acc.apply_grad([1.0], local_step=at - 1)
        assert acc.apply_grad([1.0], local_step=at)
        with acc.take(1) as taken:
            assert taken.global_step == at
        assert acc.global_step() == at + 1


def test_a_take_at_the_last_step_is_an_error_and_takes_nothing(open_dense):
    acc = open_dense("float32", [1])
    acc.set_global_step(LAST)
    assert not acc.apply_grad([1.0], local_step=LAST - 1)
    assert acc.apply_grad([7.0], local_step=LAST)
    for _ in range(2):
        with pytest.raises(redisacc.RedisAccError, match=str(LAST)):
            acc.take_grad(1)
    assert acc.global_step() == LAST
    assert acc.num_accumulated() == 1
    assert acc.info().waiting == []
    acc.set_global_step(LAST - 1)
    assert acc.take_grad(1).tolist() == [7.0]
    assert acc.global_step() == LAST


def test_steps_of_every_integer_type_are_accepted(open_dense):
    acc = open_dense("float32", [1])
    for kind in (np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64):
        acc.set_global_step(kind(9))
        assert acc.apply_grad([1.0], local_step=kind(9))
        assert acc.apply_grad([1.0], np.array(10, kind))
    assert acc.take_grad(np.int64(14)).tolist() == [1.0]
