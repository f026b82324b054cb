"""Fixtures of the tests of trainings: a chief and workers, in threads."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import redis
from support.moved_clock import MovedClock, server_ms
from support.proxy import Fault, Proxy, proxy_before_server
from support.servers import ServerUnderTest
from support.training_options import grouped

import redisacc


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch, durations: Callable[..., None]) -> None:
    durations(look_every=0.05, look_after=0.2, claim_every=0.05, poll_every=0.1)
    for name in ("ROLE", "WORKER_NUMBER", "WORKERS", "RUN_ID", "CHIEF_RUN_ID", "RESTARTED"):
        monkeypatch.delenv(f"REDISACC_{name}", raising=False)


@pytest.fixture
def time_runs(clock: MovedClock, real_client: redis.Redis) -> Iterator[None]:
    """Renewals of leases find out what the server has lost, and claims of what is left take seconds to come."""
    with clock.running():
        yield


# Fixtures of proxies.
PROXIES = {"proxy", "late", "ahead"}


class Training:
    """Opens chiefs and workers of one training, and closes them when the test ends."""

    def __init__(self, client: redis.Redis, background: Callable[..., Any]) -> None:
        self.client = client
        self._background = background
        self._opened: list[Any] = []

    def chief(self, parameters: Any = None, **options: Any) -> redisacc.Chief:
        """Opens a chief; of two integers unless parameters are given."""
        if parameters is None:
            parameters = {"w": np.zeros(2, np.int64)}
        given = {"workers": 1, "reduction_type": "SUM", "redis": self.client, **options}
        self._opened.append(redisacc.Chief("train", parameters, **grouped(given)))
        return self._opened[-1]

    def worker(self, number: int | None = None, **options: Any) -> redisacc.Worker:
        """Opens a worker."""
        self._opened.append(redisacc.Worker("train", number=number, **{"redis": self.client, **options}))
        return self._opened[-1]

    def gradients(self, parameters: Any = None, **options: Any) -> Any:
        """Opens a handle on the accumulator; of the two integers unless parameters are given."""
        if parameters is None:
            parameters = {"w": np.zeros(2, np.int64)}
        given = {"reduction_type": "SUM", "redis": self.client, "once_per_worker": True, **options}
        self._opened.append(redisacc.TreeAccumulator.like(parameters, "train", **given))
        return self._opened[-1]

    def work(self, worker: redisacc.Worker | None = None, gradient: Any = None) -> Any:
        """Runs the loop of a worker in a thread. Its result: the worker's number, and its steps.

        Args:
            worker: None: a new one.
            gradient: gets the number, the step and the parameters. None: 1 and the step.
        """

        def run() -> tuple[int, list[int]]:
            one = worker or self.worker()
            steps = []
            for step, parameters in one.steps():
                steps.append(step)
                given = {"w": [1, step]} if gradient is None else gradient(one.number, step, parameters)
                one.apply(given)
            return one.number, steps

        return self._background(run)

    @staticmethod
    def lead(chief: redisacc.Chief, until: int) -> None:
        """Runs the loop of a chief that adds gradients to its parameters."""
        for taken in chief.rounds(until=until):
            chief.publish({"w": chief.parameters["w"] + taken.gradient["w"]})

    def chief_deletes(self) -> None:
        """Deletes the training, as `redisacc rm` does."""
        self.gradients().delete()
        with redisacc.Parameters("train", redis=self.client) as parameters:
            parameters.delete()

    def close(self) -> None:
        for one in self._opened:
            one.close()

    @property
    def record(self) -> dict[bytes, bytes]:
        """The record of the accumulator."""
        return self.client.hgetall("redisacc:{train}")

    @property
    def leases(self) -> dict[str, str]:
        """Who holds, or held, which lease."""
        return {place.decode(): entry.decode() for place, entry in self.client.hgetall("redisacc:{train}:crew").items()}

    def give_lease(
        self, place: str, who: str, ms: int, *, holder: str = "other", process: str = "elsewhere.1.1"
    ) -> None:
        """Gives a lease to somebody else, as if its holder had stood still, for so many milliseconds."""
        entry = f"{holder} {server_ms(self.client) + ms} {process} {who}"
        self.client.hset("redisacc:{train}:crew", place, entry)

    def dead_process(self) -> str:
        """Returns the identity of a process of this machine that has ended."""
        with redisacc.Worker("train", number=99, redis=self.client):
            machine, _, started = self.leases["worker 99"].split()[2].split(".")
        with subprocess.Popen(["true"]) as dead:
            return f"{machine}.{dead.pid}.{started}"


@pytest.fixture
def training(
    request: pytest.FixtureRequest, real_client: redis.Redis, background: Callable[..., Any]
) -> Iterator[Training]:
    """Opens chiefs and workers of one training; they are closed when the test ends."""
    for name in PROXIES.intersection(request.fixturenames):
        # First of all, because what is closed has to reach the server.
        request.getfixturevalue(name)
    made = Training(real_client, background)
    yield made
    made.close()


@pytest.fixture
def late(real_server: ServerUnderTest) -> Iterator[Proxy]:
    """A proxy for reducers that are late, or that a test listens to."""
    with proxy_before_server(real_server.url) as proxy:
        yield proxy


@pytest.fixture
def ahead(real_server: ServerUnderTest) -> Iterator[Proxy]:
    """A proxy for workers."""
    with proxy_before_server(real_server.url) as proxy:
        yield proxy


@pytest.fixture
def reducing(training: Training, background: Callable[..., Any], until: Callable[..., Any]) -> Iterator[Any]:
    """Runs reducers in threads, and waits until they work on the training."""

    opened: list[redisacc.Reducer] = []

    def start(number: int = 1, *, wait: bool = True, wanted: int = 3, redis: Any = None) -> list[redisacc.Reducer]:
        # As if the chief had waited for a round already: a reducer reads once a second how many gradients it wants.
        training.client.hset("redisacc:{train}", "wanted", wanted)
        for _ in range(number):
            opened.append(redisacc.Reducer(redis=redis or training.client))
            background(opened[-1].run)
        partitions = training.client.hget("redisacc:{train}", "partitions") or b""
        leases = [f"redisacc:{{train}}:reducer:{one}".rstrip(":") for one in partitions.decode().split(",")]

        def there() -> bool:
            training.client.publish("redisacc:{train}:calls", "required=1")
            return all(training.client.hget(key, "who") for key in leases)

        if wait:
            until(there)
        return opened

    yield start
    for one in opened:
        one.close()


# All keys at one moment: what each holds, and how long it will last.
KEPT = """
local kept = {}
for number, key in ipairs(redis.call('KEYS', '*')) do
  kept[number] = {key, redis.call('DUMP', key), redis.call('PTTL', key)}
end
return kept
"""


class Losses:
    """Takes data from the server that a process reaches through a proxy, and again while they are being restored."""

    def __init__(self, proxy: Proxy, client: Any) -> None:
        self._proxy = proxy
        self._client = client
        self.number = self._left = self._after = 0
        self.lose = client.flushall

    def begin(self, after: int, times: int = 1) -> None:
        """Loses data now, and that many times again, each time after so many requests of that process."""
        self._left, self._after = times, after
        self._happens()

    def _happens(self) -> None:
        if self._left:
            self._left -= 1
            self._proxy.when_it_happens = self._happens
            self._proxy.arm(Fault("request", self._after, 0, "pass"))
        self.number += 1
        self.lose()

    def keep(self) -> None:
        """From now on, the server goes back to the data that it has now, as after a restart."""
        kept = self._client.eval(KEPT, 0)

        def lose() -> None:
            with self._client.pipeline() as pipeline:
                pipeline.flushall()
                for key, data, left in kept:
                    pipeline.restore(key, max(left, 0), data)
                pipeline.execute()

        self.lose = lose

    def only(self, pattern: bytes) -> None:
        """From now on, only keys with such names are lost."""

        def lose() -> None:
            names = [key for key in self._client.scan_iter() if re.search(pattern, key)]
            if names:
                self._client.delete(*names)

        self.lose = lose


@pytest.fixture
def losses(proxy: Proxy, real_client: Any) -> Losses:
    return Losses(proxy, real_client)
