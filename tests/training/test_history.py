"""The history of a training: each step once, with its metrics, written together with the version that follows."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

import redisacc
from redisacc._admin.garbage import find_garbage
from redisacc._data.metrics import MOST_BYTES
from redisacc._format.history_entries import history_text, parse_history
from redisacc._format.keys import ParameterKeys
from redisacc._protocol.scripts.parameters import Follows, ParameterScripts
from redisacc._protocol.scripts.updates import UpdateScripts
from redisacc._redis import script_loader
from redisacc._redis.connect import connect

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


class Died(Exception):
    """Raised in place of a kill."""


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
    assert find_garbage(connect(real_client)) == []


def test_it_is_readable_with_redis_cli(real_client):
    run(real_client, 2, lambda step: {"loss": 0.25, "acc": float("nan")}, **HOWS["optimizer"])
    published = real_client.hget(RECORD, "published_ms")
    entries = real_client.zrange(HISTORY, 0, -1, withscores=True)
    assert [score for _, score in entries] == [0.0, 1.0]
    assert entries[1][0] == b"1 " + published + b" 1 acc=nan loss=0.25"
    assert real_client.hget(RECORD, "history_latest") == entries[1][0]


def test_a_training_that_continues_adds_to_it(real_client):
    run(real_client, 2, **HOWS["update"])
    steps = run(real_client, 5, **HOWS["update"])
    assert [past.step for past in steps] == list(range(5))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_chief_that_dies_as_it_publishes_neither_loses_nor_doubles_a_step(
    training, background, monkeypatch, after, own
):
    model = {"w": np.zeros(2)}
    options = {"reduction_type": "MEAN"} if own else {"optimizer": redisacc.optim.SGD(0.1)}

    def lead(chief):
        if not own:
            for _ in chief.updates(until=3):
                pass
            return
        for _ in chief.rounds(until=3):
            chief.publish(model)

    worker = background(lambda: work(training))
    chief = training.chief(model, **options)
    name = "publish" if own else "commit_update"
    scripts = ParameterScripts if own else UpdateScripts
    real = getattr(scripts, name)

    def die(self, follows, *args, **given):
        if follows.step != 2:
            return real(self, follows, *args, **given)
        if after:
            assert real(self, follows, *args, **given) == "published"
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(scripts, name, die)
        with pytest.raises(Died):
            lead(chief)
        assert len(chief.history()) == (2 if after else 1)
        chief.close()
    successor = training.chief(model, **options)
    lead(successor)
    worker.result(30)
    assert [(past.step, past.metrics) for past in successor.history()] == [(step, {"loss": step}) for step in range(3)]


def test_a_version_that_a_chief_publishes_again_is_not_added_again(training, background):
    chief, crew = training.chief(), background(lambda: work(training))
    rounds = chief.rounds(until=2)
    next(rounds)
    chief.publish({"w": chief.parameters["w"] + 1})
    training.client.hset(RECORD, "history_latest", "0 5 1 loss=9")
    before = training.client.zrange(HISTORY, 0, -1)
    assert len(before) == 1
    chief._send_parameters()
    assert training.client.zrange(HISTORY, 0, -1) == before
    assert [past.metrics for past in chief.history()] == [{"loss": 9}]
    next(rounds)
    chief.publish({"w": chief.parameters["w"] + 1})
    list(rounds)
    crew.result(30)


def test_after_a_loss_of_data_it_begins_anew_and_the_last_step_is_announced_again(training, background):
    chief, crew = training.chief(), background(lambda: work(training))
    for _ in chief.rounds(until=4):
        chief.publish(chief.parameters)
        if chief.step == 2:
            training.client.flushall()
    crew.result(30)
    assert training.client.hget(RECORD, "until") == b"4"
    assert [past.step for past in chief.history()] == [2, 3]


def test_it_is_deleted_with_the_training(real_client):
    with redisacc.Training("train", {"w": np.zeros(2)}, workers=1, number=0, redis=real_client, **HOWS["update"]) as t:
        for _, weights in t.steps(until=2):
            t.apply(weights, metrics={"loss": 0.5})
        assert real_client.exists(HISTORY) == 1
        t.delete()
        assert real_client.exists(HISTORY) == 0
        assert t.history() == []


def test_a_training_without_metrics_has_none(real_client):
    with redisacc.Training("train", {"w": np.zeros(2)}, workers=1, number=0, redis=real_client, **HOWS["update"]) as t:
        for _, weights in t.steps(until=2):
            t.apply(weights)
        assert t.history() == []
        assert real_client.exists(HISTORY) == 0
        assert not any(b"history" in name for name in real_client.hkeys(RECORD))
        t.delete()


def test_parameters_without_a_training_have_none(real_client):
    with redisacc.Parameters("train", redis=real_client) as parameters:
        assert parameters.history() == []
        parameters.publish(np.zeros(2), 0)
        parameters.publish(np.zeros(2), 1)
        assert parameters.history() == []
        assert not any(b"history" in name for name in real_client.hkeys(RECORD))
        assert real_client.exists(HISTORY) == 0
        parameters.delete()


class Publisher:
    """Publishes versions without values, as a chief adds steps."""

    def __init__(self, client):
        self._scripts = ParameterScripts(connect(client), ParameterKeys("train"))
        self._previous = ""

    def publish(self, *steps, metrics=None):
        for step in steps:
            version = f"v{step}"
            past = history_text(step, 3, {"loss": step / 4} if metrics is None else metrics)
            reply = self._scripts.publish(
                Follows("i", self._previous, step + 1), version=version, event="e", fields=["a", "b"], past=past
            )
            assert reply == "published"
            self._previous = version


@pytest.fixture
def few(monkeypatch):
    """Makes a history keep 20 steps, so that a test is fast."""
    script = script_loader.load("publish")
    text = script.text.replace("KEPT = 1000", "KEPT = 20")
    assert text != script.text
    short = script_loader.Script(script.name, text, script.keys, script.args)
    monkeypatch.setattr("redisacc._protocol.scripts.parameters.load", lambda name: short)
    return 20


def check_spread(found, until, most):
    """Checks that these are steps of a whole run, evenly spread, with the first and the latest one."""
    assert (found[0], found[-1]) == (0, until - 1)
    assert found == sorted(set(found))
    # About half as many remain when the stride has just been doubled and everything is thinned.
    assert most / 2 < len(found) <= most + 10
    assert max(np.diff(found)) <= 4 * until / most


@pytest.mark.servers("fakeredis", "valkey")
@pytest.mark.forges
@pytest.mark.parametrize("first", [0, -100, 2**53 - 40])
def test_it_is_thinned_and_not_cut(client, few, first):
    publisher = Publisher(client)
    keys = ParameterKeys("train")
    for until in (20, 21, 22, 40, 41, 60, 100, 333, 777, 1500):
        begun = client.zcard(keys.history) and int(client.hget(keys.record, "step")) - first
        publisher.publish(*range(first + begun, first + until))
        steps = [int(entry.split()[0]) for entry in client.zrange(keys.history, 0, -1)]
        latest = int(client.hget(keys.record, "history_latest").split()[0])
        assert latest == first + until - 1
        assert len(steps) <= few + 8
        stride = int(client.hget(keys.record, "history_stride") or 1)
        # The pass that halves it has reached this step.
        assert sum(step % stride != 0 for step in steps) <= few
        if first == 0:
            check_spread(sorted({*steps, latest}), until, few if until > few else until)
    client.delete(keys.record, keys.history)


@pytest.mark.thorough
@pytest.mark.forges
def test_a_long_run_has_about_a_thousand_steps(client):
    publisher, keys = Publisher(client), ParameterKeys("train")
    publisher.publish(*range(30_000))
    steps = [int(entry.split()[0]) for entry in client.zrange(keys.history, 0, -1)]
    check_spread(sorted({*steps, 29_999}), 30_000, 1000)
    client.delete(keys.record, keys.history)


@pytest.mark.forges
@pytest.mark.parametrize(
    ("stride", "thinned"),
    [(text, "2") for text in ("x", "0", "-1", "nan", "inf", "1e999", "0.5")]
    + [("2", text) for text in ("x", "nan", "inf", "-inf", "(")],
)
def test_foreign_numbers_of_the_thinning_do_no_harm(client, few, stride, thinned):
    publisher, keys = Publisher(client), ParameterKeys("train")
    publisher.publish(*range(22))
    client.hset(keys.record, mapping={"history_stride": stride, "history_thinned": thinned})
    publisher.publish(*range(22, 60))
    assert client.hget(keys.record, "step") == b"60"
    assert client.zcard(keys.history) <= 60
    client.delete(keys.record, keys.history)


@pytest.mark.forges
def test_a_history_whose_record_is_gone_is_replaced(client):
    publisher, keys = Publisher(client), ParameterKeys("train")
    publisher.publish(0, 1, 2)
    client.delete(keys.record)
    Publisher(client).publish(0)
    assert [entry.split()[0] for entry in client.zrange(keys.history, 0, -1)] == [b"0"]
    client.delete(keys.record, keys.history)


@pytest.mark.forges
def test_a_key_of_another_type_is_refused_before_anything_changes(client):
    publisher, keys = Publisher(client), ParameterKeys("train")
    publisher.publish(0)
    client.delete(keys.history)
    client.set(keys.history, "x")
    before = client.hgetall(keys.record)
    with pytest.raises(redisacc.CorruptDataError):
        publisher.publish(1)
    assert client.hgetall(keys.record) == before
    client.delete(keys.record, keys.history)


def test_what_is_not_written_by_redisacc_is_refused(real_client):
    with redisacc.Training("train", {"w": np.zeros(2)}, workers=1, number=0, redis=real_client, **HOWS["update"]) as t:
        for _, weights in t.steps(until=2):
            t.apply(weights, metrics={"loss": 0.5})
        for entry in ("x", "1 2", "1 2 3 loss", "1 2 3 loss=x", "99999999999999999999 2 3", "1 2 3 " + "x" * 2000):
            real_client.zadd(HISTORY, {entry: 5})
            with pytest.raises(redisacc.CorruptDataError, match="parameters:history"):
                t.history()
            real_client.zrem(HISTORY, entry)
        assert len(t.history()) == 2
        real_client.zadd(HISTORY, {f"{step} 1 1": step for step in range(3000)})
        with pytest.raises(redisacc.CorruptDataError, match="more than the 2000 entries"):
            t.history()
        t.delete()


def test_metrics_that_are_too_long_are_left_out_by_name():
    metrics = {f"{number:064}": 0.1 for number in range(30)}
    text = history_text(2**63 - 1, 10**15 - 1, metrics)
    assert len(text) <= MOST_BYTES + 40
    (past,) = parse_history("key", [text.replace(" ", f" {10**15 - 1} ", 1).encode()], None)
    assert past.metrics == dict(list(metrics.items())[: len(past.metrics)])
    assert len(past.metrics) == MOST_BYTES // 69
    assert math.isnan(past.seconds)


def test_steps_that_are_left_out_share_their_time():
    entries = [b"0 2000 1", b"1 2500 1", b"5 4500 2 loss=1.5", b"5 4500 2 loss=1.5"]
    steps = parse_history("key", entries, 1000)
    assert [dataclasses.astuple(step) for step in steps] == [
        (0, 2.0, 1.0, 1, {}),
        (1, 2.5, 0.5, 1, {}),
        (5, 4.5, 0.5, 2, {"loss": 1.5}),
    ]
