"""Arrays of every form (strided, foreign, read-only, lists), and what becomes of them."""

from __future__ import annotations

import array

import numpy as np
import pytest
from support.model import assert_same

import redisacc


def layouts(base):
    """The same numbers in every layout of memory that numpy has."""
    padded = np.zeros((*base.shape[:-1], base.shape[-1] * 2), base.dtype)
    padded[..., ::2] = base
    read_only = base.copy()
    read_only.flags.writeable = False
    buffer = bytearray(base.nbytes + 1)
    unaligned = np.frombuffer(buffer, base.dtype, base.size, offset=1).reshape(base.shape)
    unaligned[...] = base
    return {
        "plain": base.copy(),
        "column order": np.asfortranarray(base),
        "every other": padded[..., ::2],
        "reversed": base[::-1].copy()[::-1],
        "big-endian": base.astype(base.dtype.newbyteorder(">")),
        "read-only": read_only,
        "unaligned": unaligned,
        "transposed": base.T.copy().T,
    }


LAYOUTS = list(layouts(np.zeros((2, 2))))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_every_layout(open_dense, open_sparse, layout):
    for dtype in ("float32", "int16", "int64", "complex64"):
        base = (np.arange(12) - 5).reshape(4, 3).astype(dtype)
        acc = open_dense(dtype, [4, 3], reduction_type="SUM")
        grad = layouts(base)[layout]
        before = grad.copy()
        acc.apply_grad(grad)
        acc.apply_grad(base)
        assert np.array_equal(grad, before)
        result = acc.take_grad(2)
        assert_same(result, base + base)
        assert result.dtype.isnative
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    indices = np.array([[7, 2], [3, 9]])
    acc = open_sparse("float32", [10, 3])
    acc.apply_grad(layouts(indices)[layout].reshape(-1), layouts(values)[layout])
    # A view with a stride of its own, which reshape would have copied.
    acc.apply_grad(np.repeat([7, 2, 3, 9], 2)[::2], values)
    result_indices, result, _ = acc.take_grad(2)
    assert result_indices.tolist() == [2, 3, 7, 9]
    assert_same(result, values[[1, 2, 0, 3]])


def test_lists_tuples_and_buffers(open_dense, open_sparse):
    dense = open_dense("float32", [2])
    for grad in ([1, 2], (1.0, 2.0), array.array("f", [1, 2]), array.array("i", [1, 2]), memoryview(np.ones(2))):
        assert dense.apply_grad(grad)
    assert_same(dense.take_grad(5), np.float32([5, 9]) / np.float32(5))
    sparse = open_sparse("float32", [4, 1])
    assert sparse.apply_grad([1], [[1.0]])
    assert sparse.apply_grad((1, 2), ((1.0,), (2.0,)))
    assert sparse.apply_grad(array.array("q", [2]), [np.float32([4])])
    assert sparse.take_grad(3)[1].tolist() == [[1.0], [3.0]]


def test_lists_of_ints_for_integer_types(open_dense):
    for dtype, low, high in (("uint8", 0, 255), ("int8", -128, 127), ("uint64", 0, 2**63 - 1)):
        acc = open_dense(dtype, [2], reduction_type="SUM")
        acc.apply_grad([low, high])
        assert_same(acc.take_grad(1), np.array([low, high], dtype))
        for wrong in ([low - 1, 0], [0, 2 * high + 2], [0.5, 1]):
            with pytest.raises(redisacc.InvalidArgumentError):
                acc.apply_grad(wrong, local_step=1)
        assert acc.num_accumulated() == 0


def test_wider_integers_are_converted_where_they_fit(open_dense):
    acc = open_dense("int8", [2], reduction_type="SUM")
    acc.apply_grad(np.array([-128, 127], np.int64))
    for wrong in ([128, 0], [-129, 0]):
        with pytest.raises(redisacc.InvalidArgumentError):
            acc.apply_grad(np.array(wrong, np.int64))
    assert_same(acc.take_grad(1), np.array([-128, 127], np.int8))


def test_numpy_scalars_and_arrays_of_rank_zero(open_dense):
    acc = open_dense("float32", [])
    for grad in (1, 2.0, np.float32(3), np.int16(4), np.array(5.0), True):
        assert acc.apply_grad(grad)
    assert acc.take_grad(6).tolist() == np.float32(16) / np.float32(6)


class Tensor:
    """An array of another library."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype or np.float64)


def test_foreign_arrays(open_dense, open_sparse):
    dense, sparse = open_dense("float32", [2]), open_sparse("float32", [4, 1])
    dense.apply_grad(Tensor([1.0, 2.0]))
    assert_same(dense.take_grad(1), np.array([1, 2], np.float32))
    sparse.apply_grad(np.array([2]), Tensor([[1.0]]))
    assert_same(sparse.take_grad(1)[1], np.array([[1]], np.float32))


def test_a_masked_array_is_refused(open_dense):
    acc = open_dense("float32", [2])
    with pytest.raises(redisacc.InvalidArgumentError, match=r"mask would be lost: call filled\(\) first"):
        acc.apply_grad(np.ma.masked_array([1.0, 2.0], [True, False]))
    assert acc.num_accumulated() == 0


def test_a_gradient_may_be_overwritten_as_soon_as_it_is_applied(open_dense_stored, open_sparse_stored):
    buffer = np.ones(3000, np.float32)
    acc = open_dense_stored("float32", [3000], reduction_type="SUM")
    rows = np.ones((3000, 1), np.float32)
    sparse = open_sparse_stored("float32", [3000, 1], reduction_type="SUM")
    for value in (1, 2, 4):
        buffer[:] = rows[:] = value
        acc.apply_grad(buffer)
        sparse.apply_grad(np.arange(3000), rows)
    buffer[:] = rows[:] = 100
    assert set(acc.take_grad(3).tolist()) == {7.0}
    assert set(sparse.take_grad(3)[1].ravel().tolist()) == {7.0}
