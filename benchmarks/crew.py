"""Runs rounds with a crew, which is the processes of one peer.

A round has three phases. All processes prepare and confirm. The taker starts its take and is given a moment to begin to
wait, as in training, where computing a gradient takes longer than the call. Then all workers get the signal, by one
write into a pipe that they share.

The round's time is measured from before that write until the taker has the whole result as numpy arrays, on
CLOCK_MONOTONIC. Until then every process does only the peer's work; workers report after the taker has. All this is the
same for every peer. If no process is only a taker (all_reduce, one process), the first worker acts as the taker.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PEERS = Path(__file__).with_name("peers")
# Seconds between the start of the take and the signal to the workers.
SETTLE = 0.01
# Long, because dozens of processes may import TensorFlow at once. A process that ends is noticed at once.
START_TIMEOUT = 600.0
ROUND_TIMEOUT = 150.0


class BenchmarkError(Exception):
    """A peer failed or gave a wrong result, which ends the run."""


def free_ports(number: int) -> list[int]:
    """Returns ports on which no process listens."""
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Member:
    """One process of a crew, or a server.

    Args:
        python: interpreter of its environment.
        program: its program in ``peers/``, without ``.py``.
        settings: its settings; ``role`` and ``number`` say which process it is.
        signal: the pipe from which it reads the signal to begin; None: it gets no jobs.
        directory: folder for settings and log.
        prefix: words before the command, to run it on another host.
    """

    def __init__(
        self,
        python: str,
        program: str,
        settings: dict[str, Any],
        signal: int | None,
        directory: Path,
        *,
        prefix: Sequence[str] = (),
    ) -> None:
        self.label = f"{program} {settings['role']} {settings['number']}"
        stem = f"{directory.name}-{program}-{settings['role']}-{settings['number']}-{time.monotonic_ns()}"
        path = directory / f"{stem}.json"
        path.write_text(json.dumps({**settings, "signal": signal}))
        self._log = directory / f"{stem}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*prefix, python, str(PEERS / f"{program}.py"), str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                pass_fds=[] if signal is None else [signal],
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to = self._process.stdin
        self._from = self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._from, selectors.EVENT_READ)
        self._unread = b""

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Returns the file descriptor of its replies."""
        return self._from.fileno()

    def send(self, job: dict[str, Any] | None) -> None:
        """Sends a job to prepare, or, with None, the request to report."""
        try:
            self._to.write(b"\n" if job is None else json.dumps(job).encode() + b"\n")
        except BrokenPipeError:
            raise self._failure("is gone") from None

    def receive(self, timeout: float) -> dict[str, Any]:
        """Returns its next reply.

        Raises:
            BenchmarkError: the process failed, ended, or sent nothing for ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while b"\n" not in self._unread:
            if not self._selector.select(max(deadline - time.monotonic(), 0)):
                raise self._failure(f"sent nothing for {timeout:.0f} s")
            data = os.read(self._from.fileno(), 65536)
            if not data:
                raise self._failure("ended")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise BenchmarkError(f"{self.label}:\n{reply['error']}")
        return reply

    def _failure(self, what: str) -> BenchmarkError:
        return BenchmarkError(f"{self.label} {what}\n{self._log.read_text(errors='replace')[-3000:]}")

    def end(self) -> None:
        """Kills it."""
        self._process.kill()
        self._process.wait()
        self._selector.close()
        self._to.close()
        self._from.close()


@dataclass(frozen=True)
class Timing:
    """The times of one round, in seconds, and the CPU seconds of its clients.

    Attributes:
        elapsed: time from the signal to the result.
        finished: time from the signal until every process was done.
        applies: time of each worker's call (or calls).
        taken: time of the taker's call, including its wait.
        tail: time from the end of the last worker's calls to the result; negative if the taker was done earlier.
        worker_cpu: CPU time of all workers together.
        taker_cpu: CPU time of the taker.
        peak_memory: bytes that the taker used beyond what it used before; None if this was not measured.
    """

    elapsed: float
    finished: float
    applies: list[float]
    taken: float
    tail: float
    worker_cpu: float
    taker_cpu: float
    peak_memory: int | None


class Crew:
    """The processes of one peer.

    Args:
        name: name of the peer in the report.
        python: interpreter of its environment.
        program: its program in ``peers/``, without ``.py``.
        workers: number of workers.
        settings: settings given to each process.
        directory: folder for settings and logs.
        taker: whether to start one more process that takes.
        shared: whether one process holds all workers.
        helpers: roles of processes that only have to run, such as the parameter server; equal ones are numbered.
        host: returns for a role and a number with which words a command begins that runs on that process's host.
    """

    def __init__(
        self,
        name: str,
        python: str,
        program: str,
        *,
        workers: int,
        settings: dict[str, Any],
        directory: Path,
        taker: bool = True,
        shared: bool = False,
        helpers: tuple[str, ...] = (),
        host: Callable[[str, int], Sequence[str]] = lambda *_: (),
    ) -> None:
        self.name = name
        self._size = workers
        # One pipe for the workers and one for the taker. Each byte in it is a signal.
        self._signals = {role: os.pipe() for role in ("worker", "taker")}
        roles = [(helper, helpers[:place].count(helper)) for place, helper in enumerate(helpers)]
        roles += [("worker", number) for number in range(1 if shared else workers)]
        roles += [("taker", 0)] if taker else []
        self._members: list[Member] = []
        self._steps: dict[str, int] = {}
        try:
            for role, number in roles:
                own = {**settings, "workers": workers, "role": role, "number": number}
                signal, _ = self._signals["taker" if role == "taker" else "worker"]
                self._members.append(Member(python, program, own, signal, directory, prefix=host(role, number)))
            self.versions = [member.receive(START_TIMEOUT)["versions"] for member in self._members][-1]
        except BaseException:
            self.end()
            raise
        helping = len(helpers)
        self._helpers = self._members[:helping]
        self._workers = self._members[helping:-1] if taker else self._members[helping:]
        self._taker = self._members[-1] if taker else None

    @property
    def helper_pids(self) -> list[int]:
        """Process ids of the helpers."""
        return [member.pid for member in self._helpers]

    def round(
        self,
        workload: str,
        *,
        active: int | None = None,
        repeat: int = 1,
        before_take: Callable[[], None] | None = None,
        memory: bool = False,
    ) -> Timing:
        """Runs one round and checks its result against numpy's.

        Args:
            workload: name of the workload.
            active: number of workers that take part; None: all.
            repeat: number of gradients that each worker applies.
            before_take: called when every gradient has arrived; the take begins only after it.
            memory: whether to measure the taker's peak memory, too.

        Returns:
            The times of the round.

        Raises:
            BenchmarkError: a process failed, or the result is wrong.
        """
        step = self._steps.get(workload, 0)
        self._steps[workload] = step + 1
        active = active or self._size
        job = {
            "workload": workload,
            "step": step,
            "variant": step % 2,
            "workers": active,
            "repeat": repeat,
            "num_required": active * repeat,
            "memory": memory,
        }
        workers = self._workers[:active]
        members = [*workers, *([self._taker] if self._taker else [])]
        for member in members:
            member.send(job)
        for member in members:
            member.receive(ROUND_TIMEOUT)
        if self._taker is not None:
            self._taker.send(None)
            if before_take is None:
                self._signal("taker", 1)
        time.sleep(SETTLE)
        started = time.monotonic()
        self._signal("worker", len(workers))
        if self._taker is None:
            done = self._reports(workers)
            taken = done[0]
        elif before_take is None:
            self._wait(self._taker, workers)
            taken = self._taker.receive(ROUND_TIMEOUT)
            done = self._reports(workers)
        else:
            done = self._reports(workers)
            before_take()
            self._signal("taker", 1)
            taken = self._taker.receive(ROUND_TIMEOUT)
        return Timing(
            elapsed=taken["end"] - started,
            finished=max(one["end"] for one in (taken, *done)) - started,
            applies=[one["end"] - one["start"] for one in done],
            taken=taken["end"] - taken["start"],
            tail=taken["end"] - max(one["end"] for one in done),
            worker_cpu=sum(one["cpu"] for one in done),
            taker_cpu=taken["cpu"] if self._taker is not None else 0.0,
            peak_memory=taken.get("peak_memory"),
        )

    def _signal(self, role: str, number: int) -> None:
        os.write(self._signals[role][1], bytes(number))

    @staticmethod
    def _wait(taker: Member, workers: list[Member]) -> None:
        """Waits until the taker has replied, or a worker, which replies without being asked only if it failed."""
        with selectors.DefaultSelector() as selector:
            for member in (taker, *workers):
                selector.register(member, selectors.EVENT_READ, member)
            for key, _ in selector.select(ROUND_TIMEOUT):
                if key.data is not taker:
                    # Raises.
                    key.data.receive(0)

    @staticmethod
    def _reports(members: list[Member]) -> list[dict[str, Any]]:
        for member in members:
            member.send(None)
        return [member.receive(ROUND_TIMEOUT) for member in members]

    def end(self) -> None:
        """Kills all processes of the crew."""
        for member in self._members:
            member.end()
        for ends in self._signals.values():
            for end in ends:
                os.close(end)
        self._signals = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
