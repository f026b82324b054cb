"""Waits for a global step."""

from __future__ import annotations

from redisacc._protocol.rounds.current_round import RecordReader
from redisacc._protocol.waiting.wait import Wait
from redisacc._wire.transport import limited
from redisacc.errors import WaitTimeoutError

# The beginnings of events that leave the step as it is.
_OTHERS = ("applied ", "stale ", "repeated ", "waiting ", "left")


class StepWait(Wait[int]):
    """Waits until the global step is at least ``wanted``, and returns the step, which may be higher.

    Args:
        records: reads the step.
        wanted: the step.
        deadline: when to stop waiting, by ``clock.now()``; infinity: never.
        label: the accumulator's name in log records and errors.
    """

    doing = "waiting for a step"

    def __init__(self, records: RecordReader, *, wanted: int, deadline: float, label: str) -> None:
        keys = records.keys
        super().__init__(
            records.transport, records.lifetime, keys.events, name=keys.name, deadline=deadline, label=label
        )
        self._records = records
        self._wanted = wanted
        self._step: int | None = None

    def poll(self, timeout: float) -> int | None:
        """Reads the step."""
        with limited(timeout):
            self._step = self._records.read().global_step
        return self._step if self._step >= self._wanted else None

    def on_event(self, event: str | None) -> None:
        """Handles an event, in the thread that listens."""
        if event is None or not event.startswith(_OTHERS):
            self.poll_soon()

    def progress(self) -> str:
        """Describes the wait in messages about a long one."""
        return self.described(f"{self.label}: still waiting for step {self._wanted}: {self._seen}")

    def timed_out(self, seconds: float) -> WaitTimeoutError:  # noqa: ARG002 - the caller knows its timeout
        """Returns the error that says which step was reached."""
        return WaitTimeoutError(f"{self.label}: step {self._wanted} was not reached in time: {self._seen}")

    @property
    def _seen(self) -> str:
        return "the server did not report the current step" if self._step is None else f"it is {self._step}"
