"""Forks of this process: when they must wait, what a child must release, and what no signal may interrupt."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Protocol

__all__ = ["Disownable", "disown_after_fork", "fork_lock", "handlers_deferred"]

fork_lock = threading.RLock()
"""Keeps other threads from forking while it is held.

A forked child has a copy of every open file, also of those that a subprocess closes at its `exec`. It is reentrant,
because a signal handler may fork in the very thread that holds it.
"""


class Disownable(Protocol):
    """An object that belongs to the process that created it."""

    def disown(self) -> None:
        """Lets go, in a forked child, of everything that affects the owner's process."""


_disownables: weakref.WeakSet[Disownable] = weakref.WeakSet()


def disown_after_fork(disownable: Disownable) -> None:
    """Calls `disownable.disown()` in every child that this process forks from now on. Keeps a weak reference.

    The caller holds `fork_lock` from before the object opens anything until this call returns.
    """
    _disownables.add(disownable)


def _after_fork_in_child() -> None:
    for disownable in list(_disownables):
        disownable.disown()
    _disownables.clear()
    fork_lock.release()


os.register_at_fork(before=fork_lock.acquire, after_in_parent=fork_lock.release, after_in_child=_after_fork_in_child)


@contextlib.contextmanager
def handlers_deferred() -> Iterator[None]:
    """Defers this program's signal handlers to the end of a block, which must be short.

    A handler that raises, such as Python's for Ctrl-C, may do so between any two instructions, also when a call made
    a process or a directory, and before its result is stored. Then nothing refers to it. A signal that arrives
    while `Popen` waits for the new process to be executed does just that.
    """
    # In other threads, no handler ever runs.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    handlers = {
        int(number): handler for number in signal.valid_signals() if callable(handler := signal.getsignal(number))
    }
    try:
        with contextlib.ExitStack() as restoring:
            for number, handler in handlers.items():
                restoring.callback(signal.signal, number, handler)
                signal.signal(number, lambda number, _frame: arrived.append(number))
            yield
    finally:
        for arrival in arrived:
            handlers[arrival](arrival, None)
