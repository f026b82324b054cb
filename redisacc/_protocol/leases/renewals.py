"""Renews the leases that this process holds: of its private accumulators, and as a chief or worker of a training.

There is one thread for each transport, so that a server which does not answer delays no lease on another server. The
thread runs while there are leases.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import weakref
from typing import Protocol

from redisacc._clock import clock
from redisacc._redis import forks
from redisacc._redis.transport import Transport

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
        """Tries to renew it within about one interval, and raises nothing."""


class Renewals:
    """Renews the leases that are held over one transport."""

    def __init__(self) -> None:
        # Guards what follows.
        self._lock = forks.lock()
        # When to renew which lease, by clock.now(). The numbers decide between leases with the same time.
        self._due: list[tuple[float, int, Renewed]] = []
        self._numbers = itertools.count()
        self._is_running = False
        self._changed = forks.event()

    def add(self, lease: Renewed) -> None:
        """Renews a lease until it is over."""
        with self._lock:
            heapq.heappush(self._due, (clock.now() + lease.interval, next(self._numbers), lease))
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
                if self._changed.is_set():
                    self._changed.clear()
                    self._due = [entry for entry in self._due if not entry[2].is_over]
                    heapq.heapify(self._due)
                while self._due and self._due[0][2].is_over:
                    heapq.heappop(self._due)
                if not self._due:
                    self._is_running = False
                    return
                due, _, lease = self._due[0]
                pause = due - clock.now()
                if pause <= 0:
                    again = clock.now() + lease.interval
                    heapq.heapreplace(self._due, (again, next(self._numbers), lease))
            if pause <= 0:
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
