"""Measures how time, CPU, memory and traffic grow with workers, with rows, and with gradients in a round."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import redis

from benchmarks.crew import Crew
from benchmarks.environment import Run
from benchmarks.stats import summary
from benchmarks.workloads import Workload

MOST_WORKERS = 16


@dataclass(frozen=True)
class Point:
    """One point of a curve: the workload, the number of workers, and the number of gradients of each."""

    x: int
    workload: Workload
    active: int
    repeat: int = 1


def curves(run: Run) -> dict[str, list[Point]]:
    """Returns every curve, by name."""
    small = Workload("growth-10x16", "sparse", (1000, 16), 10)
    middle = Workload("growth-100x64", "sparse", (10_000, 64), 100)
    buffered = Workload("growth-10x16-buffered", "sparse", (1000, 16), 10, in_place_limit=0)
    dense = Workload("growth-dense-1MB", "dense", (500, 500))
    counts = (1, 8) if run.tiny else (1, 8, 100, 1000) if run.quick else (1, 8, 100, 1000, 10_000)
    workers = (1, 2) if run.tiny else (1, 4, 16) if run.quick else (1, 2, 4, 8, 16)
    rows = (10,) if run.tiny else (10, 100, 1000, 10_000) if run.quick else (10, 100, 1000, 10_000, 100_000)
    return {
        "workers, sparse 10x16": [Point(n, small, n) for n in workers],
        "workers, sparse 100x64": [Point(n, middle, n) for n in workers],
        "workers, dense 1 MB": [Point(n, dense, n) for n in workers],
        "rows of 16, four workers": [
            Point(n, Workload(f"growth-rows-{n}", "sparse", (max(1000, 10 * n), 16), n), min(4, max(workers)))
            for n in rows
        ],
        "gradients of 10x16, in place": [_shared(n, small, max(workers)) for n in counts],
        "gradients of 10x16, buffered": [_shared(n, buffered, max(workers)) for n in counts],
    }


def _shared(number: int, workload: Workload, most: int) -> Point:
    active = min(4, number, most)
    return Point(number, workload, active, number // active)


def growth(run: Run) -> dict[str, Any]:
    """Measures every point of every curve: the time over some rounds, the memory in a round of its own."""
    every = curves(run)
    points = [point for curve in every.values() for point in curve]
    workers = max(point.active for point in points)
    sizes = sorted({point.active for point in points})
    settings = run.arrays(list(dict.fromkeys(point.workload for point in points)), sizes)
    results: dict[str, Any] = {}
    with (
        run.start_server("growth", persistent=False) as (server, client),
        Crew(
            "redisacc",
            sys.executable,
            "redisacc_peer",
            workers=workers,
            settings={**settings, "url": server.url},
            directory=run.directory,
        ) as crew,
    ):
        for name, curve in every.items():
            print(f"  {name}")
            results[name] = []
            for point in curve:
                gradients = point.active * point.repeat
                rounds = 3 if run.quick or gradients >= 1000 else 10
                if gradients >= 10_000:
                    rounds = 2
                result = measure(client, crew, point, rounds)
                results[name].append(result)
                print(
                    f"    {point.x:>7}: {result['seconds']['median'] * 1e3:9.2f} ms, server CPU "
                    f"{result['server_cpu_seconds'] * 1e3:8.2f} ms, memory {result['server_memory'] / 1e6:8.2f} MB, "
                    f"wire {result['bytes_in'] / 1e6:8.2f} MB in, {result['bytes_out'] / 1e6:8.2f} MB out",
                    flush=True,
                )
    return {"curves": results}


def measure(client: redis.Redis, crew: Crew, point: Point, rounds: int) -> dict[str, Any]:
    """Measures one point, and returns figures for one round.

    In the round for the memory, the take begins when all gradients have arrived.
    """
    name = point.workload.name
    crew.round(name, active=point.active, repeat=min(point.repeat, 10))
    before = _counters(client)
    timings = [crew.round(name, active=point.active, repeat=point.repeat) for _ in range(rounds)]
    used = [(b - a) / rounds for a, b in zip(before, _counters(client), strict=True)]
    empty = client.info("memory")["used_memory"]
    full: list[int] = []
    crew.round(
        name,
        active=point.active,
        repeat=point.repeat,
        before_take=lambda: full.append(client.info("memory")["used_memory"]),
    )
    return {
        "x": point.x,
        "gradients": point.active * point.repeat,
        "bytes_of_a_gradient": point.workload.bytes,
        "seconds": summary([t.elapsed for t in timings]),
        "server_cpu_seconds": used[0],
        "bytes_in": used[1],
        "bytes_out": used[2],
        "server_memory": full[0] - empty,
        "worker_cpu_seconds": sum(t.worker_cpu for t in timings) / rounds,
        "taker_cpu_seconds": sum(t.taker_cpu for t in timings) / rounds,
    }


def _counters(client: redis.Redis) -> tuple[float, float, float]:
    info = client.info("everything")
    return (
        info["used_cpu_user"] + info["used_cpu_sys"],
        info["total_net_input_bytes"],
        info["total_net_output_bytes"],
    )
