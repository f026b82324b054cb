"""The process of a server, and the shell script that ends processes when the process that started them is gone."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from redisacc._clock import durations
from redisacc.embedded.data_directory import DataDirectory

__all__ = ["Guard", "GuardedProcess", "status_text"]

_log = logging.getLogger("redisacc")

_SCRIPT = Path(__file__).with_name("guard.sh")
# The pipe to the guard is the standard output, so that the server doesn't keep it.
_TELL_AND_EXECUTE = 'echo "0 $$" && exec "$@" >&2'


class Guard:
    """A running `guard.sh`, which ends processes and their children when this process is gone.

    Ctrl-C in the terminal doesn't reach it.

    Args:
        grace: whole seconds that the processes have between SIGTERM and SIGKILL.
        leaders: the processes that are there already, by slot. It knows them from its first moment on.
        directory: its working directory, where servers save their snapshots. None means this process's.
        temporary: whether it removes the directory once the processes have ended.

    Raises:
        OSError: it can't be started.
    """

    def __init__(
        self,
        grace: int,
        leaders: Mapping[int, int] = MappingProxyType({}),
        *,
        directory: Path | None = None,
        temporary: bool = False,
    ) -> None:
        reader, self.writer = os.pipe()
        try:
            for slot, pid in leaders.items():
                self.tell(slot, pid)
            self.process = subprocess.Popen(
                ["/bin/sh", str(_SCRIPT), str(grace), str(directory) if temporary else ""],
                stdin=reader,
                # The guard outlives its owner. A reader of the owner's output must not have to wait for it as well.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=directory,
                start_new_session=True,
            )
        except BaseException:
            os.close(self.writer)
            raise
        finally:
            os.close(reader)

    @property
    def alive(self) -> bool:
        """Whether it is running."""
        return self.process.poll() is None

    def tell(self, slot: int, pid: int) -> None:
        """Tells the guard that a process, which leads a process group, has a slot from now on; with 0, that none has.

        A new process does this itself, before it becomes the program that it is to run. So if the owner is killed, the
        guard knows every process: it sees the end of the file only when no new process has the pipe any more.

        If the guard is gone, nothing happens. The owner will notice.
        """
        with contextlib.suppress(BrokenPipeError):
            # Shorter than PIPE_BUF, so it is written whole.
            os.write(self.writer, b"%d %d\n" % (slot, pid))

    def close(self) -> None:
        """Ends the guard, and whatever it still knows of. Blocks until it has ended. May be called more than once."""
        self._release()
        _ends_within(self.process, math.inf)

    def disown(self) -> None:
        """Lets go, in a forked child, of the pipe and the guard."""
        self._release()
        self.process.returncode = 0

    def _release(self) -> None:
        writer, self.writer = self.writer, -1
        if writer >= 0:
            os.close(writer)


class GuardedProcess:
    """A running server, and the guard that ends it when this process is gone.

    The server leads a process group, so Ctrl-C in the terminal doesn't reach it. The owner decides when it ends.

    The caller holds `forks.fork_lock`, because a copy of the pipe in a forked child would keep the server alive, and
    defers signal handlers, because one that raises inside `Popen` loses the process id.

    Args:
        command: the server's command.
        directory: the working directory, which the guard removes after the server has ended if it is temporary.
        lock: descriptor that the server keeps open as long as it lives, so that the directory stays locked for as long
            as any process can write into it.
        log: descriptor of the server's standard output and standard error.
        environment: variables that are set unless this process has them already.
        written: what the server reads from its standard input, less than a pipe holds.

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
        written: bytes,
    ) -> None:
        self._directory = directory
        self.guard = Guard(math.ceil(durations.ending), directory=directory.path, temporary=directory.temporary)
        try:
            reader, writer = os.pipe()
            with open(reader) as stdin:
                with open(writer, "wb") as file:
                    file.write(written)
                self._server = subprocess.Popen(
                    ["/bin/sh", "-c", _TELL_AND_EXECUTE, "sh", *command],
                    stdin=stdin,
                    stdout=self.guard.writer,
                    stderr=log,
                    cwd=directory.path,
                    env=environment | os.environ,
                    pass_fds=[lock],
                    process_group=0,
                )
        except BaseException:
            self.guard.close()
            raise
        self._leads = True

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._server.pid

    def exit_status(self) -> int | None:
        """Returns the exit status of the server, negative for a signal, or None while it is running."""
        status = self._server.poll()
        if status is None:
            if not self.guard.alive:
                # The guard was killed. The server would outlive an owner that is killed.
                self._signal(signal.SIGTERM)
        elif self._leads:
            # A killed server leaves a child that saves a snapshot, and keeps the directory locked meanwhile. Later, the
            # number of the group may be somebody else's.
            self._leads = False
            self._signal(signal.SIGKILL)
            self.guard.tell(0, 0)
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
                self.wait()
        self.exit_status()
        self.guard.close()

    def wait(self) -> None:
        """Blocks until the server has ended."""
        _ends_within(self._server, math.inf)

    def disown(self) -> None:
        """Lets go, in a forked child, of the pipe and the processes."""
        self.guard.disown()
        # It isn't a child of this process: Popen would warn that it is still running, and try to wait for it.
        self._server.returncode = 0

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def status_text(status: int) -> str:
    """Returns a clause for an exit status, such as "ended with exit code 1" or "was killed by SIGKILL"."""
    if status >= 0:
        return f"ended with exit code {status}"
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
