"""Sessions, and requests: an id and a sequence number by which the server knows what it has executed before."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from typing import Any

from redisacc._arrays.validation import shape_text
from redisacc._clock import clock
from redisacc._format.stored_text import weight_text

# The server keeps a session that has been idle for less than this, in seconds: an hour, less a margin for clocks that
# differ (lua/include/forget_ms.lua).
IDLE_S = 3480.0


class Session:
    """An id under which requests go out one after the other, each with a higher sequence number than the one before.

    Args:
        now_ms: a time of the server's clock. The server forgets idle sessions, and tells by its age whether an unknown
            session is new or may have been forgotten.

    Attributes:
        id: "BORN-RANDOM", where BORN is ``now_ms``.
        born_ms: ``now_ms``.
        sequence: the number of the latest request.
        acknowledged: the number of the latest request whose outcome is known. A server that does not know that request
            has lost data.
    """

    def __init__(self, now_ms: int) -> None:
        self.begin_anew(now_ms)

    @classmethod
    def of_take(cls, token: str) -> Session | None:
        """Returns the session of a take as it was when the take was granted; None if a recovery issued the token."""
        born, _, rest = token.partition("-")
        random, _, sequence = rest.partition("-")
        if not sequence.isdigit():
            return None
        session = cls(int(born))
        session.id = f"{born}-{random}"
        session.sequence = session.acknowledged = int(sequence)
        return session

    def begin_anew(self, now_ms: int) -> None:
        """Takes another id, because the server no longer knows this one."""
        self.born_ms = now_ms
        self.id = f"{now_ms}-{secrets.token_hex(8)}"
        self.sequence = 0
        self.acknowledged = 0
        # When the latest outcome became known, by clock.now().
        self._learnt = 0.0

    def next(self) -> int:
        """Returns the number of a new request. A request that is sent again keeps its number."""
        self.sequence += 1
        return self.sequence

    def learn(self, sequence: int) -> None:
        """Notes that the outcome of a request is known."""
        self.acknowledged = sequence
        self._learnt = clock.now()

    def was_idle(self) -> bool:
        """Returns whether the session was idle for so long that the server may have forgotten it."""
        return not self.acknowledged or clock.now() - self._learnt > IDLE_S


class SessionPool:
    """Lends each session to one request at a time.

    Two threads must not share a session: request 6 might reach the server before request 5, which would then be refused
    as an old copy. The pool holds as many sessions as requests were ever under way at once, mostly one.

    Args:
        now_ms: a time of the server's clock.
    """

    def __init__(self, now_ms: int) -> None:
        # The latest known time of the server's clock.
        self.now_ms = now_ms
        self._start_anew()

    def _start_anew(self) -> None:
        # Threads share the list: each call on it is atomic.
        self._idle: list[Session] = []
        # Last, because another thread of a child that finds its own pid here would borrow a session of the parent.
        self._pid = os.getpid()

    def begin(self) -> tuple[Session, int]:
        """Returns a session for the caller alone, until it is given back, and the number of its next request."""
        session = self.borrow()
        session.sequence += 1
        return session, session.sequence

    def borrow(self) -> Session:
        """Returns a session for the caller alone, until it is given back."""
        if self._pid != os.getpid():
            # After a fork, the server would take requests under the parent's ids for copies of the parent's requests.
            self._start_anew()
        try:
            return self._idle.pop()
        except IndexError:
            return Session(self.now_ms)

    def give_back(self, session: Session) -> None:
        """Takes a session back."""
        self.now_ms = max(self.now_ms, session.born_ms)
        self._idle.append(session)


@dataclass(slots=True, eq=False)
class Request:
    """A request that the server counts once, and what its sender knows about it.

    Attributes:
        session: the session that sends it, and sends nothing else until its outcome is known.
        sequence: its number. The same number again changes nothing.
        worker: the name of the sender.
        fate: its outcome; "fenced": it was not executed and never will be; "unknown": the server can no longer tell.
            None means it is not known yet.
        abandoned: whether an interrupt ended the call that sent it.
        retried: whether the caller has an error whose ``settle()`` sends it again, so that its session is not free.
    """

    session: Session
    sequence: int
    worker: str
    fate: str | None = field(default=None, init=False)
    abandoned: bool = field(default=False, init=False)
    retried: bool = field(default=False, init=False)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments by which scripts know the request."""
        session = self.session
        return {
            "session": session.id,
            "sequence": self.sequence,
            "acknowledged": session.acknowledged,
            "worker": self.worker,
        }


@dataclass(slots=True, eq=False)
class GradientRequest(Request):
    """A request to count a gradient under the name of a worker.

    Attributes:
        local_step: the step for which the gradient was computed.
        round_shape: the shape of a dense gradient, or of the rows of a sparse one. All gradients of a round share it.
        own_step: whether the gradient is dropped if it is of a later step than the round.
        notes: what is noted of it for takers, separated by spaces: the traceparent of the span that applies it, and its
            metrics; "" if there is nothing.
        weight: factor applied to the gradient, before its staleness counts.
        order: its place in the order of the round, if that follows the workers' numbers; else "".
    """

    local_step: int
    round_shape: tuple[int, ...]
    own_step: bool = False
    notes: str = ""
    weight: float = 1.0
    order: str = ""

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments by which scripts know the request, and what they need to know of its gradient."""
        return {
            **Request.arguments(self),
            "local_step": self.local_step,
            "own_step": self.own_step,
            "round_shape": shape_text(self.round_shape) if self.round_shape else "[]",
            "weight": "1" if self.weight == 1 else weight_text(self.weight),
        }
