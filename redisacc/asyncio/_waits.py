"""How calls wait on an event loop: other tasks run meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import ssl
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from redisacc._clock import running_time
from redisacc._interrupts import suppressed
from redisacc._wire.clients import Endpoint, disconnect, translated
from redisacc._wire.faults import SilentError
from redisacc._wire.sockets import Connection
from redisacc._wire.waits import Waits
from redisacc.asyncio import _calls
from redisacc.asyncio._errors import OutcomeUnknownError
from redisacc.asyncio._sockets import Clock, LoopConnection, LoopTlsConnection
from redisacc.errors import OutcomeUnknownError as BlockingOutcomeUnknownError
from redisacc.errors import RedisAccError

logger = logging.getLogger("redisacc")

Value = TypeVar("Value")

# How many connections a node has at most for the calls of a loop. All calls share one thread, so more would not be
# faster, and a thousand takes that poll once a second are served by far fewer.
CONNECTIONS = 16
# How many of them are opened at the same time. redis-py blocks while it opens one, so a thread of the loop's executor
# does it, and by default that has only five threads on a machine with one processor. If the server is silent, openings
# that waited for a thread would end seconds after the first ones.
OPENINGS = 4


class LoopWaits(Waits):
    """Lets an event loop run other tasks. It belongs to the loop that runs when it is made.

    Attributes:
        loop: the event loop.
        call_later: its method of that name, by which calls wait.
    """

    opens_lanes = False

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.call_later = self.loop.call_later
        self._thread = threading.get_ident()
        self._pid = os.getpid()
        self._tasks: set[asyncio.Task[None]] = set()
        self._clock = Clock(self.loop)
        self._runner = _calls.Calls()
        self._calls = 0
        self._is_idle = asyncio.Event()
        self._openings: defaultdict[str, LoopTurns] = defaultdict(partial(LoopTurns, self.loop, OPENINGS))

    # For tasks

    async def run(self, function: Callable[[], Value]) -> Value:
        """Returns what blocking code returns, which waits by this object.

        Raises:
            RedisAccError: another loop is running.
            OutcomeUnknownError: the code has raised that. Its ``settle()`` is to be awaited.
        """
        if asyncio.get_running_loop() is not self.loop or os.getpid() != self._pid:
            raise RedisAccError(
                "this handle belongs to another event loop, or to a parent of this process: open one on this loop"
            )
        self._calls += 1
        self._is_idle.clear()
        try:
            return await self._runner.run(function)
        except BlockingOutcomeUnknownError as error:
            raise OutcomeUnknownError(str(error), error.settle, self.run) from error
        finally:
            self._calls -= 1
            if not self._calls:
                self._is_idle.set()

    async def close(self) -> None:
        """Waits for calls that are ending, and ends what runs in the background."""
        if self._calls:
            with suppressed(TimeoutError):
                async with asyncio.timeout(_calls.CLEAN_UP):
                    await self._is_idle.wait()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def is_here(self) -> bool:
        """Returns whether the caller is in the thread of the loop."""
        return threading.get_ident() == self._thread

    # For calls

    def sleep(self, seconds: float) -> None:
        future = self.loop.create_future()
        timer = self.call_later(seconds, _finish, future)
        try:
            _calls.wait(future)
        finally:
            timer.cancel()

    def alarm(self) -> LoopAlarm:
        return LoopAlarm(self)

    def event(self) -> LoopEvent:
        return LoopEvent(self)

    def lock(self) -> LoopTurns:
        return LoopTurns(self.loop, 1)

    def turns(self, most: int | None) -> LoopTurns:
        # One is left to listen on.
        return LoopTurns(self.loop, CONNECTIONS if most is None else max(1, min(most - 1, CONNECTIONS)))

    def local(self) -> TaskLocal:
        return TaskLocal()

    def open(self, endpoint: Endpoint, tick: float) -> Connection:
        openings = self._openings[endpoint.address]
        openings.take()
        try:
            with translated():
                pooled = self.call(endpoint.open, disconnect)
        except BaseException as error:
            openings.give_back(silent=isinstance(error, SilentError))
            raise
        openings.give_back()
        kind = LoopTlsConnection if isinstance(pooled._sock, ssl.SSLSocket) else LoopConnection
        return kind(pooled, pooled._sock, self.loop, self._clock, tick)

    def call(self, function: Callable[[], Value], discard: Callable[[Value], object] | None = None) -> Value:
        # ``discard`` gets the value if the caller was cancelled before it was there.
        if not _calls.is_call():
            # Whatever ends an object that was never closed: it cannot await.
            return function()
        handover = _Handover(function, discard)
        future = self.loop.run_in_executor(None, contextvars.copy_context().run, handover.work)
        try:
            value: Value = _calls.wait(future)
        except BaseException:
            handover.decline()
            raise
        return value

    def start(self, run: Callable[[], object], name: str) -> None:
        # Like a thread, it begins with nothing that its starter has set.
        # Not create_task: an eager factory would run it now, in this greenlet, where the caller may hold a lock.
        task = asyncio.Task(self._background(run, name), loop=self.loop, name=name, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _background(self, run: Callable[[], object], name: str) -> None:
        try:
            await self._runner.run(run)
        except Exception:
            logger.exception("%s failed", name)


def _finish(future: asyncio.Future[Any], value: object = None) -> None:
    if not future.done():
        future.set_result(value)


class _Handover(Generic[Value]):
    """Hands the value of a function, which a thread runs, to a caller who may decline it at any moment.

    Args:
        function: the function.
        discard: gets the value if the caller has declined it.
    """

    def __init__(self, function: Callable[[], Value], discard: Callable[[Value], object] | None) -> None:
        self._function = function
        self._discard = discard
        self._lock = threading.Lock()
        self._is_declined = False
        self._value: list[Value] = []

    def work(self) -> Value:
        """Runs the function."""
        value = self._function()
        with self._lock:
            self._value.append(value)
            self._discard_if_declined()
        return value

    def decline(self) -> None:
        """Declines the value, also one that is on its way."""
        with self._lock:
            self._is_declined = True
            self._discard_if_declined()

    def _discard_if_declined(self) -> None:
        if self._is_declined and self._value and self._discard is not None:
            self._discard(self._value.pop())


class LoopEvent:
    """A ``threading.Event`` for calls on a loop. Any thread may set it."""

    def __init__(self, waits: LoopWaits) -> None:
        self._waits = waits
        self._is_set = False
        self._waiting: set[asyncio.Future[None]] = set()

    def set(self) -> None:
        """Wakes all calls that wait."""
        self._is_set = True
        if self._waits.is_here():
            self._wake()
            return
        # The loop may be closed by now.
        with contextlib.suppress(RuntimeError):
            self._waits.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for future in self._waiting:
            _finish(future)

    def clear(self) -> None:
        """Resets the event."""
        self._is_set = False

    def is_set(self) -> bool:
        """Returns whether the event is set."""
        return self._is_set

    def wait(self, timeout: float) -> bool:
        """Waits until the event is set, or for ``timeout`` seconds. Returns whether it is set."""
        if not self._is_set:
            future = self._waits.loop.create_future()
            timer = self._waits.call_later(max(timeout, 0.0), _finish, future)
            self._waiting.add(future)
            try:
                _calls.wait(future)
            finally:
                timer.cancel()
                self._waiting.discard(future)
        return self._is_set


class LoopAlarm(LoopEvent):
    """Wakes one waiting call. Any thread may set it."""

    def wait(self, timeout: float) -> bool:
        """Waits until the alarm is set, and resets it; or for ``timeout`` seconds. Returns whether it was set."""
        was_set = super().wait(timeout)
        self._is_set = False
        return was_set


class LoopTurns:
    """Lets some calls at a time do something. Those that wait are served in order of arrival.

    Args:
        loop: the event loop.
        number: how many.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        self._loop = loop
        self._free = number
        self._queue: deque[asyncio.Future[bool]] = deque()

    def take(self) -> float:
        """Waits until it is the caller's turn. Returns for how many seconds, which are not the server's fault.

        Raises:
            SilentError: a call whose turn it was has found the server silent.
        """
        if self._free:
            self._free -= 1
            return 0.0
        began = running_time()
        future: asyncio.Future[bool] = self._loop.create_future()
        self._queue.append(future)
        try:
            is_mine = _calls.wait(future)
        except BaseException:
            if future.done() and not future.cancelled() and future.result():
                # It was cancelled just when its turn had come.
                self.give_back()
            raise
        if not is_mine:
            raise SilentError("the server did not reply to other calls of this event loop")
        return running_time() - began

    def give_back(self, *, silent: bool = False) -> None:
        """Ends the caller's turn.

        Args:
            silent: whether the server was silent. Calls that wait then fail as well, and not one after the other.
        """
        while self._queue:
            future = self._queue.popleft()
            if future.done():
                continue
            future.set_result(not silent)
            if not silent:
                return
        self._free += 1

    # As a lock that may be held while its holder waits

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *error: object) -> None:
        self.give_back()


class TaskLocal:
    """A namespace whose content is each task's own."""

    def __init__(self) -> None:
        self.__dict__["_of"] = weakref.WeakKeyDictionary()

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__["_of"].get(asyncio.current_task(), {})
        if name not in values:
            raise AttributeError(name)
        return values[name]

    def __setattr__(self, name: str, value: object) -> None:
        self.__dict__["_of"].setdefault(asyncio.current_task(), {})[name] = value
