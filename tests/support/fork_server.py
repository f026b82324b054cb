"""A program that forks a process for each line it reads. The process does one operation; see child_processes.py.

python fork_server.py URL, then lines of JSON: {"operation", "limit", "size", "kind", "out"}. Answers each with the
child's pid.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import redisacc
from redisacc.optim import AdamW

NAME = "child"
# A sum shows which gradients are in it: the child applies 1, the others larger powers of two.
CHILDS_VALUE = 1.0
# The limit holds two buffered gradients: a third one makes the client compact.
ROOM = 2


def open_shared(
    redis: Any, size: int, limit: int, worker: str | None = None, *, kind: str = "dense"
) -> redisacc.ConditionalAccumulatorBase[Any]:
    """Opens the accumulator that all processes of a test share.

    Args:
        redis: the way to the server.
        size: the number of elements of a dense leaf or array.
        limit: in_place_limit.
        worker: the name of this process.
        kind: "dense", "tree", or "partitions" for a dense one with three of them; "leaves" or "leaves in partitions"
            for a tree of two dense leaves of this size.
    """
    options: dict[str, Any] = {
        "reduction_type": "SUM",
        "redis": redis,
        "worker": worker,
    }

    def limits(room: int) -> redisacc.Limits:
        return redisacc.Limits(limit, ROOM * room)

    if kind == "tree":
        # A gradient has an index and a row, the dense leaf, and which leaves it has.
        spec = {"d": ("float32", (size,)), "s": redisacc.Sparse("float32", (None, 2))}
        return redisacc.TreeAccumulator(
            spec,
            NAME,
            mean=redisacc.Mean(missing="skip"),
            limits=limits(4 * size + 24),
            **options,
        )
    if kind.startswith("leaves"):
        partitions = 3 if kind == "leaves in partitions" else None
        spec = {"d": ("float32", (size,)), "e": ("float32", (size,))}
        return redisacc.TreeAccumulator(spec, NAME, limits=limits(8 * size), partitions=partitions, **options)
    if kind == "partitions":
        options["partitions"] = 3
    return redisacc.ConditionalAccumulator("float32", [size], NAME, limits=limits(4 * size), **options)


def version(step: int, size: int) -> dict[str, Any]:
    """Returns the tree of a step, by which every part of it can be told from those of other steps."""
    table = np.zeros((1000, 8))
    table[: step + 1] = step
    return {"table": table, "dense": np.full(size, step)}


def publish_next(parameters: redisacc.Parameters, size: int) -> int:
    """Publishes the version after the one that is there, as a chief does, and returns its step."""
    step = (parameters.step() or 0) + 1
    parameters.latest()
    parameters.publish(version(step, size), step, changed={"table": range(step + 1)}, state=[np.full(size, step)])
    return step


# The optimiser of a training whose chief is a child, and how many updates it makes.
OPTIMIZER = AdamW(0.01, ema=0.9)
UPDATED = 2
# Its leaves whose gradients are rows.
TABLES = ("a",)


def model_of(size: int) -> dict[str, Any]:
    """Returns the weights to begin with: of two dtypes."""
    table = np.linspace(-1, 1, 200, dtype=np.float32).reshape(100, 2)
    dense = {"w": np.linspace(-1, 1, size, dtype=np.float32), "b": np.linspace(-1, 1, size // 2), "c": np.ones(3)}
    return {"a": table, **dense}


def open_chief(redis: Any, size: int, partitions: int | None, *, workers: int = 2) -> redisacc.Chief:
    """Opens the chief of a training with an optimiser."""
    rows = redisacc.types.GradientOptions(sparse=TABLES, partitions=partitions)
    return redisacc.Chief(NAME, model_of(size), workers=workers, optimizer=OPTIMIZER, redis=redis, accumulator=rows)


def gradient_of(kind: str, size: int, value: float) -> Any:
    """Returns a gradient whose elements all have this value."""
    dense = np.full(size, value, np.float32)
    if kind.startswith("leaves"):
        return {"d": dense, "e": dense}
    return dense if kind != "tree" else {"d": dense, "s": ([5], np.full((1, 2), value, np.float32))}


def value_of(gradient: Any) -> float:
    """Returns the value that all elements of a gradient have."""
    leaves = gradient.values() if isinstance(gradient, dict) else [gradient]
    arrays = [leaf.values if isinstance(leaf, redisacc.IndexedSlices) else leaf for leaf in leaves]
    values = {float(value) for array in arrays for value in (array.min(), array.max())}
    assert len(values) == 1, values
    return values.pop()


def stream(acc: Any, gradient: dict[str, Any]) -> redisacc.ApplyResult:
    """Applies a gradient leaf by leaf, from the last one on, so that some parts are there before the last leaf."""
    upload = acc._begin(2**62)
    for leaf in reversed(range(len(gradient))):
        upload.put(leaf, gradient[acc.paths[leaf]])
        while leaf and not upload._written and not upload._has_failed:
            time.sleep(0.001)
    result: redisacc.ApplyResult = acc._commit(upload, gradient, 1.0, None, "")
    return result


def operate(operation: str, url: str, size: int, limit: int, kind: str) -> Any:
    """Does the operation and returns its value, if it is one that JSON can hold."""
    if operation == "publish":
        return publish_next(redisacc.Parameters(NAME, redis=url), size)
    if operation == "update":
        with open_chief(url, size, 3 if kind == "partitions" else None) as chief:
            # Not finished, so that the workers stay.
            return [step for step, _ in zip(chief.updates(), range(UPDATED), strict=False)]
    if operation == "reduce":
        # Until it is killed.
        return redisacc.Reducer(NAME, redis=url).run()
    acc: Any = open_shared(url, size, limit, "child", kind=kind)
    match operation:
        case "open":
            return None
        case "apply":
            return acc.apply_grad(gradient_of(kind, size, CHILDS_VALUE)).outcome
        case "stream":
            return stream(acc, gradient_of(kind, size, CHILDS_VALUE)).outcome
        case "take":
            return value_of(acc.take_grad(1, timeout=30))
        case "wait":
            return value_of(acc.take_grad(2, timeout=60))
        case "recover":
            with acc.recover() as taken:
                return None if taken is None else value_of(taken.gradient)
        case "set_global_step":
            return acc.set_global_step(7)
        case "delete":
            return acc.delete()
    raise AssertionError(operation)


def main() -> None:
    # The parent never waits for its children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        task = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                value = operate(task["operation"], sys.argv[1], task["size"], task["limit"], task["kind"])
            except redisacc.RedisAccError as error:
                value = type(error).__name__
            out = Path(task["out"])
            out.with_suffix(".new").write_text(json.dumps(value))
            out.with_suffix(".new").rename(out)
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
