"""Locks that a forked child finds free.

A child has one thread, and a copy of every lock of its parent. A lock that another thread of the parent held at that
moment stays locked in the child forever, because the thread that would release it does not exist there. So each lock
that a call may need is made here, and is released in the child before that runs any code. Locks of a client's library
are not needed: every connection is our own, and is opened by objects of the library that are made for it alone.

In the child, the data that a lock guards may be half-changed. Code that uses ``lock`` therefore starts from scratch in
a child, or guards only changes that are complete at every moment.

Locks inside OpenSSL and the name resolution of the C library cannot be released. So a fork waits for threads that are
opening connections, which is when these locks are taken.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

# How long a fork waits for connections that are being opened, in seconds. A host that does not answer takes longer, but
# whoever waits for one holds none of these locks.
_PATIENCE = 1.0

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def lock() -> threading.Lock:
    """Returns a new lock. A forked child finds it free."""
    made = threading.Lock()
    _locks.add(made)
    return made


def event() -> threading.Event:
    """Returns a new event. A forked child can wait for it, and set it."""
    made = threading.Event()
    _locks.add(made)
    return made


class _Openings:
    """The threads that are opening connections, and the forks that wait for them.

    A thread that forks while it opens a connection itself, in a signal handler, does not wait for itself.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: set[int] = set()
        self._forks = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._forks, _PATIENCE)
            self._threads.add(me)
        try:
            yield
        finally:
            with self._changed:
                self._threads.discard(me)
                self._changed.notify_all()

    def before_fork(self) -> None:
        # Nothing begins until the fork is over.
        self._changed.acquire()
        self._forks += 1
        self._changed.wait_for(lambda: self._threads <= {threading.get_ident()}, _PATIENCE)

    def after_fork_in_parent(self) -> None:
        self._forks -= 1
        self._changed.notify_all()
        self._changed.release()

    def after_fork_in_child(self) -> None:
        self.__init__()  # type: ignore[misc]
        for made in list(_locks):
            made._at_fork_reinit()


_openings = _Openings()
opening = _openings.one
"""Makes forks wait while its block opens a connection."""

os.register_at_fork(
    before=_openings.before_fork,
    after_in_parent=_openings.after_fork_in_parent,
    after_in_child=_openings.after_fork_in_child,
)
