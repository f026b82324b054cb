"""Twenty random faults in a row, from a seed, in one training on three hosts: it continues after each of them.

Hosts are killed, stopped for longer than all leases, or cut off for a minute (in network namespaces, so only as root on
Linux); they continue, return, return twice, or are replaced. With --long, there are four seeds instead of one.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
from pathlib import Path
from time import monotonic

import pytest
from several_hosts import Hosts, kill, says, trained
from support.until import until

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.timeout(1800),
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
        time.sleep(0.05)
        training.apply({"w": weights["w"] + step})
        if step % 10 == 0:
            print("step", step)
        if os.path.exists("stop"):
            training.finish()
    step, weights = training.latest()
    assert (weights["w"] == weights["w"][0]).all()
    print("ended", step, weights["w"][:2].tolist())
"""
FAULTS = 20
# For how many seconds a host is gone, unless it is killed: longer than every lease.
GONE = {"killed": 0.0, "stopped": 12.0, "cut off": 60.0}
# Hosts that take the place of others.
JOINING = "defghijklmnopqrstuvw"
# The last words of a command that is one too many.
REFUSED = (
    "takes part in the run at|another command runs as host|is one too many|has taken the place of host|is in use, by "
    "another training|another training has begun"
)


class Training:
    """A training on hosts of which some fail."""

    def __init__(self, host, choice, options, folder):
        self._host = host
        self._choice = choice
        self._options = options
        self._folder = folder
        self._unused = iter(JOINING)
        self.told = []
        self._began = monotonic()
        self._refused = []
        self._twice = {}
        self.runs = {name: self._start(name) for name in "abc"}

    def _start(self, name, *more):
        kept = ("--server-dir", self._folder / name) if self._folder else ()
        return self._host(name, 3, *self._options, *kept, "--restarts", 1, *more, script=TRAINING)

    def _tell(self, text):
        self.told.append(f"{monotonic() - self._began:.0f} s, step {max(self.steps().values())}: {text}")
        print(self.told[-1], flush=True)

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
            # The processes of the other command of its host may be in the same directory.
            assert run.process.wait(60) == 1, run.err
            until(lambda run=run: re.search(REFUSED, run.err.splitlines()[-1]), details=lambda run=run: run.err)
        self._refused.clear()

    def fail(self):
        """Lets one host or two of them fail, and brings them back in another order."""
        victims = self._choice.sample(sorted(self.runs), self._choice.choice([1, 1, 2]))
        told = "does not answer" if "a" in victims else f"host {victims[-1]} is missing"
        before = {name: run.err.count(told) for name, run in self.runs.items()}
        faults = {name: self._choice.choice(["killed", "killed", "stopped", "cut off"]) for name in victims}
        if self._host.network is None:
            faults = {name: fault.replace("cut off", "stopped") for name, fault in faults.items()}
        self._tell(f"{faults}")
        stopped = {}
        for name, fault in faults.items():
            if fault == "killed":
                kill(self.runs[name])
            elif fault == "stopped":
                stopped[name] = self._stop(self.runs[name])
            else:
                self._host.network.cut_off(name)
        for name, run in self.runs.items():
            if name not in victims:
                says(run, told, before[name] + 1)
        end = monotonic() + max(GONE[fault] for fault in faults.values())
        until(lambda: monotonic() >= end, 100)
        for name in self._choice.sample(victims, len(victims)):
            self._bring_back(name, faults[name], stopped.get(name, []), alone=len(victims) == 1)
        for name in list(self._twice):
            self._one_stays(name)

    def _stop(self, run):
        pids = [run.process.pid, *run.left()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        return pids

    def _bring_back(self, name, fault, stopped, *, alone):
        is_killed = fault == "killed"
        ways = ["returns", "returns twice"] if is_killed else ["continues", "continues, and is started again"]
        if name != "a" and alone:
            # Of several that are gone, a host that joins replaces the first.
            ways.append("is replaced")
        way = self._choice.choice(ways)
        self._tell(f"{name} {way}")
        before = self.runs[name]
        if way == "is replaced":
            del self.runs[name]
            new = next(self._unused)
            self.runs[new] = self._start(new, "--join")
            says(self.runs["a"], f"host {new} takes the place of host {name}")
            self._refused.append(self._start(name) if is_killed else before)
        elif way != "continues":
            new = self._start(name)
            if way == "returns":
                self.runs[name] = new
            elif is_killed:
                self.runs[name] = new
                self._twice[name] = self._start(name)
            else:
                self._refused.append(new)
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if fault == "cut off":
            self._host.network.connect(name)

    def _one_stays(self, name):
        """Of two commands of one host, one stays, as soon as the meeting host is back."""
        two = [self.runs[name], self._twice.pop(name)]
        until(lambda: any(run.process.poll() is not None for run in two), 60, details=lambda: [run.err for run in two])
        self._refused += [run for run in two if run.process.poll() is not None]
        (self.runs[name],) = set(two) - set(self._refused)


@pytest.fixture
def hosts(start, monkeypatch):
    """Starts runs on hosts: in network namespaces, if the system lets this process build them."""
    monkeypatch.syspath_prepend(ROOT)
    with contextlib.ExitStack() as stack:
        built = None
        with contextlib.suppress(ImportError):
            from benchmarks.network import hosts as network

            if not network.obstacles():
                with contextlib.suppress(network.HostsError):
                    built = stack.enter_context(network.Hosts("abc" + JOINING, 1))
        yield Hosts(start, built)


def pytest_generate_tests(metafunc):
    metafunc.parametrize("seed", range(4 if metafunc.config.option.long else 1))


@pytest.mark.parametrize("kept", ["nowhere", "in directories", "in replicas"])
def test_a_training_continues_after_random_faults_of_its_hosts(hosts, tmp_path, kept, seed):
    options = ("--replicas", int(kept == "in replicas"))
    folder = tmp_path / "data" if kept == "in directories" else None
    training = Training(hosts, random.Random(seed), options, folder)
    training.continues()
    for _ in range(FAULTS):
        training.fail()
        training.continues()
    (tmp_path / "stop").touch()
    for run in training.runs.values():
        assert run.code(100) == 0, run.err
        step, weights = re.findall(r"ended (\d+) (\[.*\])\n", run.out)[-1]
        assert weights == trained(int(step))
