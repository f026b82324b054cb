"""Objects of no library that we know: what they offer decides, and what they raise becomes our error."""

import array
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.model import assert_same

import redisacc
from redisacc._arrays import foreign, validation


def test_what_numpy_reads_by_itself_is_left_to_it():
    for value in (memoryview(np.ones(2)), np.ones(2), np.float32(1), [1.0], 1, None):
        assert foreign.host_array(value, "grad") is value
        assert foreign.rows_of(value, "grad") is None
    assert validation.array(array.array("f", [1, 2]), "grad").tolist() == [1, 2]


def test_what_numpy_cannot_read_is_refused():
    class OnlyDLPack:
        """An array that numpy reads by ``from_dlpack`` only."""

        __dlpack__, __dlpack_device__ = np.ones(2).__dlpack__, np.ones(2).__dlpack_device__

    with pytest.raises(
        redisacc.InvalidArgumentError, match=r"^grad must be an array of numbers, but numpy finds objects"
    ):
        validation.array(OnlyDLPack(), "grad")


def slices(**fields):
    return types.SimpleNamespace(**{"indices": [1], "values": [[1.0, 2.0]], "dense_shape": None, **fields})


def test_slices_of_any_class(open_sparse_stored):
    acc = open_sparse_stored("float32", [4, 2])
    for grad in (slices(), slices(dense_shape=(4, 2)), slices(values=np.float32([[3, 4]]))):
        assert acc.apply_indexed_slices_grad(grad)
    assert_same(acc.take_grad(3)[1], np.float32([[5, 8]]) / np.float32(3))


def test_a_dense_accumulator_refuses_slices(open_dense):
    acc = open_dense("float32", None)
    for grad in (slices(), redisacc.IndexedSlices([[1.0]], [0])):
        with pytest.raises(redisacc.InvalidArgumentError, match=r"^grad must be dense, .*to_dense\(\)"):
            acc.apply_grad(grad)
    with pytest.raises(redisacc.InvalidArgumentError, match=r"^dense must be dense"):
        redisacc.IndexedSlices.from_dense(slices())


class SlicesValue(NamedTuple):
    """As a session of TensorFlow 1 returns them."""

    values: Any
    indices: Any
    dense_shape: Any


def test_slices_that_are_a_named_tuple(open_dense, open_sparse):
    grad = SlicesValue(np.float32([[1, 2]]), np.array([1]), np.array([4, 2]))
    acc = open_sparse("float32", [4, 2])
    acc.apply_indexed_slices_grad(grad)
    assert acc.take_grad(1)[1].tolist() == [[1, 2]]
    with pytest.raises(redisacc.InvalidArgumentError, match=r"^grad must be dense"):
        open_dense("float32", None).apply_grad(grad)


class Coo:
    """As scipy's were before they could have any number of dimensions."""

    row, col, data, shape = np.array([2, 0]), np.array([1, 0]), np.float32([5, 6]), (3, 2)

    def tocoo(self):
        return self


def test_coordinates_without_coords():
    indices, values, shape = foreign.rows_of(Coo(), "grad")
    assert (indices.tolist(), values.tolist(), shape.tolist()) == ([0, 2], [[6, 0], [0, 5]], [3, 2])


class Raises:
    """Whatever is asked of it, it raises."""

    def __getattr__(self, name):
        raise KeyError("there is nothing")

    def __array__(self, dtype=None, copy=None):
        raise KeyError("there is nothing")


class RaisesInside:
    """Looks like a sparse array until it is read."""

    def tocoo(self):
        raise OSError("the file is gone")


def test_whatever_an_object_raises_becomes_our_error(open_dense, open_sparse):
    dense, sparse = open_dense("float32", None), open_sparse("float32", None)
    with pytest.raises(redisacc.InvalidArgumentError, match="there is nothing"):
        dense.apply_grad(Raises())
    with pytest.raises(redisacc.InvalidArgumentError, match="must be sparse"):
        sparse.apply_indexed_slices_grad(Raises())
    with pytest.raises(redisacc.InvalidArgumentError, match="the file is gone"):
        sparse.apply_indexed_slices_grad(RaisesInside())


@pytest.mark.slow
def test_no_library_is_imported():
    import subprocess
    import sys

    code = """
import sys, redisacc, numpy
from redisacc._arrays import validation
validation.array([1.0], "grad"), redisacc.IndexedSlices([[1.0]], [0])
print([name for name in ("torch", "jax", "tensorflow", "scipy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
