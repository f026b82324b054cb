"""A simulated training on machines of unequal speed that die and return: loss over time for several settings.

The clock is simulated, so a run takes a fraction of a second, and the same seed gives the same result. A step waits as
the library would: its `CrewQuorum` says how many gradients a step needs, and its leases say how long a step waits for a
worker that has died.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from redisacc._clock import durations
from redisacc._format.quorum import Quorum
from redisacc._handles.environment import place
from redisacc._training.quorum import CrewQuorum

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Machines:
    """The machines of a crew.

    Attributes:
        workers: how many.
        median: of the seconds that a gradient takes; they are distributed log-normally.
        spread: the standard deviation of their logarithm: 0.5 means that one in six takes 1.6 times the median.
        life: mean time between the deaths of a machine, in seconds.
        absence: mean time until a machine that has died is back, in seconds.
    """

    workers: int = 8
    median: float = 1.0
    spread: float = 0.6
    life: float = 240.0
    absence: float = 40.0


@dataclass(frozen=True)
class Problem:
    """A quadratic loss: its curvatures, and the noise of a gradient.

    Attributes:
        size: number of weights.
        flattest: the smallest curvature; the largest is 1.
        noise: the standard deviation of each element of a gradient.
        rate: the learning rate of a step with a gradient of every worker. One with fewer gradients is proportionally
            smaller, so each gradient has the same weight in all settings.
    """

    size: int = 20
    flattest: float = 0.005
    noise: float = 0.08
    rate: float = 1.5

    @property
    def curvatures(self) -> Array:
        return np.geomspace(self.flattest, 1.0, self.size)

    def loss(self, weights: Array) -> float:
        return float(0.5 * (self.curvatures * weights * weights).mean())


@dataclass(frozen=True)
class Setting:
    """One of the settings that are compared: arguments of a chief, and how late gradients may be.

    Attributes:
        quorum: what a step waits for.
        workers: None: the number of machines. Or "all", those that are there.
        max_staleness: by how many steps a gradient may be late; None: by any number.
        staleness_weight: "constant", or "inverse_sqrt": a gradient that is τ steps late counts 1/√(1 + τ).
    """

    quorum: int | Quorum
    workers: Literal["all"] | None = None
    max_staleness: int | None = 0
    staleness_weight: Literal["constant", "inverse_sqrt"] = "constant"


@dataclass
class Outcome:
    """The result of a simulated training.

    Attributes:
        times: when each step was made, in seconds.
        losses: the loss after each.
        used: number of gradients that were accepted.
        stale: number of gradients that were dropped.
    """

    times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    used: int = 0
    stale: int = 0

    def at(self, moments: Array) -> Array:
        """Returns the loss at given moments, none of them before the first step."""
        return np.array(self.losses)[np.searchsorted(self.times, moments, side="right") - 1]


def absences(machines: Machines, random: np.random.Generator, seconds: float) -> Iterator[tuple[float, float]]:
    """Yields when a machine dies and when it is back, until the end."""
    now = 0.0
    while (died := now + random.exponential(machines.life)) < seconds:
        now = died + random.exponential(machines.absence)
        yield died, now


@dataclass
class _Worker:
    durations: np.random.Generator
    noise: np.random.Generator
    # Counts its lives, so that what an earlier one computed is discarded.
    life: int = 0
    is_alive: bool = True
    lease_ends: float = math.inf
    step: int = -1
    weights: Array = field(default_factory=lambda: np.zeros(0))
    is_waiting: bool = True


class Training:
    """A training of one setting. ``run`` may be called once.

    Args:
        setting: what a step waits for.
        seed: of the durations, the deaths and the noise. They do not depend on the setting.
        machines: the crew.
        problem: what is learnt.
    """

    def __init__(
        self, setting: Setting, seed: int, machines: Machines | None = None, problem: Problem | None = None
    ) -> None:
        self._machines = machines or Machines()
        self._problem = problem or Problem()
        self._setting = setting
        self._crew_quorum = CrewQuorum.of(setting.workers or self._machines.workers, setting.quorum, place({}))
        self._seed = seed
        self._workers = [
            _Worker(np.random.default_rng([seed, number, 0]), np.random.default_rng([seed, number, 1]))
            for number in range(self._machines.workers)
        ]
        self._events: list[tuple[float, int, str, int, int]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._step = 0
        self._weights = np.ones(self._problem.size)
        self._sum = np.zeros(self._problem.size)
        self._count = 0
        self._contributors: set[int] = set()
        self._grace_ends = math.inf
        self._outcome = Outcome([0.0], [self._problem.loss(self._weights)])
        self._look()

    def run(self, seconds: float) -> Outcome:
        """Runs the training for this number of seconds of its clock."""
        for number, worker in enumerate(self._workers):
            random = np.random.default_rng([self._seed, number, 2])
            for died, returned in absences(self._machines, random, seconds):
                self._at(died, "died", number)
                self._at(returned, "returned", number)
            self._begin(number, worker)
        self._at(durations.look_every, "look")
        while self._events and self._events[0][0] <= seconds:
            self._now, _, what, number, life = heapq.heappop(self._events)
            self._happen(what, number, life)
        return self._outcome

    def _at(self, when: float, what: str, number: int = 0, life: int = 0) -> None:
        heapq.heappush(self._events, (when, next(self._order), what, number, life))

    def _happen(self, what: str, number: int, life: int) -> None:
        worker = self._workers[number]
        match what:
            case "look":
                self._look()
                self._at(self._now + durations.look_every, "look")
            case "died":
                worker.is_alive, worker.lease_ends = False, self._now + durations.lease
                worker.life += 1
            case "returned":
                worker.is_alive, worker.lease_ends = True, math.inf
                self._begin(number, worker)
            case "computed" if life == worker.life:
                self._apply(number, worker)
        self._grant()

    def _begin(self, number: int, worker: _Worker) -> None:
        """Lets a worker compute a gradient of the newest weights."""
        worker.step, worker.weights, worker.is_waiting = self._step, self._weights, False
        duration = worker.durations.lognormal(math.log(self._machines.median), self._machines.spread)
        self._at(self._now + duration, "computed", number, worker.life)

    def _apply(self, number: int, worker: _Worker) -> None:
        limit = self._setting.max_staleness
        if limit is not None and worker.step < self._step - limit:
            self._outcome.stale += 1
        else:
            noise = worker.noise.normal(scale=self._problem.noise, size=self._problem.size)
            is_lighter = self._setting.staleness_weight == "inverse_sqrt"
            weight = 1 / math.sqrt(1 + self._step - worker.step) if is_lighter else 1.0
            self._sum = self._sum + weight * (self._problem.curvatures * worker.weights + noise)
            self._count += 1
            self._contributors.add(number)
            self._outcome.used += 1
            if self._count == self._required and self._quorum.grace:
                self._grace_ends = self._now + self._quorum.grace
                self._at(self._grace_ends, "grace")
        worker.is_waiting = True
        if worker.step < self._step:
            self._begin(number, worker)

    def _look(self) -> None:
        """Does what a chief does once a second: it counts those who hold a lease or have contributed."""
        holders = {number for number, worker in enumerate(self._workers) if self._now < worker.lease_ends}
        self._quorum = self._crew_quorum.of_crew(len(holders | self._contributors))

    @property
    def _required(self) -> int:
        assert self._quorum.least is not None
        return self._quorum.least

    def _grant(self) -> None:
        enough = self._count >= self._required
        if enough and self._quorum.grace:
            enough = self._now >= self._grace_ends or self._count >= (self._quorum.most or math.inf)
        if not enough:
            return
        self._weights = self._weights - self._problem.rate / self._machines.workers * self._sum
        self._step += 1
        self._sum, self._count, self._contributors = np.zeros(self._problem.size), 0, set()
        self._grace_ends = math.inf
        self._outcome.times.append(self._now)
        self._outcome.losses.append(self._problem.loss(self._weights))
        for number, worker in enumerate(self._workers):
            if worker.is_alive and worker.is_waiting:
                self._begin(number, worker)
