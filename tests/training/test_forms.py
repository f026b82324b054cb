"""A program gets its trees back in the form in which it has given them: the order of dicts, named tuples."""

from typing import NamedTuple

import numpy as np
import pytest

import redisacc

pytestmark = pytest.mark.servers("valkey")


class Layer(NamedTuple):
    weight: object
    bias: object


def tree(fill):
    return {"z": Layer(np.full(2, fill, np.float32), np.float32(fill)), "a": [np.float32(fill)]}


STATE = {"second": Layer(np.zeros(2), 1), "first": np.zeros(1)}


def check(found, name="z"):
    assert list(found) == ["z", "a"]
    assert type(found["z"]) is Layer


@pytest.mark.parametrize("encoding", ["float32", "bfloat16"])
def test_a_training_with_an_update(real_client, encoding):
    seen = []

    def update(taken, weights, state):
        for each in (taken.gradient, weights):
            check(each)
        seen.append(state)
        return weights, state

    for until in (1, 2):  # The second one continues what the first one has published.
        with redisacc.Training(
            "train", tree(1), update=update, state=STATE, workers=1, redis=real_client, encoding=encoding
        ) as training:
            for _, weights in training.steps(until=until):
                check(weights)
                training.apply(dict(sorted(weights.items())))
            check(training.latest()[1])
            seen.append(training.latest_state()[1])
    assert [list(state) for state in seen] == [["second", "first"]] * 4
    assert {type(state["second"]) for state in seen} == {Layer}


def test_a_training_with_an_optimizer(real_client):
    optimizer = redisacc.optim.SGD(0.5, momentum=0.5)
    with redisacc.Training("train", tree(1), optimizer=optimizer, workers=1, redis=real_client) as training:
        for _, weights in training.steps(until=2):
            check(weights)
            training.apply(weights)
        check(training.latest_state()[1]["momentum_buffer"])


def test_processes_may_give_other_forms(real_client):
    with redisacc.Parameters("p", redis=real_client) as one, redisacc.Parameters("p", redis=real_client) as other:
        one.publish(tree(1), 0)
        check(one.latest()[1])
        assert list(other.latest()[1]) == ["a", "z"]
        assert type(other.latest()[1]["z"]) is tuple
        other.publish({"a": [np.float32(2)], "z": (np.zeros(2, np.float32), np.float32(0))}, 1)
        check(one.latest()[1])


def test_an_accumulator(real_client):
    with redisacc.TreeAccumulator.like(tree(1), "acc", redis=real_client) as accumulator:
        accumulator.apply_grad(tree(2))
        check(accumulator.spec)
        check(accumulator.take_grad(1))
