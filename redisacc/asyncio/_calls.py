"""Blocking code on an event loop: it runs in a greenlet, and wherever it waits, the task that called it awaits.

A greenlet is a stack of its own in the same thread. The task starts it. When the code in it has to wait for a future,
it switches back to the task, which awaits the future and switches to the greenlet again with the result, or with the
error. So the event loop runs other tasks meanwhile, and the code is the same that blocks a thread elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from greenlet import getcurrent, greenlet

from redisacc.errors import EventLoopError

Value = TypeVar("Value")

# How long a call that was cancelled may take to clean up, in seconds: to leave the queue of takers, for example. If the
# server does not answer, two commands of a second each are given up by then.
CLEAN_UP = 3.0


class _Call(greenlet):  # type: ignore[misc]
    """A function that runs in a greenlet.

    Attributes:
        abandoned: whether nobody awaits it any more, so that it must not wait again.
    """

    abandoned = False

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(function)
        # What the task has set is in effect in the call.
        self.gr_context = getcurrent().gr_context


async def run(function: Callable[[], Value]) -> Value:
    """Returns what blocking code returns, and lets the loop run other tasks while it waits.

    If the task is cancelled, the code gets ``asyncio.CancelledError`` where it waits, and cleans up as after Ctrl-C.
    That may take ``CLEAN_UP`` seconds, in which further cancellations do not disturb it.
    """
    call = _Call(function)
    given_up_at: float | None = None
    outcome = call.switch()
    while not call.dead:
        try:
            value = await (outcome if given_up_at is None else _undisturbed(outcome, given_up_at))
        except GeneratorExit:
            # The loop was closed, or has dropped the task.
            call.abandoned = True
            with contextlib.suppress(BaseException):
                call.throw(asyncio.CancelledError())
            raise
        except BaseException as error:  # noqa: BLE001 - it is raised in the code that waits
            if given_up_at is None and isinstance(error, asyncio.CancelledError):
                given_up_at = time.monotonic() + CLEAN_UP
            outcome = call.throw(error)
        else:
            outcome = call.switch(value)
    return cast(Value, outcome)


async def _undisturbed(future: asyncio.Future[Any], until: float) -> Any:
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
    """Returns whether the caller is code that ``run`` runs."""
    return isinstance(getcurrent(), _Call)


def wait(future: asyncio.Future[Any]) -> Any:
    """Waits for a future, in code that ``run`` runs, and returns its result.

    Raises:
        EventLoopError: the caller is other code, and would block the event loop.
    """
    call = getcurrent()
    if not isinstance(call, _Call):
        future.cancel()
        raise EventLoopError("a handle of redisacc.asyncio was used without await")
    if call.abandoned:
        future.cancel()
        raise asyncio.CancelledError
    assert call.parent is not None
    return call.parent.switch(future)
