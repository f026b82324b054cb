"""Fixtures of the tests of trainings: a chief and workers, in threads."""

import re
import subprocess

import numpy as np
import pytest
from support.moved_clock import server_ms
from support.proxy import Fault, proxy_before_server
from support.servers import Snapshot
from support.training_options import grouped

import redisacc


@pytest.fixture(autouse=True)
def _short(monkeypatch, durations):
    durations(look_every=0.05, look_after=0.2, claim_every=0.05, poll_every=0.1)
    for name in ("ROLE", "WORKER_NUMBER", "WORKERS", "RUN_ID", "CHIEF_RUN_ID", "RESTARTED"):
        monkeypatch.delenv(f"REDISACC_{name}", raising=False)


@pytest.fixture
def time_runs(clock, real_client):
    """Renewals of leases find out what the server has lost, and claims of what is left take seconds to come."""
    with clock.running():
        yield


# Fixtures of proxies.
PROXIES = {"proxy", "late", "ahead"}


class Training:
    """Opens chiefs and workers of one training, and closes them when the test ends."""

    def __init__(self, client, background):
        self.client = client
        self._background = background
        self._opened = []

    def chief(self, parameters=None, **options):
        """Opens a chief; of two integers unless parameters are given."""
        if parameters is None:
            parameters = {"w": np.zeros(2, np.int64)}
        given = {"workers": 1, "reduction_type": "SUM", "redis": self.client, **options}
        self._opened.append(redisacc.Chief("train", parameters, **grouped(given)))
        return self._opened[-1]

    def worker(self, number=None, **options):
        """Opens a worker."""
        self._opened.append(redisacc.Worker("train", number=number, **{"redis": self.client, **options}))
        return self._opened[-1]

    def gradients(self, parameters=None, **options):
        """Opens a handle on the accumulator; of the two integers unless parameters are given."""
        if parameters is None:
            parameters = {"w": np.zeros(2, np.int64)}
        given = {"reduction_type": "SUM", "redis": self.client, "once_per_worker": True, **options}
        self._opened.append(redisacc.TreeAccumulator.like(parameters, "train", **given))
        return self._opened[-1]

    def work(self, worker=None, gradient=None):
        """Runs the loop of a worker in a thread. Its result: the worker's number, and its steps.

        Args:
            worker: None: a new one.
            gradient: gets the number, the step and the parameters. None: 1 and the step.
        """

        def run():
            one = worker or self.worker()
            steps = []
            for step, parameters in one.steps():
                steps.append(step)
                given = {"w": [1, step]} if gradient is None else gradient(one.number, step, parameters)
                one.apply(given)
            return one.number, steps

        return self._background(run)

    @staticmethod
    def lead(chief, until):
        """Runs the loop of a chief that adds gradients to its parameters."""
        for taken in chief.rounds(until=until):
            chief.publish({"w": chief.parameters["w"] + taken.gradient["w"]})

    def close(self):
        for one in self._opened:
            one.close()

    @property
    def record(self):
        """The record of the accumulator."""
        return self.client.hgetall("redisacc:{train}")

    @property
    def leases(self):
        """Who holds, or held, which lease."""
        return {place.decode(): entry.decode() for place, entry in self.client.hgetall("redisacc:{train}:crew").items()}

    def give_lease(self, place, who, ms, *, holder="other", process="elsewhere.1.1"):
        """Gives a lease to somebody else, as if its holder had stood still, for so many milliseconds."""
        entry = f"{holder} {server_ms(self.client) + ms} {process} {who}"
        self.client.hset("redisacc:{train}:crew", place, entry)

    def dead_process(self):
        """Returns the identity of a process of this machine that has ended."""
        with redisacc.Worker("train", number=99, redis=self.client):
            machine, _, started = self.leases["worker 99"].split()[2].split(".")
        with subprocess.Popen(["true"]) as dead:
            return f"{machine}.{dead.pid}.{started}"


@pytest.fixture
def training(request, real_client, background):
    """Opens chiefs and workers of one training; they are closed when the test ends."""
    for name in PROXIES.intersection(request.fixturenames):
        # First of all, because what is closed has to reach the server.
        request.getfixturevalue(name)
    made = Training(real_client, background)
    yield made
    made.close()


@pytest.fixture
def late(real_server):
    """A proxy for reducers that are late, or that a test listens to."""
    with proxy_before_server(real_server.url) as proxy:
        yield proxy


@pytest.fixture
def ahead(real_server):
    """A proxy for workers."""
    with proxy_before_server(real_server.url) as proxy:
        yield proxy


@pytest.fixture
def reducing(training, background, until):
    """Runs reducers in threads, and waits until they work on the training."""

    opened = []

    def start(number=1, *, wait=True, wanted=3, redis=None):
        # As if the chief had waited for a round already: a reducer reads once a second how many gradients it wants.
        training.client.hset("redisacc:{train}", "wanted", wanted)
        for _ in range(number):
            opened.append(redisacc.Reducer(redis=redis or training.client))
            background(opened[-1].run)
        partitions = training.client.hget("redisacc:{train}", "partitions") or b""
        leases = [f"redisacc:{{train}}:reducer:{one}".rstrip(":") for one in partitions.decode().split(",")]

        def there():
            training.client.publish("redisacc:{train}:calls", "required=1")
            return all(training.client.hget(key, "who") for key in leases)

        if wait:
            until(there)
        return opened

    yield start
    for one in opened:
        one.close()


class Losses:
    """Takes data from the server that a process reaches through a proxy, and again while they are being restored."""

    def __init__(self, proxy, client):
        self._proxy = proxy
        self._client = client
        self.number = self._left = self._after = 0
        self.lose = client.flushall

    def begin(self, after, times=1):
        """Loses data now, and that many times again, each time after so many requests of that process."""
        self._left, self._after = times, after
        self._happens()

    def _happens(self):
        if self._left:
            self._left -= 1
            self._proxy.when_it_happens = self._happens
            self._proxy.arm(Fault("request", self._after, 0, "pass"))
        self.number += 1
        self.lose()

    def keep(self):
        """From now on, the server goes back to the data that it has now, as after a restart."""
        self.lose = Snapshot(self._client).restore

    def only(self, pattern):
        """From now on, only keys with such names are lost."""

        def lose():
            names = [key for key in self._client.scan_iter() if re.search(pattern, key)]
            if names:
                self._client.delete(*names)

        self.lose = lose


@pytest.fixture
def losses(proxy, real_client):
    return Losses(proxy, real_client)
