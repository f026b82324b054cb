"""Calls that run at the same time, each in a thread of its own."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Value = TypeVar("Value")


def in_parallel(calls: Sequence[Callable[[], Value]]) -> list[Value]:
    """Returns the values of all calls, of which the first runs in this thread.

    All of them have ended when this returns or raises one of their errors. Only an interrupt, such as Ctrl-C, leaves
    the others to themselves.
    """
    values: list[Any] = [None] * len(calls)
    errors: list[BaseException | None] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            values[number] = calls[number]()
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
            errors[number] = error

    threads = []
    for number in range(1, len(calls)):
        # The limits that the caller is under hold in each thread.
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(run, number), name="redisacc-node", daemon=True)
        threads.append(thread)
        thread.start()
    if calls:
        run(0)
        if errors[0] is not None and not isinstance(errors[0], Exception):
            raise errors[0]
    for thread in threads:
        thread.join()
    for error in errors:
        if error is not None:
            raise error
    return values
