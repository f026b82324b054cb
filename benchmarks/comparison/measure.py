"""What is measured of one program: the lines that change, the time of an epoch, and what a kill does."""

from __future__ import annotations

import difflib
import itertools
import re
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.comparison.crew import GPT, MODES, OURS, Crew
from benchmarks.network.hosts import Hosts

HERE = Path(__file__).parent
# The program that the others are compared with.
ALONE = "alone"
# Processes on one host.
WORKERS = 2
# Seconds that a run has to end, and that the survivors of a kill have to make all their epochs.
LIMIT = 300.0
PATIENCE = 60.0


def changes(name: str) -> list[str]:
    """Returns the lines in which a program differs from the one alone: with "-" what it lacks, with "+" what is new."""
    alone = GPT + ALONE if name.startswith(GPT) else ALONE
    before, after = ((HERE / f"{each}.py").read_text().splitlines() for each in (alone, name))
    lines = [*difflib.unified_diff(before, after, n=0, lineterm="")][2:]
    return [line for line in lines if not line.startswith("@@") and line[1:].strip()]


def new_lines(name: str) -> int:
    """Returns how many lines of a program are new, or different from those of ``alone.py``."""
    return sum(line.startswith("+") for line in changes(name))


def undisturbed(name: str, workers: int, epochs: int, hosts: Hosts | None = None) -> dict[str, Any]:
    """Runs a program to its end.

    Returns:
        The seconds of each epoch but the first one, in which connections begin, and the accuracy and the digest of the
        weights at the end.
    """
    with Crew(name, workers, epochs, hosts) as crew:
        crew.wait(LIMIT)
        ends = _ends(crew)
        if len(ends) > 1:
            raise RuntimeError(f"the processes of {name} end with different weights: {', '.join(ends)}")
        return {"seconds": _seconds(crew), "accuracy": crew.number(0, "accuracy"), "weights": ends[0]}


def mode(optimizer: str, epochs: int, *, fused: bool) -> dict[str, Any]:
    """Measures one way of making the update.

    Returns:
        ``optimizer`` and ``fused``; ``seconds``: the median of a step; ``bytes``: how many pass through the server in a
        step, snapshots included; ``back``: by how many seconds an epoch with a kill is longer.
    """
    told = {"COMPARISON_OPTIMIZER": optimizer, "COMPARISON_FUSED": str(fused)}
    with Crew(MODES + OURS, WORKERS, epochs, environment=told) as crew:
        crew.wait(LIMIT)
        seconds = statistics.median(_seconds(crew)) / crew.number(0, "steps")
        passed = crew.number(0, "bytes")
    kill = after_a_kill(MODES + OURS, epochs, told)
    return {"optimizer": optimizer, "fused": fused, "seconds": seconds, "bytes": passed, "back": kill["pause"]}


def after_a_kill(name: str, epochs: int, told: Mapping[str, str] = {}) -> dict[str, Any]:
    """Kills one of two processes after its first epoch, and watches the other one.

    Returns:
        ``weights``: the digests at the end, if the training came to its end. ``pause``: by how many seconds the longest
        epoch was longer than an ordinary one. ``ended``: the seconds until the other one ended with an error, None if
        it did not. ``error``: what it said.
    """
    found: dict[str, Any] = {"weights": [], "pause": None, "ended": None, "error": ""}
    with Crew(name, WORKERS, epochs, environment=told) as crew:
        if not crew.wait_for_epoch(1, 0, LIMIT):
            raise RuntimeError(crew.errors())
        killed = time.monotonic()
        crew.kill(1)
        if crew.wait_for_epoch(0, epochs - 1, PATIENCE):
            crew.wait(LIMIT)
            found["weights"] = _ends(crew)
            found["pause"] = max(_seconds(crew)) - statistics.median(_seconds(crew))
        elif time.monotonic() < killed + PATIENCE:
            found["ended"] = time.monotonic() - killed
            found["error"] = last_error(crew.errors())
    return found


def largest_difference(optimizer: str, epochs: int) -> float:
    """Returns the largest difference between the weights of two processes and of one with batches twice as large.

    The model is the GPT in float32.
    """
    found = []
    for workers in (WORKERS, 1):
        with tempfile.NamedTemporaryFile() as file:
            told = {"OPTIMIZER": optimizer, "FLOAT32": "1", "WEIGHTS": file.name, "BATCH": str(8 * WORKERS // workers)}
            told = {f"COMPARISON_{name}": value for name, value in told.items()}
            with Crew(GPT + OURS, workers, epochs, environment=told) as crew:
                crew.wait(LIMIT)
            found.append(np.fromfile(file.name, np.float32))
    return float(np.abs(found[0] - found[1]).max())


def _ends(crew: Crew) -> list[str]:
    """Returns the digests of the weights with which the workers have ended, each of them once."""
    return sorted({crew.epochs(worker)[-1].weights for worker in range(crew.workers)})


def _seconds(crew: Crew) -> list[float]:
    times = [epoch.when for epoch in crew.epochs(0)]
    return [after - before for before, after in itertools.pairwise(times)]


def last_error(text: str) -> str:
    """Returns the message of the last exception in a text, without places in the code and addresses."""
    lines = [line for line in text.splitlines() if re.search(r"\w(Error|Exception)\b", line)]
    message = re.sub(r"^.*?(Error|Exception):? ?", "", lines[-1]) if lines else ""
    message = re.sub(r" ?\[[^]]*\](:\d+)?", "", message)
    return message.split(". ")[0].strip(" .") or "no message"
