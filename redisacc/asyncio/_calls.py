"""Blocking code on an event loop: it runs in a greenlet, and wherever it waits, the task that called it awaits.

A greenlet is a stack of its own in the same thread. The task starts a call on it. When the call has to wait for a
future, it switches back to the task, which awaits the future and switches to the call again with the result, or with
the error. So the event loop runs other tasks meanwhile, and the code is the same that blocks a thread elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from greenlet import getcurrent, greenlet

from redisacc.errors import RedisAccError

Value = TypeVar("Value")

# How long a call that was cancelled may take to clean up, in seconds: to leave the queue of takers, for example. If the
# server does not answer, two commands of a second each are given up by then.
CLEAN_UP = 3.0
# How many stacks without a call are kept. To make one costs more than to switch to it, because Python allocates 16 KiB.
IDLE_STACKS = 32


class _Stack(greenlet):  # type: ignore[misc]
    """A greenlet that runs one call after the other.

    Attributes:
        is_over: whether the call has ended.
        value: what it has returned.
        error: what it has raised.
        is_abandoned: whether the call is no longer awaited, so that it must not wait again.
        gr_context: what the task has set (``contextvars``), which is in effect in the call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_over = True
        self.is_abandoned = False
        self.value: Any = None
        self.error: BaseException | None = None

    def begin(self, function: Callable[[], Any]) -> Any:
        """Runs a call until it waits or ends. Returns what it waits for."""
        self.is_over, self._function = False, function
        self.gr_context = getcurrent().gr_context
        return self.switch()

    def run(self) -> None:
        while True:
            try:
                self.value = self._function()
            except BaseException as error:  # noqa: BLE001 - the task raises it
                self.error = error
            del self._function
            self.is_over = True
            self.parent.switch()

    def end(self) -> Any:
        """Returns what the call has returned, or raises what it has raised."""
        value, error, self.value, self.error = self.value, self.error, None, None
        if error is None:
            return value
        try:
            raise error
        finally:
            # The error knows this frame.
            del error


class Calls:
    """Runs blocking code on the event loop of one thread."""

    def __init__(self) -> None:
        self._idle: list[_Stack] = []

    async def run(self, function: Callable[[], Value]) -> Value:
        """Returns what blocking code returns, and lets the loop run other tasks while it waits.

        If the task is cancelled, the code gets ``asyncio.CancelledError`` where it waits, and cleans up as after
        Ctrl-C. That may take ``CLEAN_UP`` seconds, in which further cancellations do not disturb it.
        """
        stack = self._idle.pop() if self._idle else _Stack()
        given_up_at: float | None = None
        awaited = stack.begin(function)
        while not stack.is_over:
            try:
                value = await (awaited if given_up_at is None else _undisturbed(awaited, given_up_at))
            except GeneratorExit:
                # The loop was closed, or has dropped the task.
                stack.is_abandoned = True
                with contextlib.suppress(BaseException):
                    stack.throw(asyncio.CancelledError())
                raise
            except BaseException as error:  # noqa: BLE001 - it is raised in the code that waits
                if given_up_at is None and isinstance(error, asyncio.CancelledError):
                    given_up_at = time.monotonic() + CLEAN_UP
                awaited = stack.throw(error)
            else:
                awaited = stack.switch(value)
        if len(self._idle) < IDLE_STACKS:
            self._idle.append(stack)
        return cast(Value, stack.end())


async def _undisturbed(future: Any, until: float) -> Any:
    """Awaits a future, whatever is cancelled meanwhile, until a time. Raises CancelledError then."""
    while not future.done():
        remaining = until - time.monotonic()
        if remaining <= 0:
            future.cancel()
            raise asyncio.CancelledError
        # The cancellation that began the cleaning up ends the task.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future], timeout=remaining)
    return future.result()


def is_call() -> bool:
    """Returns whether the caller is code that ``Calls`` runs."""
    return isinstance(getcurrent(), _Stack)


def wait(future: Any) -> Any:
    """Waits for a future, or what tasks accept as one, in code that ``Calls`` runs. Returns its result.

    Raises:
        RedisAccError: the caller is other code, and would block the event loop.
    """
    stack = getcurrent()
    if not isinstance(stack, _Stack):
        future.cancel()
        raise RedisAccError("a handle of redisacc.asyncio was used without await")
    if stack.is_abandoned:
        future.cancel()
        raise asyncio.CancelledError
    return stack.parent.switch(future)
