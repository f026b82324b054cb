"""Forks of this process: when they must wait, and what a forked child must let go of."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

__all__ = ["Disownable", "disown_after_fork", "fork_lock"]

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
