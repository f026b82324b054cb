"""Measures redisacc.asyncio: an awaited apply compared with a blocking one, and the memory of waits.

    python -m benchmarks.event_loop

Blocks of both kinds of apply alternate, so that both meet the same noise of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import statistics
import threading
import time
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

import redisacc
import redisacc.asyncio
from redisacc import embedded

# name → the number of elements, and how many applies one block has.
GRADIENTS = {"100 elements, in place": (100, 300), "10,000 elements, inline": (10_000, 200), "4 MB": (1_000_000, 10)}
NUM_WAITS = 1000


async def applies(url: str, elements: int, together: int, blocks: int) -> tuple[float, float, float]:
    """Returns medians: the seconds of a blocking apply, the seconds of an awaited one, and their ratio."""
    gradient = np.ones(elements, np.float32)
    names = {"shared_name": f"of {elements}", "redis": url}
    times: list[tuple[float, float]] = []
    with redisacc.ConditionalAccumulator("float32", [elements], **names) as blocking:
        async with redisacc.asyncio.ConditionalAccumulator("float32", [elements], **names) as awaited:
            for _ in range(blocks):
                began = time.perf_counter()
                for _ in range(together):
                    blocking.apply_grad(gradient, local_step=2**62)
                between = time.perf_counter()
                for _ in range(together):
                    await awaited.apply_grad(gradient, local_step=2**62)
                ended = time.perf_counter()
                times.append(((between - began) / together, (ended - between) / together))
                blocking.take_grad(1)
        blocking.delete()
    # The first block opens connections and loads scripts.
    times = times[1:]
    return (
        statistics.median(one for one, _ in times),
        statistics.median(other for _, other in times),
        statistics.median(other / one for one, other in times),
    )


def resident() -> int:
    """Returns how many bytes of memory the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def waits(url: str, accumulators: int, *, traced: bool) -> tuple[float, int]:
    """Returns how many bytes NUM_WAITS takes need that wait, and how many threads the process has then.

    Args:
        url: of the server.
        accumulators: on how many accumulators they wait.
        traced: whether to count what Python allocates, and not what the kernel has given to the process.
    """
    handles = [
        await redisacc.asyncio.ConditionalAccumulator("float32", [2], f"wait {number}", redis=url)
        for number in range(accumulators)
    ]
    # The first take allocates memory that stays, so it comes before the measurement, which is about waits alone.
    await handles[0].apply_grad([1.0, 2.0])
    await handles[0].take_grad(1)
    gc.collect()
    if traced:
        tracemalloc.start()
    before = 0 if traced else resident()
    takes = [asyncio.create_task(handles[one % accumulators].take_grad(1)) for one in range(NUM_WAITS)]
    for handle in handles:
        while len((await handle.info()).waiting) < NUM_WAITS // accumulators:
            await asyncio.sleep(0.05)
    await asyncio.sleep(3)
    used = tracemalloc.get_traced_memory()[0] if traced else resident() - before
    tracemalloc.stop()
    threads = threading.active_count()
    for take in takes:
        take.cancel()
    await asyncio.gather(*takes, return_exceptions=True)
    for handle in handles:
        await handle.delete()
        await handle.close()
    return used, threads


def measured_waits(url: str, accumulators: int, traced: bool) -> tuple[float, int]:
    """Does the same without an event loop."""
    # Each wait would say that it is long.
    logging.getLogger("redisacc").setLevel(logging.ERROR)
    return asyncio.run(waits(url, accumulators, traced=traced))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=40, help="blocks of applies of each kind")
    blocks = parser.parse_args().blocks
    with embedded.Server() as server:
        print("| gradient | blocking, ms | awaited, ms | ratio |\n| --- | --- | --- | --- |")
        for name, (elements, together) in GRADIENTS.items():
            one, other, ratio = asyncio.run(applies(server.url, elements, together, blocks))
            print(f"| {name} | {one * 1e3:.3f} | {other * 1e3:.3f} | {ratio:.2f} |")
        print(f"\n| {NUM_WAITS} takes wait on | MB by Python | MB by the kernel | threads |\n| --- | --- | --- | --- |")
        for accumulators in (1, 1000):
            # Each in a process of its own: memory that Python has once allocated would not count again.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
                kernel, threads = processes.submit(measured_waits, server.url, accumulators, False).result()
                traced, _ = processes.submit(measured_waits, server.url, accumulators, True).result()
            print(f"| {accumulators} accumulators | {traced / 1e6:.1f} | {kernel / 1e6:.1f} | {threads} |")


if __name__ == "__main__":
    main()
