"""The processes of one program, on one host or on several, started as its users start them."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

from benchmarks.crew import free_ports
from benchmarks.network.hosts import INTERFACE, Hosts

ROOT = Path(__file__).parents[2]
OURS = "with_redisacc"
# The prefix of the second model's programs.
GPT = "gpt_"
# The prefix of the program that measures both ways of making the update.
MODES = "modes_"
# Where hosts meet: each is a network namespace.
PORT = 29500


class Epoch(NamedTuple):
    """The end of an epoch: its number, when it was, the id of the process, and the digest of the weights."""

    number: int
    when: float
    pid: int
    weights: str


class Crew:
    """Processes of one program, from the beginning of a ``with`` block to its end.

    Those of redisacc are started by ``redisacc run``, with a server on this host, or with a node on each of the others.

    Args:
        name: the program.
        workers: how many processes.
        epochs: how many epochs each makes.
        hosts: where they are, one on each; None: on this host.
        environment: further variables.
    """

    def __init__(
        self, name: str, workers: int, epochs: int, hosts: Hosts | None = None, environment: Mapping[str, str] = {}
    ) -> None:
        self.workers = workers
        self._name = name
        self._hosts = hosts
        self._directory = tempfile.TemporaryDirectory(prefix="redisacc-comparison-")
        self._started: list[subprocess.Popen[bytes]] = []
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "COMPARISON_EPOCHS": str(epochs),
            **environment,
        }

    def __enter__(self) -> Self:
        run = [sys.executable, "-m", "redisacc", "run"]
        program = [sys.executable, "-m", f"benchmarks.comparison.{self._name}"]
        first = self._hosts.address("host0") if self._hosts else "127.0.0.1"
        if not self._name.endswith(OURS):
            self._environment |= {"WORLD_SIZE": str(self.workers), "MASTER_ADDR": first}
            # Another program of torch may have its usual port.
            self._environment["MASTER_PORT"] = str(PORT if self._hosts else free_ports(1)[0])
            if self._hosts:
                self._environment["GLOO_SOCKET_IFNAME"] = INTERFACE
            for number in range(self.workers):
                self._start(number, program, RANK=str(number))
        elif self._hosts:
            self._environment["REDISACC_PASSWORD"] = secrets.token_hex(16)
            for number in range(self.workers):
                where = ["--hosts", str(self.workers), "--meet", f"{first}:{PORT}", "--host-name", f"host{number}"]
                self._start(number, [*run, *where, "--workers", "1", "--", *program])
        else:
            self._start(0, [*run, "--server", "--workers", str(self.workers), "--", *program])
        return self

    def __exit__(self, *_: object) -> None:
        # `redisacc run` ends its processes when it is told to end, and those of DDP need nothing else.
        for each in self._started:
            each.terminate()
        for each in self._started:
            try:
                each.wait(20)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
        self._directory.cleanup()

    def _start(self, number: int, command: list[str], **environment: str) -> None:
        before = self._hosts.command(f"host{number}") if self._hosts else []
        with self._path(number, "out").open("wb") as out, self._path(number, "err").open("wb") as err:
            started = subprocess.Popen(
                [*before, *command], cwd=ROOT, env={**self._environment, **environment}, stdout=out, stderr=err
            )
        self._started.append(started)

    def _path(self, number: int, kind: str) -> Path:
        return Path(self._directory.name, f"{number}.{kind}")

    def _lines(self, worker: int, first: str) -> list[list[str]]:
        """Returns the words after the first one of the lines of a worker that begin with it."""
        found = []
        for number in range(len(self._started)):
            for line in self._path(number, "out").read_text().splitlines():
                # `redisacc run` puts the name of the process in front.
                place, bar, text = line.rpartition(" | ")
                words = text.split()
                if words[:1] == [first] and (place == f"worker {worker}" if bar else number == worker):
                    found.append(words[1:])
        return found

    def epochs(self, worker: int) -> list[Epoch]:
        """Returns the epochs that a worker has completed."""
        lines = self._lines(worker, "epoch")
        return [Epoch(int(line[0]), float(line[1]), int(line[2]), line[3]) for line in lines if len(line) == 4]

    def number(self, worker: int, name: str) -> float:
        """Returns the number that a worker has reported under a name, such as the accuracy."""
        return float(self._lines(worker, name)[-1][0])

    def errors(self) -> str:
        """Returns what all processes have written to their standard error."""
        return "".join(self._path(number, "err").read_text() for number in range(len(self._started)))

    def wait(self, limit: float) -> None:
        """Waits until all processes have ended.

        Raises:
            RuntimeError: one has failed, or has not ended within so many seconds.
        """
        give_up = time.monotonic() + limit
        for each in self._started:
            try:
                status: object = each.wait(max(give_up - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                status = f"nothing for {limit:g} s"
            if status:
                raise RuntimeError(f"a process of {self._name} ended with {status}:\n{self.errors()}")

    def wait_for_epoch(self, worker: int, number: int, limit: float) -> bool:
        """Returns whether a worker completes an epoch within a time, in seconds, and before a process fails."""
        give_up = time.monotonic() + limit
        while time.monotonic() < give_up:
            have_ended = any(each.poll() not in (None, -signal.SIGKILL) for each in self._started)
            if any(each.number >= number for each in self.epochs(worker)):
                return True
            if have_ended:
                return False
            time.sleep(0.01)
        return False

    def kill(self, worker: int) -> None:
        """Kills a worker that has completed an epoch."""
        os.kill(self.epochs(worker)[-1].pid, signal.SIGKILL)
