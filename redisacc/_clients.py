"""Who sends a request: (client id, sequence number), by which the server knows a request that it has seen."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Client:
    """An id for which requests go out one after the other, each with a sequence number above the one before."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    sequence: int = 0

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
        self._lock = threading.Lock()
        self._idle: list[Client] = []

    @contextlib.contextmanager
    def lend(self) -> Iterator[Client]:
        """A client that is nobody else's until the block ends."""
        if self._pid != os.getpid():
            # After a fork: with our parent's ids our requests would be taken for copies of its own.
            self._start_anew()
        with self._lock:
            client = self._idle.pop() if self._idle else Client()
        try:
            yield client
        finally:
            with self._lock:
                self._idle.append(client)
