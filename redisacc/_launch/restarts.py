"""How soon a process that died is started again, and when it is given up."""

from __future__ import annotations

__all__ = ["PERMANENT", "STEADY", "Restarts"]

# Exit codes by which a program usually says that the same command would fail again: wrong usage, also of Python or a
# shell itself; EX_USAGE and EX_CONFIG of sysexits.h; what a shell cannot execute or find.
PERMANENT = (2, 64, 78, 126, 127)

# A process that lived for this many seconds was not in a crash loop: its death counts as the first one.
STEADY = 60.0
# Seconds before the first restart. Each further pause is twice as long as the one before.
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0


class Restarts:
    """The deaths of the processes that take one place.

    Args:
        limit: maximum number of restarts in succession, at least 0.

    Attributes:
        deaths: the number of deaths in succession: since the start of the run, or since a process has lived for
            `STEADY` seconds.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.deaths = 0

    def pause_after(self, lived: float) -> float | None:
        """Records the death of a process and returns the pause before its restart. None: it is given up.

        Args:
            lived: the number of seconds that the process lived.
        """
        self.deaths = 1 if lived >= STEADY else self.deaths + 1
        if self.deaths > self._limit:
            return None
        # The exponent is bounded, because any number of restarts may be allowed.
        return min(_FIRST_PAUSE * 2.0 ** min(self.deaths - 1, 10), _LONGEST_PAUSE)
