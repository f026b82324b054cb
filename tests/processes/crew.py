"""One process of a crew: applies gradients, or takes rounds, and writes down what it was told.

python crew.py ROLE URL KIND HOLDING NUMBER COUNT OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import redisacc
from redisacc import _parked, _taking

ROW = 4


def opened(kind: str, url: str, limit: int, worker: str) -> Any:
    if kind == "sparse":
        return redisacc.SparseConditionalAccumulator(
            "float64", [None, ROW], "crew", reduction_type="SUM", redis=url, worker=worker, in_place_limit=limit
        )
    # Column w counts the gradients of worker w, and column 8 + w adds their numbers up.
    return redisacc.ConditionalAccumulator(
        "int32", [16], "crew", reduction_type="SUM", redis=url, worker=worker, in_place_limit=limit
    )


def apply(acc: Any, kind: str, number: int, count: int) -> dict[str, Any]:
    """Applies `count` gradients, each of which can be told from all others; for each: its number and the result."""
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
        # What it knows of the step may be old by the time of the next gradient.
        step = result.global_step
    return {"results": results}


def take(acc: Any, kind: str, number: int, required: int, stop: Path) -> dict[str, Any]:
    """Takes rounds until there are no more and the file `stop` is there; every round as it came."""
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


def main() -> None:
    role, url, kind, holding, number, count, out = sys.argv[1:]
    if holding == "in_parts":
        _parked.SMALL_BYTES = 0
    # Half a second, for the last look of a take, is less than a busy machine may stand still.
    _taking.LAST_LOOK = _taking.LOOK_PATIENCE = 30.0
    if role == "once":
        # Who stands in the queue there is never passed over.
        _taking.LEASE_MS = 60_000
    acc = opened(kind, url, 10**9 if holding == "in_place" else 0, f"{role}{number}")
    path = Path(out)
    if role == "apply":
        found = apply(acc, kind, int(number), int(count))
    elif role == "take":
        found = take(acc, kind, int(number), int(count), path.with_name("stop"))
    else:
        found = take_once(acc)
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
