"""The loop of a worker, the training in one process, and the comparison of the two."""

import math
import os
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from demo_text import SMALL, small_corpus
from support.rows import every_row

import redisacc
from redisacc.tools.cli import main
from redisacc.tools.demo import DemoError, training
from redisacc.tools.demo.training import (
    average,
    check_result,
    judge,
    largest_difference,
    tolerance_for,
    train,
    train_alone,
)

CORPUS = small_corpus()
LEAVES = ("input", "output", "position")


# The comparison


def trained(value=1.0):
    arrays = {leaf: np.ones((2, 2), "f4") for leaf in LEAVES}
    arrays["output"][1, 0] = value
    return arrays


@every_row(
    "values, difference, message",
    [
        ((2, 1), 0.251, r"^the two results differ by 2\.51e-01, more than 2\.5e-01$"),
        *(
            ((2, 1), largest_difference(trained(value), trained(other)), r"the two results differ by (nan|inf)")
            for value in (math.nan, math.inf)
            for other in (value, 1.0)
        ),
        *((values, 0.0, "the loss did not fall") for values in ((1.0, 1.0), (1.0, 2.0), (1.0,), (1.0, math.nan))),
    ],
)
def test_results_that_are_not_accepted(values, difference, message, capsys):
    with pytest.raises(DemoError, match=message):
        judge(values, difference, 0.25)
    assert "The results agree" not in capsys.readouterr().out


def test_the_tolerance_tells_a_lost_gradient_from_rounding(monkeypatch):
    settings = replace(SMALL, workers=4, steps=30)
    tolerance = tolerance_for(settings)
    assert tolerance == pytest.approx(1e-3)
    whole = train_alone(settings, CORPUS)
    calls = iter(range(10**6))

    def reversed_order(found):
        return average(list(found)[::-1])

    def loses_one(found):
        # The smallest possible fault: the last worker's gradient of the last step, in one of the two tables.
        mean = average(found)
        if next(calls) == settings.steps - 1:
            mean["input"] = average(found[:-1])["input"]
        return mean

    monkeypatch.setattr(training, "average", reversed_order)
    assert 0 < largest_difference(train_alone(settings, CORPUS), whole) < tolerance / 10
    monkeypatch.setattr(training, "average", loses_one)
    assert largest_difference(train_alone(settings, CORPUS), whole) > tolerance * 10


# Together. Threads instead of processes: what a process adds is tested with the command.


def result():
    """Returns what was published last."""
    with redisacc.Parameters("t", create=False) as published:
        return published.wait()[1]


@pytest.fixture
def start(real_server, background, monkeypatch):
    monkeypatch.setenv("REDISACC_URL", real_server.url)
    for name in [name for name in os.environ if name.startswith("REDISACC_") and name != "REDISACC_URL"]:
        monkeypatch.delenv(name)
    yield lambda settings: background(train, "t", settings, CORPUS)
    CliRunner().invoke(main, ["rm", "t", "--yes"])


def same(ours, theirs):
    return all(ours[leaf].tobytes() == theirs[leaf].tobytes() for leaf in LEAVES)


def test_together_they_train_what_one_does(start, capsys):
    settings = replace(SMALL, workers=4)
    for worker in [start(settings) for _ in range(4)]:
        worker.result(60)
    assert largest_difference(result(), train_alone(settings, CORPUS)) < 1e-5
    capsys.readouterr()
    check_result("t", settings, CORPUS)
    assert capsys.readouterr().out.endswith("The results agree, and the loss fell.\n")


@pytest.mark.servers("valkey")
def test_the_check_finds_a_difference(start, monkeypatch):
    settings = replace(SMALL, workers=1)
    start(settings).result(60)
    honest = training.average
    monkeypatch.setattr(training, "average", lambda found: honest(found) | {"position": found[0]["position"] * 1.1})
    with pytest.raises(DemoError, match="the two results differ by"):
        check_result("t", settings, CORPUS)


class Died(Exception):
    """Stands for the death of a process."""


@pytest.mark.servers("valkey")
def test_two_that_die_change_no_bit(start, monkeypatch, until):
    # With two workers the order of arrival makes no difference: a + b = b + a.
    settings = replace(SMALL, kill=True)

    def die(step, first, *, at):
        if first < step == at:
            raise Died(step)

    monkeypatch.setattr(training, "kill_once", die)
    living = [start(settings), start(settings)]
    # The one that leads dies first, then worker 0, which may be either of them.
    for step in (4, 8):
        [died] = until(lambda: [worker for worker in living if not worker.running], 60)
        with pytest.raises(Died, match=f"^{step}$"):
            died.result(60)
        living.remove(died)
        living.append(start(settings))
    for worker in living:
        worker.result(60)
    assert same(result(), train_alone(settings, CORPUS))


@pytest.mark.servers("valkey")
def test_a_worker_too_many_is_turned_away(start):
    with redisacc.Worker("t", number=0), pytest.raises(DemoError, match="t has workers 0 to 0, and no worker 1"):
        start(replace(SMALL, workers=1, steps=2)).result(30)


@pytest.mark.servers("valkey")
@pytest.mark.usefixtures("start")
def test_there_is_nothing_to_check():
    with pytest.raises(redisacc.NotFoundError, match="nothing has been published"):
        check_result("t", SMALL, CORPUS)
