"""The history of a training: each step once, with its metrics, written together with the version that follows."""

import contextlib

import numpy as np
import pytest

import redisacc

pytestmark = pytest.mark.servers("valkey")

HISTORY = "redisacc:{train}:parameters:history"
RECORD = "redisacc:{train}:parameters"
HOWS = {
    "update": {"update": lambda taken, w, state: (w, state)},
    "optimizer": {"optimizer": redisacc.optim.SGD(0.1)},
    "partitions": {"optimizer": redisacc.optim.SGD(0.1), "accumulator": {"partitions": 2}},
    "update in partitions": {"update": lambda taken, w, state: (w, state), "accumulator": {"partitions": 2}},
}


def work(training):
    with training.worker() as worker:
        for step, weights in worker.steps():
            worker.apply(weights, metrics={"loss": step})


def run(client, until, metrics=lambda step: {"loss": step / 2}, **how):
    with redisacc.Training("train", {"w": np.zeros(2)}, workers=1, number=0, redis=client, **how) as training:
        for step, weights in training.steps(until=until):
            training.apply(weights, metrics=metrics(step))
        return training.history()


@pytest.mark.parametrize("how", HOWS)
def test_each_step_is_in_it(real_client, how):
    before = real_client.time()
    steps = run(real_client, 4, **HOWS[how])
    after = real_client.time()
    assert [(past.step, past.metrics, past.num_accumulated) for past in steps] == [
        (step, {"loss": step / 2}, 1) for step in range(4)
    ]
    times = [past.time for past in steps]
    assert before[0] <= times[0] <= times[1] <= times[2] <= times[3] <= after[0] + 1
    created = int(real_client.hget(RECORD, "created_ms")) / 1000
    assert [past.seconds for past in steps] == pytest.approx(np.diff([created, *times]).tolist(), abs=1e-6)


def test_after_a_loss_of_data_it_begins_anew_and_the_last_step_is_announced_again(training, background):
    chief, crew = training.chief(), background(lambda: work(training))
    for _ in chief.rounds(until=4):
        chief.publish(chief.parameters)
        if chief.step == 2:
            training.client.flushall()
    crew.result(30)
    assert training.client.hget(RECORD, "until") == b"4"
    assert [past.step for past in chief.history()] == [2, 3]


@contextlib.contextmanager
def two_steps(client, **metrics):
    """Yields a training that has made two steps with these metrics, and then deletes it with its history."""
    with redisacc.Training(
        "train", {"w": np.zeros(2)}, workers=1, number=0, redis=client, **HOWS["update"]
    ) as training:
        for _, weights in training.steps(until=2):
            training.apply(weights, metrics=metrics)
        yield training
        training.delete()
        assert client.exists(HISTORY) == 0
        assert training.history() == []


def test_a_training_without_metrics_has_none(real_client):
    with two_steps(real_client) as training:
        assert training.history() == []
        assert real_client.exists(HISTORY) == 0
        assert not any(b"history" in name for name in real_client.hkeys(RECORD))


@pytest.mark.forges
def test_a_key_of_another_type_is_refused_before_anything_changes(training, background):
    chief, crew = training.chief(), background(lambda: work(training))
    rounds = chief.rounds(until=1)
    next(rounds)
    training.client.set(HISTORY, "x")
    before = training.client.hgetall(RECORD)
    with pytest.raises(redisacc.CorruptDataError):
        chief.publish(chief.parameters)
    assert training.client.hgetall(RECORD) == before
    training.client.delete(HISTORY)
    chief.publish(chief.parameters)
    assert list(rounds) == []
    crew.result(30)


def test_more_entries_than_redisacc_keeps_are_refused(real_client):
    with two_steps(real_client, loss=0.5) as training:
        assert len(training.history()) == 2
        real_client.zadd(HISTORY, {f"{step} 1 1": step for step in range(3000)})
        with pytest.raises(redisacc.CorruptDataError, match="more than the 2000 entries"):
            training.history()
