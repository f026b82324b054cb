"""Random faults in a row, from a seed, in one training on three hosts: it continues after each of them."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
from pathlib import Path
from time import monotonic

import pytest
from several_hosts import kill, says
from support.until import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.timeout(600),
    pytest.mark.servers("valkey"),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc"),
]

TRAINING = """
import os
import time
import numpy as np
import redisacc

with redisacc.Training("hosts", {"w": np.zeros(1000)}, optimizer=redisacc.optim.SGD(0.1)) as training:
    for step, weights in training.steps(until=10**6):
        time.sleep(0.02)
        training.apply({"w": weights["w"] + step})
        if step % 10 == 0:
            print("step", step)
        if os.path.exists("stop"):
            training.finish()
    print("weights", training.latest()[1]["w"][:2].tolist())
"""
# Longer than every lease, in seconds.
BEYOND_LEASES = 12.0
# The last words of a command that is one too many.
REFUSED = (
    "is in the training at|another command has come as host|is one too many|has taken the place of host|is in use, by "
    "another training|another training has begun"
)


class Training:
    """A training on hosts of which some fail."""

    def __init__(self, host, choice):
        self._host = host
        self._choice = choice
        self._options = ("--replicas", choice.choice([0, 1]), "--restarts", 1)
        self._unused = iter("defghijklmnopqrstuvw")
        self.runs = {name: self._start(name) for name in "abc"}
        self.told = [f"{self._options}"]
        self._refused = []
        self._twice = {}

    def _start(self, name, *more):
        return self._host(name, 3, *self._options, *more, script=TRAINING)

    def _said(self):
        return "\n".join([*self.told, *(f"--- {name}\n{run.out}\n{run.err}" for name, run in self.runs.items())])

    def steps(self):
        """The latest step that each host has printed."""
        return {
            name: max(map(int, re.findall(r"step (\d+)\n", run.out)), default=-1) for name, run in self.runs.items()
        }

    def continues(self):
        """Waits until each host has printed further steps."""
        before = max(self.steps().values())

        def has_continued():
            for run in self.runs.values():
                assert run.process.poll() is None, self._said()
            return min(self.steps().values()) > before

        until(has_continued, 150, details=self._said)
        for run in self._refused:
            assert run.code(60) == 1, run.err
            assert re.search(REFUSED, run.err.splitlines()[-1]), run.err
        self._refused.clear()

    def fail(self):
        """Lets one host or two of them fail, and brings them back in another order."""
        victims = self._choice.sample(sorted(self.runs), self._choice.choice([1, 1, 2]))
        stopped = {}
        told = "does not answer" if "a" in victims else f"host {victims[-1]} is gone"
        before = {name: run.err.count(told) for name, run in self.runs.items()}
        for name in victims:
            if self._choice.random() < 0.4:
                stopped[name] = self._stop(self.runs[name])
            else:
                kill(self.runs[name])
        self.told.append(f"{victims}, of which stopped {list(stopped)}")
        for name, run in self.runs.items():
            if name not in victims:
                says(run, told, before[name] + 1)
        if stopped:
            end = monotonic() + BEYOND_LEASES
            until(lambda: monotonic() >= end)
        for name in self._choice.sample(victims, len(victims)):
            self._bring_back(name, stopped.get(name, []), alone=len(victims) == 1)
        for name in list(self._twice):
            self._one_stays(name)

    def _stop(self, run):
        pids = [run.process.pid, *run.left()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        return pids

    def _bring_back(self, name, stopped, *, alone):
        ways = ["returns", "returns twice"] if not stopped else ["continues", "continues, and is started again"]
        if name != "a" and alone:
            # Of several that are gone, a host that joins replaces the first.
            ways.append("is replaced")
        way = self._choice.choice(ways)
        self.told.append(f"{name} {way}")
        before = self.runs[name]
        if way == "is replaced":
            del self.runs[name]
            new = next(self._unused)
            self.runs[new] = self._start(new, "--join")
            says(self.runs["a"], f"host {new} takes the place of host {name}")
            self._refused.append(self._start(name) if not stopped else before)
        elif way != "continues":
            new = self._start(name)
            if way == "returns":
                self.runs[name] = new
            elif stopped:
                self._refused.append(new)
            else:
                self.runs[name] = new
                self._twice[name] = self._start(name)
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _one_stays(self, name):
        """Of two commands of one host, one stays, as soon as the meeting host is back."""
        two = [self.runs[name], self._twice.pop(name)]
        until(lambda: any(run.process.poll() is not None for run in two), 60, details=lambda: [run.err for run in two])
        self._refused += [run for run in two if run.process.poll() is not None]
        (self.runs[name],) = set(two) - set(self._refused)


@pytest.mark.parametrize("seed", range(3))
def test_a_training_continues_after_random_faults_of_its_hosts(host, tmp_path, seed):
    training = Training(host, random.Random(seed))
    training.continues()
    for _ in range(4):
        training.fail()
        training.continues()
    (tmp_path / "stop").touch()
    weights = set()
    for run in training.runs.values():
        assert run.code(100) == 0, run.err
        weights |= set(re.findall(r"weights (\[.*\])\n", run.out))
    assert len(weights) == 1
