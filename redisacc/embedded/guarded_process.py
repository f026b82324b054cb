"""The process of a server, and the shell script that ends it when this process is gone."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from redisacc._clock import durations
from redisacc.embedded.data_directory import DataDirectory

__all__ = ["GuardedProcess", "status_text"]

_log = logging.getLogger("redisacc")

_SCRIPT = Path(__file__).with_name("guard.sh")


class GuardedProcess:
    """A running server, and a running `guard.sh` that ends it when the owner's end of a socket pair is closed.

    The guard is started first and leads a process group, which the server joins before it is executed. So if the owner
    is killed at any moment, the guard finds the server in its group. Ctrl-C in the terminal reaches neither of them: it
    is for the owner, which decides when the server ends.

    The caller holds `forks.fork_lock`, because a copy of the socket in a forked child would keep the server alive, and
    defers signal handlers, because one that raises inside `Popen` loses the process id.

    Args:
        command: the server's command.
        directory: the working directory, which the guard removes after the server has ended if it is temporary.
        lock: descriptor that the server keeps open as long as it lives, so that the directory stays locked for as long
            as any process can write into it.
        log: descriptor of the server's standard output and standard error.
        environment: variables that are set unless this process has them already.
        written: what the server reads from its standard input, less than a pipe holds. None: it has none.

    Raises:
        OSError: the shell or the server can't be started.
    """

    def __init__(
        self,
        command: list[str],
        *,
        directory: DataDirectory,
        lock: int,
        log: int,
        environment: dict[str, str],
        written: bytes | None = None,
    ) -> None:
        removed = str(directory.path) if directory.temporary else ""
        self._directory = directory
        self._socket, inherited = socket.socketpair()
        try:
            with inherited:
                self._guard = subprocess.Popen(
                    ["/bin/sh", str(_SCRIPT), str(math.ceil(durations.ending)), removed],
                    stdin=inherited.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=directory.path,
                    process_group=0,
                )
            with _input(written) as stdin:
                self._server = subprocess.Popen(
                    command,
                    stdin=stdin,
                    stdout=log,
                    stderr=log,
                    cwd=directory.path,
                    env=environment | os.environ,
                    pass_fds=[lock],
                    process_group=self._guard.pid,
                )
            self._socket.sendall(b"%d\n" % self._server.pid)
        except BaseException:
            # The guard kills what has joined its group.
            self._socket.close()
            for process in (getattr(self, "_guard", None), getattr(self, "_server", None)):
                if process is not None:
                    _ends_within(process, math.inf)
            raise

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._server.pid

    @property
    def guard_pid(self) -> int:
        """The process id of the guard, which is also the id of their process group."""
        return self._guard.pid

    def exit_status(self) -> int | None:
        """Returns the exit status of the server, negative for a signal, or None while it is running."""
        status = self._server.poll()
        if status is None and self._guard.poll() is not None:
            # The guard was killed. The server would outlive an owner that is killed.
            self._signal(signal.SIGTERM)
        return status

    def end(self) -> None:
        """Ends the server and its guard, and blocks until both have ended. May be called more than once."""
        if self.exit_status() is None:
            self._signal(signal.SIGTERM)
        saved = self._directory.unfinished_snapshot_bytes()
        while not _ends_within(self._server, durations.ending):
            before, saved = saved, self._directory.unfinished_snapshot_bytes()
            if saved == before:
                _log.warning("the server (process %d) does not end; killing it", self.pid)
                self._signal(signal.SIGKILL)
                _ends_within(self._server, math.inf)
        with contextlib.suppress(OSError):
            self._socket.sendall(b"\n")
        self._socket.close()
        _ends_within(self._guard, math.inf)

    def wait(self) -> None:
        """Blocks until the server has ended."""
        _ends_within(self._server, math.inf)

    def disown(self) -> None:
        """Lets go, in a forked child, of the socket and the processes."""
        with contextlib.suppress(OSError):
            self._socket.close()
        # They aren't children of this process: Popen would warn that they are still running, and try to wait for them.
        self._guard.returncode = self._server.returncode = 0

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


@contextlib.contextmanager
def _input(written: bytes | None) -> Iterator[int]:
    """Provides a standard input that holds these bytes, during a block."""
    if written is None:
        yield subprocess.DEVNULL
        return
    reader, writer = os.pipe()
    try:
        try:
            os.write(writer, written)
        finally:
            os.close(writer)
        yield reader
    finally:
        os.close(reader)


def status_text(status: int) -> str:
    """Returns a clause for an exit status, such as "ended with exit status 1" or "was killed by SIGKILL"."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _ends_within(process: subprocess.Popen[bytes], timeout: float) -> bool:
    """Waits until a process has ended. False if it is still running after `timeout` seconds.

    This doesn't use Popen.wait(): a Ctrl-C at the moment when Popen.poll() takes its lock leaves it locked for good,
    and wait() would block forever.
    """
    deadline = time.monotonic() + timeout
    while process.returncode is None:
        try:
            pid, status = os.waitpid(process.pid, os.WNOHANG)
        except ChildProcessError:
            # Other code has waited for it, or the program ignores SIGCHLD.
            process.returncode = 0
            break
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            break
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.005)
    return True
