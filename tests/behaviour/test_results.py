"""The small objects that operations return, and IndexedSlices."""

import dataclasses

import numpy as np
import pytest

import redisacc


@pytest.mark.fixed("client")
@pytest.mark.servers("fakeredis", "valkey")
def test_attributes_of_an_accumulator(open_dense, open_sparse):
    dense = open_dense("float32", [2, None], "both", name="d", reduction_type="SUM")
    assert dense.dtype == np.dtype(np.float32)
    assert isinstance(dense.dtype, np.dtype)
    assert dense.shape == (2, None)
    assert (dense.name, dense.shared_name, dense.reduction_type) == ("d", "both", "SUM")
    assert dense.accumulator_ref == "redisacc:{both}"
    sparse = open_sparse("int8")
    assert (sparse.shape, sparse.shared_name) == (None, None)
    assert (sparse.name, sparse.reduction_type) == ("sparse_conditional_accumulator", "MEAN")
    assert sparse.accumulator_ref.startswith("redisacc:{")
    assert open_dense("float32").name == "conditional_accumulator"
    for acc in (dense, sparse):
        assert isinstance(acc, redisacc.ConditionalAccumulatorBase)
        assert repr(acc).startswith(type(acc).__name__)


@pytest.mark.servers("fakeredis", "valkey")
def test_infos_and_rounds_are_frozen(open_dense):
    acc = open_dense("float32", [1])
    acc.apply_grad([1.0])
    with acc.take(1) as taken:
        for value, field in ((acc.info(), "global_step"), (taken, "gradient"), (acc.peek(), "workers")):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, field, None)


def test_indexed_slices():
    slices = redisacc.IndexedSlices(np.float32([[1, 2], [3, 4]]), np.array([4, 0]), [5, 2])
    assert slices.dtype == np.float32
    assert slices.indices.tolist() == [4, 0]
    assert slices.values.tolist() == [[1, 2], [3, 4]]
    assert list(slices.dense_shape) == [5, 2]
    assert slices.to_dense().tolist() == [[3, 4], [0, 0], [0, 0], [0, 0], [1, 2]]
    assert slices.to_dense().dtype == np.float32


def test_to_dense_sums_repeated_rows():
    slices = redisacc.IndexedSlices(np.array([1, 2, 4]), np.array([1, 0, 1]), [3])
    assert slices.to_dense().tolist() == [2, 5, 0]


def test_from_dense_keeps_the_rows_that_hold_something():
    dense = np.float32([[0, 0], [1, 0], [0, 0], [np.nan, 2]])
    slices = redisacc.IndexedSlices.from_dense(dense)
    assert slices.indices.tolist() == [1, 3]
    assert list(slices.dense_shape) == [4, 2]
    assert np.array_equal(slices.to_dense(), dense, equal_nan=True)


def test_an_unknown_dense_shape_can_not_be_filled():
    for shape in (None, [-1, 2]):
        slices = redisacc.IndexedSlices(np.float32([[1, 2]]), np.array([1]), shape)
        with pytest.raises(redisacc.InvalidArgumentError):
            slices.to_dense()


def test_slices_that_do_not_fit_are_refused():
    for values, indices, shape in (
        ([[1.0]], [3], [3, 1]),
        ([[1.0]], [-1], [3, 1]),
        ([[1.0]], [0], [3, 2]),
        ([[1.0]], [0], [3]),
        ([1.0], [0, 1], [3]),
    ):
        with pytest.raises(redisacc.InvalidArgumentError):
            redisacc.IndexedSlices(np.array(values), np.array(indices), shape).to_dense()


@pytest.mark.fixed("client")
def test_a_peek_ends_with_its_handle(proxy, open_dense):
    """It would otherwise go on for as long as gradients come."""
    limits = redisacc.Limits(in_place=0, inline=0)
    acc, other = open_dense("float32", [1], "w", redis=proxy.where), open_dense("float32", [1], "w", limits=limits)
    other.apply_grad([1.0])

    def disturb():
        other.apply_grad([1.0])
        acc.close()

    # It reads the parts when it has read the record.
    proxy.before("GET", disturb)
    with pytest.raises(redisacc.CancelledError):
        acc.peek()
