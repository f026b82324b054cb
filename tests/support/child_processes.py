"""Processes that do one operation each, through a proxy, and may be killed or stopped in the middle of it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.moved_clock import runs
from support.until import until
from support.warm_python import PIPE, WarmPython

PROGRAM = Path(__file__).with_name("fork_server.py")


class ChildProcess:
    """A process that does one operation.

    Attributes:
        pid: its process id.
    """

    def __init__(self, pid: int, out: Path) -> None:
        self.pid = pid
        self._out = out

    def signal(self, number: int) -> None:
        """Sends a signal; a process that has done its operation and ended may miss it."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            # It was stalled after the end of its last reply, and has ended by itself.
            assert self.done
        if number == signal.SIGSTOP:
            # What a thread is sending still leaves.
            until(lambda: not runs(self.pid))

    @property
    def done(self) -> bool:
        """Whether the operation has ended."""
        return self._out.exists()

    @property
    def value(self) -> Any:
        """The operation's value, or the name of its exception."""
        return json.loads(self._out.read_text())

    @property
    def gone(self) -> bool:
        """Whether the process no longer exists."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        return False


class ChildProcesses:
    """Starts child processes by means of a fork server, since hundreds of them have to start in a few seconds.

    Args:
        url: the address that they connect to.
        folder: where they write their values.
        env: their environment.
    """

    def __init__(self, url: str, folder: Path, env: Mapping[str, str]) -> None:
        self._folder = folder
        self._fork_server = WarmPython([str(PROGRAM), url], stdin=PIPE, stderr=sys.stderr, text=True, env=env)
        self._started: list[ChildProcess] = []

    def start(self, operation: str, limit: int, size: int, kind: str = "dense") -> ChildProcess:
        """Starts a process that does one operation of `fork_server.operate`."""
        out = self._folder / f"out{len(self._started)}"
        task = {"operation": operation, "limit": limit, "size": size, "kind": kind, "out": str(out)}
        print(json.dumps(task), file=self._fork_server.stdin, flush=True)
        assert self._fork_server.stdout is not None
        self._started.append(ChildProcess(int(self._fork_server.stdout.readline()), out))
        return self._started[-1]

    def end(self) -> None:
        """Kills the remaining processes and the fork server."""
        for child in self._started:
            if not child.done and not child.gone:
                child.signal(signal.SIGKILL)
        assert self._fork_server.stdin is not None
        assert self._fork_server.stdout is not None
        self._fork_server.stdin.close()
        self._fork_server.stdout.close()
        self._fork_server.wait(20)
