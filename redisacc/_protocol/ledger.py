"""What became of a thread's or a task's requests, also of those that an interrupt cut short.

A signal handler may raise between any two instructions of the main thread: while a reply is on its way, or after it has
arrived and before the caller has seen it. So every change here is a single assignment, and a request stays open until
its outcome is known.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, NamedTuple

from redisacc._data.results import Tally
from redisacc._protocol.sessions import Session
from redisacc._redis.waits import Waits

# What a request did. "fenced": it was not executed, and never will be. "unknown": nobody can tell any more.
Fate = Literal["applied", "stale", "repeated", "set", "lowered", "configured", "taken", "fenced", "unknown"]


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that may have been sent.

    Attributes:
        session: the session that sends it, and nothing else until its outcome is known.
        sequence: its number.
        worker: the name of the worker.
        fate: what it did; None if that is not known yet.
        abandoned: whether an interrupt ended the call that sent it.
        retried: whether the caller has an error whose ``retry()`` sends it again, so that its session is not free.
    """

    session: Session
    sequence: int
    worker: str
    fate: Fate | None = None
    abandoned: bool = False
    retried: bool = False


class _State(NamedTuple):
    open: tuple[OpenRequest, ...]
    tally: Tally


class Ledger:
    """The requests of one thread on one handle.

    Attributes:
        pid: the process that they belong to. After a fork, those of the parent are none of the child's business.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._state = _State((), Tally(0, 0, 0, 0))

    @property
    def open(self) -> tuple[OpenRequest, ...]:
        """Requests whose outcome is not known, the oldest first."""
        return self._state.open

    @property
    def tally(self) -> Tally:
        """How many requests of each outcome there were."""
        return self._state.tally

    def begin(self, request: OpenRequest) -> None:
        """Notes that a request may be sent from now on."""
        self._state = _State((*self._state.open, request), self._state.tally)

    def close(self, request: OpenRequest, fate: Fate) -> None:
        """Notes the outcome of a request. A request is counted once, however often it is closed."""
        request.fate = fate
        state = self._state
        if request in state.open:
            self._state = _State(tuple(other for other in state.open if other is not request), _add(state.tally, fate))

    def drop(self, request: OpenRequest) -> None:
        """Forgets a request that was not executed, or whose outcome the caller learns by ``retry()``."""
        state = self._state
        if request in state.open:
            self._state = _State(tuple(other for other in state.open if other is not request), state.tally)


def _add(tally: Tally, fate: Fate) -> Tally:
    return Tally(
        tally.applied + (fate == "applied"),
        tally.stale + (fate == "stale"),
        tally.repeated + (fate == "repeated"),
        tally.unknown + (fate == "unknown"),
    )


class Ledgers:
    """The ledgers of the threads, or tasks, of one handle."""

    def __init__(self, waits: Waits) -> None:
        self._local = waits.local()

    def mine(self) -> Ledger:
        """Returns the ledger of the calling thread or task."""
        ledger: Ledger | None = getattr(self._local, "ledger", None)
        if ledger is None or ledger.pid != os.getpid():
            ledger = self._local.ledger = Ledger()
        return ledger
