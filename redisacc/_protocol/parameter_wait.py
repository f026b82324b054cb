"""Waits for a version of parameters: it polls, sleeps, and polls again after every event or second."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from redisacc._format.keys import ParameterKeys
from redisacc._format.parameter_record import ParameterRecord, announced
from redisacc._protocol.lifetime import Lifetime
from redisacc._protocol.outage_log import OutageLog
from redisacc._protocol.parameter_reader import READ_TIMEOUT, TOGETHER_BYTES, ParameterReader, VersionGoneError
from redisacc._protocol.polling import LAST_POLL_TIMEOUT, POLL_INTERVAL, POLL_TIMEOUT
from redisacc._protocol.similar_names import suggestion
from redisacc._protocol.wait_log import WaitLog
from redisacc._redis.pubsub import pubsub_of
from redisacc._redis.running_time import running_time
from redisacc._redis.transport import Transport
from redisacc.errors import CancelledError, ParametersFinishedError, ParametersTimeoutError, ServerUnavailableError

logger = logging.getLogger("redisacc")


def wait_for_version(
    transport: Transport,
    keys: ParameterKeys,
    reader: ParameterReader,
    lifetime: Lifetime,
    *,
    after: int | None,
    deadline: float,
    label: str,
    skip_last: bool = False,
    cancel: Callable[[], bool] | None = None,
    describe: Callable[[], str] | None = None,
) -> tuple[ParameterRecord, Any]:
    """Blocks until a version with a higher step than ``after`` is published, and reads it.

    Args:
        transport: the way to the server.
        keys: the keys of the parameters.
        reader: reads them.
        lifetime: of the handle. The wait ends with CancelledError when the handle is closed.
        after: the step; None: any version will do.
        deadline: when to stop waiting, on ``time.monotonic()``'s clock; infinity: never.
        label: the name of the parameters in log records and errors.
        skip_last: whether a version that was declared the last one ends the wait instead of being returned.
        cancel: cancels the wait if it returns True; it is asked after every poll that was answered. None: nothing does.
        describe: returns what else a message about the wait says, "" for nothing.

    Returns:
        The record and the tree.
    """
    wait = _Wait(
        transport,
        keys,
        reader,
        after=after,
        deadline=deadline,
        label=label,
        skip_last=skip_last,
        cancel=cancel,
        describe=describe,
    )
    with ExitStack() as stack:
        stack.callback(lifetime.register(wait.alarm))
        return wait.run(lifetime, stack)


class _Wait:
    def __init__(
        self,
        transport: Transport,
        keys: ParameterKeys,
        reader: ParameterReader,
        *,
        after: int | None,
        deadline: float,
        label: str,
        skip_last: bool,
        cancel: Callable[[], bool] | None,
        describe: Callable[[], str] | None,
    ) -> None:
        self._transport, self._keys, self._reader = transport, keys, reader
        self._after, self._deadline, self._label, self._cancel = after, deadline, label, cancel
        self._skip_last, self._describe = skip_last, describe
        self.alarm = transport.waits.alarm()
        # Set by the thread that listens: whether there may be something new, and what the last event said.
        self._poll_now = True
        self._event = ""
        self._found: ParameterRecord | None = None
        self._answered = False
        self._fields: dict[str, object] = {"accumulator": keys.name}
        self._outage = OutageLog(label, "waiting for parameters")

    def _on_event(self, event: str | None) -> None:
        self._event = event or ""
        self._poll_now = True
        self.alarm.set()

    def run(self, lifetime: Lifetime, stack: ExitStack) -> tuple[ParameterRecord, Any]:
        """Polls until there is a version."""
        log = WaitLog(time.monotonic())
        next_poll = 0.0
        # In many cases the version is there already, and a new subscription would cost more than reading it.
        listens = pubsub_of(self._transport, self._keys.events).hears(self._keys.events)
        if listens:
            self._listen(stack)
        while True:
            self.alarm.clear()
            if lifetime.closed:
                raise CancelledError(f"{self._label}: the handle was closed while it waited for parameters")
            now = time.monotonic()
            if self._poll_now or now >= next_poll or now >= self._deadline:
                self._poll_now = False
                read = self._poll()
                if read is not None:
                    return read
                self._check_over()
                now = time.monotonic()
                next_poll = now + POLL_INTERVAL
                if now >= self._deadline:
                    raise self._timed_out()
            if self._outage.error is None and log.is_due(now):
                logger.warning("%s", self._state("still waiting"), extra=self._fields)
            if not listens:
                listens = True
                self._listen(stack)
                # What was published between the poll and the subscription has not been heard of.
                self._poll_now = True
                continue
            self.alarm.wait(min(next_poll, self._deadline, log.due) - now)

    def _listen(self, stack: ExitStack) -> None:
        stack.enter_context(pubsub_of(self._transport, self._keys.events).listen(self._keys.events, self._on_event))

    def _check_over(self) -> None:
        """Raises an error if no version is to be expected any more, or the caller has cancelled the wait."""
        if self._outage.error is not None:
            return
        if self._found is not None and self._found.finished:
            raise ParametersFinishedError(
                f"{self._label}: step {self._found.step} was the last that is published: its publisher has finished",
                step=self._found.step,
            )
        if self._cancel is not None and self._cancel():
            raise CancelledError(f"{self._label}: the wait for parameters was cancelled")

    def _poll(self) -> tuple[ParameterRecord, Any] | None:
        """Reads the version if there is one. Logs a warning and returns None if the server cannot be reached."""
        event, self._event = self._event, ""
        timeout = min(POLL_TIMEOUT, max(self._deadline - time.monotonic(), LAST_POLL_TIMEOUT))
        try:
            wanted = announced(self._reader.keys, event, TOGETHER_BYTES)
            record, fetched = self._reader.poll_and_fetch(wanted, timeout=timeout)
            self._answered = True
            self._outage.end(self._fields)
            give_up = running_time() + READ_TIMEOUT
            while True:
                self._found = record
                if record is None or (self._after is not None and record.step <= self._after):
                    return None
                if record.finished and self._skip_last:
                    return None
                try:
                    return record, self._reader.values(record, fetched)
                except VersionGoneError as error:
                    record, fetched = self._reader.after_loss(record, error, give_up), {}
        except ServerUnavailableError as error:
            self._outage.begin(error, self._fields)
        return None

    def _state(self, what: str) -> str:
        wanted = "parameters" if self._after is None else f"parameters after step {self._after}"
        text = f"{self._label}: {what} for {wanted}"
        if not self._answered:
            return f"{text}: the server did not report what is published"
        if self._found is None:
            text += f": nothing has been published, so check the name{suggestion(self._transport, self._keys.name)}"
        else:
            text += f": step {self._found.step} is the last that was published"
        if self._outage.error is not None:
            return f"{text}; the server cannot be reached"
        more = self._describe() if self._describe is not None else ""
        return f"{text}; {more}" if more else text

    def _timed_out(self) -> ParametersTimeoutError:
        error = ParametersTimeoutError(
            self._state("timed out waiting"), after=self._after, step=None if self._found is None else self._found.step
        )
        error.__cause__ = self._outage.error
        return error
