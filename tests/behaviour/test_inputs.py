"""Arrays of every form (strided, foreign, read-only, lists), and what becomes of them."""

import array

import numpy as np
import pytest
from support.model import assert_same

import redisacc


def layouts(base):
    """The same numbers in every layout of memory that numpy has."""
    base = np.asarray(base)
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


def test_gradients_of_every_layout(open_dense, open_sparse):
    for dtype in ("float32", "int16", "int64", "complex64"):
        base = (np.arange(12) - 5).reshape(4, 3).astype(dtype)
        acc = open_dense(dtype, [4, 3], reduction_type="SUM")
        for step, (layout, grad) in enumerate(layouts(base).items()):
            before = grad.copy()
            acc.apply_grad(grad, step)
            acc.apply_grad(base, step)
            assert np.array_equal(grad, before), layout
            result = acc.take_grad(2)
            assert_same(result, base + base)
            assert result.dtype.isnative
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    acc = open_sparse("float32", [10, 3])
    for step, (indices, rows) in enumerate(
        zip(layouts([[7, 2], [3, 9]]).values(), layouts(values).values(), strict=True)
    ):
        acc.apply_grad(indices.reshape(-1), rows, local_step=step)
        # A view with a stride of its own, which reshape would have copied.
        acc.apply_grad(np.repeat([7, 2, 3, 9], 2)[::2], values, local_step=step)
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


def test_numpy_scalars_and_arrays_of_rank_zero(open_dense):
    acc = open_dense("float32", [])
    for grad in (1, 2.0, np.float32(3), np.int16(4), np.array(5.0), True):
        assert acc.apply_grad(grad)
    assert acc.take_grad(6).tolist() == np.float32(16) / np.float32(6)


def test_a_masked_array_is_refused(open_dense):
    acc = open_dense("float32", [2])
    with pytest.raises(redisacc.InvalidArgumentError, match=r"mask would be lost: call filled\(\) first"):
        acc.apply_grad(np.ma.masked_array([1.0, 2.0], [True, False]))
    step, number = np.ma.masked_array(1, True), np.ma.masked_array(1.0, True)
    for name, options in (
        ("local_step", {"local_step": step}),
        ("weight", {"weight": number}),
        ("metric loss", {"metrics": {"loss": number}}),
    ):
        with pytest.raises(redisacc.InvalidArgumentError, match=f"{name} must not be a masked array"):
            acc.apply_grad([1.0, 2.0], **options)
    assert acc.num_accumulated() == 0


def test_many_rows_of_which_few_are_in_several_gradients(open_sparse_stored):
    acc, rows = open_sparse_stored("float32", [9000, 8]), np.arange(3000)
    acc.apply_grad(rows, np.full((3000, 8), 1, np.float32))
    acc.apply_grad(rows[:10], np.full((10, 8), 4, np.float32))
    assert acc.take_grad(2)[1][:, 0].tolist() == [2.5] * 10 + [1] * 2990


def test_results_belong_to_the_caller(open_dense_stored):
    acc, grad = open_dense_stored("float32", [3]), np.float32([1, 2, 3])
    for step in range(2):
        acc.apply_grad(grad, step)
        result = acc.take_grad(1)
        assert result.tolist() == [1, 2, 3]
        result += 1
    assert grad.tolist() == [1, 2, 3]


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
