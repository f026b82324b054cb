"""Waits for a version of parameters."""

from __future__ import annotations

from typing import Any, Unpack

from redisacc._clock import durations, running_time
from redisacc._format.buffered import PartMissingError
from redisacc._format.parameter_record import ParameterRecord, announced
from redisacc._protocol.parameters.reader import TOGETHER_BYTES, ParameterReader
from redisacc._protocol.waiting.lifetime import Lifetime
from redisacc._protocol.waiting.wait import Wait, WaitOptions
from redisacc._wire.pubsub import pubsub_of
from redisacc._wire.transport import Transport, limited
from redisacc.errors import FinishedError, WaitTimeoutError

# A record and the tree that it describes.
Version = tuple[ParameterRecord, Any]


class VersionWait(Wait[Version]):
    """Waits until a version with a higher step than ``after`` is published, and reads it.

    Args:
        transport: the way to the server.
        lifetime: of the handle.
        reader: reads them.
        after: the step; None means any version will do.
        skip_last: whether a version that was declared the last one ends the wait instead of being returned.
        how: of the wait.
    """

    doing = "waiting for parameters"
    begins_without_server = True

    # The last event, if it was not read yet. Set by the thread that listens.
    _event = ""
    _found: ParameterRecord | None = None

    def __init__(
        self,
        transport: Transport,
        lifetime: Lifetime,
        reader: ParameterReader,
        *,
        after: int | None,
        skip_last: bool,
        **how: Unpack[WaitOptions],
    ) -> None:
        super().__init__(transport, lifetime, reader.keys.events, name=reader.keys.name, **how)
        self._reader = reader
        self._after = after
        self._skip_last = skip_last

    def on_event(self, event: str | None) -> None:
        """Handles an event, in the thread that listens."""
        self._event = event or ""
        self.poll_soon()

    def knows_nothing_new(self) -> bool:
        """Returns whether the version that it is to follow was the latest, and no event has come since."""
        heard = pubsub_of(self.transport, self.channel).heard(self.channel)
        return heard > 0 and self._reader.seen == (self._after, heard)

    def poll(self, timeout: float) -> Version | None:
        """Reads the version if there is one.

        Raises:
            FinishedError: no such version will be published.
        """
        event, self._event = self._event, ""
        heard = pubsub_of(self.transport, self.channel).heard(self.channel)
        wanted = announced(self._reader.keys, event, TOGETHER_BYTES)
        with limited(timeout):
            record, fetched = self._reader.poll_and_fetch(wanted)
        self.answered = True
        give_up = running_time() + durations.call
        self._found = record
        if record is not None and not record.finished:
            self._reader.seen = record.step, heard
        while record is not None and self._is_wanted(record):
            try:
                return record, self._reader.values(record, fetched)
            except PartMissingError as error:
                record, fetched = self._reader.after_loss(record, error, give_up), {}
                self._found = record
        if record is not None and record.finished:
            raise FinishedError(
                f"{self.label}: step {record.step} was the last that is published: its publisher has finished",
                step=record.step,
            )
        return None

    def _is_wanted(self, record: ParameterRecord) -> bool:
        is_later = self._after is None or record.step > self._after
        return is_later and not (record.finished and self._skip_last)

    def progress(self) -> str:
        """Describes the wait in messages about a long one."""
        return self._text("still waiting")

    def timed_out(self, seconds: float) -> WaitTimeoutError:  # noqa: ARG002 - the caller knows its timeout
        """Returns the error that says which version is the latest."""
        return WaitTimeoutError(self._text("timed out waiting"))

    def _text(self, what: str) -> str:
        wanted = "parameters" if self._after is None else f"parameters after step {self._after}"
        text = f"{self.label}: {what} for {wanted}"
        if not self.answered:
            text += ": the server did not report what is published"
        elif self._found is None:
            text += ": nothing has been published, so check the name"
        else:
            text += f": step {self._found.step} is the last that was published"
        return self.described(text)
