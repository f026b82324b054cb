"""A chief that waits some time for the gradients of more workers than a step needs."""

from __future__ import annotations

import numpy as np
import pytest
from support.leaks import remaining

import redisacc
from redisacc import Quorum

HOUR = 3600


def ones(number, step, parameters):
    return {"w": [1, 10**number]}


def test_a_step_gets_the_gradients_of_all_who_come_in_time(training, background):
    chief = training.chief(workers=2, quorum=Quorum(1, 2, HOUR))
    leading = background(training.lead, chief, 3)
    crew = [training.work(training.worker(number), gradient=ones) for number in (0, 1)]
    leading.result()
    assert chief.parameters["w"].tolist() == [6, 33]
    assert [one.result()[1] for one in crew] == [[0, 1, 2]] * 2


def test_the_grace_ends_when_every_worker_has_contributed(training):
    chief = training.chief(workers=1, quorum=Quorum(grace=HOUR))
    one = training.work(training.worker(0), gradient=ones)
    training.lead(chief, 2)
    assert one.result()[1] == [0, 1]


def test_a_step_goes_on_without_those_who_do_not_come(training, background):
    chief = training.chief(workers=2, quorum=Quorum(1, 2, 0.1))
    leading = background(training.lead, chief, 3)
    one = training.work(training.worker(0), gradient=ones)
    leading.result()
    assert chief.parameters["w"].tolist() == [3, 3]
    assert one.result()[1] == [0, 1, 2]


def test_a_chief_that_is_started_again_does_not_start_the_grace_again(training, background, until):
    chief = training.chief(workers=2, quorum=Quorum(1, grace=HOUR))
    leading = background(training.lead, chief, 1)
    one = training.work(training.worker(0), gradient=ones)
    until(lambda: int(training.record.get(b"grace_began_ms", 0)))
    chief.close()
    with pytest.raises(redisacc.CancelledError):
        leading.result()
    began = int(training.record[b"grace_began_ms"])
    training.client.hset("redisacc:{train}", "grace_began_ms", began - HOUR * 1000)
    chief = training.chief(workers=2, quorum=Quorum(1, grace=HOUR))
    training.lead(chief, 1)
    assert chief.parameters["w"].tolist() == [1, 1]
    one.join()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"most": 3}, "needs a grace"),
        ({"most": 1, "grace": 1}, r"most must be in \[2, "),
        ({"grace": float("nan")}, "grace must be a number of seconds"),
        ({"grace": -1}, "grace must be a number of seconds"),
        ({"grace": 10**9}, "grace must be a number of seconds"),
    ],
)
def test_invalid_ones(training, options, message):
    with pytest.raises(redisacc.InvalidArgumentError, match=message):
        training.chief({"w": np.zeros(2)}, workers=2, quorum=Quorum(**options))
    assert remaining(training.client) == []


def test_a_step_needs_a_weight(training, background):
    chief = training.chief({"w": np.zeros(2)}, workers=2, quorum=Quorum(1, min_weight=3), reduction_type="MEAN")
    leading = background(training.lead, chief, 1)
    first, second = training.worker(0), training.worker(1)
    next(first.steps())
    next(second.steps())
    with pytest.raises(redisacc.InvalidArgumentError, match="weight must be"):
        first.apply({"w": [1, 1]}, weight=0)
    assert first.apply({"w": [1, 1]}, weight=1)
    assert training.record[b"num_accumulated"] == b"1"
    assert second.apply({"w": [5, 3]}, weight=2)
    leading.result()
    assert chief.parameters["w"].tolist() == [11 / 3, 7 / 3]


def test_an_invalid_weight_of_a_chief(training):
    with pytest.raises(redisacc.InvalidArgumentError, match="min_weight must be"):
        training.chief(workers=1, quorum=Quorum(min_weight=-1))
