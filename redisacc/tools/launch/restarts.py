"""How soon a process that died is started again, and when it is given up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

# Exit codes by which a program usually says that the same command would fail again: wrong usage, also of Python or a
# shell itself; EX_USAGE and EX_CONFIG of sysexits.h; what a shell cannot execute or find.
PERMANENT = (2, 64, 78, 126, 127)

# Seconds for which a death counts. Counting only deaths in quick succession would restart a process for ever that dies
# every few minutes and finishes nothing.
WINDOW = 3600.0
# A process that lived for this many seconds is started again at once: pauses are for processes that die while they
# begin, and would cost a training on machines that fail now and then much of its time.
STEADY = 5.0
# Seconds before the first restart in such a succession. Each further pause is twice as long as the one before.
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0


class Restarts:
    """The deaths of the processes that take one place.

    Args:
        limit: maximum number of restarts within an hour, at least 0.
        lacks_hosts: whether something on another host is missing, of which a process may die: its deaths do not count.
    """

    def __init__(self, limit: int, lacks_hosts: Callable[[], bool] = lambda: False) -> None:
        self._limit = limit
        self._lacks_hosts = lacks_hosts
        self._deaths: deque[float] = deque()
        self._in_succession = 0

    @property
    def deaths(self) -> int:
        """The number of deaths within the hour that ended with the latest one."""
        return len(self._deaths)

    def pause_after(self, lived: float, now: float) -> float | None:
        """Records the death of a process and returns the pause before its restart. None means it is given up.

        Args:
            lived: the number of seconds that the process lived.
            now: the time of its death, in seconds of a clock that never goes back.
        """
        while self._deaths and now - self._deaths[0] >= WINDOW:
            self._deaths.popleft()
        self._in_succession = 0 if lived >= STEADY else self._in_succession + 1
        if not self._lacks_hosts():
            self._deaths.append(now)
            if len(self._deaths) > self._limit:
                return None
        if not self._in_succession:
            return 0.0
        # The exponent is bounded, because any number of restarts may be allowed.
        return min(_FIRST_PAUSE * 2.0 ** min(self._in_succession - 1, 10), _LONGEST_PAUSE)
