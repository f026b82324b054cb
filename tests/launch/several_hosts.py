"""Hosts of one run, each with a loopback address of its own; and a training whose result is known."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
from pathlib import Path

import numpy as np
from support.until import until

PORT = 6400
SECRET = 'se"cret \\ %41'

_TRAINING = """
import time
import numpy as np
import redisacc

optimizer = redisacc.optim.SGD(0.1)
with redisacc.Training("hosts", {"w": np.zeros(SIZE)}, optimizer=optimizer) as training:
    for step, weights in training.steps(until=UNTIL):
        time.sleep(0.02)
        training.apply({"w": weights["w"] + step})
        if step == 20:
            print("step 20")
    weights = training.latest()[1]["w"]
    assert (weights == weights[0]).all()
    print(weights[:2].tolist())
"""


def training(until, size=2):
    """A program whose processes print "step 20" once they have that one, and two of the weights at the end."""
    return _TRAINING.replace("UNTIL", str(until)).replace("SIZE", str(size))


def trained(until):
    """The weights that each process prints, however many there are: their gradients are the same."""
    weights = np.zeros(2)
    for step in range(until):
        weights -= 0.1 * (weights + step)
    return str(weights.tolist())


class Hosts:
    """Starts runs on hosts, which are named a, b, c and so on. They meet on the first.

    Args:
        start: starts a run.
        network: hosts in network namespaces; None: all are this machine.
    """

    def __init__(self, start, network=None):
        self._start = start
        self.network = network
        # Tests that run at the same time have other addresses, so the ports may be the same.
        self._block = f"127.{1 + secrets.randbelow(254)}.{secrets.randbelow(256)}"
        self.meet = f"{self.address('a')}:{PORT}"

    def address(self, name):
        if self.network is not None:
            return self.network.address(name)
        return f"{self._block}.{ord(name) - ord('a') + 1}"

    def __call__(self, name, hosts, *options, meet=None, **more):
        where = ("--meet", meet or self.meet, "--address", self.address(name), "--host-name", name)
        given = {"REDISACC_URL": "", "REDISACC_PASSWORD": SECRET, **more}
        if self.network is not None:
            # Processes of one machine know each other by its name and their process ids.
            rename = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
            given["machine"] = [*self.network.command(name), *rename]
        return self._start("--hosts", hosts, *where, "--workers", 1, *options, **given)


def says(run, text, count=1):
    """Waits until a run has said something on standard error."""
    until(lambda: run.err.count(text) >= count or run.process.poll() is not None)
    assert run.err.count(text) >= count, (text, run.out, run.err)


def number_of(run):
    """Which worker a run has."""
    (number,) = set(re.findall(r"runs (worker \d+) on this host", run.err))
    return str(number)


def servers_of(run):
    """The process ids of a run's servers: the meeting point, if it is there, and its nodes."""
    found = []
    for pid in run.left():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().startswith(("redis-server", "valkey-server")):
                found.append(pid)
    return found


def kill(run):
    """Kills a host's command and its servers at once, as if its power failed."""
    for pid in [run.process.pid, *servers_of(run)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.process.wait(10)
    until(lambda: not run.left())


def all_trained(runs, until):
    """Waits for the end on all hosts, each of which has the same weights, bit by bit, and has told no secret."""
    for run in runs.values():
        # What died with a host is waited for, for as long as a reducer elsewhere may have it.
        assert run.code(100) == 0, run.err
        assert run.out.splitlines()[-1].endswith(f"| {trained(until)}")
        assert SECRET not in run.out + run.err
