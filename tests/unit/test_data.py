"""redisacc.data: every example once in each epoch, whoever uses it."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rows import every_row

import redisacc
from redisacc.data import Batches


def of_step(batches, step, workers):
    """What all workers together use in a step, in the order of their numbers."""
    return np.concatenate([batches.indices(step, number, workers) for number in range(workers)]).tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 50),
    st.booleans(),
    st.integers(0, 2**63),
    st.lists(st.integers(1, 50), min_size=1, max_size=30),
)
def test_every_epoch_has_each_example_once_even_if_the_crew_changes_between_steps(
    size, batch_size, shuffle, seed, crews
):
    seed = min(seed, 2**63 - 1)
    batches = Batches(size, batch_size, seed=seed, shuffle=shuffle)
    sequence = []
    for step, workers in enumerate(crews):
        found = of_step(batches, step, min(workers, batch_size))
        assert len(found) == batch_size
        sequence += found
    epochs = [sequence[start : start + size] for start in range(0, len(sequence), size)]
    for epoch in epochs[:-1]:
        assert sorted(epoch) == list(range(size))
    assert max(Counter(epochs[-1]).values()) == 1


def test_an_order_depends_on_the_seed_and_the_epoch_alone():
    def orders(batch_size, seed):
        batches = Batches(1000, batch_size, seed=seed)
        sequence = [index for step in range(2000 // batch_size) for index in of_step(batches, step, 1)]
        return [sequence[:1000], sequence[1000:]]

    first, second = orders(8, seed=0)
    assert orders(250, seed=0) == [first, second]
    assert len({tuple(order) for order in (first, second, *orders(8, seed=1))}) == 4


def test_orders_stay_as_they_are():
    """If they change, a training that is continued with another version repeats examples and leaves others out."""
    assert Batches(10, 10, seed=3).indices(7).tolist() == [8, 3, 6, 2, 9, 5, 7, 1, 0, 4]


def test_an_order_is_made_once_in_an_epoch(monkeypatch):
    made = []
    real = np.random.RandomState

    def counted(generator):
        made.append(1)
        return real(generator)

    monkeypatch.setattr(np.random, "RandomState", counted)
    batches = Batches(100, 6)
    for step in range(batches.steps(epochs=3)):
        batches.indices(step, 1, 2)
    assert len(made) == 3


def test_what_a_step_returns_is_its_own_memory():
    batches = Batches(6, 3, shuffle=False)
    batches.indices(0)[:] = 5
    assert batches.indices(0).tolist() == [0, 1, 2]


def test_shares_differ_by_one_at_most():
    assert [len(Batches(100, 8).indices(0, number, 3)) for number in range(3)] == [2, 3, 3]


def test_epochs_and_steps():
    batches = Batches(10, 4)
    assert [batches.epoch(step) for step in range(6)] == [0, 0, 0, 1, 1, 2]
    assert [batches.steps(epochs) for epochs in range(4)] == [0, 3, 5, 8]
    for epoch, (start, stop) in enumerate(pairwise(map(batches.steps, range(20)))):
        assert batches.epoch(start) == epoch
        assert batches.epoch(stop - 1) == epoch


@every_row(
    "arguments, message",
    [
        ({"size": 0}, r"^size must be in \[1, "),
        ({"batch_size": 0}, r"^batch_size must be in \[1, "),
        ({"seed": -1}, r"^seed must be in \[0, "),
        ({"shuffle": 1}, "^shuffle must be True or False, not 1"),
    ],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(redisacc.InvalidArgumentError, match=message):
        Batches(**{"size": 10, "batch_size": 4, **arguments})


@every_row(
    "arguments, message",
    [
        ((-1,), r"^step must be in \[0, "),
        ((0, -1, 2), r"^number must be in \[0, "),
        (
            (0, 2, 2),
            "^this is worker 2, and .* 0 to 1. pass the number of all workers",
        ),
        ((0, 0, 0), r"^workers must be in \[1, "),
        ((0, 0, 5), "^batch_size must be at least the number of workers, .* 4 examples cannot be cut among 5 workers"),
    ],
)
def test_invalid_shares(arguments, message):
    with pytest.raises(redisacc.InvalidArgumentError, match=message):
        Batches(10, 4).indices(*arguments)
