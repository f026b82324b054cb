"""A server that is killed again and again, and comes back with less than it had acknowledged: the training is exact."""

import random
import threading

import numpy as np
import pytest
from support.daemons import PowerFailure

import redisacc

LOSSES = 5


class Snapshots:
    """A server without an append-only file: a kill takes everything since the last snapshot."""

    options = ("--appendonly", "no")

    def __init__(self, server):
        self._server = server

    def keep(self):
        with self._server.client() as client:
            client.save()

    def lose(self):
        self._server.kill()
        self._server.start()


class EverySecond:
    """A machine that loses its power: the end of the append-only file had not reached the disk."""

    options = ("--appendonly", "yes", "--appendfsync", "everysec", "--aof-load-truncated", "yes")

    def __init__(self, server):
        self._power = PowerFailure(server)

    def keep(self):
        self._power.last_flush()

    def lose(self):
        self._power.strike()


@pytest.mark.thorough
@pytest.mark.parametrize("limit", [None, 0], ids=["in_place", "buffered"])
@pytest.mark.parametrize("persistence", [Snapshots, EverySecond])
def test_the_server_forgets_what_it_acknowledged(training, daemon, background, until, caplog, persistence, limit):
    server = daemon(*persistence.options).start()
    training.client = server.client()
    chief = training.chief(workers=2, limits=redisacc.Limits(in_place=limit), state={"m": np.array(0)})
    crew = [training.work(training.worker(number)) for number in range(2)]
    enough = threading.Event()

    def lead():
        for taken in chief.rounds():
            chief.publish({"w": chief.parameters["w"] + taken.gradient["w"]}, state={"m": np.array(chief.step)})
            if enough.is_set():
                break
        # Acknowledges what came back with older data, and ends the workers' loops.
        for _ in chief.rounds(until=chief.step):
            pass

    leading = background(lead)

    def pass_steps(number):
        goal = chief.step + number
        until(lambda: chief.step >= goal or not leading.running)

    disk, choice = persistence(server), random.Random(6001)
    for _ in range(LOSSES):
        pass_steps(choice.randint(1, 4))
        disk.keep()
        # 0: in the middle of a step, too.
        pass_steps(choice.randint(0, 6))
        disk.lose()
    pass_steps(3)
    enough.set()
    leading.result()
    for one in crew:
        one.result()
    # Each worker's gradient of each step was used once: 1 and the step.
    steps = chief.step
    assert chief.parameters["w"].tolist() == [2 * steps, steps * (steps - 1)]
    with redisacc.Parameters("train", redis=training.client) as parameters:
        step, tree = parameters.latest()
        assert (step, tree["w"].tolist()) == (steps, chief.parameters["w"].tolist())
        assert parameters.latest_state()[1]["m"].item() == steps - 1
    assert training.client.hlen("redisacc:{train}:taken") == 0
    said = [record.getMessage() for record in caplog.records]
    assert any("has lost" in text or "older data" in text for text in said)
    # A take that came back with older data is waited for, and not asked again and again whether it is still there.
    assert len([text for text in said if "was lowered" in text]) <= 4 * LOSSES
