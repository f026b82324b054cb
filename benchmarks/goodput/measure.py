"""Runs the training for some time, and kills its processes."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.goodput.servers import OnCluster, OneServer

# How many gradients a step needs.
NEEDED = 3
# Seconds that a training has for its first steps, and then to end.
_START = 60.0
_END = 60.0
# No run is measured before this step: processes are still starting.
_FIRST_STEP = 10
_TICK = 0.01


@dataclass(frozen=True)
class Crew:
    """What is run.

    Attributes:
        cluster: whether the data are on a cluster, instead of one server.
        training: whether all processes are the same, a ``Training``, instead of a chief and workers.
        backup: how many workers more there are than gradients in a step.
    """

    cluster: bool = False
    training: bool = False
    backup: int = 0


@dataclass
class Outcome:
    """What a run has done.

    Attributes:
        steps: how many steps were made in its time.
        seconds: that time.
        kills: how many processes were killed.
        back: seconds from the death of a worker to the next step that its place begins.
        digests: step → the digests of its parameters that workers noted.
    """

    steps: int
    seconds: float
    kills: int
    back: list[float] = field(default_factory=list)
    digests: dict[int, set[int]] = field(default_factory=dict)


def run(seconds: float, victim: str, every: float | None, crew: Crew, *, seed: int) -> Outcome:
    """Runs the training for some seconds, from one of its first steps on.

    Args:
        seconds: how long.
        victim: "worker" or "chief"; "any" of a training; or, on a cluster, "reducer" or "node".
        every: how often one is killed, in seconds, for the first time after half of that; None: never.
        crew: what is run.
        seed: decides which processes are killed.
    """
    choose = random.Random(seed)  # noqa: S311 - not for secrets
    with (
        tempfile.TemporaryDirectory(prefix="redisacc-goodput-") as directory,
        OnCluster() if crew.cluster else OneServer() as servers,
    ):
        folder = Path(directory)
        command = [sys.executable, "-m", "redisacc", "run", *servers.options, "--restarts", "100000"]
        command += ["--workers", str(NEEDED + crew.backup), "--total-workers", str(NEEDED + crew.backup)]
        command += [
            *(() if crew.training else ["--chief"]),
            "--",
            sys.executable,
            "-m",
            "benchmarks.goodput.trainee",
        ]
        command += [str(folder), "--needed", str(NEEDED), "--partitions", str(servers.partitions)]
        command += ["--training"] if crew.training else []
        with (folder / "log").open("wb") as log:
            running = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                first = _wait_for_steps(folder, running)
                began, deaths = time.monotonic(), list[float]()
                due = None if every is None else began + every / 2
                while (now := time.monotonic()) < began + seconds:
                    servers.look_after()
                    if due is not None and every is not None and now >= due and servers.kill(victim, folder, choose):
                        deaths.append(time.time())
                        due = max(due + every, now)
                    time.sleep(_TICK)
                steps, seconds = _step(folder) - first, time.monotonic() - began
            finally:
                running.send_signal(signal.SIGTERM)
                running.wait(_END)
        lines = [_lines(path) for path in folder.glob("*.steps")]
        found = Outcome(steps, seconds, len(deaths))
        for step, digest, _, _ in (line for worker in lines for line in worker):
            found.digests.setdefault(int(step), set()).add(int(digest))
        if victim in ("worker", "any"):
            found.back = [back for death in deaths if (back := seconds_until_back(lines, death)) is not None]
        return found


def _step(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return int((folder / "step").read_text())
    return 0


def _wait_for_steps(folder: Path, running: subprocess.Popen[bytes]) -> int:
    give_up = time.monotonic() + _START
    while (step := _step(folder)) < _FIRST_STEP:
        if running.poll() is not None or time.monotonic() > give_up:
            raise RuntimeError((folder / "log").read_text(errors="replace"))
        time.sleep(_TICK)
    return step


def _lines(path: Path) -> list[list[float]]:
    """Returns the step, the digest, the time and the process of each line."""
    found = [line.split(" ") for line in path.read_text().splitlines()]
    # A worker may have been killed while it wrote.
    return [[float(word) for word in words] for words in found if len(words) == 4 and all(words)]


def seconds_until_back(workers: list[list[list[float]]], death: float) -> float | None:
    """Returns how long after a death the first new process of a worker began its first step; None if none did.

    Args:
        workers: the lines of each worker: steps, digests, times and processes.
        death: the time of the death.
    """
    firsts = [
        line[2] - death
        for lines in workers
        for before, line in itertools.pairwise(lines)
        if before[3] != line[3] and line[2] > death
    ]
    return min(firsts, default=None)


def median(values: list[float]) -> float | None:
    """Returns the median; None if there is no value."""
    return statistics.median(values) if values else None
