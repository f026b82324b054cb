"""A process of a trace: a worker of a training, or a worker or the taker of rounds. Writes what it has recorded."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import redisacc
from benchmarks.trace.recording import Recording, note_commands, noted_commands, recorded

# Rounds begin at these intervals, in seconds.
EVERY, FIRST = 0.1, 1.0
ROWS, WIDTH, TABLE = 100, 64, 10_000


def train(recording: Recording, transport: Any, given: dict[str, Any]) -> list[int]:
    """Takes part in a training of two leaves. Returns when it got the parameters of each step."""
    sizes = [given["bytes"] // 8, given["bytes"] // 4 - given["bytes"] // 8]
    weights = {f"w{number}": np.zeros(size, np.float32) for number, size in enumerate(sizes)}
    gradient = {name: np.full(values.shape, 0.5, np.float32) for name, values in weights.items()}
    begins = []
    training = redisacc.Training(
        "trace",
        weights,
        optimizer=redisacc.optim.SGD(0.1),
        redis=transport,
        encoding=given["encoding"],
        **({"workers": given["workers"]} if given["workers"] else {}),
    )
    with training:
        for _ in training.steps(until=given["rounds"]):
            begins.append(time.monotonic_ns())
            with recording.span("call", "apply"):
                training.apply(gradient)
    return begins


def join_rounds(recording: Recording, transport: Any, given: dict[str, Any]) -> list[int]:
    """Applies a gradient to each round, or takes it, at moments that all processes know."""
    acc = redisacc.SparseConditionalAccumulator("float32", (TABLE, WIDTH), shared_name="trace", redis=transport)
    rows = np.sort(np.random.default_rng(given["number"]).choice(TABLE, ROWS, replace=False)).astype(np.int64)
    values = np.ones((ROWS, WIDTH), np.float32)
    begins = []
    for step in range(given["rounds"]):
        # The first round finds nothing ready, and takes longer.
        begins.append(given["start"] + int((step and FIRST + step * EVERY) * 1e9))
        while given["role"] != "taker" and acc.global_step() < step:
            time.sleep(EVERY / 10)
        with recording.span("pause"):
            time.sleep(max(begins[-1] - time.monotonic_ns(), 0) / 1e9)
        if given["role"] == "taker":
            with recording.span("call", "take"):
                acc.take_grad(given["workers"], timeout=30)
        else:
            with recording.span("call", "apply"):
                acc.apply_grad(rows, values, local_step=step)
    acc.close()
    return begins


def main() -> None:
    """Does what the argument says, and writes a file for this process."""
    given = {"url": os.environ.get("REDISACC_URL"), **json.loads(sys.argv[1])}
    recording, transport = recorded(given["url"])
    first = given["role"] == "taker" or os.environ.get("REDISACC_WORKER_NUMBER") == "0"
    if first:
        note_commands(transport, given["url"])
    begins = (train if given["role"] == "train" else join_rounds)(recording, transport, given)
    more = {
        "begins": begins,
        "role": given["role"],
        "servers": noted_commands(transport, given["url"]) if first else {},
    }
    recording.write(Path(given["folder"], f"{os.getpid()}.json"), **more)
    transport.close()


if __name__ == "__main__":
    main()
