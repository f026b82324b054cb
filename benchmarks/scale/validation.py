"""Measures steps, on one machine and between network namespaces, and simulates the same ones."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from benchmarks import models
from benchmarks.environment import Run
from benchmarks.network import arrangements
from benchmarks.network.crews import Network, host_names
from benchmarks.network.hosts import Hosts
from benchmarks.scale.costs import Costs, server_seconds
from benchmarks.scale.model import Arrangement, Process, Simulation
from benchmarks.scale.model import Network as Links
from benchmarks.scale.step import Step
from redisacc.embedded import Cluster

MODELS = {"4 MB": models.dense("updates-4MB"), "31 MB": models.dense("updates-31MB", 8)}
# Steps of a block, whose mean counts; blocks before those that count; and blocks that count.
BLOCK, WARM_UP, BLOCKS = 6, 2, 7


@dataclass(frozen=True)
class Row:
    """A step that is measured and simulated.

    Attributes:
        workers: number of workers.
        model: a key of ``MODELS``.
        beside: whether each worker's host has a node; else, there is one server.
        gigabits: rate of the links; infinity: on one machine without links.
    """

    workers: int
    model: str
    beside: bool
    gigabits: float = math.inf

    @property
    def key(self) -> str:
        """The arrangement in the benchmark between hosts."""
        return "nodes" if self.beside else "one"

    def arrangement(self) -> Arrangement:
        """Returns what is simulated."""
        nbytes = MODELS[self.model].bytes
        return Arrangement(Step(self.workers, self.workers if self.beside else 1, nbytes), beside=self.beside)


# What the model does not know of a process is fitted with these, which are not compared.
FITTED = [Row(2, "4 MB", False), Row(2, "31 MB", False), Row(4, "4 MB", True)]
COMPARED = [
    row
    for name in MODELS
    for beside in (False, True)
    for row in (*[Row(workers, name, beside) for workers in (2, 4, 8)], Row(4, name, beside, 1.0))
    if row not in FITTED
]


class Loopback(Hosts):
    """Hosts that are all this machine: nothing limits their links."""

    def __init__(self) -> None:
        return

    def address(self, name: str) -> str:  # noqa: ARG002
        return "127.0.0.1"

    def command(self, name: str) -> list[str]:  # noqa: ARG002
        return []

    def traffic(self) -> dict[str, dict[str, int]]:
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


class OneMachine(Network):
    """A network on one machine."""

    def cluster(self, hosts: Sequence[str]) -> tuple[str, list[int]]:
        cluster = self.stack.enter_context(Cluster(len(hosts), executable=self.run.server))
        pids = []
        for node in cluster.nodes:
            command = [sys.executable, "-m", "redisacc", "reduce", "--redis", cluster.url, "--node", _address(node.url)]
            reducer = self.stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            self.stack.callback(reducer.kill)
            pids += [node.pid, reducer.pid]
        return cluster.url, pids


def _address(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]


def measure(run: Run, row: Row) -> dict[str, Any]:
    """Measures the steps of a row: seconds, and the processor time of each kind of process in a step."""
    model = MODELS[row.model]
    folder = run.directory / f"{row.gigabits:g}-{row.workers}-{model.name}-{row.key}"
    models.write(folder, [model], row.workers)
    is_local = row.gigabits == math.inf
    hosts = Loopback() if is_local else Hosts(host_names(row.workers, arrangements.SERVERS), row.gigabits)
    settings = {"arrays": str(folder), "workloads": [], "model": model.name}
    with hosts, contextlib.ExitStack() as stack:
        network = (OneMachine if is_local else Network)(run, hosts, row.workers, "updates", settings, stack)
        (peer,) = arrangements.start(network, [row.key])
        # Each server is followed by its reducer.
        servers, reducers = peer.server_pids[::2], peer.server_pids[1::2]
        times, cpu, others = [], [], []
        for number in range(-WARM_UP, BLOCKS):
            before, busy, began = [server_seconds(pid) for pid in (*servers, *reducers)], _busy(), time.monotonic()
            timing = peer.crew.round("", repeat=BLOCK)
            if number < 0:
                continue
            used = [server_seconds(pid) - start for pid, start in zip((*servers, *reducers), before, strict=True)]
            times.append(timing.finished / BLOCK)
            at = (timing.worker_cpu, timing.taker_cpu, sum(used[: len(servers)]), sum(used[len(servers) :]))
            cpu.append([seconds / BLOCK for seconds in at])
            others.append(max(_busy() - busy - sum(at), 0.0) / (time.monotonic() - began))
        peer.crew.round("", repeat=1)
    kinds = ("workers", "chief", "servers", "reducers")
    found = {kind: statistics.median(of) for kind, of in zip(kinds, zip(*cpu, strict=True), strict=True)}
    return {"seconds": statistics.median(times), "blocks": times, "cpu": found, "others": statistics.median(others)}


def _busy() -> float:
    """Returns for how many seconds the cores of this machine have worked."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")


def simulated(row: Row, costs: Costs, cores: int, others: float = 0.0) -> tuple[float, dict[str, float]]:
    """Returns the seconds of a step of a row, and the processor time of each kind of process in it.

    Args:
        row: the row.
        costs: the costs.
        cores: of the machine. Between namespaces, all processes share them, too.
        others: how many of them other programs used.
    """
    links = Links(row.gigabits, cores=cores, slowness=cores / max(cores - others, 0.25))
    simulation = Simulation(row.arrangement(), links, costs)
    steps = 6
    outcome = simulation.run(steps)
    kinds: dict[str, list[Process]] = {
        "workers": simulation.workers,
        "chief": [simulation.chief],
        "servers": simulation.servers,
        "reducers": simulation.reducers,
    }
    return outcome.seconds, {kind: sum([of.busy for of in found]) / steps for kind, found in kinds.items()}


def fitted(costs: Costs, measured: Sequence[dict[str, Any]], cores: int) -> Costs:
    """Returns the costs with those that processes need beyond what the others explain.

    Args:
        costs: the costs, with zero for these.
        measured: what ``measure`` has returned for ``FITTED``.
        cores: of the machine.
    """

    def beyond(number: int, costs: Costs) -> dict[str, float]:
        found = measured[number]
        _, cpu = simulated(FITTED[number], costs, cores, found["others"])
        return {kind: max(found["cpu"][kind] - cpu[kind], 0.0) for kind in cpu}

    small, large = beyond(0, costs), beyond(1, costs)
    crew, sizes = FITTED[0].workers, [MODELS[row.model].bytes for row in FITTED]
    each = max(large["workers"] - small["workers"], 0.0) / crew / (sizes[1] - sizes[0])
    found = replace(
        costs,
        worker=small["workers"] / crew - each * sizes[0],
        worker_byte=each,
        chief=small["chief"],
        reducer=small["reducers"],
    )
    return replace(found, worker_node=beyond(2, found)["workers"] / FITTED[2].workers ** 2)
