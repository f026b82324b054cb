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


def test_a_take_returns_everything_not_only_what_it_required(open_dense_stored):
    acc = open_dense_stored("float32", [1])
    for value in range(5):
        acc.apply_grad(f32(value))
    assert_same(acc.take_grad(2), f32(2))
    assert acc.num_accumulated() == 0


def test_gradients_of_many_chunks(open_dense_stored):
    acc = open_dense_stored("float64", None, reduction_type="SUM")
    for step, elements in enumerate((1, 255, 256, 257, 1000, 5003)):
        first, second = np.arange(elements) + 0.25, np.arange(elements)[::-1] * 3.0
        acc.apply_grad(first, step)
        acc.apply_grad(second, step)
        assert_same(acc.take_grad(2), first + second)


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


def test_nothing_is_broadcast(open_dense_stored):
    acc = open_dense_stored("float32", [2, 3])
    acc.apply_grad(np.ones((2, 3), np.float32))
    for shape in ((), (1,), (3,), (1, 3), (2, 1), (2, 3, 1)):
        with pytest.raises(redisacc.InvalidArgumentError):
            acc.apply_grad(np.ones(shape, np.float32))
    assert acc.num_accumulated() == 1


def test_results_belong_to_the_caller(open_dense_stored):
    acc = open_dense_stored("float32", [3])
    grad = f32(1, 2, 3)
    acc.apply_grad(grad)
    result = acc.take_grad(1)
    result += 1
    assert grad.tolist() == [1, 2, 3]
    acc.apply_grad(grad, local_step=1)
    assert_same(acc.take_grad(1), f32(1, 2, 3))
