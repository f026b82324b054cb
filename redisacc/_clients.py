"""Who sends a request: (client id, sequence number), by which the server knows a request that it has seen."""

from __future__ import annotations

import os
import secrets
import time

# A server doesn't forget a client that has been idle for less, in seconds; an hour, in lua/include/forget_idle.lua, but
# for clocks that differ.
IDLE_S = 3480.0


class Client:
    """An id for which requests go out one after the other, each with a sequence number above the one before.

    Args:
        now_ms: a time of the server's clock. The server forgets clients that are idle, and tells by their age those
            that it may have forgotten from those that are new.
    """

    def __init__(self, now_ms: int) -> None:
        self.begin_anew(now_ms)

    def begin_anew(self, now_ms: int) -> None:
        """Takes another id: the server doesn't know this one any more."""
        self.born_ms = now_ms
        self.id = f"{now_ms}-{secrets.token_hex(8)}"
        self.sequence = 0
        # The last request of which the outcome is known, and when it was learnt, on time.monotonic()'s clock. A server
        # that doesn't know that request has lost data.
        self.acknowledged = 0
        self._learnt = 0.0

    def next(self) -> int:
        """The number of a new request. A request that is sent again keeps its number."""
        self.sequence += 1
        return self.sequence

    def learn(self, sequence: int) -> None:
        """The outcome of that request is known."""
        self.acknowledged = sequence
        self._learnt = time.monotonic()

    def was_idle(self) -> bool:
        """Whether the server may have forgotten it."""
        return not self.acknowledged or time.monotonic() - self._learnt > IDLE_S


class Clients:
    """Lends a client to one request at a time.

    Two threads must not share one: request 6 might reach the server before request 5, which would then be refused
    as an old copy. There are as many clients as requests were ever under way at once, mostly one.
    """

    def __init__(self, now_ms: int) -> None:
        # The latest time of the server's clock that anybody has heard of.
        self.now_ms = now_ms
        self._start_anew()

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        # Threads share it: each call on it is one step for them.
        self._idle: list[Client] = []

    def borrow(self) -> Client:
        """A client that is nobody else's until it is given back."""
        if self._pid != os.getpid():
            # After a fork: with our parent's ids our requests would be taken for copies of its own.
            self._start_anew()
        try:
            return self._idle.pop()
        except IndexError:
            return Client(self.now_ms)

    def give_back(self, client: Client) -> None:
        """Lends the client to others from now on."""
        self.now_ms = max(self.now_ms, client.born_ms)
        self._idle.append(client)
