"""When a wait that lasts is logged: soon for the first time, because that shows a mistake, and then less often."""

from __future__ import annotations

# The first message, and the longest pause between two, in seconds after the beginning of the wait. Each pause is twice
# as long as the one before.
FIRST = 5.0
LONGEST_PAUSE = 60.0


class WaitLog:
    """The times at which one wait is logged.

    Attributes:
        due: the time of the next message, on the caller's clock.
    """

    def __init__(self, now: float) -> None:
        self._pause = FIRST
        self.due = now + FIRST

    def is_due(self, now: float) -> bool:
        """Returns whether it is time for a message. If so, the next one is due later."""
        if now < self.due:
            return False
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self.due = now + self._pause
        return True
