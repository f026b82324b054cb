"""What every peer's process does: read jobs from standard input, wait for the signal, do it, say when it was done.

Runs in every environment: only numpy and the standard library. A job comes as a line of JSON and is prepared and
confirmed; then a byte is the signal to do it, for workers out of a pipe that they share. So nothing but reading one
byte lies between signal and work. When it is done, that is said when an empty line asks for it: a worker that wrote
its report while others are still at work would take the processor from them.
Times are those of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path

import numpy as np


class WrongResult(Exception):
    """A result that isn't what numpy says."""


class Actor:
    """A worker, a taker, or both. Subclasses prepare in ``ready`` and work in ``go``."""

    def __init__(self, settings):
        self.settings = settings
        self.directory = Path(settings["arrays"])
        self.workloads = {workload["name"]: workload for workload in settings["workloads"]}
        self.job = {}
        self._loaded = {}

    def gradient(self, name, worker, variant):
        """Indices (dense: None) and values."""
        key = (name, worker, variant)
        if key not in self._loaded:
            folder = self.directory / name
            indices = None
            if self.workloads[name]["kind"] == "sparse":
                indices = np.load(folder / f"indices-{worker}-{variant}.npy")
            self._loaded[key] = indices, np.load(folder / f"values-{worker}-{variant}.npy")
        return self._loaded[key]

    def expected(self, name, workers, variant):
        """Indices, mean and counts, by numpy."""
        key = (name, "expected", workers, variant)
        if key not in self._loaded:
            with np.load(self.directory / name / f"expected-{workers}-{variant}.npz") as file:
                self._loaded[key] = file["indices"], file["mean"], file["counts"]
        return self._loaded[key]

    def ready(self, job):
        """Prepares what isn't to be timed."""
        self.job = job

    def go(self):
        """Does the job; returns the result if this process is the one that gets it."""
        raise NotImplementedError

    def check(self, result):
        """Compares a result ``(indices or None, mean)`` with numpy's."""
        job = self.job
        indices, mean, _ = self.expected(job["workload"], job["workers"], job["variant"])
        compare(job, result, (indices if result[0] is not None else None, mean))


def compare(job, result, expected):
    """Raises WrongResult where they differ by more than the rounding of one division."""
    for what, given, wanted in zip(("indices", "values"), result, expected, strict=True):
        if wanted is None:
            continue
        got = np.asarray(given)
        same = got.shape == wanted.shape and (
            np.array_equal(got, wanted) or (what == "values" and np.allclose(got, wanted, rtol=1e-6, atol=0))
        )
        if not same:
            raise WrongResult(f"wrong {what} in {job}: {got!r:.300}, not {wanted!r:.300}")


def peak_memory():
    """The most memory that this process has used since `reset_peak_memory`, in bytes; None where it can't be known."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def reset_peak_memory():
    """Lets the peak begin at what is used now. Returns that, or None where it can't be done."""
    # Memory that was freed and kept would be used again without being seen.
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return peak_memory()


def serve(make_actor):
    """Runs jobs until standard input ends. The settings are the only argument, a JSON file."""
    # What libraries print must not stand between the replies.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(message):
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        settings = json.loads(Path(sys.argv[1]).read_text())
        actor = make_actor(settings)
        reply({"versions": actor.versions()})
        for line in sys.stdin.buffer:
            actor.ready(json.loads(line))
            reply({})
            os.read(settings["signal"], 1)
            before = reset_peak_memory() if actor.job.get("memory") else None
            cpu, start = time.process_time(), time.monotonic()
            result = actor.go()
            end, cpu = time.monotonic(), time.process_time() - cpu
            message = {"start": start, "end": end, "cpu": cpu}
            if before is not None:
                message["peak_memory"] = peak_memory() - before
            sys.stdin.buffer.readline()
            if result is not None:
                actor.check(result)
            reply(message)
    except BaseException:
        reply({"error": traceback.format_exc()})
        raise
    finally:
        # Threads of servers that run in this process would keep it alive.
        replies.flush()
        sys.stderr.flush()
        os._exit(0)
