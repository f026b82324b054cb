"""raw_ops: functions on handles, which are plain strings."""

from __future__ import annotations

import functools
import inspect
import itertools

import numpy as np
import pytest
from support.model import assert_same

import redisacc
from redisacc import raw_ops


@pytest.fixture
def dense(client):
    handle = raw_ops.ConditionalAccumulator(
        dtype="float32", shape=[2], container="", shared_name="d", reduction_type="MEAN", redis=client
    )
    yield handle
    redisacc.ConditionalAccumulator("float32", [2], "d", redis=client).delete()


@pytest.fixture
def sparse(client):
    handle = raw_ops.SparseConditionalAccumulator(dtype="float32", shape=[4, 1], shared_name="s", redis=client)
    yield handle
    redisacc.SparseConditionalAccumulator("float32", [4, 1], "s", redis=client).delete()


def test_handles_are_plain_strings(dense, sparse):
    assert dense == "redisacc:{d}"
    assert type(dense) is str
    assert sparse == "redisacc:{s}"


def test_dense_operations(dense, client):
    apply = raw_ops.AccumulatorApplyGradient
    apply(handle=dense, local_step=0, gradient=np.float32([1, 2]), redis=client)
    apply(handle=dense, local_step=-1, gradient=np.float32([100, 100]), redis=client)
    apply(handle=dense, local_step=5, gradient=np.float32([3, 4]), name="x", redis=client)
    assert raw_ops.AccumulatorNumAccumulated(handle=dense, redis=client) == 2
    result = raw_ops.AccumulatorTakeGradient(handle=dense, num_required=2, dtype="float32", redis=client)
    assert_same(result, np.float32([2, 3]))
    raw_ops.AccumulatorSetGlobalStep(handle=dense, new_global_step=9, redis=client)
    apply(handle=dense, local_step=8, gradient=np.float32([1, 2]), redis=client)
    assert raw_ops.AccumulatorNumAccumulated(handle=dense, redis=client) == 0


def test_sparse_operations(sparse, client):
    def apply(shape, known, step=0):
        return raw_ops.SparseAccumulatorApplyGradient(
            handle=sparse,
            local_step=step,
            gradient_indices=[3, 1],
            gradient_values=np.float32([[3], [1]]),
            gradient_shape=shape,
            has_known_shape=known,
            redis=client,
        )

    apply([4, 1], True)
    apply([], False)
    # An unknown shape isn't checked.
    apply([77, 77], False)
    for wrong in ([5, 1], [4], []):
        with pytest.raises(redisacc.InvalidArgumentError):
            apply(wrong, True)
    assert raw_ops.AccumulatorNumAccumulated(handle=sparse, redis=client) == 3
    indices, values, shape = raw_ops.SparseAccumulatorTakeGradient(
        handle=sparse, num_required=3, dtype="float32", redis=client
    )
    assert_same(indices, np.array([1, 3]))
    assert_same(values, np.float32([[1], [3]]))
    assert list(shape) == [4, 1]


def test_handles_and_objects_are_the_same_accumulator(dense, client):
    acc = redisacc.ConditionalAccumulator("float32", [2], "d", redis=client)
    assert acc.accumulator_ref == dense
    acc.apply_grad([1.0, 2.0])
    assert raw_ops.AccumulatorNumAccumulated(handle=acc.accumulator_ref, redis=client) == 1
    raw_ops.AccumulatorApplyGradient(handle=dense, local_step=0, gradient=[3.0, 4.0], redis=client)
    assert acc.take_grad(2).tolist() == [2.0, 3.0]


def test_everything_is_keyword_only():
    for function in raw_ops.__all__:
        parameters = inspect.signature(getattr(raw_ops, function)).parameters.values()
        assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}
        assert {"name", "redis"} <= {parameter.name for parameter in parameters}


def test_other_things_are_no_handles(dense, client):
    before = {key: client.dump(key) for key in client.scan_iter()}
    calls = [
        raw_ops.AccumulatorNumAccumulated,
        functools.partial(raw_ops.AccumulatorSetGlobalStep, new_global_step=1),
        functools.partial(raw_ops.AccumulatorApplyGradient, local_step=0, gradient=[1.0, 1.0]),
        functools.partial(raw_ops.AccumulatorTakeGradient, num_required=1, dtype="float32"),
        functools.partial(raw_ops.SparseAccumulatorTakeGradient, num_required=1, dtype="float32"),
    ]
    others = ["", "d", "redisacc:d", "redisacc:{}", "redisacc:{d", "redisacc:{d}:sums", b"redisacc:{d}", None, 7, []]
    for call, handle in itertools.product(calls, others):
        with pytest.raises(redisacc.InvalidArgumentError, match="handle"):
            call(handle=handle, redis=client)
    assert {key: client.dump(key) for key in client.scan_iter()} == before


def test_a_handle_of_nothing(client):
    with pytest.raises(redisacc.NotFoundError, match="accumulator"):
        raw_ops.AccumulatorNumAccumulated(handle="redisacc:{nothing}", redis=client)
    assert client.keys() == []


def test_operations_of_the_other_kind_or_dtype_are_refused(dense, sparse, client):
    raw_ops.AccumulatorApplyGradient(handle=dense, local_step=0, gradient=[1.0, 2.0], redis=client)
    calls = [
        lambda: raw_ops.AccumulatorApplyGradient(handle=sparse, local_step=0, gradient=[1.0], redis=client),
        lambda: raw_ops.AccumulatorTakeGradient(handle=sparse, num_required=1, dtype="float32", redis=client),
        lambda: raw_ops.SparseAccumulatorTakeGradient(handle=dense, num_required=1, dtype="float32", redis=client),
        lambda: raw_ops.AccumulatorTakeGradient(handle=dense, num_required=1, dtype="float64", redis=client),
        lambda: raw_ops.SparseAccumulatorApplyGradient(
            handle=dense,
            local_step=0,
            gradient_indices=[1],
            gradient_values=[[1.0]],
            gradient_shape=[],
            has_known_shape=False,
            redis=client,
        ),
    ]
    for call in calls:
        with pytest.raises(redisacc.InvalidArgumentError):
            call()
    assert raw_ops.AccumulatorNumAccumulated(handle=dense, redis=client) == 1
    assert raw_ops.AccumulatorNumAccumulated(handle=sparse, redis=client) == 0
