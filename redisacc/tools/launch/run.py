"""A run: its members, when it ends, and with which exit code."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import select
import signal
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import NamedTuple

from redisacc._clock import clock, durations
from redisacc._handles.environment import Place
from redisacc._text import MESSAGE, printable
from redisacc.embedded.guarded_process import Guard, status_text
from redisacc.tools.launch.member import Member
from redisacc.tools.launch.output import outputs
from redisacc.tools.launch.restarts import PERMANENT, Restarts

# A shell's exit code for a program that was ended by a signal is this plus the signal's number.
STOPPED_BY_SIGNAL = 128

# The signals that the processes get, which do not end the run.
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)

# CUDA reads it: the numbers or ids of the GPUs that a process may use, separated by commas.
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"

# Seconds between two looks at what nothing wakes this process for, usually and while something is about to end.
_TICK = 0.5
_SHORT_TICK = 0.02

_OWN_NAME = "redisacc"
_OWN_COLOR = "1"
_CHIEF_COLOR = "1;35"
# Not red, which looks like an error.
_WORKER_COLORS = ("36", "32", "33", "34", "96", "92", "93", "94")


class CannotStartError(Exception):
    """A process can't be started. Its text says which one and why.

    Attributes:
        exit_code: what a shell returns if it can't execute a command.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Look(NamedTuple):
    """What a look at something that a run depends on has found.

    Attributes:
        text: a line for people.
        code: the exit code of the run if it has to end; None if it continues. With 0, its processes get time to end by
            themselves.
    """

    text: str
    code: int | None = None


def places(*, chief: bool, workers: int, first_worker: int, total_workers: int | None) -> list[Place]:
    """Returns the places of the run on this machine, each with a new id."""

    def run_id() -> str:
        return secrets.token_hex(16)

    chief_run_id = run_id() if chief else None
    numbers = range(first_worker, first_worker + workers)
    return [Place("chief", None, total_workers, chief_run_id)] * chief + [
        Place("worker", number, total_workers, run_id(), chief_run_id) for number in numbers
    ]


def gpus_of(local: tuple[int, int] | None, gpus: int, visible: str) -> str:
    """Returns which GPUs a worker may use: each has one or more if there are enough, else several share one.

    Args:
        local: which worker of this machine it is, from 0, and how many there are; a chief, which has none, may use no
            GPU.
        gpus: how many GPUs the workers of this machine share.
        visible: the GPUs that this process may use, as the variable lists them; "": all.
    """
    if local is None:
        return ""
    number, workers = local
    listed = visible.split(",") if visible else list(map(str, range(gpus)))
    return ",".join(listed[number:gpus:workers] or [listed[number % gpus]])


class Run:
    """The processes of a run on this machine. Call `wait` once.

    Args:
        members: their places; at most one is the chief's.
        command: the program of every process, and its arguments.
        environment: the variables of every process, except the ones that name its place.
        gpus: how many GPUs the workers share; None means each process may use all.
        ranks: whether workers get torchrun's variables.
        restarts: returns what is known of the deaths of a process, which are none yet.
        follows: whether the run had begun before, so that data of it may be lost.
        give_up_on: exit codes after which no process is started again.
        grace: seconds that workers have to end after the chief has finished, and that every process has between SIGTERM
            and SIGKILL.
        companions: further processes by their names, and the command of each. They run as long as the others do, and
            nothing depends on them.

    Attributes:
        is_stopped: whether somebody has stopped it, by a signal or by not reading its output.
        look: called now and then; returns what there is to say of something else that the run depends on, such as its
            server, and whether the run has to end because of it. To be set before `wait`.
    """

    def __init__(
        self,
        members: Sequence[Place],
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        gpus: int | None = None,
        ranks: bool = False,
        restarts: Callable[[], Restarts],
        follows: bool = False,
        give_up_on: Collection[int] = PERMANENT,
        grace: float,
        companions: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self.is_stopped = False
        self._restarts, self._follows = restarts, follows
        self._give_up_on = give_up_on
        self._grace = grace
        self.look: Callable[[], Look | None] = lambda: None
        self._out, self._err = outputs(os.environ)
        self._width = max(len(_OWN_NAME), *(len(str(place)) for place in members), *map(len, companions))
        self._guard = Guard(math.ceil(grace))
        self._members: list[Member] = []
        self._chief: Member | None = None
        # The workers that have ended with 0 since that was last said, and when to say it.
        self._early: list[str] = []
        self._say_early_at = 0.0
        workers = [place for place in members if place.role != "chief"]
        for place in members:
            is_chief = place.role == "chief"
            local = None if is_chief else (workers.index(place), len(workers))
            variables = place.added_to(environment, local if ranks else None)
            if gpus is not None:
                variables[VISIBLE_GPUS] = gpus_of(local, gpus, environment.get(VISIBLE_GPUS, ""))
            color = _CHIEF_COLOR if is_chief else _WORKER_COLORS[(place.number or 0) % len(_WORKER_COLORS)]
            member = self._add(str(place), command, variables, color)
            if is_chief:
                self._chief = member
        # Those on which the run depends.
        self._main = list(self._members)
        self._companions = [
            self._add(name, its_command, environment, _OWN_COLOR) for name, its_command in companions.items()
        ]
        # The exit code, once the run is ending. From then on nothing is started.
        self._code: int | None = None
        self._failed: CannotStartError | None = None
        # Whether the workers may end by themselves until `_terminate_at`.
        self._patient = False
        self._terminate_at: float | None = None
        self._kill_at: float | None = None
        self._unwritable = False
        self._signals: list[int] = []
        # The signal that processes get first when the run ends: SIGHUP if that has ended it.
        self._ends_with: int = signal.SIGTERM
        self._interrupted = False
        self._woken: socket.socket | None = None

    def _add(self, name: str, command: Sequence[str], environment: Mapping[str, str], color: str) -> Member:
        slot = len(self._members)
        member = Member(
            name,
            command,
            environment,
            restarts=self._restarts(),
            follows=self._follows,
            # The guard may be replaced.
            tell=lambda process: self._guard.tell(slot, process),
            prefix=self._prefix(name),
            color=color,
            out=self._out,
            err=self._err,
        )
        self._members.append(member)
        return member

    def wait(self) -> int:
        """Starts the processes and blocks until all of them have ended. Returns the exit code of the run.

        It is 0 once the chief, or without a chief every worker, has ended with 0. A process that is given up ends the
        run with its exit code, and a signal with 128 plus its number.

        Raises:
            CannotStartError: a process can't be started. All others have ended.
        """
        try:
            with self._signals_wake_it():
                for member in self._members:
                    if self._code is None:
                        self._start(member)
                while not self._finished():
                    self._sleep_and_read()
                    self._handle_signals()
                    self._look_at_members()
                    self._look_at_server_and_guard()
                    self._say_who_ended_early()
                    self._flush()
                    self._hurry()
        finally:
            # Usually nothing is left; this is for an error of ours.
            for member in self._members:
                member.signal(signal.SIGKILL)
            self._guard.close()
        if self._failed is not None:
            raise self._failed
        return self._code or 0

    # Waiting

    @contextlib.contextmanager
    def _signals_wake_it(self) -> Iterator[None]:
        def note(number: int, _frame: FrameType | None) -> None:
            self._signals.append(number)

        handlers = {signal.SIGTERM: note, signal.SIGCHLD: lambda *_: None}
        for number in (signal.SIGINT, signal.SIGHUP, *PASSED_ON):
            # Under nohup, SIGHUP stays ignored; so does Ctrl-C in a shell's background job.
            if signal.getsignal(number) is not signal.SIG_IGN:
                handlers[number] = note
        self._woken, writer = socket.socketpair()
        with self._woken, writer:
            self._woken.setblocking(False)
            writer.setblocking(False)
            before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
            previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(previous)
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _sleep_and_read(self) -> None:
        assert self._woken is not None
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        # While the output takes nothing, neither do we, so that memory stays bounded; the processes wait as well.
        if not self._out.full and not self._err.full:
            for member in self._members:
                for descriptor in member.pipes:
                    poll.register(descriptor, select.POLLIN)
        for output in {self._out, self._err}:
            if not output.empty:
                poll.register(output.descriptor, select.POLLOUT)
        now = clock.now()
        deadlines = [now + (_SHORT_TICK if any(member.leaving for member in self._members) else _TICK)]
        deadlines += [member.restart_at for member in self._members if member.restart_at is not None]
        deadlines += [moment for moment in (self._terminate_at, self._kill_at) if moment is not None]
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, min(deadlines) - now) * 1000)}
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        for member in self._members:
            for descriptor in ready.intersection(member.pipes):
                if not self._out.full and not self._err.full:
                    member.read(descriptor)

    def _flush(self) -> None:
        for output in {self._out, self._err}:
            try:
                output.flush()
            except OSError as error:
                # The reader is gone. Like any other program, the run ends.
                output.discard()
                self.is_stopped = self.is_stopped or self._code is None
                if error.errno not in (errno.EPIPE, errno.EIO):
                    self._end(1)
                    if output is not self._err and not self._unwritable:
                        self.say(f"cannot write the output ({error.strerror}); the run ends")
                else:
                    self._end(STOPPED_BY_SIGNAL + signal.SIGPIPE)
                self._unwritable = True

    # Members

    def _start(self, member: Member) -> None:
        if not self._guard.alive:
            self._replace_guard()
        try:
            member.start()
        except OSError as error:
            code = {errno.ENOENT: 127, errno.EACCES: 126, errno.ENOEXEC: 126}.get(error.errno or 0, 1)
            self._failed = CannotStartError(f"cannot start {member.name}: {error.strerror or error}", code)
            self._end(code)

    def _look_at_members(self) -> None:
        for member in self._members:
            status = member.take_status()
            if status is not None:
                self._ended(member, status)
            member.clean_up()
            if member.restart_at is not None and clock.now() >= member.restart_at and member.idle:
                self._start(member)

    def _ended(self, member: Member, status: int) -> None:
        code = STOPPED_BY_SIGNAL - status if status < 0 else status
        if self._code is not None:
            return
        is_companion = member in self._companions
        if status == 0 and not is_companion:
            self._finished_by_itself(member)
            return
        how = status_text(status)
        if status in self._give_up_on and not is_companion:
            self.say(
                f"{member.name} {how}: it would fail again, so it is not restarted (--give-up-on), and the run "
                "ends. Its output above may say why"
            )
            self._end(code)
            return
        pause = member.restarts.pause_after(member.lived, clock.now())
        if pause is not None:
            self.say(f"{member.name} {how}; it restarts{f' in {pause:g} s' if pause else ''}")
            member.restart_at = clock.now() + pause
            return
        if is_companion:
            self.say(f"{member.name} {how} too often; the run continues without it")
            return
        deaths = member.restarts.deaths
        often = "" if deaths == 1 else f", failure number {deaths} within an hour"
        self.say(
            f"{member.name} {how}{often}; the run ends with exit code {code}. Its output above may say why. "
            "--restarts allows more failures"
        )
        self._end(code)

    def _finished_by_itself(self, member: Member) -> None:
        if member is self._chief:
            # The loops of the workers end as well, once they see that the chief has finished.
            self._end(0, patience=self._grace)
        elif self._chief is None and not self._still_there:
            self._end(0)
        else:
            self._say_early_at = self._say_early_at if self._early else clock.now() + durations.report
            self._early.append(member.name)

    @property
    def _still_there(self) -> list[str]:
        """The names of the members that run, or are to be started again."""
        return [other.name for other in self._main if other.running or other.restart_at is not None]

    def _say_who_ended_early(self) -> None:
        """Says which workers have ended with 0, if others still run after a while: at the end of a run, all end."""
        if self._early and self._code is None and clock.now() >= self._say_early_at:
            names, self._early = ", ".join(self._early), []
            there = ", ".join(self._still_there)
            self.say(f"{names} ended with exit code 0, which is final. Still there: {there}")

    def _look_at_server_and_guard(self) -> None:
        if not self._guard.alive:
            self._replace_guard()
        while self._code is None and (found := self.look()) is not None:
            self.say(found.text)
            if found.code is not None:
                self._end(found.code, patience=0.0 if found.code else self._grace)

    def _replace_guard(self) -> None:
        leaders = {slot: member.group for slot, member in enumerate(self._members)}
        before, self._guard = self._guard, Guard(math.ceil(self._grace), leaders)
        before.close()

    # The end

    def _handle_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number in PASSED_ON:
                for member in self._main:
                    member.pass_on(number)
                continue
            if number == signal.SIGHUP:
                self._ends_with = number
            self.is_stopped = self.is_stopped or self._code is None
            self._end(STOPPED_BY_SIGNAL + number)
            # A terminal that is closed sends SIGHUP more than once, so only Ctrl-C counts as impatience.
            if number != signal.SIGINT:
                continue
            if self._interrupted:
                self._terminate_at, self._kill_at = None, 0.0
            else:
                self._interrupted = True
                self.say("stopping; Ctrl-C again kills what still runs")

    def _end(self, code: int, *, patience: float = 0.0) -> None:
        """Ends the run: nothing is started any more, and what runs gets a signal when the patience is exhausted."""
        if self._code is None:
            self._code = code
        for member in self._members:
            member.restart_at = None
        if self._kill_at is None:
            self._patient = patience > 0
            self._terminate_at = clock.now() + patience

    def _hurry(self) -> None:
        """Sends the signals that are due."""
        now = clock.now()
        if self._terminate_at is not None and self._companions and all(member.idle for member in self._main):
            self._terminate_at = now
        if self._terminate_at is not None and now >= self._terminate_at:
            late = [member.name for member in self._main if member.running]
            if self._patient and late:
                whose = "run" if self._chief is None else "chief"
                self.say(
                    f"{self._grace:g} s after the end of the {whose}, still running and stopped: {', '.join(late)}"
                )
            for member in self._members:
                member.signal(self._ends_with)
            self._terminate_at, self._kill_at = None, now + self._grace
        if self._kill_at is not None and now >= self._kill_at:
            for member in self._members:
                member.signal(signal.SIGKILL)
            # Nobody has read the last lines within the time.
            for output in (self._out, self._err):
                output.discard()
            self._kill_at = now + _TICK

    def _finished(self) -> bool:
        return (
            self._code is not None
            and all(member.idle for member in self._members)
            and self._out.empty
            and self._err.empty
        )

    # Messages

    def _prefix(self, name: str) -> str:
        return name.ljust(self._width) + " |"

    def say(self, text: str) -> None:
        """Writes a line of its own to standard error, between the lines of its processes."""
        self._err.put(self._prefix(_OWN_NAME), _OWN_COLOR, printable(text, MESSAGE).encode())
