"""With ``order="worker"``, sums follow the numbers of the workers, and not the order in which gradients arrive."""

import functools
import itertools

import numpy as np
import pytest

import redisacc

CREW = 4
SHAPE = [40]
ORDERS = list(itertools.permutations(range(CREW)))


def values(number, shape=SHAPE):
    """Returns the gradient of a worker. In float32, another order of addition gives other bits."""
    random = np.random.default_rng(number)
    return (random.normal(size=shape) * 10.0 ** random.integers(-3, 4, size=shape)).astype(np.float32)


def in_order(numbers=range(CREW), shape=SHAPE):
    """Returns the bytes of the mean of the gradients of these workers, added in this order."""
    mean = functools.reduce(np.add, (values(number, shape) for number in numbers)) / np.float32(len(numbers))
    return mean.tobytes()


@pytest.fixture
def crew(open_dense):
    """Opens the handles of a crew on one dense accumulator."""

    def open_all(shape=SHAPE, number=CREW, **options):
        options = {"order": "worker", **options}
        return [open_dense("float32", shape, "w", worker=f"worker {n}", **options) for n in range(number)]

    return open_all


def apply_all(crew, order, step, *, shape=SHAPE):
    for number in order:
        assert crew[number].apply_grad(values(number, shape), step)


# What is added


def test_a_sum_follows_the_numbers_whoever_comes_first(crew):
    handles = crew()
    expected = in_order()
    for step, order in enumerate(ORDERS):
        apply_all(handles, order, step)
        assert handles[0].peek().gradient.tobytes() == expected
        assert handles[0].take_grad(CREW).tobytes() == expected


# How it is stored


def test_gradients_are_refused_and_not_compacted(crew):
    handles = crew([30], limits=redisacc.Limits(in_place=0, buffer=300))
    apply_all(handles, (1, 0), 0, shape=[30])
    with pytest.raises(redisacc.AccumulatorFullError, match="with order='worker' they are not compacted"):
        handles[2].apply_grad(values(2, [30]), 0)
    assert handles[0].take_grad(2).tobytes() == in_order(range(2), shape=[30])


def test_there_is_no_limit_unless_the_creator_gives_one(crew):
    handles = crew([30])
    assert handles[0].info().buffer_limit == 10**15 - 1


# Arguments


def test_a_worker_needs_a_number(open_dense):
    for name in ["ann", "worker", "worker 01", "worker -1", "chief", "worker 1 ", "worker 1234567890123"]:
        acc = open_dense("float32", SHAPE, "w", worker=name, order="worker")
        with pytest.raises(redisacc.InvalidArgumentError, match="name its handle 'worker N', where N is its number"):
            acc.apply_grad(values(0))
        assert acc.num_accumulated() == 0
