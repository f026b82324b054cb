"""An outage of the server while somebody waits: it is logged when it begins and when it ends."""

from __future__ import annotations

import logging

from redisacc._redis.running_time import running_time
from redisacc._redis.transport import LIMITS
from redisacc.errors import ServerUnavailableError

logger = logging.getLogger("redisacc")


class OutageLog:
    """Tracks whether the server is away, and logs each change once.

    Args:
        label: the accumulator's name in log records.
        waiting: a clause that describes the wait, as in "lost the server while a take was waiting".

    Attributes:
        error: why the server could not be reached when it was last asked; None if it answered.
    """

    def __init__(self, label: str, waiting: str) -> None:
        self._label = label
        self._waiting = waiting
        self.error: ServerUnavailableError | None = None
        self._began = 0.0

    def begin(self, error: ServerUnavailableError, fields: dict[str, object]) -> None:
        """Notes that the server did not answer. ``fields`` go to the log record.

        Raises:
            ServerUnavailableError: this error, if the outage has lasted for as long as ``LIMITS`` allows.
        """
        if self.error is None:
            self._began = running_time()
        if running_time() - self._began >= LIMITS.get().outage:
            raise error
        if self.error is None:
            logger.warning(
                "%s: lost the server while %s; trying until it is back: %s",
                self._label,
                self._waiting,
                error,
                extra=fields,
            )
        self.error = error

    def end(self, fields: dict[str, object]) -> None:
        """Notes that the server answered. ``fields`` go to the log record."""
        if self.error is not None:
            logger.warning("%s: the server is back", self._label, extra=fields)
            self.error = None
