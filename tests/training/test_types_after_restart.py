"""A program finds the same types before a restart and after it: numpy arrays in dicts, lists and tuples."""

import collections

import numpy as np
import pytest
from support.training_options import grouped

import redisacc

pytestmark = pytest.mark.servers("valkey")


class Tensor:
    """An array of another library, as numpy can read it."""

    def __init__(self, values):
        self.values = np.asarray(values, np.float32)

    def __array__(self, dtype=None, copy=None):
        return self.values if dtype is None else self.values.astype(dtype)


def types(tree):
    """Returns the tree with the type of each node and the dtype of each leaf."""
    if isinstance(tree, dict):
        return dict, {key: types(child) for key, child in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree), [types(child) for child in tree]
    return type(tree), getattr(tree, "dtype", None), getattr(tree, "shape", None)


def given():
    """Returns parameters and a state of everything that may be given."""
    parameters = collections.OrderedDict(w=Tensor([1, 2]), layers=[Tensor(3), (np.ones(2), 4.5)])
    return parameters, {"seen": 3, "momentum": Tensor([0, 0])}


@pytest.mark.parametrize("encoding", [None, "bfloat16"])
def test_rounds(training, background, until, encoding):
    parameters, state = given()
    found = []

    def lead(last):
        with training.chief(parameters, state=state, workers=1, encoding=encoding) as chief:
            found.append((types(chief.parameters), types(chief.state)))
            for _ in chief.rounds(until=last):
                # What a program computes is of its own library, too.
                chief.publish(given()[0], state=given()[1])
                found.append((types(chief.parameters), types(chief.state)))

    def work():
        with training.worker(0) as worker:
            for _, weights in worker.steps():
                worker.apply(weights)

    published = redisacc.Parameters("train", redis=training.client)
    for last in (2, 3):
        leading = background(lead, last)
        # A worker that finds the training finished has nothing to do.
        until(lambda: published.step() is not None and not published.finished())
        background(work).result(30)
        leading.result(30)
    assert len(found) == 5
    assert all(one == found[0] for one in found)
    assert found[0][1] == (
        dict,
        {"momentum": (np.ndarray, np.dtype(np.float32), (2,)), "seen": (np.ndarray, np.dtype(np.int64), ())},
    )


def test_an_update_of_a_training(real_client):
    in_update, in_loop = [], []

    def update(taken, parameters, state):
        in_update.append((types(taken.gradient), types(parameters), types(state)))
        return given()

    parameters, state = given()
    options = {"update": update, "state": state, "workers": 1, "number": 0, "redis": real_client}
    for until in (2, 4):
        with redisacc.Training("train", parameters, **grouped(options)) as training:
            for _, weights in training.steps(until=until):
                in_loop.append((types(weights), types(training.latest()[1]), types(training.latest_state()[1])))
                training.apply(weights)
    assert len(in_update) == len(in_loop) == 4
    assert in_update == [in_update[0]] * 4
    assert in_loop == [in_update[0]] * 4


def test_own_memory_is_not_copied(training):
    weights = np.zeros(3)
    with training.chief({"w": weights}, workers=1) as chief:
        assert chief.parameters["w"] is weights
