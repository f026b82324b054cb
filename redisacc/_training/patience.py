"""Repeats a call through an outage of the server, for as long as the user chooses.

A server that refuses writes for the time being, because its disk or its memory is full or its replicas are gone, is
waited for in the same way.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TypeVar

from redis.backoff import ExponentialBackoff

from redisacc._clock import durations, running_time
from redisacc._handles.environment import is_started_again
from redisacc._wire.faults import WritesRefusedError
from redisacc._wire.transport import LIMITS, Limits
from redisacc._wire.waits import Waits
from redisacc.errors import OutcomeUnknownError, ServerUnavailableError

logger = logging.getLogger("redisacc")

Value = TypeVar("Value")

_BACKOFF = ExponentialBackoff(cap=1.0, base=0.1)


class Patience:
    """How long every call of a loop waits for a server that does not answer.

    An outage of a few seconds is not logged. One that lasts is logged when that is clear, and when it ends.

    Args:
        seconds: how long, 0 or more; None means forever. A server that answers always gets the time for its answer.
        name: the name of the training, for log records.
        waits: how it pauses.
    """

    def __init__(self, seconds: float | None, name: str, waits: Waits) -> None:
        self._seconds = seconds = math.inf if seconds is None else seconds
        self._name = name
        self._waits = waits
        self._limits = Limits(call=min(max(seconds, durations.last_poll), durations.poll), outage=seconds)

    def call(self, attempt: Callable[[], Value], what: str, *, in_steps: bool = False) -> Value:
        """Returns the result of ``attempt``, which is repeated while the server does not answer.

        Args:
            attempt: may be repeated without harm.
            what: the purpose of the attempt, for log records, as in "to publish step 7".
            in_steps: whether the attempt consists of several requests, so that it begins again at the first one. If
                not, and it raises OutcomeUnknownError, that error's ``settle`` takes its place.

        Raises:
            ServerUnavailableError: the server did not answer in time. The message says why.
        """
        token = LIMITS.set(self._limits)
        try:
            return self._repeated(attempt, what, in_steps)
        finally:
            LIMITS.reset(token)

    def opening(self, attempt: Callable[[], Value], what: str) -> Value:
        """Returns the result of ``attempt``, the first call to the server.

        A process that follows another one in its place is patient: the training has seen its server. For a first one,
        the address may be wrong.
        """
        return self.call(attempt, what, in_steps=True) if is_started_again() else attempt()

    def _repeated(self, attempt: Callable[[], Value], what: str, in_steps: bool) -> Value:
        failures, said = 0, ""
        # When the first attempt began that failed. A wait that was well for hours and then fails has been patient
        # itself: see ``Limits``.
        began = 0.0
        while True:
            tried = running_time()
            try:
                result = attempt()
            except (ServerUnavailableError, WritesRefusedError) as error:
                failures += 1
                if failures == 1:
                    began = tried
                pause = _BACKOFF.compute(failures)
                if running_time() + pause - began >= self._seconds:
                    raise
                if isinstance(error, OutcomeUnknownError) and not in_steps:
                    attempt = error.settle
                cause = "could not reach the server %s; trying until it is back: %s"
                if isinstance(error, WritesRefusedError):
                    cause = "the server refuses writes; trying %s until it accepts them: %s"
                if cause != said:
                    said = cause
                    logger.warning(f"%s: {cause}", self._name, what, error, extra={"accumulator": self._name})
                self._waits.sleep(pause)
                continue
            if failures:
                logger.warning("%s: the server is back", self._name, extra={"accumulator": self._name})
            return result
