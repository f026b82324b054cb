"""The outcomes of a thread's or a task's requests, including requests that an interrupt cut short.

A signal handler may raise between any two instructions of the main thread: while a reply is on its way, or after it has
arrived and before the caller has seen it. So every change here is a single assignment, and a request stays open until
its outcome is known.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

from redisacc._arrays.results import Tally
from redisacc._protocol.sessions import Request
from redisacc._wire.waits import Waits

_NOTHING: Mapping[str, int] = MappingProxyType({})


class Outcomes:
    """The outcomes of the requests of one thread on one handle.

    Attributes:
        pid: the process that they belong to. After a fork, a child ignores its parent's.
        state: the requests whose outcome is not known, the oldest first; and how many requests had each outcome.
    """

    __slots__ = ("pid", "state")

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.state: tuple[tuple[Request, ...], Mapping[str, int]] = (), _NOTHING

    @property
    def tally(self) -> Tally:
        """How many requests of each outcome there were."""
        counts = self.state[1]
        return Tally(*(counts.get(outcome, 0) for outcome in ("applied", "stale", "repeated", "unknown")))

    def begin(self, request: Request) -> None:
        """Notes that a request may be sent from now on."""
        under_way, counts = self.state
        self.state = (*under_way, request), counts

    def close(self, request: Request, fate: str) -> None:
        """Notes the outcome of a request. A request is counted once, however often it is closed."""
        request.fate = fate
        under_way, counts = self.state
        if request in under_way:
            self.state = _without(request, under_way), {**counts, fate: counts.get(fate, 0) + 1}

    def drop(self, request: Request) -> None:
        """Forgets a request that was not executed, or whose outcome the caller learns by an error's ``settle()``."""
        under_way, counts = self.state
        if request in under_way:
            self.state = _without(request, under_way), counts


def _without(request: Request, under_way: tuple[Request, ...]) -> tuple[Request, ...]:
    place = under_way.index(request)
    return under_way[:place] + under_way[place + 1 :]


class OutcomesOfThreads:
    """The outcomes of the threads, or tasks, of one handle."""

    def __init__(self, waits: Waits) -> None:
        self._local = waits.local()

    def mine(self) -> Outcomes:
        """Returns the outcomes of the calling thread or task."""
        found: Outcomes | None = getattr(self._local, "outcomes", None)
        if found is None or found.pid != os.getpid():
            found = self._local.outcomes = Outcomes()
        return found
