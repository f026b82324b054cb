"""raw_ops: functions on handles, which are plain strings."""

import inspect

import pytest

import redisacc
from redisacc import raw_ops


def test_handles_are_plain_strings(client):
    for make, kind in (
        (raw_ops.ConditionalAccumulator, redisacc.ConditionalAccumulator),
        (raw_ops.SparseConditionalAccumulator, redisacc.SparseConditionalAccumulator),
    ):
        handle = make(dtype="float32", shape=[2], container="", shared_name="w", redis=client)
        assert (type(handle), handle) == (str, "redisacc:{w}")
        kind("float32", [2], "w", redis=client).delete()


def test_everything_is_keyword_only():
    for function in raw_ops.__all__:
        parameters = inspect.signature(getattr(raw_ops, function)).parameters.values()
        assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}
        assert {"name", "redis"} <= {parameter.name for parameter in parameters}


def test_a_handle_of_nothing(client):
    with pytest.raises(redisacc.NotFoundError, match="accumulator"):
        raw_ops.AccumulatorNumAccumulated(handle="redisacc:{nothing}", redis=client)
    assert client.keys() == []
