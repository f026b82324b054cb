"""A program gets its trees back in the form in which it has given them, before a restart and after it.

The order of dicts and the classes of named tuples stay, and leaves are arrays of numpy.
"""

from typing import NamedTuple

import numpy as np
import pytest

import redisacc

pytestmark = pytest.mark.servers("valkey")


class Layer(NamedTuple):
    weight: object
    bias: object


class Tensor:
    """An array of another library, as numpy can read it."""

    def __init__(self, values):
        self.values = np.asarray(values, np.float32)

    def __array__(self, dtype=None, copy=None):
        return self.values if dtype is None else self.values.astype(dtype)


def tree(fill=1.0):
    return {"z": Layer(Tensor([fill, fill]), np.float32(fill)), "a": [np.ones(2), fill]}


def state():
    return {"second": Layer(np.zeros(2), 1), "first": Tensor([0])}


def types(tree):
    """Returns the type of each node, its keys in their order, and the dtype and the shape of each leaf."""
    if isinstance(tree, dict):
        return type(tree), [(key, types(child)) for key, child in tree.items()]
    if isinstance(tree, (list, tuple)):
        return type(tree), [types(child) for child in tree]
    return type(tree), tree.dtype.name, tree.shape


SINGLE, WIDE = [(np.ndarray, "float32", (2,)), (np.ndarray, "float32", ())], [(np.ndarray, "float64", (2,))]
TREE = (dict, [("z", (Layer, SINGLE)), ("a", (list, [*WIDE, (np.ndarray, "float64", ())]))])
STATE = (
    dict, [("second", (Layer, [*WIDE, (np.ndarray, "int64", ())])), ("first", (np.ndarray, "float32", (1,)))]
)  # fmt: skip


@pytest.mark.parametrize("encoding", ["float32", "bfloat16"])
def test_a_training_with_an_update(real_client, encoding):
    trees, states = [], []

    def update(taken, weights, kept):
        trees.extend([taken.gradient, weights])
        states.append(kept)
        # What a program computes is of its own library, too.
        return tree(), state()

    for until in (2, 4):  # The second one continues what the first one has published.
        with redisacc.Training(
            "train", tree(), update=update, state=state(), workers=1, number=0, redis=real_client, encoding=encoding
        ) as training:
            for _, weights in training.steps(until=until):
                trees.extend([weights, training.latest()[1]])
                states.append(training.latest_state()[1])
                training.apply(dict(sorted(weights.items())))
    assert [types(each) for each in trees] == [TREE] * 16
    assert [types(each) for each in states] == [STATE] * 8


def test_a_training_with_an_optimizer(real_client):
    optimizer = redisacc.optim.SGD(0.5, momentum=0.5)
    with redisacc.Training("train", tree(), optimizer=optimizer, workers=1, redis=real_client) as training:
        for _, weights in training.steps(until=2):
            assert types(weights) == TREE
            training.apply(weights)
        assert types(training.latest_state()[1]["momentum_buffer"]) == TREE


def test_processes_may_give_other_forms(real_client):
    with redisacc.Parameters("p", redis=real_client) as one, redisacc.Parameters("p", redis=real_client) as other:
        one.publish(tree(), 0)
        assert types(one.latest()[1]) == TREE
        found = other.latest()[1]
        assert (list(found), type(found["z"])) == (["a", "z"], tuple)
        other.publish({"a": [np.zeros(2), 2.0], "z": (np.zeros(2, np.float32), np.float32(0))}, 1)
        assert types(one.latest()[1]) == TREE


def test_an_accumulator(real_client):
    with redisacc.TreeAccumulator.like(tree(), "acc", redis=real_client) as accumulator:
        accumulator.apply_grad(tree(2))
        assert list(accumulator.spec) == ["z", "a"]
        assert types(accumulator.take_grad(1)) == TREE


def test_own_memory_is_not_copied(training):
    weights = np.zeros(3)
    with training.chief({"w": weights}, workers=1) as chief:
        assert chief.parameters["w"] is weights
