"""Metrics: numbers that travel with gradients, whose means by weight the chief gets."""

import math

import numpy as np
import pytest

import redisacc

pytestmark = pytest.mark.servers("valkey")

WEIGHTS = (1.0, 2.0, 5.0)
# Of each worker; the mean of "loss" is (1*0.1 + 2*0.7 + 5*0.3) / 8.
METRICS = ({"loss": 0.1, "seen/all": 3}, {"loss": np.float32(0.7)}, {"loss": 0.3, "grad-norm": float("nan")})
LOSS = (1.0 * 0.1 + 2.0 * float(np.float32(0.7)) + 5.0 * 0.3) / 8.0


def check(metrics):
    assert list(metrics) == ["grad-norm", "loss", "seen/all"]
    assert metrics["loss"] == LOSS
    assert metrics["seen/all"] == 3
    assert math.isnan(metrics["grad-norm"])


def work(training, number, model, weights=WEIGHTS):
    with training.worker(number) as worker:
        for _ in worker.steps():
            worker.apply(model, weight=weights[number], metrics=METRICS[number])


MODELS = {"tiny": np.zeros(2), "in parts": np.zeros(200_000, np.float32)}


@pytest.mark.parametrize("size", MODELS)
@pytest.mark.parametrize("order", ["worker", "arrival"])
def test_a_round_has_their_means_by_weight(training, background, size, order):
    model = {"w": MODELS[size]}
    chief = training.chief(model, workers=3, order=order)
    crew = [background(work, training, number, model) for number in range(3)]
    for taken in chief.rounds(until=2):
        check(taken.metrics)
        chief.publish(model)
    for one in crew:
        one.result(30)


@pytest.mark.parametrize("partitions", [None, 3])
def test_an_update_has_them(training, background, partitions):
    model = {"w": MODELS["in parts"]}
    chief = training.chief(model, workers=3, optimizer=redisacc.optim.SGD(0.1), partitions=partitions)
    assert chief.metrics == {}
    crew = [background(work, training, number, model) for number in range(3)]
    for _ in chief.updates(until=2):
        check(chief.metrics)
    for one in crew:
        one.result(30)


@pytest.mark.parametrize("own", [False, True])
def test_a_training_logs_them(real_client, own):
    logged = []
    how = {"update": lambda taken, w, state: (w, state)} if own else {"optimizer": redisacc.optim.SGD(0.1)}
    with redisacc.Training(
        "train",
        {"w": np.zeros(2)},
        workers=1,
        number=0,
        redis=real_client,
        log=lambda step, metrics: logged.append((step, metrics)),
        **how,
    ) as training:
        for step, weights in training.steps(until=3):
            training.apply(weights, metrics={"loss": step / 2})
    assert logged == [(0, {"loss": 0.0}), (1, {"loss": 0.5}), (2, {"loss": 1.0})]


def test_they_are_readable_with_redis_cli(client):
    with redisacc.ConditionalAccumulator("float32", [2], "w", redis=client, worker="ann") as acc:
        acc.apply_grad([1, 2], weight=2.0, metrics={"loss": 0.25})
        acc.apply_grad([1, 2], metrics={"loss": 1, "seen": 3})
        assert client.hgetall("redisacc:{w}:workers") == {b"ann": b"2 loss=0.25*2.0 loss=1.0*1.0 seen=3.0*1.0"}
        assert acc.peek().metrics == {"loss": 0.5, "seen": 3.0}
        assert acc.info().workers == {"ann": 2}
        with acc.take(2) as taken:
            assert taken.metrics == {"loss": 0.5, "seen": 3.0}
        acc.apply_grad([1, 2], local_step=1)
        with acc.take(1) as taken:
            assert taken.metrics == {}
        acc.delete()


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([("loss", 1)], "metrics must be a dict"),
        ({"": 1}, "the name of a metric must be 1 to 64"),
        ({"a b": 1}, "'a b'"),
        ({"loss=": 1}, "loss="),
        ({"x" * 65: 1}, "1 to 64"),
        ({3: 1}, "not 3"),
        ({"loss": "low"}, "metric loss must be a number, not 'low'"),
        ({"loss": True}, "metric loss must be a number, not True"),
        ({"loss": None}, "metric loss must be a number, not None"),
        ({"loss": 1j}, "metric loss must be a number"),
        ({"loss": 10**400}, "metric loss is too large for a float"),
        ({"loss": np.zeros(2)}, "metric loss must be a single number"),
        ({f"m{n}": 1 for n in range(33)}, "at most 32 names, not 33"),
        ({f"{n:064}": 1 for n in range(20)}, "at most 768 bytes"),
    ],
    ids=lambda value: None if isinstance(value, str) else "metrics",
)
def test_invalid_ones_are_refused_before_anything_is_sent(client, metrics, message):
    with redisacc.ConditionalAccumulator("float32", [2], "w", redis=client) as acc:
        with pytest.raises(redisacc.InvalidArgumentError, match=message):
            acc.apply_grad([1, 2], metrics=metrics)
        assert acc.num_accumulated() == 0
        acc.delete()
