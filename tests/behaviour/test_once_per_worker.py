"""A round that accepts one gradient of each worker: decided by the server, for the accumulator or for one gradient."""

from __future__ import annotations

import numpy as np
import pytest

import redisacc


@pytest.mark.servers("fakeredis")
def test_only_true_and_false_are_accepted(open_dense):
    acc = open_dense("float32", [1])
    for value in (1, 0, "yes", [], np.array([True])):
        with pytest.raises(redisacc.InvalidArgumentError, match="once_per_worker must be True or False"):
            open_dense("float32", [1], once_per_worker=value)
        with pytest.raises(redisacc.InvalidArgumentError, match="once_per_worker must be True or False"):
            acc.apply_grad([1.0], once_per_worker=value)
    assert acc.num_accumulated() == 0


@pytest.mark.servers("fakeredis", "valkey")
def test_an_event_says_so(open_dense):
    acc = open_dense("float32", [1], worker="ann", once_per_worker=True)
    with acc.events(timeout=10) as events:
        acc.apply_grad([1.0])
        acc.apply_grad([1.0], local_step=4)
        assert next(events).kind == "applied"
        event = next(events)
    assert (event.kind, event.global_step, event.num_accumulated, event.who) == ("repeated", 0, 1, "ann")
    assert event.details == {"local_step": "4"}
