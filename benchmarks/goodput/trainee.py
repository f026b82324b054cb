"""The program of the training: ``python -m benchmarks.goodput.trainee FOLDER``, in each place of a `redisacc run`.

It writes into the folder: its process id, the chief the steps, and each worker a line for each step that it has seen.
"""

from __future__ import annotations

import argparse
import os
import time
import zlib
from pathlib import Path

import numpy as np

import redisacc
from redisacc.types import GradientOptions

# The shape of the parameters: 1 MB of float32.
SHAPE = (512, 512)
# How long a worker computes, in seconds. It sleeps, because a machine with few cores would otherwise measure itself.
COMPUTE = 0.1
PARAMETERS = {"w": np.ones(SHAPE, np.float32)}


def main() -> None:
    """Takes the place of this process in the training, until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--needed", type=int, required=True, help="how many gradients a step needs")
    parser.add_argument("--partitions", type=int, help="of a cluster whose masters have replicas")
    parser.add_argument("--training", action="store_true", help="all processes are the same")
    given = parser.parse_args()
    here = redisacc.place()
    name = "chief" if here.role == "chief" else f"worker-{here.number}"
    (given.folder / f"{name}.pid").write_text(str(os.getpid()))
    if here.role == "chief":
        _chief(given)
    elif given.training:
        with redisacc.Training("goodput", PARAMETERS, quorum=given.needed, optimizer=_optimizer()) as training:
            _work(given, name, training)
    else:
        with redisacc.Worker("goodput") as worker:
            _work(given, name, worker)


def _optimizer() -> redisacc.optim.Optimizer:
    return redisacc.optim.AdamW(1e-3, weight_decay=0.01)


def _chief(given: argparse.Namespace) -> None:
    spread: GradientOptions = {"partitions": given.partitions, "min_replicas": 1} if given.partitions else {}
    with redisacc.Chief(
        "goodput", PARAMETERS, quorum=given.needed, optimizer=_optimizer(), accumulator=spread
    ) as chief:
        for step in chief.updates():
            _note(given, "chief", step)


def _note(given: argparse.Namespace, name: str, step: int) -> None:
    """Writes the step. Whoever reads it must not find the file empty."""
    new = given.folder / f"{name}.new"
    new.write_text(str(step))
    new.replace(given.folder / "step")


def _work(given: argparse.Namespace, name: str, worker: redisacc.Worker | redisacc.Training) -> None:
    with (given.folder / f"{name}.steps").open("a") as lines:
        # If there are backup workers, a step takes gradients of whoever is first, so all have the same.
        has_backup = redisacc.place().workers != given.needed
        for step, parameters in worker.steps():
            lines.write(f"{step} {zlib.crc32(np.ascontiguousarray(parameters['w']))} {time.time()} {os.getpid()}\n")
            lines.flush()
            if given.training:
                _note(given, name, step)
            time.sleep(COMPUTE)
            # A gradient that is applied again is the same.
            seed = [step, 0 if has_backup else worker.number]
            noise = np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)
            # The mean of three or four times the same integers is exact.
            worker.apply({"w": np.rint(8 * noise) if has_backup else parameters["w"] + noise})


if __name__ == "__main__":
    main()
