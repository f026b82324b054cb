"""Forks a process for each line it reads, which does one operation; so that hundreds can be killed in a few seconds.

python nursery.py URL, then lines of JSON: {"operation", "limit", "size", "out"}. Answers each with the child's pid.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

import redisacc
from redisacc import _parking, _taking

NAME = "mortal"
# A row of it says which gradients are in a sum: the dead one's is 1, those of others are larger powers of two.
MINE = 1.0
# Room for two parked gradients; a third makes room.
ROOM = 2


def opened(redis: Any, size: int, limit: int, worker: str | None = None) -> redisacc.ConditionalAccumulator:
    return redisacc.ConditionalAccumulator(
        "float32",
        [size],
        NAME,
        reduction_type="SUM",
        redis=redis,
        in_place_limit=limit,
        parked_limit=ROOM * 4 * size,
        worker=worker,
    )


def operate(operation: str, url: str, size: int, limit: int) -> Any:
    """Does the operation, and returns what it came to."""
    acc = opened(url, size, limit, "mortal")
    match operation:
        case "open":
            return None
        case "apply":
            return acc.apply_grad(np.full(size, MINE, np.float32)).outcome
        case "take":
            return float(acc.take_grad(1, timeout=30)[0])
        case "wait":
            return float(acc.take_grad(2, timeout=60)[0])
        case "recover":
            with acc.recover() as taken:
                return None if taken is None else float(taken.gradient[0])
        case "set_global_step":
            return acc.set_global_step(7)
        case "delete":
            return acc.delete()
    raise AssertionError(operation)


def main() -> None:
    # Nobody waits for the children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Leases are what takes time here.
    _taking.LEASE_MS = 1000
    _parking.FOLDING_MS = 500
    for line in sys.stdin:
        task = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                value = operate(task["operation"], sys.argv[1], task["size"], task["limit"])
            except redisacc.RedisAccError as error:
                value = type(error).__name__
            out = Path(task["out"])
            out.with_suffix(".new").write_text(json.dumps(value))
            out.with_suffix(".new").rename(out)
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
