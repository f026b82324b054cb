"""Sparse arrays whose entries have coordinates: the rows that they become."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.model import assert_same
from support.rows import every_row

from redisacc._arrays.elements import rows_of_elements
from redisacc.errors import InvalidArgumentError

DTYPES = ["bool", "int8", "uint8", "int64", "uint64", "float16", "float32", "complex128", ml_dtypes.bfloat16]


@st.composite
def sparse_arrays(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=2, max_size=4)))
    sparse_dims = draw(st.integers(2, len(shape)))
    number = draw(st.integers(0, 12))
    coordinates = [
        np.array([draw(st.integers(0, d - 1)) for _ in range(number)], np.int32) for d in shape[:sparse_dims]
    ]
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    values = np.ones((number, *shape[sparse_dims:]), dtype) * np.array(draw(st.integers(0, 3)), dtype)
    return coordinates, values, shape


@given(sparse_arrays())
def test_rows_are_those_of_the_dense_array(array):
    coordinates, values, shape = array
    indices, rows, dense_shape = rows_of_elements(coordinates, values, shape, "grad")
    # One entry after the other, in a type that holds all of these numbers exactly.
    dense = np.zeros(shape, np.complex128)
    for place in range(len(values)):
        dense[tuple(int(vector[place]) for vector in coordinates)] += values[place].astype(np.complex128)
    assert indices.dtype == np.int64
    assert indices.tolist() == sorted({int(index) for index in coordinates[0]})
    assert rows.shape == (len(indices), *shape[1:])
    assert_same(rows.astype(np.complex128), dense[indices])
    assert dense_shape.tolist() == list(shape)


def test_without_repetitions_the_dtype_remains():
    for dtype in DTYPES:
        values = np.ones(2, dtype)
        assert rows_of_elements([np.array([1, 0]), np.array([0, 0])], values, (2, 1), "grad").values.dtype == dtype


@every_row(
    "dtype, wide",
    [
        ("bool", "uint64"),
        ("uint8", "uint64"),
        ("int8", "int64"),
        ("float16", "float32"),
        (ml_dtypes.bfloat16, "float32"),
        ("float64", "float64"),
        ("complex64", "complex64"),
    ],
)
def test_repetitions_are_added_up_in_a_wider_type(dtype, wide):
    number = 3000
    zeros = np.zeros(number, np.int64)
    rows = rows_of_elements([zeros, zeros], np.ones(number, dtype), (2, 1), "grad").values
    assert rows.dtype == wide
    assert rows.tolist() == [[number]]


def test_rows_are_handed_on():
    indices, values = np.array([9, -1, 9]), np.ones((3, 2))
    rows = rows_of_elements([indices], values, (4, 2), "grad")
    assert rows.indices is indices
    assert rows.values is values


ONE = np.array([0])


@every_row(
    "coordinates, values, shape, message",
    [
        ([], np.ones(1), (), "at least one sparse dimension"),
        ([ONE, ONE], np.ones(2), (2, 2), "integer coordinates for each of its 2 entries"),
        ([ONE, ONE], np.array(1.0), (2, 2), "integer coordinates"),
        ([ONE, ONE.astype(float)], np.ones(1), (2, 2), "integer coordinates"),
        ([ONE, ONE[None]], np.ones(1), (2, 2), "integer coordinates"),
        ([ONE, ONE], np.ones(1), (2,), "must fit its shape"),
        ([ONE, ONE], np.ones((1, 3)), (2, 2, 4), "must fit its shape"),
        ([ONE, ONE], np.ones((1, 3)), (2, 2), "must fit its shape"),
        ([ONE + 2, ONE], np.ones(1), (2, 2), r"dimension 0 must be in \[0, 1\], but one of them is 2"),
        ([ONE - 1, ONE], np.ones(1), (2, 2), r"dimension 0 must be in \[0, 1\], but one of them is -1"),
        ([ONE, ONE - 1], np.ones(1), (2, 2), r"dimension 1 must be in \[0, 1\], but one of them is -1"),
        ([ONE, np.array([2**64 - 1], np.uint64)], np.ones(1), (2, 2), "but one of them is 18446744073709551615"),
        ([ONE, ONE], np.ones(1), (2, 0), "dimension 1"),
        ([ONE, ONE], np.ones(1), (1, 2**50), "does not fit into memory"),
        ([ONE, ONE], np.ones(1), (1, 2**62), "does not fit into memory"),
        ([ONE, ONE], np.ones(1), (1, 2**70), "does not fit into memory"),
    ],
)
def test_refused(coordinates, values, shape, message):
    with pytest.raises(InvalidArgumentError, match=f"grad.*{message}"):
        rows_of_elements(coordinates, values, shape, "grad")
