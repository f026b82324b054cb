"""Whatever is lost or away at whatever moment, a training looks at what there is, and does the first thing missing."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from support.proxy import Fault
from support.training_options import grouped

import redisacc
from redisacc.optim import SGD

pytestmark = [pytest.mark.loses_data, pytest.mark.servers("valkey")]


@pytest.fixture(autouse=True)
def _brief(durations):
    durations(poll=0.2, poll_every=0.1, gathering=0.5)


@pytest.fixture
def join(real_client, proxy):
    """Opens a process's side of a training, over the proxy; all are closed when the test ends."""
    opened = []

    def open_it(parameters, **options):
        given = {"workers": 1, "redis": proxy.url, **options}
        opened.append(redisacc.Training("train", parameters, **grouped(given)))
        return opened[-1]

    yield open_it
    for one in opened:
        one.close()


def add(taken, parameters, state):
    return {"w": parameters["w"] + taken.gradient["w"]}, {"n": np.array(taken.global_step)}


HOW = {"update": {"update": add}, "optimizer": {"optimizer": SGD(0.5)}}

both = pytest.mark.parametrize("how", HOW)


class Losses:
    """Empties the server, and empties it again after so many requests of the process, so many times."""

    def __init__(self, proxy, client):
        self._proxy, self._client, self.number = proxy, client, 0

    def begin(self, after, times):
        self._left, self._after = times, after
        self._empty()

    def _empty(self):
        if self._left:
            self._left -= 1
            self._proxy.when_it_happens = self._empty
            self._proxy.arm(Fault("request", self._after, 0, "pass"))
        self.number += 1
        self._client.flushall()


def train(one, until, seen=lambda step: None):
    """Trains with gradients of ones. Returns the steps, and the weights in the end."""
    steps = []
    for step, found in one.steps(until=until):
        steps.append(step)
        seen(step)
        one.apply({"w": np.ones_like(found["w"])})
    step, found = one.latest()
    assert step == until
    return steps, found["w"][0].item()


EXPECTED = {"update": float, "optimizer": lambda steps: -0.5 * steps}


@both
@pytest.mark.parametrize("times", [1, 2, 3])
def test_the_only_process_loses_everything_again_and_again(join, proxy, real_client, background, how, times):
    """The defect: the last copy of the weights ended with the process."""
    losses = Losses(proxy, real_client)
    one = join({"w": np.zeros(3, np.float32)}, **HOW[how])
    after = range(0, 40, 3)
    begin = {2 + place: number for place, number in enumerate(after)}
    until = 3 + len(after)
    _, found = background(
        train, one, until, lambda step: step in begin and losses.begin(begin.pop(step), times)
    ).result(120)
    assert found == EXPECTED[how](until)
    assert losses.number > len(after)
    one.delete()


@pytest.mark.usefixtures("time_runs")
def test_everything_is_lost_together_with_a_reducer(join, reducing, real_client, background, caplog):
    """The worker in the process that leads has the weights; only the optimizer's state is lost."""
    parameters = {"w": np.zeros(350_000, np.float32)}
    one = join(parameters, optimizer=SGD(0.5, momentum=0.5))
    reducers = []

    def seen(step):
        if step == 1:
            reducers.extend(reducing(wanted=1))
        if step == 5:
            for reducer in reducers:
                reducer.close()
            real_client.flushall()

    steps, _ = background(train, one, 8, seen).result(120)
    assert steps[-1] == 7
    one.delete()


def test_an_outage_outlasts_the_patience_of_opening(join, proxy, background, durations, monkeypatch, until, caplog):
    """A process that is started again in its place does without a server for as long as its patience says."""
    monkeypatch.setenv("REDISACC_RESTARTED", "1")
    durations(opening=0.2)
    proxy.refuses = True

    def run():
        return train(join({"w": np.zeros(3, np.float32)}, **HOW["update"]), 3)

    running = background(run)
    until(lambda: "could not reach the server to open the training" in caplog.text)
    began = time.monotonic()
    until(lambda: time.monotonic() - began > 1 or not running.running)
    proxy.refuses = False
    assert running.result(30)[1] == 3.0


@pytest.fixture
def refusing(daemon):
    """A server of its own, which can be made to refuse writes, and to accept them again."""
    server = daemon("--enable-protected-configs", "yes", "--save", "3600 1000").start()

    def refuse(cause):
        with server.client() as client:
            if cause == "NOREPLICAS":
                client.config_set("min-replicas-to-write", 1)
                return
            # It cannot save its data.
            gone = server.folder / "gone"
            gone.mkdir()
            client.config_set("save", "3600 1000")
            client.config_set("dir", str(gone))
            gone.rmdir()
            client.bgsave()
            while client.info("persistence")["rdb_last_bgsave_status"] == "ok":
                time.sleep(0.01)

    def accept():
        with server.client() as client:
            client.config_set("min-replicas-to-write", 0)
            client.config_set("dir", str(server.folder))
            client.config_set("stop-writes-on-bgsave-error", "no")

    return server, refuse, accept


@both
@pytest.mark.parametrize("cause", ["NOREPLICAS", "MISCONF"])
def test_writes_that_are_refused_for_a_while(join, refusing, background, caplog, until, how, cause):
    server, refuse, accept = refusing
    one = join({"w": np.zeros(3, np.float32)}, **HOW[how], redis=server.url)

    def end():
        until(lambda: "the server refuses writes; trying" in caplog.text and cause in caplog.text)
        accept()

    def seen(step):
        if step == 2:
            refuse(cause)
            background(end)

    _, found = background(train, one, 6, seen).result(60)
    assert found == EXPECTED[how](6)
    one.delete()


@pytest.fixture
def outages(proxy, caplog):
    """Cuts a process off from its server after so many replies, until it says that it waits."""
    over = threading.Event()

    def end():
        while not ("trying until it is back" in caplog.text or over.wait(0.01)):
            pass
        proxy.refuses = False

    def begin():
        proxy.refuses = True
        caplog.clear()
        threading.Thread(target=end, daemon=True).start()
        proxy.cut_all()

    def begin_after(number, direction):
        proxy.when_it_happens = begin
        proxy.arm(Fault(direction, number, 0, "cut"))

    yield begin_after
    over.set()


@both
@pytest.mark.parametrize("direction", ["request", "reply"])
def test_the_server_is_away_at_each_exchange_of_a_step(join, outages, background, how, direction):
    one = join({"w": np.zeros(3, np.float32)}, **HOW[how])
    after = dict(enumerate(range(12), 2))
    until = len(after) + 3

    def seen(step):
        if step in after:
            outages(after.pop(step), direction)

    assert background(train, one, until, seen).result(120)[1] == EXPECTED[how](until)
    assert not after
    one.delete()
