"""Whether a taker relies on a reducer, and when it calls for one."""

from __future__ import annotations

import math

from redisacc._clock import clock, durations

# How often a handle calls for a reducer, in seconds.
CALL_INTERVAL = 1.0


class ReducerReliance:
    """Decides for one handle whether its takes rely on a reducer.

    After a take for which the sum came too late, they do without for 1, 2, 4, … 64 seconds. A sum that was there in
    time ends that.
    """

    def __init__(self) -> None:
        self._pause = durations.without_reducer
        self._resumes_at = 0.0
        self._call_again = 0.0

    @property
    def relies(self) -> bool:
        """Whether a take that begins now relies on a reducer, if there is one."""
        return clock.now() >= self._resumes_at

    def calls(self) -> bool:
        """Returns whether to call for a reducer now: once a second."""
        now = clock.now()
        if now < self._call_again:
            return False
        self._call_again = now + CALL_INTERVAL
        return True

    def call_no_more(self) -> None:
        """Notes that the server refuses calls."""
        self._call_again = math.inf

    def succeed(self) -> None:
        """Notes that the whole sum was there in time."""
        self._pause, self._resumes_at = durations.without_reducer, 0.0

    def fail(self) -> None:
        """Notes that a part of the sum was not there in time."""
        self._resumes_at = clock.now() + self._pause
        self._pause = min(2 * self._pause, durations.longest_without_reducer)
