"""With ``order="worker"``, sums follow the numbers of the workers, and not the order in which gradients arrive."""

import itertools

import numpy as np
import pytest

import redisacc

CREW = 4
SHAPE = [40]
ORDERS = list(itertools.permutations(range(CREW)))
# Some of them, for gradients that take a moment: among them the reverse, and each number as the first and as the last.
SOME_ORDERS = [(3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1), (0, 1, 2, 3)]
WEIGHTS = [0.1, 3.7, 1.0, 0.3]


def values(number, shape=SHAPE):
    """Returns the gradient of a worker. In float32, another order of addition gives other bits."""
    random = np.random.default_rng(number)
    return (random.normal(size=shape) * 10.0 ** random.integers(-3, 4, size=shape)).astype(np.float32)


def in_order(numbers=range(CREW), shape=SHAPE, weights=None):
    """Returns the mean of the gradients of these workers, added in this order."""
    total, whole = None, 0.0
    for number in numbers:
        weight = 1.0 if weights is None else weights[number]
        part = values(number, shape) if weight == 1 else values(number, shape) * np.float32(weight)
        total = part if total is None else total + part
        whole += weight
    return total / np.float32(whole)


def bits(gradient):
    """Returns the bytes of a gradient of any kind."""
    if isinstance(gradient, redisacc.IndexedSlices):
        return gradient.indices.tobytes(), gradient.values.tobytes()
    if isinstance(gradient, dict):
        return {path: bits(leaf) for path, leaf in gradient.items()}
    return gradient.tobytes()


@pytest.fixture
def crew(open_dense):
    """Opens the handles of a crew on one dense accumulator."""

    def open_all(shape=SHAPE, number=CREW, **options):
        options = {"order": "worker", **options}
        return [open_dense("float32", shape, "w", worker=f"worker {n}", **options) for n in range(number)]

    return open_all


def apply_all(crew, order, step, *, shape=SHAPE, weights=None):
    for number in order:
        weight = 1.0 if weights is None else weights[number]
        assert crew[number].apply_grad(values(number, shape), step, weight=weight)


# What is added


def test_a_sum_follows_the_numbers_whoever_comes_first(crew):
    handles = crew()
    expected = bits(in_order())
    for step, order in enumerate(ORDERS):
        apply_all(handles, order, step)
        assert bits(handles[0].peek().gradient) == expected
        assert bits(handles[0].take_grad(CREW)) == expected


@pytest.mark.slow(keep="-weighted")
@pytest.mark.parametrize("elements", [30_000, 400_000], ids=["a part", "several parts"])
@pytest.mark.parametrize("partitions", [None, 3])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["unweighted", "weighted"])
def test_gradients_in_parts(crew, elements, partitions, weights):
    handles = crew([elements], partitions=partitions)
    expected = bits(in_order(shape=[elements], weights=weights))
    for step, order in enumerate(SOME_ORDERS):
        apply_all(handles, order, step, shape=[elements], weights=weights)
        assert bits(handles[0].peek().gradient) == expected
        with handles[0].take(CREW) as taken:
            assert bits(taken.gradient) == expected


@pytest.mark.slow(keep="3")
@pytest.mark.parametrize("elements", [30_000, 400_000], ids=["a part", "several parts"])
@pytest.mark.parametrize("partitions", [None, 3])
def test_a_taker_that_waits(crew, background, until, elements, partitions):
    handles = crew([elements], partitions=partitions)
    expected = bits(in_order(shape=[elements]))
    for step, order in enumerate(SOME_ORDERS):
        take = background(handles[0].take_grad, CREW)
        until(lambda: len(handles[0].info().waiting) == 1)
        apply_all(handles, order, step, shape=[elements])
        assert bits(take.result(30)) == expected


# How it is stored


def test_gradients_are_refused_and_not_compacted(crew):
    handles = crew([30], limits=redisacc.Limits(in_place=0, buffer=300))
    apply_all(handles, (1, 0), 0, shape=[30])
    with pytest.raises(redisacc.AccumulatorFullError, match="with order='worker' they are not compacted"):
        handles[2].apply_grad(values(2, [30]), 0)
    assert bits(handles[0].take_grad(2)) == bits(in_order(range(2), shape=[30]))


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
