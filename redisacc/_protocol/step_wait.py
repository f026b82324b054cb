"""Waits for a global step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from redisacc._protocol.events import Events
from redisacc._protocol.outage_log import OutageLog
from redisacc._protocol.polling import LAST_POLL_TIMEOUT, POLL_INTERVAL, POLL_TIMEOUT
from redisacc._protocol.record_reader import RecordReader
from redisacc._protocol.wait_log import WaitLog
from redisacc.errors import ServerUnavailableError, StepTimeoutError

logger = logging.getLogger("redisacc")


def wait_for_step(
    records: RecordReader,
    listen: Callable[[], Events],
    *,
    wanted: int,
    deadline: float,
    label: str,
    name: str,
) -> int:
    """Blocks until the global step is at least ``wanted``.

    Args:
        records: reads the step, and raises CancelledError once the handle is closed.
        listen: begins to listen to the accumulator's events.
        wanted: the step.
        deadline: when to stop waiting, on ``time.monotonic()``'s clock; infinity: never.
        label: the accumulator's name in log records and errors.
        name: its name in Redis.

    Returns:
        The step, which may be higher.
    """
    step: int | None = None
    outage = OutageLog(label, "waiting for a step")
    log = WaitLog(time.monotonic())
    fields: dict[str, object] = {"accumulator": name}
    # The step is read before anybody listens: in most cases it has been reached already.
    events: Events | None = None
    try:
        while True:
            try:
                step = records.read(min(POLL_TIMEOUT, max(deadline - time.monotonic(), LAST_POLL_TIMEOUT))).global_step
                outage.end(fields)
            except ServerUnavailableError as error:
                if outage.error is None and step is None and deadline == math.inf:
                    raise
                outage.begin(error, fields)
            if outage.error is None and step is not None and step >= wanted:
                return step
            left = deadline - time.monotonic()
            if left <= 0:
                seen = "the server did not report the current step" if step is None else f"it is {step}"
                raise StepTimeoutError(
                    f"{label}: step {wanted} was not reached in time: {seen}", wanted=wanted, global_step=step
                ) from outage.error
            if outage.error is None and log.is_due(time.monotonic()):
                logger.warning("%s: still waiting for step %d: it is %s", label, wanted, step, extra=fields)
            if events is None:
                events = listen()
                # If the step was set between the read and the subscription, its message was missed: read again.
                continue
            events.wait_for_move(min(left, POLL_INTERVAL))
    finally:
        if events is not None:
            events.close()
