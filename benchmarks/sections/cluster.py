"""Measures what a Redis Cluster costs: apply and take, compared with a standalone server.

One process applies a gradient and takes it, on one server after the other, so that both meet the same machine. The
third peer is the standalone server once more: its ratio to itself shows how much of a difference is chance.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import redisacc
from benchmarks.crew import BenchmarkError
from benchmarks.environment import Run
from benchmarks.stats import ratio, summary
from benchmarks.workloads import Workload
from redisacc.embedded import Cluster

# How many times as long as on a standalone server a call may take.
ALLOWED = 1.15
MASTERS = 3
OPERATIONS = ("apply", "take")


def cluster(run: Run) -> dict[str, Any]:
    """Measures a small sparse gradient and a large dense one."""
    rows = {
        Workload("sparse 10x16", "sparse", (10_000, 16), 10): 8 if run.tiny else 100 if run.quick else 1000,
        Workload("dense 4 MB", "dense", (1000 if run.tiny else 1_000_000,)): 4
        if run.tiny
        else 15
        if run.quick
        else 150,
    }
    with (
        run.start_server("cluster", persistent=False) as (server, _),
        Cluster(MASTERS, executable=run.server) as nodes,
    ):
        urls = {"standalone": server.url, "again": server.url, "cluster": nodes.url}
        return {
            "allowed": ALLOWED,
            "masters": MASTERS,
            "rows": {row.name: _measure(row, urls, rounds) for row, rounds in rows.items()},
        }


def _measure(workload: Workload, urls: dict[str, str], rounds: int) -> dict[str, Any]:
    peers = {name: _Peer(workload, name, url) for name, url in urls.items()}
    order = list(peers)
    for number in range(rounds):
        first = number % len(order)
        for name in order[first:] + order[:first]:
            peers[name].round(number)
    for peer in peers.values():
        peer.close()
    found = {}
    for operation in OPERATIONS:
        times = {name: peer.seconds[operation] for name, peer in peers.items()}
        ratios = {name: ratio(times[name], times["standalone"]) for name in ("again", "cluster")}
        found[operation] = {"seconds": {name: summary(values) for name, values in times.items()}, "ratios": ratios}
        medians = ", ".join(f"{name} {np.median(values) * 1e6:.0f} µs" for name, values in times.items())
        print(f"  {workload.name}, {operation}: {medians}; {ratios['cluster']['of_medians']:.2f} times", flush=True)
    return found


class _Peer:
    """An accumulator on one of the servers."""

    def __init__(self, workload: Workload, name: str, url: str) -> None:
        self._indices, self._values = workload.gradient(0, 0)
        kind = redisacc.ConditionalAccumulator if self._indices is None else redisacc.SparseConditionalAccumulator
        self._accumulator: Any = kind("float32", workload.shape, f"{workload.name} {name}", redis=url)
        self.seconds: dict[str, list[float]] = {operation: [] for operation in OPERATIONS}

    def round(self, step: int) -> None:
        gradient = (self._values,) if self._indices is None else (self._indices, self._values)
        started = time.perf_counter()
        self._accumulator.apply_grad(*gradient, local_step=step)
        applied = time.perf_counter()
        taken = self._accumulator.take_grad(1)
        done = time.perf_counter()
        if not np.array_equal(taken if self._indices is None else taken[1], self._values):
            raise BenchmarkError(f"cluster: the mean of one gradient is another one at step {step}")
        self.seconds["apply"].append(applied - started)
        self.seconds["take"].append(done - applied)

    def close(self) -> None:
        self._accumulator.delete()
