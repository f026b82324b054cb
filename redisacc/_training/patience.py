"""Repeats a call through an outage of the server, for as long as the user chooses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from redis.backoff import ExponentialBackoff

from redisacc.errors import OutcomeUnknownError, ServerUnavailableError

logger = logging.getLogger("redisacc")

Value = TypeVar("Value")

_BACKOFF = ExponentialBackoff(cap=5.0, base=0.1)


class Patience:
    """How long every call of a loop waits for a server that does not answer.

    Args:
        seconds: how long, 0 or more; infinity: forever.
        name: the name of the training, for log records.
    """

    def __init__(self, seconds: float, name: str) -> None:
        self._seconds = seconds
        self._name = name

    def call(self, attempt: Callable[[], Value], what: str) -> Value:
        """Returns what ``attempt`` returns. It is repeated while the server does not answer.

        Args:
            attempt: may be repeated without harm. If it raises OutcomeUnknownError, that error's ``retry`` takes its
                place.
            what: what it does, for log records, as in "to publish step 7".

        Raises:
            ServerUnavailableError: the server did not answer in time. It says why.
        """
        started = time.monotonic()
        failures = 0
        while True:
            try:
                result = attempt()
            except ServerUnavailableError as error:
                if isinstance(error, OutcomeUnknownError):
                    attempt = error.retry
                if time.monotonic() - started >= self._seconds:
                    raise
                failures += 1
                if failures == 1:
                    logger.warning(
                        "%s: could not reach the server %s; trying until it is back: %s",
                        self._name,
                        what,
                        error,
                        extra={"accumulator": self._name},
                    )
                time.sleep(_BACKOFF.compute(failures))
                continue
            if failures:
                logger.warning("%s: the server is back", self._name, extra={"accumulator": self._name})
            return result
