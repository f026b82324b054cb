"""Processes on this machine: the workers, and the process that trains alone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

import numpy as np

from redisacc.demo import DemoError
from redisacc.demo.exchange import Settings
from redisacc.demo.skipgram import Parameters
from redisacc.demo.text import Corpus
from redisacc.demo.training import OnStep, Trained, initial_parameters, train_alone

# The matrices are small: threads of a linear algebra library take longer to start than to multiply, and many times
# longer where other processes use the cores too. The library reads these variables when it is loaded, which has already
# happened in the command's own process.
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)


class LocalWorkers:
    """Worker processes on this machine, as a context manager that ends them all.

    They get the URL of the server through the environment, where other users of the machine cannot read its password.

    Args:
        number: number of workers; their numbers are 0 … ``number`` - 1.
        url: URL of the server.
        run: name of the run.
        text: files to train on; none means the default text.
        timeout: seconds that each worker waits for the chief.
    """

    def __init__(self, number: int, *, url: str, run: str, text: Sequence[Path], timeout: float) -> None:
        self._number = number
        self._environment = _ONE_THREAD | dict(os.environ, REDISACC_URL=url)
        self._command = [sys.executable, "-m", "redisacc", "demo", "--role", "worker", "--run", run]
        self._command += ["--timeout", str(timeout)]
        for file in text:
            self._command += ["--text", str(file)]
        self._children: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []

    def __enter__(self) -> LocalWorkers:
        try:
            for index in range(self._number):
                # A file rather than a pipe, on which a worker would block until it is read.
                log = tempfile.TemporaryFile()
                child = subprocess.Popen(
                    [*self._command, "--worker-index", str(index)],
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
                self._children.append((child, log))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def problems(self) -> list[str]:
        """Returns a text for each worker that has failed: how it ended, and the last line that it wrote."""
        found = []
        for index, (child, log) in enumerate(self._children):
            status = child.poll()
            if status is None or status == 0:
                continue
            if status < 0:
                how = f"was ended by signal {-status} ({signal.strsignal(-status)})"
            else:
                how = f"ended with exit code {status}"
            text = f"worker-{index} (process {child.pid}) {how}"
            # Of a worker that was stopped from outside, the last line says nothing about why.
            last = _last_line(log) if 0 < status < 128 else ""
            found.append(f"{text}: {last}" if last else text)
        return found

    def wait(self, timeout: float) -> None:
        """Blocks until all workers have ended by themselves, at most ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        for child, _ in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        """Ends the workers that still run, with SIGTERM first and with SIGKILL after 5 seconds."""
        for child, _ in self._children:
            child.terminate()
        self.wait(5.0)
        for child, log in self._children:
            child.kill()
            child.wait()
            log.close()
        self._children.clear()


def _last_line(log: IO[bytes]) -> str:
    size = os.fstat(log.fileno()).st_size
    # pread: the file's offset is shared with the worker that writes to it.
    lines = os.pread(log.fileno(), 2000, max(0, size - 2000)).decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return last.removeprefix("redisacc demo: ")


def train_in_one_process(settings: Settings, corpus: Corpus, on_step: OnStep) -> Trained:
    """Runs ``train_alone`` in a process of its own with one thread, and blocks until it ends.

    Raises:
        DemoError: the process failed.
    """
    # With "fork", numpy would already be loaded, without having read the environment.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_alone, args=(theirs, settings, corpus), daemon=True)
    with ours, _environment(_ONE_THREAD):
        try:
            process.start()
            # Once the child's end is closed here, its death is an end of file.
            theirs.close()
            losses = []
            for step in range(1, settings.steps + 1):
                loss, gradients = ours.recv()
                losses.append(loss)
                on_step(step, loss, gradients)
            like = initial_parameters(settings)
            arrays = [
                np.frombuffer(ours.recv_bytes(), array.dtype).reshape(array.shape)
                for array in (like.input, like.output, like.position)
            ]
        except EOFError:
            process.join()
            raise DemoError(f"the process that trains alone ended with exit code {process.exitcode}") from None
        finally:
            if process.pid is not None:
                process.terminate()
                process.join()
                process.close()
    return Trained(Parameters(*arrays), tuple(losses))


def _alone(connection: Connection, settings: Settings, corpus: Corpus) -> None:
    # Ctrl-C reaches every process of the terminal; the parent reports it and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError):  # the parent was killed
        trained = train_alone(settings, corpus, lambda _, loss, gradients: connection.send((loss, gradients)))
        for array in (trained.parameters.input, trained.parameters.output, trained.parameters.position):
            connection.send_bytes(array.tobytes())


@contextlib.contextmanager
def _environment(defaults: dict[str, str]) -> Iterator[None]:
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
