"""Starts the programs in examples/ as users do."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from support.until import until

import redisacc

EXAMPLES = Path(__file__).parents[2] / "examples"

# One thread per process, because the matrices are small and there are many processes.
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Programs:
    """The programs of an example, on one server. All of them end with the ``with`` block."""

    def __init__(self, url):
        self._url = url
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._stack.close()

    def start(self, *arguments, **environment):
        """Starts Python with these arguments. Its output goes to a pipe, which is large enough for all of it."""
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=EXAMPLES,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **_THREADS, "REDISACC_URL": self._url, **environment},
        )
        self._stack.callback(_end, process)
        return process

    def run(self, workers, program, *options, arguments=()):
        """Starts `redisacc run` with these options, of a program with these arguments."""
        command = ["run", "--workers", str(workers), *options, "--", sys.executable, program, *arguments]
        return self.start("-m", "redisacc", *command)


def _end(process):
    # `redisacc run` ends its processes when it is told to end, and a guard does when it is killed.
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def output_of(process, timeout=100):
    """Returns what a program printed, once it has succeeded."""
    text = process.communicate(timeout=timeout)[0]
    assert process.returncode == 0, text
    return text


def until_step(step, name, url, process):
    """Waits until the parameters of a step are published while a program runs."""
    with redisacc.Parameters(name, redis=url) as parameters:
        until_true(lambda: (published := parameters.step()) is not None and published >= step, process)


def until_true(condition, process, timeout=150):
    """Waits until a condition is true while a program runs; returns its value."""

    def found():
        value = condition()
        assert value or process.poll() is None, process.communicate()[0]
        return value

    return until(found, timeout)


def kill_one_of(run, role):
    """Kills a process that `redisacc run` started: the chief, or a worker."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        # The process may end at any time.
        with contextlib.suppress(OSError):
            name_and_rest = path.read_text().rpartition(") ")
            environment = (path.parent / "environ").read_bytes().split(b"\0")
            if int(name_and_rest[2].split()[1]) == run.pid and f"REDISACC_ROLE={role}".encode() in environment:
                os.kill(int(path.parent.name), signal.SIGKILL)
                return
    raise AssertionError(f"the run has no {role}")
