"""Sparse arrays of scipy as gradients: matrices and arrays in every format."""

import numpy as np
import pytest
import scipy.sparse
from support.model import assert_same

import redisacc

WHOLE = np.float32([[0, 1, 0, 0], [0, 0, 0, 0], [2, 0, 3, 0], [0, 0, 0, 0]])
DENSE = (
    r"^grad must be dense, .*: make it dense with toarray\(\), or apply it to a SparseConditionalAccumulator with "
    r"apply_indexed_slices_grad\(\)"
)
FORMATS = ("bsr", "coo", "csc", "csr", "dia", "dok", "lil")


def made(name, whole):
    return getattr(scipy.sparse, name)(whole)


@pytest.mark.parametrize("kind", ["array", "matrix"])
@pytest.mark.parametrize("format_", FORMATS)
def test_the_rows_that_have_an_entry(open_sparse_stored, format_, kind):
    acc = open_sparse_stored("float32", [4, 4])
    acc.apply_indexed_slices_grad(made(f"{format_}_{kind}", WHOLE))
    slices = acc.take_indexed_slices_grad(1)
    assert slices.indices.tolist() == [0, 2]
    assert_same(slices.to_dense(), WHOLE)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "float64", "complex128", "bool"])
def test_dtypes(open_sparse, dtype):
    name = "uint8" if dtype == "bool" else dtype
    acc = open_sparse(name, [4, 4])
    acc.apply_indexed_slices_grad(scipy.sparse.csr_array(WHOLE.astype(dtype)))
    assert_same(acc.take_indexed_slices_grad(1).to_dense(), WHOLE.astype(dtype).astype(name))


def test_entries_that_are_unsorted_repeated_and_zero(open_sparse):
    array = scipy.sparse.coo_array(([3.0, 1.0, 1.0, 0.0, 1.0], ([2, 0, 2, 1, 2], [2, 1, 0, 3, 0])), shape=(4, 4))
    acc = open_sparse("float32", [4, 4])
    acc.apply_indexed_slices_grad(array)
    slices = acc.take_indexed_slices_grad(1)
    # A zero that is written down is an entry.
    assert slices.indices.tolist() == [0, 1, 2]
    assert_same(slices.to_dense(), WHOLE)


def test_arrays_of_one_and_of_three_dimensions(open_sparse):
    if not hasattr(scipy.sparse.coo_array((1, 1)), "coords"):
        pytest.skip("this version of scipy has matrices only")
    vector = scipy.sparse.coo_array(([1.0, 2.0, 4.0], ([3, 1, 3],)), shape=(4,))
    acc = open_sparse("float64", [4])
    acc.apply_indexed_slices_grad(vector)
    assert acc.take_indexed_slices_grad(1).to_dense().tolist() == [0, 2, 0, 5]
    cube = scipy.sparse.coo_array(([1.0, 2.0, 4.0], ([3, 1, 3], [0, 1, 1], [0, 2, 2])), shape=(4, 2, 3))
    acc = open_sparse("float64", [4, 2, 3])
    acc.apply_indexed_slices_grad(cube)
    slices = acc.take_indexed_slices_grad(1)
    assert slices.indices.tolist() == [1, 3]
    assert_same(slices.to_dense(), cube.todense())


def test_without_entries(open_sparse):
    acc = open_sparse("float64", [4, 2])
    for shape in ((4, 2), (4, 2)):
        assert acc.apply_indexed_slices_grad(scipy.sparse.csr_array(shape))
    assert acc.take_grad(2)[1].shape == (0, 2)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (scipy.sparse.csr_array((5, 4)), "declared shape"),
        (np.ones((4, 4)), "must be sparse"),
        (np.asmatrix(np.ones((4, 4))), "must be sparse"),
    ],
)
def test_what_is_refused(open_sparse, array, message):
    acc = open_sparse("float32", [4, 4])
    with pytest.raises(redisacc.InvalidArgumentError, match=f"grad.*{message}"):
        acc.apply_indexed_slices_grad(array)
    assert acc.num_accumulated() == 0


@pytest.mark.parametrize("format_", FORMATS)
def test_a_dense_accumulator_refuses_sparse_arrays(open_dense, open_sparse, format_):
    acc = open_dense("float32", None)
    for kind in ("array", "matrix"):
        with pytest.raises(redisacc.InvalidArgumentError, match=DENSE):
            acc.apply_grad(made(f"{format_}_{kind}", WHOLE))
        with pytest.raises(redisacc.InvalidArgumentError, match=r"^grad_values must be dense"):
            open_sparse("float32", None).apply_grad([0, 1, 2, 3], made(f"{format_}_{kind}", WHOLE))


def test_rows_that_are_too_many_for_the_memory(open_sparse):
    acc = open_sparse("float32", None)
    array = scipy.sparse.coo_array(([1.0, 1.0], ([0, 1], [0, 2**60])), shape=(2, 2**60 + 1))
    with pytest.raises(redisacc.InvalidArgumentError, match=r"^grad does not fit into memory as rows"):
        acc.apply_indexed_slices_grad(array)
