"""How calls wait: for an answer, a message, a lock, or some seconds.

All of redisacc is written as blocking code. Wherever it has to wait, it asks the ``Waits`` of its transport. The one
for threads, ``BLOCKING``, blocks. The one for event loops (``redisacc/asyncio/_waits.py``) lets the loop run other
tasks meanwhile. So one copy of everything serves both: what is sent, how replies are read, what is sent again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from redisacc._clock import clock
from redisacc._wire import forks
from redisacc._wire.clients import Endpoint
from redisacc._wire.sockets import Connection, connection_of

Value = TypeVar("Value")

# How long to wait for a call before looking again, in seconds. Each call has its own limit.
_LOOK = 60.0


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
    """Limits how many calls use something at the same time. Those that wait are served in order of arrival."""

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


class Waits:
    """A way to wait. This one blocks the thread of the caller.

    Attributes:
        opens_lanes: whether a large fetch may use several connections.
    """

    opens_lanes: bool = True

    def sleep(self, seconds: float) -> None:
        """Waits for some seconds."""
        clock.sleep(seconds)

    def alarm(self) -> Alarm:
        """Returns a new alarm, which is not set."""
        return ThreadAlarm()

    def event(self) -> Event:
        """Returns a new event, which is not set."""
        return forks.event()

    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a new lock that may be held while its holder waits for the server. A forked child finds it free."""
        return forks.lock()

    def turns(self, most: int | None) -> Turns | None:  # noqa: ARG002
        """Returns what limits how many calls use a node at the same time; None means nothing does.

        Args:
            most: how many connections it may have; None means as many as are needed.
        """
        return None

    def local(self) -> Any:
        """Returns a new namespace in which each caller, a thread or a task, sees its own values."""
        return threading.local()

    def open(self, endpoint: Endpoint, tick: float) -> Connection:
        """Returns a new connection.

        Args:
            endpoint: where it leads.
            tick: by how many seconds it may notice too late that a deadline has passed.
        """
        return connection_of(endpoint.open(), tick)

    def call(self, function: Callable[[], Value]) -> Value:
        """Returns what a function returns that blocks in any case, such as a library's own; on a loop, by a thread."""
        return function()

    def start(self, run: Callable[[], object], name: str) -> None:
        """Lets a function run in the background.

        Raises:
            RuntimeError: the interpreter ends, or the machine has no thread left.
        """
        threading.Thread(target=run, name=name, daemon=True).start()


BLOCKING = Waits()


def in_parallel(calls: Sequence[Callable[[], Value]], waits: Waits) -> list[Value]:
    """Returns the values of all calls. The first runs in the caller itself.

    All of them have ended when this returns or raises one of their errors. Only an interrupt, such as Ctrl-C, leaves
    the others to themselves.

    Args:
        calls: the calls. They see no context variables of the caller.
        waits: how the caller waits.
    """
    values: list[Any] = [None] * len(calls)
    errors: list[Exception] = []
    ends = [waits.event() for _ in calls]

    def run(number: int) -> None:
        try:
            values[number] = calls[number]()
        except Exception as error:  # noqa: BLE001 - it is raised in the caller
            errors.append(error)
        finally:
            ends[number].set()

    for number in range(1, len(calls)):
        waits.start(partial(run, number), "redisacc-node")
    if calls:
        run(0)
    for end in ends:
        while not end.is_set():
            end.wait(_LOOK)
    if errors:
        raise errors[0]
    return values
