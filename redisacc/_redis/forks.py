"""Locks that a forked child finds free.

A child has one thread, and a copy of every lock of its parent. A lock that another thread of the parent held at that
moment stays locked in the child forever, because the thread that would release it does not exist there. So each lock
that a call may need is made here, or found here in a client, and is released in the child before that runs any code.

In the child, the data that a lock guards may be half-changed. Code that uses ``lock`` therefore starts from scratch in
a child, or guards only changes that are complete at every moment. The pools of redis-py and valkey-py forget their
connections.

Locks inside OpenSSL and the name resolution of the C library cannot be released. So a fork waits for threads that are
opening connections, which is when these locks are taken.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

_LOCK_TYPES = (type(threading.Lock()), type(threading.RLock()))
# Collections that may hold a client's locks, besides the objects of its library.
_COLLECTIONS = (list, tuple, set, frozenset, deque)
_OF_THREADING = (threading.Condition, threading.Event, threading.Semaphore, queue.Queue)
_LIBRARIES = ("redis", "valkey")
# How long a fork waits for connections that are being opened, in seconds. A host that does not answer takes longer, but
# whoever waits for one holds none of these locks.
_PATIENCE = 1.0

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
# By id, because some versions compare clients by their settings.
_clients: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


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


def release_locks_of(client: object) -> None:
    """Releases all locks of a client, or of a pool, in every child that this process forks from now on.

    Reentrant locks that the forking thread itself holds stay locked. Keeps a weak reference.
    """
    _clients[id(client)] = client


def locks_of(things: Iterable[object]) -> list[Any]:
    """Returns the locks that objects of a client library hold, directly or through other objects of that library.

    Which attributes these are differs between versions, so all attributes are searched.
    """
    found = []
    seen = set()
    left: list[Any] = list(things)
    while left:
        thing = left.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        kind = type(thing)
        if issubclass(kind, _LOCK_TYPES):
            found.append(thing)
        elif issubclass(kind, dict):
            left += thing.values()
        elif issubclass(kind, _COLLECTIONS):
            left += thing
        elif issubclass(kind, types.MethodType):
            left.append(thing.__self__)
        elif issubclass(kind, functools.partial):
            left += [thing.func, *thing.args, *thing.keywords.values()]
        elif issubclass(kind, _OF_THREADING) or _is_of_library(kind):
            left += getattr(thing, "__dict__", {}).values()
    return found


def _is_of_library(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] in _LIBRARIES for base in kind.__mro__)


def _globals() -> list[object]:
    """Returns the global objects of the client libraries, such as registries."""
    return [
        value
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in _LIBRARIES
        for value in vars(module).values()
        if not isinstance(value, (type, types.ModuleType, types.FunctionType)) and _is_of_library(type(value))
    ]


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


_openings = _Openings()
opening = _openings.one
"""Makes forks wait while its block opens a connection."""


def _after_fork_in_child() -> None:
    _openings.after_fork_in_child()
    for made in list(_locks):
        made._at_fork_reinit()
    for found in locks_of([*_clients.values(), *_globals()]):
        # Only reentrant locks know their owner. If that is this thread, it will release it.
        if not (hasattr(found, "_is_owned") and found._is_owned()):
            found._at_fork_reinit()


os.register_at_fork(
    before=_openings.before_fork,
    after_in_parent=_openings.after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
