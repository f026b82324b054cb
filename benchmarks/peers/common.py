"""The loop of every peer's process: it reads jobs from standard input, waits for the signal, works, and reports.

It runs in every environment, with only numpy and the standard library. A job is a line of JSON, which is prepared and
confirmed. Then one byte is the signal to do it; workers read it from a pipe that they share, so only reading one
byte lies between signal and work. The report follows when an empty line asks for it, because a worker that wrote its
report while others still work would take the processor from them.

Times are CLOCK_MONOTONIC's, which all processes of a machine share.
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
    """A result differs from numpy's."""


class Actor:
    """A worker, a taker, or both. Subclasses prepare in ``ready`` and work in ``go``."""

    def __init__(self, settings):
        self.settings = settings
        self.directory = Path(settings["arrays"])
        self.workloads = {workload["name"]: workload for workload in settings["workloads"]}
        self.job = {}
        self._loaded = {}

    def gradient(self, name, worker, variant):
        """Returns indices (None if dense) and values of a worker's gradient."""
        key = (name, worker, variant)
        if key not in self._loaded:
            folder = self.directory / name
            indices = None
            if self.workloads[name]["kind"] == "sparse":
                indices = np.load(folder / f"indices-{worker}-{variant}.npy")
            self._loaded[key] = indices, np.load(folder / f"values-{worker}-{variant}.npy")
        return self._loaded[key]

    def expected(self, name, workers, variant):
        """Returns the expected indices, mean and counts."""
        key = (name, "expected", workers, variant)
        if key not in self._loaded:
            with np.load(self.directory / name / f"expected-{workers}-{variant}.npz") as file:
                self._loaded[key] = file["indices"], file["mean"], file["counts"]
        return self._loaded[key]

    def ready(self, job):
        """Prepares a job; this is not timed."""
        self.job = job

    def go(self):
        """Does the job, and returns the result if this process gets it."""
        raise NotImplementedError

    def check(self, result):
        """Compares a result ``(indices or None, mean)`` with numpy's."""
        job = self.job
        indices, mean, _ = self.expected(job["workload"], job["workers"], job["variant"])
        compare(job, result, (indices if result[0] is not None else None, mean), self.settings.get("tolerance", 0))


def compare(job, result, expected, tolerance=0):
    """Raises WrongResult if the two differ by more than the rounding of one division, and the tolerance."""
    for what, given, wanted in zip(("indices", "values"), result, expected, strict=True):
        if wanted is None:
            continue
        got = np.asarray(given)
        same = got.shape == wanted.shape and (
            np.array_equal(got, wanted) or (what == "values" and np.allclose(got, wanted, rtol=1e-6, atol=tolerance))
        )
        if not same:
            raise WrongResult(f"wrong {what} in {job}: {got!r:.300}, not {wanted!r:.300}")


def peak_memory():
    """Returns the most memory used since ``reset_peak_memory``, in bytes; None if it is unknown."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def reset_peak_memory():
    """Sets the peak to what is used now, and returns that; None if this is impossible."""
    # Memory that was freed but not returned to the system would be used again without raising the peak.
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
    # Libraries print to standard output. Their text must not appear between the replies.
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
