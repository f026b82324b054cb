"""Connections that bring no request must not keep others out.

Anybody who reaches the port can open connections, send nothing or half a request, and leave them open. So a connection
has some seconds for each request. If there are as many as there may be, which is fewer than the process may have files,
the one that has waited longest for its request makes room for a new one.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from redisacc._clock import durations

# Maximum number of connections, and how many files the process may need besides.
MOST, OTHER_FILES = 500, 100


def most_connections() -> int:
    """Returns how many connections there may be."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if files == resource.RLIM_INFINITY else max(1, min(MOST, files - OTHER_FILES))


class Connection(H11Protocol):
    """A connection whose requests have a deadline."""

    # Those that wait for a request, the one that has waited longest first; and how many there are in all.
    _waiting: ClassVar[dict[Connection, asyncio.TimerHandle]] = {}
    _number = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a request."""
        super().connection_made(transport)
        Connection._number += 1
        if Connection._number > most_connections():
            (next(iter(self._waiting)) if self._waiting else self)._abort()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        super().connection_lost(exc)
        Connection._number -= 1
        self._stop_waiting()

    def data_received(self, data: bytes) -> None:
        """Ends the wait when the headers of a request are there."""
        super().data_received(data)
        if self._is_answering():
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Begins to wait for the next request, or for the rest of this one."""
        super().on_response_complete()
        # The next request may have come with this one.
        if not self.transport.is_closing() and not self._is_answering():
            self._wait()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._stop_waiting()
        self._waiting[self] = self.loop.call_later(durations.request, self._abort)

    def _stop_waiting(self) -> None:
        if (timer := self._waiting.pop(self, None)) is not None:
            timer.cancel()

    def _abort(self) -> None:
        self._stop_waiting()
        transport: Any = self.transport
        transport.abort()
