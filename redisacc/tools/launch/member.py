"""One place of a run, and the processes that take it one after the other."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from redisacc._clock import clock
from redisacc._handles.environment import RESTARTED
from redisacc.tools.launch.lines import Lines
from redisacc.tools.launch.output import Output
from redisacc.tools.launch.restarts import Restarts

# Seconds that the children of a process have to end after the process itself has ended: first until SIGTERM has had an
# effect, then until SIGKILL has.
_LEFTOVER_GRACE = 2.0
_KILLED_GRACE = 1.0

# Bytes of one read; and the number of reads that empty the largest pipe of a usual system, 1 MiB.
_READ = 64 * 1024
_READS = 16


# Its environment holds passwords.
@dataclass(eq=False, repr=False)
class Member:
    """A place of the run, and the process that has it.

    The process leads a session and a process group of its own. So Ctrl-C in the terminal doesn't reach it, and a signal
    to the group reaches its children too. What it leaves of its group when it ends is ended, before the place is free
    for another process.

    Attributes:
        name: what people call it.
        command: the program and its arguments.
        environment: the variables of the process.
        restarts: what is known of its deaths.
        follows: whether the next process may follow one that this command has not started.
        tell: tells the guard of every process; 0 means there is none.
        prefix: the text in front of each of its lines.
        color: parameters of an escape sequence for the prefix.
        out: where the lines of its standard output go.
        err: where the lines of its standard error go.
        group: the process group of the process, as long as a member of the group is left; else 0.
        restart_at: the time of the monotonic clock at which the next process is to be started; None if none is.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    restarts: Restarts
    follows: bool
    tell: Callable[[int], None]
    prefix: str
    color: str
    out: Output
    err: Output

    def __post_init__(self) -> None:
        self.restart_at: float | None = None
        self.group = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._give_up_group_at = 0.0
        self._killed_group = False
        self._pipes: dict[int, tuple[Lines, Output]] = {}

    @property
    def running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process is not None

    @property
    def idle(self) -> bool:
        """Whether nothing is left of the last process: no child in its group, and nothing to read."""
        return self._process is None and not self.group and not self._pipes

    @property
    def leaving(self) -> bool:
        """Whether the process has ended, and something is left of it."""
        return self._process is None and not self.idle

    @property
    def pipes(self) -> Sequence[int]:
        """The descriptors from which `read` can read."""
        return list(self._pipes)

    @property
    def lived(self) -> float:
        """For how many seconds the process has lived."""
        return clock.now() - self._started

    def start(self) -> None:
        """Starts a process. The member must be idle.

        Raises:
            OSError: the program can't be executed, or the system has no room for another process.
        """
        self.restart_at = None
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as theirs:
            ends = []
            for output in (self.out, self.err):
                reader, writer = os.pipe()
                on_failure.callback(os.close, reader)
                theirs.callback(os.close, writer)
                ends.append((reader, writer, output))
            with warnings.catch_warnings():
                # Python warns that other threads may hold locks that the new process needs. The only threads here are
                # those of a linear algebra library, and the new process only tells the guard its number.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=ends[0][1],
                    stderr=ends[1][1],
                    env={**self.environment, RESTARTED: str(int(self.follows))},
                    start_new_session=True,
                    preexec_fn=lambda: self.tell(os.getpid()),  # noqa: PLW1509 - see above
                )
            on_failure.pop_all()
        self._started, self.follows = clock.now(), True
        self.group = self._process.pid
        self._killed_group = False
        self._pipes = {reader: (Lines(), output) for reader, _, output in ends}

    def signal(self, number: int) -> None:
        """Sends a signal to the process and its children."""
        if self.group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.group, number)

    def pass_on(self, number: int) -> None:
        """Sends a signal to the process alone: its children, such as those that load data, may not expect it."""
        if self._process is not None:
            self._process.send_signal(number)

    def read(self, descriptor: int) -> None:
        """Reads what has arrived in a pipe, which must be ready, and passes complete lines on."""
        lines, output = self._pipes[descriptor]
        data = os.read(descriptor, _READ)
        for line in lines.feed(data) if data else lines.end():
            output.put(self.prefix, self.color, line)
        if not data:
            self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        lines, output = self._pipes.pop(descriptor)
        for line in lines.end():
            output.put(self.prefix, self.color, line)
        os.close(descriptor)

    def take_status(self) -> int | None:
        """Returns, once, how the process has ended: its exit code, or the number of a signal, negative. Else None."""
        if self._process is None:
            return None
        status = self._process.poll()
        if status is not None:
            # Its last lines come before what is said about its end.
            self._read_the_rest()
            self._process = None
            # SIGTERM first: for example, Python's tracker of shared memory cleans up now, and ignores this signal.
            self.signal(signal.SIGTERM)
            self._give_up_group_at = clock.now() + _LEFTOVER_GRACE
        return status

    def _read_the_rest(self) -> None:
        for descriptor in self.pipes:
            # Bounded, because a child may never stop writing.
            for _ in range(_READS):
                if descriptor not in self._pipes or self._pipes[descriptor][1].full or not _readable(descriptor):
                    break
                self.read(descriptor)

    def clean_up(self) -> None:
        """Ends what is left of a process that has ended. Doesn't block: to be called until the member is idle."""
        if self._process is not None:
            return
        if self.group and self._group_gone():
            self.group = 0
            self.tell(0)
        if not self.group:
            for descriptor in self.pipes:
                # A process that still holds it has left the process group on purpose, so it is not ours to stop.
                if not _readable(descriptor):
                    self._close(descriptor)

    def _group_gone(self) -> bool:
        try:
            os.killpg(self.group, 0)
        except (ProcessLookupError, PermissionError):
            return True
        now = clock.now()
        if now >= self._give_up_group_at:
            if self._killed_group:
                # In a container whose first process waits for no orphans, they stay as zombies for ever.
                return True
            self.signal(signal.SIGKILL)
            self._killed_group = True
            self._give_up_group_at = now + _KILLED_GRACE
        return False


def _readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
