"""A small value that the program keeps: published with the step, and there again whatever was lost."""

import numpy as np
import pytest
from support.rows import every_row

import redisacc

pytestmark = pytest.mark.servers("valkey")

HOWS = {
    "update": {"update": lambda taken, w, state: (w, state)},
    "optimizer": {"optimizer": redisacc.optim.SGD(0.1)},
    "partitions": {"optimizer": redisacc.optim.SGD(0.1), "accumulator": {"partitions": 2}},
    "update in partitions": {"update": lambda taken, w, state: (w, state), "accumulator": {"partitions": 2}},
    "local steps": {"optimizer": redisacc.LocalSteps(redisacc.optim.SGD(0.1), 1)},
}


def run(client, until, number=0, workers=1, **how):
    """Keeps, with each step, which step follows and the steps that were seen. Returns what is kept in the end."""
    with redisacc.Training(
        "train", {"w": np.zeros(2)}, workers=workers, number=number, redis=client, **how
    ) as training:
        for step, weights in training.steps(until=until):
            kept = training.kept() or {"follows": 0, "seen": []}
            assert kept["follows"] == step
            training.keep({"follows": step + 1, "seen": [*kept["seen"], step], "by": number})
            assert training.kept()["follows"] == step + 1
            training.apply(weights)
        return training.kept()


@pytest.mark.parametrize("how", HOWS)
def test_it_comes_with_the_step_and_with_checkpoints(real_client, background, tmp_path, how):
    every = HOWS[how] | {"checkpoint": redisacc.Checkpoints(tmp_path, every=1)}
    assert run(real_client, 3, **every) == {"follows": 3, "seen": [0, 1, 2], "by": 0}
    real_client.flushall()
    running = [background(run, real_client, 6, number=number, workers=2, **every) for number in (1, 0)]
    # Both processes send a value with each step, and that of the lowest number counts.
    assert [one.result(30) for one in running] == [{"follows": 6, "seen": [*range(6)], "by": 0}] * 2


@pytest.mark.parametrize("how", ["update", "optimizer", "partitions"])
def test_what_the_server_loses_is_restored_with_the_parameters(real_client, how):
    with redisacc.Training(
        "train", {"w": np.zeros(2)}, workers=1, number=0, redis=real_client, **HOWS[how]
    ) as training:
        for step, weights in training.steps(until=4):
            if step == 0:
                training.keep("first")
            if step == 2:
                real_client.flushall()
            training.apply(weights)
        assert training.kept() == "first"
        training.delete()


@pytest.mark.slow
def test_a_worker_that_takes_over_restores_it(real_client, background, until):
    def work(number, dies=False):
        options = HOWS["optimizer"] | {"redis": real_client, "workers": 2, "number": number}
        with redisacc.Training("train", {"w": np.zeros(2)}, **options) as training:
            for step, weights in training.steps(until=4):
                if step == 0:
                    training.keep("first")
                if dies and step == 2:
                    assert training.leads
                    real_client.flushall()
                    return None
                training.apply(weights)
            return training.kept()

    first = background(work, 0, dies=True)
    until(lambda: real_client.exists("redisacc:{train}:parameters"))
    other = background(work, 1)
    first.result(30)
    until(lambda: real_client.exists("redisacc:{train}:parameters"))
    assert [background(work, 0).result(30), other.result(30)] == ["first", "first"]


def test_without_a_new_one_it_stays(real_client):
    how = HOWS["optimizer"]
    with redisacc.Training("train", {"w": np.zeros(2)}, workers=1, number=0, redis=real_client, **how) as training:
        assert training.kept() is None
        for step, weights in training.steps(until=5):
            assert training.kept() == ("first" if step in (1, 2, 3) else None)
            if step == 0:
                training.keep("first")
            if step == 1:
                training.skip()
                continue
            if step == 3:
                training.keep(None)
            training.apply(weights, metrics={"loss": step})
        assert training.kept() is None
        assert [past.metrics for past in training.history()] == [{"loss": step} for step in (0, 2, 3, 4)]
        training.delete()


def cyclic():
    found = []
    found.append(found)
    return found


@every_row(
    "value, message",
    [
        (np.float32(1), "value must be None, .* not float32"),
        ({"best": [1, np.zeros(2)]}, r"value\['best'\]\[1\] must be None, .* not ndarray"),
        ({"best": {1: 2}}, r"value\['best'\] must have texts as keys, not 1"),
        ((1, 2), "not tuple"),
        ("x" * 1023, "value must have at most 1024 bytes as JSON, not 1025"),
        (cyclic(), "nested so deeply"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(client, value, message):
    with redisacc.Training("train", {"w": np.zeros(2)}, workers=1, redis=client, **HOWS["optimizer"]) as training:
        with pytest.raises(redisacc.InvalidArgumentError, match=message):
            training.keep(value)
        assert training.kept() is None


@every_row(
    "value", [0, -0.5, 1e-300, True, "a b\tc\u2028\x1f'\"", [], {}, {"a": [None, {"b c": float("inf")}]}, "x" * 1022]
)
def test_it_comes_back_as_it_was(client, value):
    with redisacc.Training("train", {"w": np.zeros(2)}, workers=1, redis=client, **HOWS["optimizer"]) as training:
        training.keep(value)
        for _, weights in training.steps(until=1):
            assert training.kept() == value
            # With the longest metrics that there are.
            training.apply(weights, metrics={"x" * 62 + str(n + 10): 0.1234567890123456 for n in range(8)})
        assert training.kept() == value
        training.delete()
