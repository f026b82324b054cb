"""A training in float32 gives the same bits in every run, whatever the order in which gradients arrive."""

import itertools
import threading

import numpy as np
import pytest
from support.selection import thorough

import redisacc

CREW, STEPS = 4, 5
WEIGHTS = [0.1, 3.7, 1.0, 0.3]
PERMUTATIONS = list(itertools.permutations(range(CREW)))
SHAPES = {"inline": 40, "a part": 30_000, "several parts": 200_000}
RECORD = "redisacc:{train}"


def gradient_of(number, step, parameters):
    random = np.random.default_rng((number, step))
    shape = parameters["w"].shape
    noise = (random.normal(size=shape) * 10.0 ** random.integers(-3, 3, size=shape)).astype(np.float32)
    gradient = {"w": parameters["w"] * np.float32(0.5) + noise}
    if "table" in parameters:
        gradient["table"] = np.sort(random.choice(20, 9, replace=False)), noise[: 9 * 2].reshape(9, 2)
    return gradient


def lead(chief):
    """Runs the loop of a chief without an optimizer."""
    for taken in chief.rounds(until=STEPS):
        table = chief.parameters["table"].copy()
        table[taken.gradient["table"].indices] -= taken.gradient["table"].values
        w = chief.parameters["w"] - np.float32(taken.total_weight) * taken.gradient["w"]
        chief.publish({"w": w, "table": table})


class Turns:
    """Lets the workers apply one after the other, in another order in each step."""

    def __init__(self, orders):
        self._orders = orders
        self._next = dict.fromkeys(range(STEPS), 0)
        self._changed = threading.Condition()

    def __call__(self, step, number, apply):
        with self._changed:
            self._changed.wait_for(lambda: self._orders[step % len(self._orders)][self._next[step]] == number, 30)
            apply()
            self._next[step] += 1
            self._changed.notify_all()


@pytest.fixture
def run(training, background):
    """Runs a training to its end, and returns the bytes of its parameters."""

    def run_it(orders, elements, *, encodings=(None,) * CREW, weights=(1.0,) * CREW, **options):
        parameters = {"w": np.ones(elements, np.float32)}
        if "optimizer" not in options:
            parameters["table"] = np.ones((20, 2), np.float32)
            options["sparse"] = ["table"]
        chief = training.chief(parameters, workers=CREW, reduction_type="MEAN", **options)
        turns = Turns(orders)

        def work(number):
            with redisacc.Worker("train", number=number, redis=training.client, encoding=encodings[number]) as worker:
                for step, found in worker.steps():
                    gradient = gradient_of(number, step, found)
                    turns(step, number, lambda gradient=gradient: worker.apply(gradient, weight=weights[number]))

        crew = [background(work, number) for number in range(CREW)]
        if "optimizer" in options:
            for _ in chief.updates(until=STEPS):
                pass
        else:
            lead(chief)
        for one in crew:
            one.result(30)
        with redisacc.Parameters("train", redis=training.client) as published:
            _, last = published.latest()
        found = b"".join(array.tobytes() for array in last.values())
        chief.delete()
        return found

    return run_it


@pytest.mark.slow(keep="unweighted-a part-3")
@pytest.mark.parametrize(
    ("size", "partitions"),
    thorough(
        list(itertools.product(SHAPES, [None, 3])), usual=[("inline", None), ("a part", 3), ("several parts", None)]
    ),
)
@pytest.mark.parametrize("weights", [(1.0,) * CREW, WEIGHTS], ids=["unweighted", "weighted"])
def test_the_order_of_arrival_changes_no_bit(run, size, partitions, weights):
    options = {"partitions": partitions, "weights": weights}
    first = run([(0, 1, 2, 3)], SHAPES[size], **options)
    assert run([(3, 2, 1, 0)], SHAPES[size], **options) == first
    assert run(PERMUTATIONS[5::4], SHAPES[size], **options) == first


@pytest.mark.slow(keep="a part")
@pytest.mark.parametrize("size", SHAPES)
def test_with_sums_in_that_order_it_does(run, size):
    first = run([(0, 1, 2, 3)], SHAPES[size], order="arrival")
    assert run([(3, 2, 1, 0)], SHAPES[size], order="arrival") != first


@pytest.mark.slow(keep="a part")
@pytest.mark.parametrize("size", SHAPES)
def test_encoded_gradients(run, size):
    options = {"encodings": ("int8", None, "bfloat16", "int8"), "weights": WEIGHTS}
    first = run([(0, 1, 2, 3)], SHAPES[size], **options)
    assert run([(3, 1, 0, 2)], SHAPES[size], **options) == first


def test_a_reducer_changes_no_bit(run, training, background):
    first = run([(0, 1, 2, 3)], SHAPES["several parts"])
    with redisacc.Reducer(redis=training.client) as reducer:
        background(reducer.run)
        assert run(PERMUTATIONS[7::4], SHAPES["several parts"]) == first


@pytest.mark.slow(keep="a part")
@pytest.mark.parametrize(
    ("size", "reducer"),
    thorough(
        list(itertools.product(SHAPES, [False, True])),
        usual=[("inline", False), ("a part", True), ("several parts", True)],
    ),
    ids=str,
)
def test_with_an_optimizer(run, training, background, size, reducer):
    options = {"weights": WEIGHTS, "optimizer": redisacc.optim.AdamW(0.01, clip_norm=1.0)}
    first = run([(0, 1, 2, 3)], SHAPES[size], **options)
    with redisacc.Reducer(redis=training.client) as one:
        if reducer:
            background(one.run)
        assert run(PERMUTATIONS[3::4], SHAPES[size], **options) == first


# Which trainings have this order


def order_of(training):
    return (training.client.hget(RECORD, "order") or b"arrival").decode()


def test_a_new_training_follows_the_numbers(training):
    training.chief()
    assert order_of(training) == "worker"


@pytest.mark.parametrize("order", ["arrival", "worker"])
def test_an_existing_training_keeps_its_order(training, order):
    first = training.chief(order=order)
    assert order_of(training) == order
    first.close()
    second = training.chief()
    assert order_of(training) == order
    training.work()
    training.lead(second, until=2)
    second.close()
    with pytest.raises(redisacc.InvalidArgumentError, match=f"its order is {order}"):
        training.chief(order="worker" if order == "arrival" else "arrival")
    training.chief(order=order)


def test_a_training_of_an_earlier_version_continues(training):
    """Its record lacks the field."""
    first = training.chief(order="arrival")
    assert training.client.hget(RECORD, "order") is None
    first.close()
    second = training.chief()
    training.work()
    training.lead(second, until=1)
    assert order_of(training) == "arrival"


def test_a_training_that_is_being_deleted_is_no_existing_one(training):
    training.chief(order="arrival").close()
    incarnation = training.client.hget(RECORD, "incarnation")
    # As if somebody had died while deleting it.
    training.client.hset(RECORD, "incarnation", b"deleted:" + incarnation)
    training.chief()
    assert order_of(training) == "worker"


def test_another_order_is_refused(training):
    with pytest.raises(redisacc.InvalidArgumentError, match="order must be 'arrival' or 'worker', not 'number'"):
        training.chief(order="number")
    assert not training.client.exists(RECORD)
