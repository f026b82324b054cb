"""Renews the leases that this process holds: of its private accumulators, and as a chief or worker of a run.

There is one thread for each transport, so that a server which does not answer delays no lease on another server. The
thread runs while there are leases.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

from redisacc._clock import clock
from redisacc._wire import forks
from redisacc._wire.transport import Transport, limited

# How many times a lease is renewed before it would run out.
RENEWALS = 4


def interval_of(seconds: float) -> float:
    """Returns how many seconds pass between two renewals of a lease that lasts this many seconds."""
    return seconds / RENEWALS


class Renewed(Protocol):
    """A lease that is renewed until it is over."""

    @property
    def interval(self) -> float:
        """Seconds between two renewals."""

    @property
    def is_over(self) -> bool:
        """Whether it is renewed no longer."""

    def renew(self) -> None:
        """Tries to renew it, and raises nothing. Each call tries to reach the server for one interval at most."""


class Renewals:
    """Renews the leases that are held over one transport."""

    def __init__(self) -> None:
        # Guards what follows.
        self._lock = forks.lock()
        # When to renew which lease, by clock.now().
        self._due: dict[Renewed, float] = {}
        self._is_running = False
        self._changed = forks.event()

    def add(self, lease: Renewed) -> None:
        """Renews a lease until it is over."""
        with self._lock:
            self._due[lease] = clock.now() + lease.interval
            if not self._is_running:
                threading.Thread(target=self._run, name="redisacc-leases", daemon=True).start()
                self._is_running = True
        self._changed.set()

    def drop_ended(self) -> None:
        """Drops leases that are over, soon. Takes no lock, so that a finalizer may call it in any thread."""
        self._changed.set()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._changed.clear()
                self._due = {lease: due for lease, due in self._due.items() if not lease.is_over}
                if not self._due:
                    self._is_running = False
                    return
                lease = min(self._due, key=self._due.__getitem__)
                pause = self._due[lease] - clock.now()
                if pause <= 0:
                    self._due[lease] = clock.now() + lease.interval
            if pause <= 0:
                with limited(lease.interval):
                    lease.renew()
            # This frame must not keep a lease alive while it waits.
            del lease
            if pause > 0:
                self._changed.wait(pause)


_over: weakref.WeakKeyDictionary[Transport, Renewals] = weakref.WeakKeyDictionary()
_over_lock = forks.lock()


def renewals_over(transport: Transport) -> Renewals:
    """Returns what renews the leases that are held over a transport."""
    with _over_lock:
        return _over.setdefault(transport, Renewals())


def _after_fork_in_child() -> None:
    # The threads stay with the parent, and so do the leases.
    global _over  # noqa: PLW0603
    _over = weakref.WeakKeyDictionary()


os.register_at_fork(after_in_child=_after_fork_in_child)
