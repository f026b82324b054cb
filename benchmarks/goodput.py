"""Measures how much of a training is left when processes are killed: ``python -m benchmarks.goodput``.

A training with an optimiser runs under `redisacc run` for some time, undisturbed and then with ``kill -9`` for a random
process at a regular interval. Goodput is the number of steps in that time, as a share of the undisturbed run's. Each
worker notes a digest of the parameters of each step, and every run must have the same ones: a step that was lost,
repeated or computed from other gradients would show in all that follow.

Steps take as long as their workers compute, which is simulated by sleeping, because a machine with few cores would
otherwise measure itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.markdown import table

# The shape of the parameters: 1 MB of float32.
SHAPE = (512, 512)
# How long a worker computes, in seconds.
COMPUTE = 0.1


def train(folder: Path, workers: int) -> None:
    """Takes the place of this process in the training, until it is killed."""
    import redisacc

    here = redisacc.place()
    name = "chief" if here.role == "chief" else f"worker-{here.number}"
    (folder / f"{name}.pid").write_text(str(os.getpid()))
    if here.role == "chief":
        optimizer = redisacc.optim.AdamW(1e-3, weight_decay=0.01)
        with redisacc.Chief(
            "goodput", {"w": np.ones(SHAPE, np.float32)}, workers=workers, optimizer=optimizer
        ) as chief:
            for step in chief.updates():
                (folder / "step").write_text(str(step))
    else:
        with redisacc.Worker("goodput") as worker, (folder / f"{name}.digests").open("a") as digests:
            for step, parameters in worker.steps():
                digests.write(f"{step} {zlib.crc32(np.ascontiguousarray(parameters['w']))}\n")
                digests.flush()
                time.sleep(COMPUTE)
                # A gradient that is applied again is the same. If there are backup workers, a step takes gradients of
                # whoever is first, so all have the same.
                seed = [step, worker.number if here.workers == workers else 0]
                noise = np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)
                worker.apply({"w": parameters["w"] + noise})


@dataclass(frozen=True)
class Outcome:
    """What a run has done.

    Attributes:
        steps: how many steps were made in its time.
        kills: how many processes were killed.
        digests: step → the digests of its parameters that workers noted.
    """

    steps: int
    kills: int
    digests: dict[int, set[int]]


def run(seconds: float, *, every: float | None, victims: str, processes: int, workers: int, seed: int) -> Outcome:
    """Runs the training for some seconds.

    Args:
        seconds: how long, from its first step on.
        every: how often a process is killed, in seconds; None: never.
        victims: "chief", "worker" or "any".
        processes: how many worker processes there are.
        workers: how many gradients a step needs.
        seed: decides which processes are killed.
    """
    choose = random.Random(seed)  # noqa: S311 - not for secrets
    with tempfile.TemporaryDirectory(prefix="redisacc-goodput-") as directory:
        folder = Path(directory)
        program = [sys.executable, "-m", "benchmarks.goodput", "--train", str(folder), "--needed", str(workers)]
        command = [
            "-m",
            "redisacc",
            "run",
            "--server",
            "--restarts",
            "1000",
            "--workers",
            str(processes),
            "--",
            *program,
        ]
        with (folder / "log").open("wb") as log:
            running = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log)
            try:
                first = _wait_for_step(folder, running)
                began, kills = time.monotonic(), 0
                while (now := time.monotonic()) < began + seconds:
                    if every is not None and now >= began + (kills + 1) * every:
                        kills += 1
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(_victim(folder, victims, choose), signal.SIGKILL)
                    time.sleep(0.01)
                steps = _step(folder) - first
            finally:
                running.send_signal(signal.SIGTERM)
                running.wait(60)
        return Outcome(steps, kills, _digests(folder))


def _step(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int((folder / "step").read_text())
    return 0


def _wait_for_step(folder: Path, running: subprocess.Popen[bytes]) -> int:
    give_up = time.monotonic() + 60
    while not (step := _step(folder)):
        if running.poll() is not None or time.monotonic() > give_up:
            raise RuntimeError((folder / "log").read_text(errors="replace"))
        time.sleep(0.01)
    return step


def _victim(folder: Path, victims: str, choose: random.Random) -> int:
    names = sorted(path.stem for path in folder.glob("*.pid"))
    wanted = [name for name in names if victims == "any" or name.startswith(victims)]
    return int((folder / f"{choose.choice(wanted)}.pid").read_text())


def _digests(folder: Path) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for path in folder.glob("*.digests"):
        for line in path.read_text().splitlines():
            # A worker may have been killed while it wrote.
            with contextlib.suppress(ValueError):
                step, digest = map(int, line.split(" "))
                found.setdefault(step, set()).add(digest)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measures, and prints a table. Returns 1 if runs differ in a bit."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.goodput", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--seconds", type=float, default=600, help="how long each run takes (default: 600)")
    parser.add_argument("--every", type=float, nargs="*", default=[10, 30, 120], help="seconds between kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--needed", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.train is not None:
        train(given.train, given.needed)
        return 0
    rows: list[list[str]] = []
    digests: dict[int, set[int]] = {}
    for processes, workers, what in ((3, 3, ""), (4, 3, ", one backup worker")):
        whole = run(given.seconds, every=None, victims="any", processes=processes, workers=workers, seed=0)
        _merge(digests, whole.digests)
        for victims in ("worker", "chief", "any"):
            for every in given.every:
                found = run(
                    given.seconds, every=every, victims=victims, processes=processes, workers=workers, seed=given.seed
                )
                _merge(digests, found.digests)
                lost = (whole.steps - found.steps) * given.seconds / whole.steps / max(found.kills, 1)
                share = f"{found.steps / whole.steps:.1%}"
                rows.append([f"{victims}{what}", f"{every:g} s", str(found.kills), share, f"{lost:.2f} s"])
                print(json.dumps(rows[-1]), file=sys.stderr)
    print(table(["killed", "every", "kills", "goodput", "lost for each"], rows))
    different = [step for step, found in digests.items() if len(found) > 1]
    print(f"\n{len(digests)} steps, of which {len(different)} differ between runs or workers.")
    return 1 if different else 0


def _merge(into: dict[int, set[int]], digests: dict[int, set[int]]) -> None:
    for step, found in digests.items():
        into.setdefault(step, set()).update(found)


if __name__ == "__main__":
    sys.exit(main())
