"""Who sends a request: (client id, sequence number), by which the server knows a request that it has seen."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field

from redisacc.errors import DataLossError


@dataclass
class Client:
    """An id for which requests go out one after the other, each with a sequence number above the one before."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    sequence: int = 0
    # The last request of which the outcome is known. A server that doesn't know it has lost data.
    acknowledged: int = 0

    def next(self) -> int:
        """The number of a new request. A request that is sent again keeps its number."""
        self.sequence += 1
        return self.sequence


class Clients:
    """Lends a client to one request at a time.

    Two threads must not share one: request 6 might reach the server before request 5, which would then be refused
    as an old copy. There are as many clients as requests were ever under way at once, mostly one.
    """

    def __init__(self) -> None:
        self._start_anew()

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        # Threads share it: each call on it is one step for them.
        self._idle: list[Client] = []

    def lend(self) -> Loan:
        """A client that is nobody else's until the ``with`` block ends."""
        if self._pid != os.getpid():
            # After a fork: with our parent's ids our requests would be taken for copies of its own.
            self._start_anew()
        return Loan(self._idle)


class Loan:
    """One client, lent for a ``with`` block. A class, since a generator would cost each apply 2 microseconds."""

    __slots__ = ("_client", "_idle")

    def __init__(self, idle: list[Client]) -> None:
        self._idle = idle

    def __enter__(self) -> Client:
        try:
            self._client = self._idle.pop()
        except IndexError:
            self._client = Client()
        return self._client

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Data loss is said once. What this client remembers is gone, so the next request comes from a new one.
        if kind is not DataLossError:
            self._idle.append(self._client)
