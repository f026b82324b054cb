"""Every element type, dense and sparse, as mean and as sum, stored in both ways, against the model."""

import types

import ml_dtypes
import numpy as np
import pytest
from support import model
from support.model import assert_same, storage_dtype

import redisacc


@pytest.mark.every_server("redis62", storage="in_place")
def test_a_sum_of_integers_wraps(open_dense_stored):
    for dtype in model.INTEGERS:
        storage = storage_dtype(dtype)
        bounds = np.iinfo(storage)
        acc = open_dense_stored(dtype, [3], reduction_type="SUM")
        acc.apply_grad(np.array([bounds.max, bounds.min, bounds.max], storage))
        acc.apply_grad(np.array([1, bounds.max, bounds.max], storage))
        expected = [bounds.min, bounds.min + bounds.max, -2 if storage.kind == "i" else bounds.max - 1]
        assert_same(acc.take_grad(2), np.array(expected, storage))


def test_sums_beyond_what_doubles_hold_stay_exact(open_sparse_stored):
    # 2**21 rows of one gradient at one index: 2**53 - 2**21 in a single element, which is added in place.
    repeats, most = 2**21, 2**32 - 1
    total = repeats * most
    acc = open_sparse_stored("uint32", [2], reduction_type="SUM")
    mean = open_sparse_stored("uint32", [2])
    for one in (acc, mean):
        one.apply_grad(np.zeros(repeats, np.int64), np.full(repeats, most, np.uint32))
        one.apply_grad([0], np.array([2**21 + 1], np.uint32))
        one.apply_grad([0], np.array([2], np.uint32))
    # 2**53 + 3, which is no double.
    exact = total + 2**21 + 3
    assert exact == 2**53 + 3
    assert_same(acc.take_grad(3)[1], np.array([exact % 2**32], np.uint32))
    assert_same(mean.take_grad(3)[1], np.array([(exact // 3) % 2**32], np.uint32))


def tensorflows(name, kind):
    """An object that looks like one of TensorFlow's dtypes from outside."""
    return types.SimpleNamespace(name=name, as_numpy_dtype=kind)


SPELLINGS = [
    ("float32", "float32"),
    (np.float32, "float32"),
    (np.dtype("float32"), "float32"),
    ("<f4", "float32"),
    (np.dtype(">f4"), "float32"),
    (float, "float64"),
    (int, "int64"),
    (complex, "complex128"),
    ("half", "float16"),
    (ml_dtypes.bfloat16, "bfloat16"),
    (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
    ("bfloat16", "bfloat16"),
    (tensorflows("float32", np.float32), "float32"),
    (tensorflows("bfloat16", ml_dtypes.bfloat16), "bfloat16"),
    (tensorflows("quint8", np.dtype([("quint8", "u1")])), "quint8"),
    (np.dtype([("qint32", "i4")]), "qint32"),
    ("quint16", "quint16"),
]


@pytest.mark.servers("fakeredis")
def test_a_type_may_be_spelled_in_many_ways(open_dense):
    for spelling, name in SPELLINGS:
        acc = open_dense(spelling, [1], "spelled")
        storage = storage_dtype(name)
        assert acc.dtype == (np.dtype([(name, storage)]) if name in model.QUANTIZED else storage)
        assert acc.info().dtype == name
        assert open_dense(name, [1], "spelled").dtype == acc.dtype
        acc.apply_grad(np.array([3], storage))
        assert_same(acc.take_grad(1), np.array([3], storage))
        acc.delete()


# accumulator's dtype, gradient's dtype, whether it is converted
CASTS = [
    ("float32", "float64", True),
    ("float32", "float16", True),
    ("float32", "int64", True),
    ("float32", "bool", True),
    ("float32", "complex64", False),
    ("float32", "bfloat16", True),
    ("bfloat16", "float64", True),
    ("bfloat16", "complex64", False),
    ("float16", "float64", True),
    ("int32", "int64", True),
    ("int32", "float32", False),
    ("int32", "uint8", True),
    ("uint8", "int64", False),
    ("uint8", "uint64", True),
    ("int64", "float64", False),
    ("qint8", "int8", True),
    ("qint8", "float32", False),
    ("complex64", "float64", True),
    ("complex64", "int32", True),
    ("complex64", "complex128", True),
    ("float32", "str", False),
    ("float32", "object", False),
    ("float32", "datetime64[s]", False),
    ("int64", "timedelta64[s]", False),
]


def test_gradients_are_converted_within_their_kind(open_dense, open_sparse):
    for dtype, given, accepted in CASTS:
        grad = np.array([1, 0]).astype(ml_dtypes.bfloat16 if given == "bfloat16" else given)
        dense, sparse = open_dense(dtype, [2]), open_sparse(dtype, [5])
        if accepted:
            dense.apply_grad(grad)
            sparse.apply_grad([1, 2], grad)
            expected = np.array([1, 0], storage_dtype(dtype))
            assert_same(dense.take_grad(1), expected)
            assert_same(sparse.take_grad(1)[1], expected)
            continue
        with pytest.raises(redisacc.InvalidArgumentError):
            dense.apply_grad(grad)
        with pytest.raises(redisacc.InvalidArgumentError):
            sparse.apply_grad([1, 2], grad)
        assert dense.num_accumulated() == sparse.num_accumulated() == 0


def test_a_number_beyond_the_type_becomes_infinite_silently(open_dense, open_sparse):
    # Warnings are errors here.
    for dtype in ("float32", "float16", "bfloat16"):
        dense, sparse = open_dense(dtype, [3]), open_sparse(dtype, [3, 1])
        for given in ([1e300, -1e300, 1e-300], np.array([1e300, -1e300, 1e-300])):
            dense.apply_grad(given)
            sparse.apply_grad([0, 1, 2], np.reshape(given, (3, 1)))
        assert dense.take_grad(2).astype(float).tolist() == [np.inf, -np.inf, 0]
        assert sparse.take_grad(2)[1].astype(float).ravel().tolist() == [np.inf, -np.inf, 0]
