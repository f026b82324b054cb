"""Measures the time and the memory that a taker needs to add up buffered gradients.

This is the worst case: all gradients have arrived when the take begins, so none of the work is hidden in the wait. For
comparison, numpy does the same with arrays that are in memory already.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

import redisacc
from benchmarks.crew import Crew
from benchmarks.environment import Run
from benchmarks.stats import summary
from benchmarks.workloads import Array, Workload

MOST = 16


def cases(run: Run) -> list[tuple[str, Workload, int, int]]:
    """Returns each case: its name in the report, the workload, the workers, and the gradients of each worker."""

    def sparse(name: str, size: int, rows: int, width: int, indices: str = "random") -> Workload:
        return Workload(f"reduction-{name}", "sparse", (size, width), rows, indices, in_place_limit=0)

    if run.tiny:
        return [("few, tiny", sparse("tiny", 100, 3, 2), 2, 3)]
    few, many = (4, 250) if run.quick else (MOST, 625)
    return [
        ("many small, sparse 10x16", sparse("small", 1000, 10, 16), few, many),
        (
            "many small, dense 1,000",
            Workload("reduction-small-dense", "dense", (1000,), in_place_limit=0),
            few,
            many,
        ),
        ("few large, same indices", sparse("same", 100_000, 10_000, 64, "identical"), few, 1),
        ("few large, disjoint indices", sparse("disjoint", 200_000, 10_000, 64, "disjoint"), few, 1),
        ("few large, random indices", sparse("random", 100_000, 10_000, 64), few, 1),
        ("few large, dense 4 MB", Workload("reduction-dense", "dense", (1000, 1000), in_place_limit=0), few, 1),
    ]


def by_numpy(workload: Workload, gradients: list[tuple[Array | None, Array]]) -> None:
    """Reduces arrays in memory: adds each gradient to a table of the rows that occur, in one pass."""
    total: Array
    if workload.kind == "dense":
        total = gradients[0][1].copy()
        for _, values in gradients[1:]:
            total += values
        total /= np.float32(len(gradients))
        return
    every = [indices for indices, _ in gradients if indices is not None]
    held, places = np.unique(np.concatenate(every), return_inverse=True)
    total = np.zeros((len(held), workload.shape[1]), np.float32)
    counts = np.zeros(len(held), np.float32)
    start = 0
    for _, values in gradients:
        at = places[start : start + len(values)]
        start += len(values)
        total[at] += values
        counts[at] += 1
    total /= counts[:, np.newaxis]


def reduction(run: Run) -> dict[str, Any]:
    """Measures every case."""
    every = cases(run)
    settings = run.arrays([workload for _, workload, _, _ in every], sorted({workers for _, _, workers, _ in every}))
    rounds = 2 if run.quick else 4
    results: dict[str, Any] = {}
    with (
        run.start_server("reduction", persistent=False) as (server, client),
        Crew(
            "redisacc",
            sys.executable,
            "redisacc_peer",
            workers=max(workers for _, _, workers, _ in every),
            settings={**settings, "url": server.url},
            directory=run.directory,
        ) as crew,
    ):
        for name, workload, workers, repeat in every:
            crew.round(workload.name, active=workers)
            seconds, memory, buffered = [], [], [0]
            kind = redisacc.SparseConditionalAccumulator
            with (kind if workload.kind == "sparse" else redisacc.ConditionalAccumulator)(
                "float32", workload.shape, workload.name, redis=client, limits=redisacc.Limits(0)
            ) as acc:

                def look(acc: Any = acc, buffered: list[int] = buffered) -> None:
                    buffered[0] = acc.info().buffered

                for _ in range(rounds):
                    timing = crew.round(workload.name, active=workers, repeat=repeat, before_take=look, memory=True)
                    seconds.append(timing.taken)
                    if timing.peak_memory is not None:
                        memory.append(timing.peak_memory)
            gradients = [workload.gradient(worker, 0) for worker in range(workers)] * repeat
            plain = []
            for _ in range(3):
                before = time.perf_counter()
                by_numpy(workload, gradients)
                plain.append(time.perf_counter() - before)
            held, mean, _ = workload.expected(gradients[:workers])
            result_bytes = mean.nbytes + held.nbytes
            results[name] = {
                "gradients": workers * repeat,
                "buffered": buffered[0],
                "bytes_of_a_gradient": workload.bytes,
                "bytes_of_the_result": result_bytes,
                "take_seconds": summary(seconds),
                "numpy_seconds": summary(plain),
                "peak_memory": max(memory) if memory else None,
            }
            peak = f"{max(memory) / 1e6:8.1f} MB, " if memory else ""
            print(
                f"  {name:<30}{workers * repeat:>6} gradients: take {np.median(seconds) * 1e3:9.1f} ms, numpy alone "
                f"{np.median(plain) * 1e3:8.1f} ms; taker's peak {peak}result {result_bytes / 1e6:.2f} MB",
                flush=True,
            )
    return {"cases": results}
