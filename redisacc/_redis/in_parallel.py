"""Calls that run at the same time, and wait as their caller does: in threads, or in tasks of an event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from redisacc._redis.waits import Event, Waits

Value = TypeVar("Value")

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
