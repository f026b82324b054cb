"""raw_ops: functions on handles, which are plain strings."""

import functools
import inspect
import itertools

import pytest

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
