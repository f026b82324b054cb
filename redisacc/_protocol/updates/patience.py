"""How long a chief waits for parts of an update that updaters compute, before it computes them itself."""

from __future__ import annotations

from collections.abc import Collection

from redisacc._clock import clock, durations

# How long no part may appear, in terms of the longest pause that ended with one.
PATIENCE_FACTOR = 3.0


class Patience:
    """What one chief has seen of its updaters.

    While parts appear, it waits. If none has for some time, an updater is late, or has died. The chief then computes
    what is missing, and learns which of the two was the case: a late updater has written its part meanwhile.
    """

    def __init__(self) -> None:
        self._seconds = durations.least_patience
        self._abandoned: frozenset[int] = frozenset()
        self._abandoned_until = 0.0
        self._longest = 0.0
        self._appeared = 0.0

    def begin(self) -> None:
        """Begins a wait."""
        self._longest, self._appeared = 0.0, clock.now()

    def note_appeared(self) -> None:
        """Notes that a part has appeared."""
        now = clock.now()
        self._longest, self._appeared = max(self._longest, now - self._appeared), now

    @property
    def pause(self) -> float:
        """For how many seconds no part has appeared."""
        return clock.now() - self._appeared

    def is_over(self, missing: Collection[int]) -> bool:
        """Returns whether to wait no longer for some parts that are missing.

        Args:
            missing: their numbers, at least one.
        """
        return self.pause >= min(max(self._seconds, durations.least_patience), durations.longest_patience) or (
            self._abandoned.issuperset(missing) and clock.now() < self._abandoned_until
        )

    def succeed(self) -> None:
        """Notes that updaters have written all parts."""
        self._seconds = min(max(durations.least_patience, PATIENCE_FACTOR * self._longest), durations.longest_patience)

    def fail(self, numbers: Collection[int], late: Collection[int]) -> None:
        """Notes that the chief has computed parts.

        Args:
            numbers: their numbers.
            late: the numbers of those that an updater had written when the chief wrote its own.
        """
        if late:
            self._seconds = min(2 * self._seconds, durations.longest_patience)
        dead = frozenset(numbers).difference(late)
        if not dead <= self._abandoned or clock.now() >= self._abandoned_until:
            self._abandoned_until = clock.now() + durations.abandoned
        self._abandoned = dead
