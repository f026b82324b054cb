"""Measures what a gradient of a given size costs the client and the server, in place and buffered.

The server's figures are its own: microseconds of EVALSHA from ``INFO commandstats``, and the 99th percentile from
``INFO latencystats``, for calls that add to existing rows. Whole rounds show what the choice costs a crew.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
import redis

import redisacc
from benchmarks.crew import BenchmarkError
from benchmarks.environment import Run
from benchmarks.sections.rounds import Peer, compete, crew_at
from benchmarks.stats import summary
from benchmarks.workloads import Workload

# The time for which a script may hold the server, in microseconds.
ALLOWED = 250
# The limits of the two ways.
WAYS = {"in place": 10**9, "buffered": 0}


def bound(run: Run) -> dict[str, Any]:
    """Measures curves for sparse rows of 16 and of 64 and for dense gradients, in place and buffered."""
    sizes = (
        (64, 128)
        if run.tiny
        else (128, 512, 1280, 2048, 8192)
        if run.quick
        else (64, 128, 256, 512, 1024, 1280, 2048, 4096, 8192)
    )
    rounds = 5 if run.tiny else 40 if run.quick else 150
    results: dict[str, Any] = {}
    with run.start_server("bound", persistent=False) as (server, client):
        for name, width in (("sparse, rows of 16", 16), ("sparse, rows of 64", 64), ("dense", 0)):
            results[name] = []
            for size in sizes:
                point: dict[str, Any] = {"elements": size}
                for way, limit in WAYS.items():
                    point[way] = _measure(client, server.url, _workload(size, width, limit), rounds)
                results[name].append(point)
            print(f"  {name}")
            for point in results[name]:
                print(
                    f"    {point['elements']:>6} elements: "
                    + ", ".join(
                        f"{way} {point[way]['seconds']['median'] * 1e6:6.0f} µs, of which script "
                        f"{point[way]['script_us']:6.0f}"
                        for way in ("in place", "buffered")
                    ),
                    flush=True,
                )
    crews = (2,) if run.tiny else (1, 16)
    return {
        "curves": results,
        "rounds": {str(workers): _rounds(run, workers, sizes if run.tiny else (256, 1280, 2048)) for workers in crews},
        "allowed_us": ALLOWED,
    }


def _rounds(run: Run, workers: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Measures whole rounds of dense gradients in both ways, in alternation."""
    rows = [Workload(f"bound-{size}", "dense", (size,)) for size in sizes]
    print(f"  rounds of {workers} workers")
    with contextlib.ExitStack() as stack:
        settings = run.arrays(rows, [workers])
        peers = []
        for way, limit in WAYS.items():
            own = {**settings, "workloads": [row | {"in_place_limit": limit} for row in settings["workloads"]]}
            server, _ = stack.enter_context(run.start_server("bound", persistent=False))
            crew = crew_at(run, stack, own, server, name=way, workers=workers)
            peers.append(Peer(way, crew, [server.pid]))
        return compete(peers, rows, *((4, 2.0, 1) if run.quick else (100, 8.0, 5)))


def _workload(size: int, width: int, limit: int) -> Workload:
    if width:
        return Workload("bound", "sparse", (10_000, width), size // width, in_place_limit=limit)
    return Workload("bound", "dense", (size,), in_place_limit=limit)


def _measure(client: redis.Redis, url: str, workload: Workload, rounds: int) -> dict[str, Any]:
    indices, values = workload.gradient(0, 0)
    kind = redisacc.ConditionalAccumulator if indices is None else redisacc.SparseConditionalAccumulator
    # Shared, as in real use: the scripts of a private accumulator also renew its lease.
    with kind("float32", workload.shape, "bound", redis=url, limits=redisacc.Limits(workload.in_place_limit)) as acc:
        gradient = (values,) if indices is None else (indices, values)
        for _ in range(3):
            acc.apply_grad(*gradient)
        client.config_resetstat()
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            acc.apply_grad(*gradient)
            times.append(time.perf_counter() - started)
        stats = client.info("commandstats")["cmdstat_evalsha"]
        if stats["calls"] < rounds:
            raise BenchmarkError(
                f"bound: expected at least {rounds} calls of EVALSHA, one for each gradient, not {stats['calls']}"
            )
        percentiles = client.info("latencystats").get("latency_percentiles_usec_evalsha", {})
        taken = acc.take_grad(1)
        if not np.allclose(taken if indices is None else taken[1], values, rtol=1e-5, atol=0):
            raise BenchmarkError(f"bound: a wrong mean of {rounds} gradients of {workload.elements} elements")
        acc.delete()
    return {
        "seconds": summary(times),
        "script_us": stats["usec_per_call"],
        "script_p99_us": percentiles.get("p99"),
    }
