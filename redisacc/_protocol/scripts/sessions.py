"""Sessions: an id and a sequence number by which the server recognises a request that it has executed before."""

from __future__ import annotations

import os
import secrets

from redisacc._clock import clock

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
