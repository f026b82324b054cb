"""Starts the programs in examples/ as users do."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"


class Programs:
    """The programs of an example, on one server. All of them end with the ``with`` block."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def start(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        """Starts a program. Its output goes to a pipe, which is large enough for all of it."""
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / program), "--redis", self._url, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # One thread per process, because the matrices are small and there are many processes.
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self._stack.callback(_end, process)
        return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def output_of(process: subprocess.Popen[str], timeout: float = 100) -> str:
    """Returns what a program printed, once it has succeeded."""
    text = process.communicate(timeout=timeout)[0]
    assert process.returncode == 0, text
    return text


def until(condition: Callable[[], Any], process: subprocess.Popen[str], timeout: float = 60) -> Any:
    """Waits until a condition is true while a program runs; returns its value."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"the condition was false for {timeout} s"
        time.sleep(0.005)
    return value


def children_of(pid: int) -> Iterator[int]:
    """Yields the ids of a process's child processes."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        # The process may end at any time.
        with contextlib.suppress(OSError):
            name_and_rest = path.read_text().rpartition(") ")
            if int(name_and_rest[2].split()[1]) == pid:
                yield int(path.parent.name)
