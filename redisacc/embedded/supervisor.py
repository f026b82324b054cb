"""The shell process between this process and the server, which ends the server when this process is gone."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import subprocess
import time
from importlib import resources

from redisacc.embedded.data_directory import DataDirectory
from redisacc.errors import ServerError

__all__ = ["Supervisor"]

_log = logging.getLogger("redisacc")

# Seconds that the server has between SIGTERM and SIGKILL, a whole number. They start again while its snapshot grows.
GRACE = 10

# Seconds after which `end` kills a supervisor and a server that are still alive, unless a snapshot has grown meanwhile.
END_TIMEOUT = GRACE + 5.0

# Read once, with the Python code that knows its arguments. The shell gets the text and not the path: a shell reads its
# script line by line, so an upgrade of the package would change the script under a running one.
_SCRIPT = resources.files("redisacc.embedded").joinpath("supervisor.sh").read_text(encoding="utf-8")


class Supervisor:
    """A running `supervisor.sh`, and the socket whose closing tells it to end the server.

    The caller holds `forks.fork_lock`: a copy of the socket in a forked child would keep the server alive.

    Args:
        command: the server's command.
        directory: the working directory, which the supervisor removes after the server has ended if it is temporary.
        lock: descriptor that the server keeps open as long as it lives.
        log: descriptor of the server's standard output and standard error.
        environment: variables that are set unless this process has them already.

    Raises:
        OSError: the shell can't be started.
    """

    def __init__(
        self,
        command: list[str],
        *,
        directory: DataDirectory,
        lock: int,
        log: int,
        environment: dict[str, str],
    ) -> None:
        removed = str(directory.path) if directory.temporary else ""
        self._directory = directory
        self._socket, inherited = socket.socketpair()
        try:
            with inherited:
                self._process = subprocess.Popen(
                    ["/bin/sh", "-c", _SCRIPT, "redisacc", str(GRACE), removed, *command],
                    stdin=inherited.fileno(),
                    stdout=lock,
                    stderr=log,
                    cwd=directory.path,
                    env=environment | os.environ,
                    # Ctrl-C in the terminal is for the owner, which decides when the server ends.
                    start_new_session=True,
                )
        except BaseException:
            self._socket.close()
            raise

    @property
    def pid(self) -> int:
        """The process id of the supervisor, which is also the id of its session."""
        return self._process.pid

    def read_server_pid(self, timeout: float) -> int:
        """Returns the process id of the server, which the supervisor reports once.

        Raises:
            ServerError: the supervisor ended without reporting it, or didn't report it within `timeout` seconds.
        """
        self._socket.settimeout(timeout)
        text = b""
        try:
            while not text.endswith(b"\n"):
                received = self._socket.recv(64)
                if not received:
                    raise ServerError("the shell script that starts the server failed")
                text += received
        except OSError as error:
            raise ServerError(f"the shell script that starts the server does not answer: {error}") from error
        return int(text)

    def exit_status(self) -> int | None:
        """Returns the exit status of the server, or None while the supervisor is running."""
        return self._process.poll()

    def end(self) -> None:
        """Ends the server and blocks until it and the supervisor have ended. May be called more than once."""
        self._socket.close()
        saved = self._directory.unfinished_snapshot_bytes()
        while not self._ends_within(END_TIMEOUT):
            before, saved = saved, self._directory.unfinished_snapshot_bytes()
            if saved == before:
                _log.warning("the server's supervisor (process %d) does not end; killing its session", self.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                self._ends_within(math.inf)

    def wait(self) -> None:
        """Blocks until the server and the supervisor have ended."""
        self._ends_within(math.inf)

    def disown(self) -> None:
        """Lets go, in a forked child, of the socket and the process."""
        with contextlib.suppress(OSError):
            self._socket.close()
        # It isn't a child of this process: Popen would warn that it is still running, and try to wait for it.
        self._process.returncode = 0

    def _ends_within(self, timeout: float) -> bool:
        """Waits until the supervisor has ended. False if it is still running after `timeout` seconds.

        This doesn't use Popen.wait(): a Ctrl-C at the moment when Popen.poll() takes its lock leaves it locked for
        good, and wait() would block forever.
        """
        deadline = time.monotonic() + timeout
        while self._process.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                # Other code has waited for it, or the program ignores SIGCHLD.
                self._process.returncode = 0
                break
            if pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                break
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        return True
