"""A program that forks a process of a crew for each line it reads. Each applies gradients, or takes rounds.

The lines are JSON: the arguments of `work`. The answer to each is the process id. A process writes its results into a
file, which is there when it is done.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

import redisacc
from redisacc._clock import durations

ROW = 4


def open_shared(kind: str, url: str, storage: str, worker: str) -> Any:
    limits = redisacc.Limits(
        10**9 if storage == "in_place" else 0, inline=0 if storage in ("buffered_parts", "partitions") else None
    )
    options: dict[str, Any] = {"reduction_type": "SUM", "redis": url, "worker": worker, "limits": limits}
    if kind == "sparse":
        return redisacc.SparseConditionalAccumulator("float64", [None, ROW], "crew", **options)
    # Column w counts the gradients of worker w, and column 8 + w adds their numbers up.
    return redisacc.ConditionalAccumulator("int32", [16], "crew", **options)


def apply(acc: Any, kind: str, number: int, count: int) -> dict[str, Any]:
    """Applies `count` gradients, all different; returns the number and the result of each."""
    step = 0
    results = []
    for k in range(count):
        if kind == "sparse":
            index = number * 1_000_000 + k
            result = acc.apply_grad([index], np.full((1, ROW), index + 0.5), local_step=step)
        else:
            grad = np.zeros(16, np.int32)
            grad[number], grad[8 + number] = 1, k
            result = acc.apply_grad(grad, local_step=step)
        results.append((k, result.outcome, result.global_step, result.num_accumulated))
        # The step may have moved on by the time of the next gradient.
        step = result.global_step
    return {"results": results}


def take(acc: Any, kind: str, number: int, required: int, stop: Path) -> dict[str, Any]:
    """Takes rounds until there are no more and the file `stop` exists; returns all rounds in order."""
    rounds = []
    while True:
        try:
            with acc.take(required, timeout=0.3) as taken:
                if kind == "sparse":
                    content = [taken.gradient.indices.tolist(), taken.gradient.values.tolist()]
                else:
                    content = taken.gradient.tolist()
                rounds.append((taken.global_step, taken.num_accumulated, taken.workers, content))
        except redisacc.TakeTimeoutError:
            if stop.exists():
                return {"required": required, "rounds": rounds}


def take_once(acc: Any) -> dict[str, Any]:
    with acc.take(1, timeout=30) as taken:
        return {"step": taken.global_step, "workers": taken.workers}


def work(role: str, url: str, kind: str, storage: str, number: int, count: int, out: str) -> None:
    """Does the work of one process of the crew, and writes its results into the file ``out``."""
    # The usual timeout of a take's last poll, half a second, is shorter than a busy machine may stall.
    durations.last_poll = durations.poll = 30.0
    if role == "once":
        # No taker in this queue is ever passed over.
        durations.taker_lease = 60.0
    acc = open_shared(kind, url, storage, f"{role}{number}")
    path = Path(out)
    if role == "apply":
        found = apply(acc, kind, number, count)
    elif role == "take":
        found = take(acc, kind, number, count, path.with_name("stop"))
    else:
        found = take_once(acc)
    path.with_suffix(".new").write_text(json.dumps(found))
    path.with_suffix(".new").rename(path)


def main() -> None:
    # The parent never waits for its children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                work(*json.loads(line))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
