"""How calls wait: for an answer, a message, a lock, or some seconds.

All of redisacc is written as blocking code. Wherever it has to wait, it asks the ``Waits`` of its transport. The one
for threads, ``BLOCKING``, blocks. The one for event loops (``redisacc/asyncio/_waits.py``) lets the loop run other
tasks meanwhile. So one copy of the protocol serves both.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from redisacc._clock import clock
from redisacc._redis import forks, sockets
from redisacc._redis.sockets import TICK, Connection

Value = TypeVar("Value")


class Alarm(Protocol):
    """Wakes one waiting call. Any thread may set it."""

    def set(self) -> None:
        """Wakes the waiting call, or the next one that waits."""

    def clear(self) -> None:
        """Resets the alarm."""

    def wait(self, timeout: float) -> object:
        """Waits until the alarm is set, and resets it; or for ``timeout`` seconds."""


class Event(Protocol):
    """A ``threading.Event``, or what replaces it on a loop: it wakes all calls that wait."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float) -> object: ...


class Turns(Protocol):
    """Limits how many calls use a connection at the same time. Those that wait are served in order of arrival."""

    def take(self) -> float:
        """Waits until it is the caller's turn. Returns for how many seconds, which are not the server's fault.

        Raises:
            SilentError: a call whose turn it was has found the server silent.
        """

    def give_back(self, *, silent: bool = False) -> None:
        """Ends the caller's turn.

        Args:
            silent: whether the server was silent. Calls that wait then fail as well, and not one after the other.
        """


class Waits(Protocol):
    """A way to wait.

    Attributes:
        opens_lanes: whether a large fetch may use several connections.
    """

    opens_lanes: bool

    def sleep(self, seconds: float) -> None:
        """Waits for some seconds."""

    def alarm(self) -> Alarm:
        """Returns a new alarm, which is not set."""

    def event(self) -> Event:
        """Returns a new event, which is not set."""

    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a new lock that may be held while its holder waits for the server. A forked child finds it free."""

    def turns(self, most: int | None) -> Turns | None:
        """Returns what limits how many calls use a node at the same time; None: nothing does.

        Args:
            most: how many connections it may have; None: as many as are needed.
        """

    def openings(self) -> Turns | None:
        """Returns what limits how many connections of a node are opened at the same time; None: nothing does."""

    def local(self) -> Any:
        """Returns a new namespace in which each caller, a thread or a task, sees its own values."""

    def connection_of(self, pooled: Any, tick: float = TICK) -> Connection:
        """Returns the way to use a connection of a client's pool."""

    def call(self, function: Callable[[], Value], discard: Callable[[Value], object] | None = None) -> Value:
        """Returns what a function returns that blocks in any case, such as a library's own.

        Args:
            function: the function. On a loop, a thread runs it.
            discard: gets the value if the caller was cancelled before it was there.
        """

    def start(self, run: Callable[[], object], name: str) -> None:
        """Lets a function run in the background.

        Raises:
            RuntimeError: the interpreter ends, or the machine has no thread left.
        """


class ThreadAlarm:
    """It is a ``threading.Event`` for one waiter, without the six Python calls of that."""

    def __init__(self) -> None:
        # Held, unless the alarm is set.
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wakes the waiting thread, or the next one that waits."""
        # RuntimeError: the alarm is set already.
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def clear(self) -> None:
        """Resets the alarm."""
        self._lock.acquire(blocking=False)

    def wait(self, timeout: float) -> None:
        """Blocks until the alarm is set, and resets it; or for ``timeout`` seconds."""
        self._lock.acquire(timeout=max(timeout, 0.0))


class _Blocking:
    """Blocks the thread of the caller."""

    opens_lanes = True

    def sleep(self, seconds: float) -> None:
        clock.sleep(seconds)

    def alarm(self) -> Alarm:
        return ThreadAlarm()

    def event(self) -> Event:
        return forks.event()

    def lock(self) -> contextlib.AbstractContextManager[Any]:
        return forks.lock()

    def turns(self, most: int | None) -> Turns | None:  # noqa: ARG002
        return None

    def openings(self) -> Turns | None:
        return None

    def local(self) -> Any:
        return threading.local()

    def connection_of(self, pooled: Any, tick: float = TICK) -> Connection:
        return sockets.connection_of(pooled, tick)

    def call(self, function: Callable[[], Value], discard: Callable[[Value], object] | None = None) -> Value:  # noqa: ARG002
        return function()

    def start(self, run: Callable[[], object], name: str) -> None:
        threading.Thread(target=run, name=name, daemon=True).start()


BLOCKING: Waits = _Blocking()


# How long to wait for a call before looking again, in seconds. Each call has its own limit.
_LOOK = 60.0


def in_parallel(calls: Sequence[Callable[[], Value]], waits: Waits) -> list[Value]:
    """Returns the values of all calls. The first runs in the caller itself.

    All of them have ended when this returns or raises one of their errors. Only an interrupt, such as Ctrl-C, leaves
    the others to themselves.

    Args:
        calls: the calls. They see no context variables of the caller.
        waits: how the caller waits.
    """
    values: list[Any] = [None] * len(calls)
    errors: list[Exception | None] = [None] * len(calls)

    def run(number: int, ended: Event | None = None) -> None:
        try:
            values[number] = calls[number]()
        except Exception as error:  # noqa: BLE001 - it is raised in the caller
            errors[number] = error
        finally:
            if ended is not None:
                ended.set()

    all_ended = []
    for number in range(1, len(calls)):
        ended = waits.event()
        waits.start(partial(run, number, ended), "redisacc-node")
        all_ended.append(ended)
    if calls:
        run(0)
    for ended in all_ended:
        while not ended.is_set():
            ended.wait(_LOOK)
    for error in errors:
        if error is not None:
            raise error
    return values
