"""When a wait that lasts is logged: soon for the first time, because that shows a mistake, and then less often."""

from __future__ import annotations

from redisacc._clock import durations


class WaitLog:
    """The times at which one wait is logged.

    Attributes:
        due: the time of the next message, on the caller's clock.
    """

    def __init__(self, now: float) -> None:
        self._pause = durations.report
        self.due = now + durations.report

    def is_due(self, now: float) -> bool:
        """Returns whether it is time for a message. If so, the next one is due later."""
        if now < self.due:
            return False
        self._pause = min(2 * self._pause, durations.report_pause)
        self.due = now + self._pause
        return True
