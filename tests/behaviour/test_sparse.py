"""Sparse accumulators: indices, rows, and the mean of each row."""

from __future__ import annotations

import contextlib
import types

import numpy as np
import pytest
from support.model import assert_same

import redisacc


def check(taken, indices, values, shape, dtype=np.float32):
    assert_same(np.asarray(taken[0]), np.array(indices, np.int64))
    assert_same(taken[1], np.array(values, dtype))
    assert [int(dim) for dim in taken[2]] == shape


def test_each_row_is_divided_by_the_number_of_gradients_that_held_it(open_sparse_stored):
    acc = open_sparse_stored("float32", [4])
    acc.apply_grad([0, 1], [1.0, 2.0])
    acc.apply_grad([1, 3], [4.0, 6.0])
    acc.apply_grad([1], [6.0])
    check(acc.take_grad(3), [0, 1, 3], [1, 4, 6], [4])


def test_repeated_indices_are_summed_and_count_once(open_sparse_stored):
    acc = open_sparse_stored("float32", [5, 1])
    acc.apply_grad([2, 2, 0, 2], [[1.0], [2.0], [9.0], [3.0]])
    acc.apply_grad([2], [[4.0]])
    check(acc.take_grad(2), [0, 2], [[9], [5]], [5, 1])


def test_indices_of_every_size(open_sparse_stored):
    for index in (0, 2**31, 2**53, 2**53 + 1, 2**63 - 1):
        acc = open_sparse_stored("float32", None, reduction_type="SUM")
        near = max(index - 1, 1)
        acc.apply_grad(np.array([index, near]), [1.0, 2.0])
        acc.apply_grad(np.array([index], np.uint64), [10.0])
        expected = sorted([(index, 11.0), (near, 2.0)])
        check(acc.take_grad(2), [i for i, _ in expected], [v for _, v in expected], [-1])


def test_the_first_dimension_of_the_result_is_the_declared_one(open_sparse_stored):
    for declared, expected in (([None, 2], [-1, 2]), ([9, None], [9, 2]), (None, [-1, 2]), ([-1, -1], [-1, 2])):
        acc = open_sparse_stored("float32", declared)
        acc.apply_grad([2], [[1.0, 2.0]], grad_shape=[9, 2])
        check(acc.take_grad(1), [2], [[1, 2]], expected)


# declared shape, grad_shape, accepted
GRAD_SHAPES = [
    ([4, 2], None, True),
    ([4, 2], [4, 2], True),
    ([4, 2], [4, 2, 7], True),
    ([4, 2], [4], False),
    ([4, 2], [], False),
    ([4, 2], [5, 2], False),
    ([4, 2], [4, 3], False),
    ([4, 2], [-1, 2], False),
    ([None, 2], [100, 2], True),
    ([None, 2], [100, 3], False),
    ([None, None], [100, 3], True),
    ([None, None], [100], False),
    (None, [], True),
    (None, [4, 2], True),
]


def test_the_shape_that_a_gradient_claims(open_sparse):
    for declared, grad_shape, accepted in GRAD_SHAPES:
        acc = open_sparse("float32", declared)
        with contextlib.nullcontext() if accepted else pytest.raises(redisacc.InvalidArgumentError):
            assert acc.apply_grad([1], [[1.0, 2.0]], grad_shape)
        assert acc.num_accumulated() == int(accepted)


# indices, values: refused by an accumulator of shape [4, 2]
REFUSED = [
    # An index beyond the declared shape, and a negative one.
    ([4], [[1.0, 2.0]]),
    ([-1], [[1.0, 2.0]]),
    # Indices of rank 0 and 2, and values of rank 0 and 1.
    (1, [[1.0, 2.0]]),
    ([[1]], [[1.0, 2.0]]),
    ([1], 1.0),
    ([1], [1.0]),
    # More indices than rows, and fewer.
    ([1, 2], [[1.0, 2.0]]),
    ([1], [[1.0, 2.0], [3.0, 4.0]]),
    # Rows that are too narrow, and too wide.
    ([1], [[1.0]]),
    ([1], [[1.0, 2.0, 3.0]]),
    # Indices that are no integers.
    ([1.0], [[1.0, 2.0]]),
]


def test_a_refused_gradient_changes_nothing(open_sparse):
    acc = open_sparse("float32", [4, 2])
    acc.apply_grad([0, 1], [[1.0, 2.0], [3.0, 4.0]])
    before = acc.info()
    for gradient in REFUSED:
        # Everything that the client can check is checked for stale gradients, too.
        for step in (0, -1):
            with pytest.raises(redisacc.InvalidArgumentError):
                acc.apply_grad(*gradient, local_step=step)
            assert acc.info() == before
    check(acc.take_grad(1), [0, 1], [[1, 2], [3, 4]], [4, 2])


def test_any_index_goes_where_the_first_dimension_is_unknown(open_sparse_stored):
    acc = open_sparse_stored("float32", [None, 1])
    acc.apply_grad([10**12], [[1.0]], grad_shape=[3, 1])
    check(acc.take_grad(1), [10**12], [[1]], [-1, 1])


def test_indexed_slices_go_in_and_come_out(open_sparse_stored):
    acc = open_sparse_stored("float32", [4, 2])
    acc.apply_indexed_slices_grad(redisacc.IndexedSlices(np.ones((1, 2), np.float32), np.array([2]), [4, 2]))
    acc.apply_indexed_slices_grad(redisacc.IndexedSlices(np.ones((1, 2), np.float32), np.array([2])), local_step=3)
    foreign = types.SimpleNamespace(values=[[4.0, 7.0]], indices=[2], dense_shape=None)
    acc.apply_indexed_slices_grad(foreign)
    result = acc.take_indexed_slices_grad(3)
    assert isinstance(result, redisacc.IndexedSlices)
    check((result.indices, result.values, result.dense_shape), [2], [[2, 3]], [4, 2])
    assert not acc.apply_indexed_slices_grad(foreign, 0)


def test_a_claimed_shape_of_indexed_slices_is_checked(open_sparse):
    acc = open_sparse("float32", [4, 2])
    with pytest.raises(redisacc.InvalidArgumentError):
        acc.apply_indexed_slices_grad(redisacc.IndexedSlices(np.ones((1, 2), np.float32), np.array([2]), [5, 2]))
    for wrong in (None, 3, [1.0], types.SimpleNamespace(values=[[1.0, 1.0]])):
        with pytest.raises(redisacc.InvalidArgumentError):
            acc.apply_indexed_slices_grad(wrong)
    assert acc.num_accumulated() == 0
