"""Dense accumulators: shapes, order of addition, what a round holds."""

from __future__ import annotations

import numpy as np
import pytest
from support.model import assert_same

import redisacc


def f32(*values):
    return np.array(values, np.float32)


def test_the_mean_divides_by_the_number_of_gradients(open_dense_stored):
    acc = open_dense_stored("float32", [2])
    for grad in ([1, 10], [2, 20], [6, 60]):
        acc.apply_grad(f32(*grad))
    assert_same(acc.take_grad(3), f32(3, 30))


def test_the_sum_does_not_divide(open_dense_stored):
    acc = open_dense_stored("float32", [2], reduction_type="SUM")
    for grad in ([1, 10], [2, 20], [6, 60]):
        acc.apply_grad(f32(*grad))
    assert_same(acc.take_grad(1), f32(9, 90))


def test_a_take_returns_everything_not_only_what_it_required(open_dense_stored):
    acc = open_dense_stored("float32", [1])
    for value in range(5):
        acc.apply_grad(f32(value))
    assert_same(acc.take_grad(2), f32(2))
    assert acc.num_accumulated() == 0


def test_no_reduction_type_means_mean(open_dense):
    acc = open_dense("float32", [1], reduction_type=None)
    assert acc.reduction_type == "MEAN"
    acc.apply_grad(f32(1))
    acc.apply_grad(f32(2))
    assert_same(acc.take_grad(2), f32(1.5))


@pytest.mark.fixed("encoding")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("reduction", ["MEAN", "SUM"])
def test_sums_are_those_of_adding_in_order_of_arrival(open_dense_stored, dtype, reduction):
    rng = np.random.default_rng(5)
    acc = open_dense_stored(dtype, [37], reduction_type=reduction)
    total = None
    for _ in range(23):
        grad = (rng.standard_normal(37) * 10.0 ** rng.integers(-6, 6, 37)).astype(dtype)
        acc.apply_grad(grad)
        total = grad if total is None else total + grad
    assert_same(acc.take_grad(23), total / np.dtype(dtype).type(23) if reduction == "MEAN" else total)


@pytest.mark.fixed("encoding")
def test_infinities_nans_and_negative_zeros_are_those_of_ieee(open_dense_stored):
    acc = open_dense_stored("float32", [7], reduction_type="SUM")
    inf, nan = np.inf, np.nan
    acc.apply_grad(f32(inf, inf, nan, -0.0, -0.0, 3e38, 1e-45))
    acc.apply_grad(f32(1.0, -inf, 1.0, -0.0, 0.0, 3e38, 1e-45))
    assert_same(acc.take_grad(2), f32(inf, nan, nan, -0.0, 0.0, inf, 2.8e-45))


@pytest.mark.fixed("encoding")
def test_a_single_gradient_comes_back_bit_for_bit(open_dense_stored):
    acc = open_dense_stored("float32", [4])
    grad = f32(-0.0, 1e-45, np.finfo(np.float32).max, np.nan)
    acc.apply_grad(grad)
    assert_same(acc.take_grad(1), grad)


def test_scalars(open_dense_stored):
    acc = open_dense_stored("float64", [])
    acc.apply_grad(1.5)
    acc.apply_grad(np.float64(2.5))
    acc.apply_grad(np.array(5.0))
    result = acc.take_grad(3)
    assert_same(result, np.array(3.0))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 4)])
def test_gradients_without_elements_count(open_dense_stored, shape):
    acc = open_dense_stored("float32", shape)
    for _ in range(2):
        assert acc.apply_grad(np.zeros(shape, np.float32))
    assert acc.num_accumulated() == 2
    assert_same(acc.take_grad(2), np.zeros(shape, np.float32))


@pytest.mark.parametrize("elements", [1, 255, 256, 257, 1000, 5003])
def test_gradients_of_many_chunks(open_dense_stored, elements):
    acc = open_dense_stored("float64", None, reduction_type="SUM")
    first, second = np.arange(elements) + 0.25, np.arange(elements)[::-1] * 3.0
    acc.apply_grad(first)
    acc.apply_grad(second)
    assert_same(acc.take_grad(2), first + second)


def test_a_large_gradient_as_it_comes(open_dense):
    rng = np.random.default_rng(1)
    first, second = rng.standard_normal((2, 300, 1000)).astype(np.float32)
    acc = open_dense("float32", [300, 1000])
    acc.apply_grad(first)
    acc.apply_grad(second)
    assert_same(acc.take_grad(2), (first + second) / np.float32(2))


def test_an_unknown_shape_is_bound_by_the_first_gradient_until_the_take(open_dense_stored):
    acc = open_dense_stored("float32")
    assert acc.shape is None
    acc.apply_grad(np.ones((2, 3), np.float32))
    for other in (np.ones((3, 2)), np.ones(6), np.ones((1, 2, 3)), np.ones((2, 1)), np.float64(1)):
        with pytest.raises(redisacc.InvalidArgumentError):
            acc.apply_grad(other.astype(np.float32))
    assert acc.num_accumulated() == 1
    assert_same(acc.take_grad(1), np.ones((2, 3), np.float32))
    acc.apply_grad(np.float32(4), local_step=1)
    assert_same(acc.take_grad(1), np.array(4, np.float32))


def test_a_partial_shape_binds_what_it_names(open_dense_stored):
    acc = open_dense_stored("float32", [None, 3, -1])
    assert acc.shape == (None, 3, None)
    for wrong in ((2, 3), (2, 4, 1), (3,), ()):
        with pytest.raises(redisacc.InvalidArgumentError):
            acc.apply_grad(np.ones(wrong, np.float32))
    for step, shape in enumerate([(2, 3, 1), (5, 3, 2)]):
        acc.apply_grad(np.ones(shape, np.float32), local_step=step)
        with pytest.raises(redisacc.InvalidArgumentError):
            acc.apply_grad(np.ones((shape[0] + 1, *shape[1:]), np.float32), local_step=step)
        assert acc.take_grad(1).shape == shape


def test_nothing_is_broadcast(open_dense_stored):
    acc = open_dense_stored("float32", [2, 3])
    acc.apply_grad(np.ones((2, 3), np.float32))
    for shape in ((), (1,), (3,), (1, 3), (2, 1), (2, 3, 1)):
        with pytest.raises(redisacc.InvalidArgumentError):
            acc.apply_grad(np.ones(shape, np.float32))
    assert acc.num_accumulated() == 1


def test_a_stale_gradient_is_checked_against_the_declared_shape_but_not_against_the_round(open_dense_stored):
    acc = open_dense_stored("float32", [None])
    acc.set_global_step(1)
    acc.apply_grad(f32(1, 2), local_step=1)
    assert acc.apply_grad(f32(1, 2, 3), local_step=0).outcome == "stale"
    with pytest.raises(redisacc.InvalidArgumentError):
        acc.apply_grad(np.ones((2, 2), np.float32), local_step=0)
    assert acc.info().stale == 1


def test_a_refused_gradient_changes_nothing(open_dense_stored):
    acc = open_dense_stored("float32")
    acc.apply_grad(f32(1, 2))
    before = acc.info()
    with pytest.raises(redisacc.InvalidArgumentError):
        acc.apply_grad(f32(1, 2, 3))
    after = acc.info()
    assert after == before
    assert_same(acc.take_grad(1), f32(1, 2))


def test_results_belong_to_the_caller(open_dense_stored):
    acc = open_dense_stored("float32", [3])
    grad = f32(1, 2, 3)
    acc.apply_grad(grad)
    result = acc.take_grad(1)
    result += 1
    assert grad.tolist() == [1, 2, 3]
    acc.apply_grad(grad, local_step=1)
    assert_same(acc.take_grad(1), f32(1, 2, 3))


def test_rounds_do_not_leak_into_each_other(open_dense_stored):
    acc = open_dense_stored("float32", [2])
    for number in range(5):
        acc.apply_grad(f32(number, 0), local_step=number)
        acc.apply_grad(f32(number, 2), local_step=number)
        assert_same(acc.take_grad(2), f32(number, 1))


def test_both_ways_of_holding_meet_in_one_round(open_dense):
    small = open_dense("float64", [3], "shared", limits=redisacc.Limits(in_place=10**9), reduction_type="SUM")
    large = open_dense("float64", [3], "shared", limits=redisacc.Limits(in_place=0), reduction_type="SUM")
    small.apply_grad([1.0, 2.0, 3.0])
    large.apply_grad([10.0, 20.0, 30.0])
    small.apply_grad([100.0, 200.0, 300.0])
    large.apply_grad([1000.0, 2000.0, 3000.0])
    assert_same(small.take_grad(4), np.array([1111.0, 2222.0, 3333.0]))
    small.delete()
