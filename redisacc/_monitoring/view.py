"""One accumulator that is watched: its latest state, and its rates."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from redisacc._protocol.lifecycle.info import AccumulatorInfo

# Seconds over which rates are averaged.
WINDOW = 5.0


@dataclass
class View:
    """One accumulator that is watched.

    Attributes:
        info: its latest state.
        history: (time in seconds, applied, stale, takes) of the last seconds, the oldest first.
        required: the number of gradients that the last waiting taker required; None if there was none yet.
    """

    info: AccumulatorInfo
    history: deque[tuple[float, int, int, int]] = field(default_factory=deque)
    required: int | None = None

    def add(self, info: AccumulatorInfo) -> None:
        """Adds a new state. A new incarnation starts a new history."""
        if info.incarnation != self.info.incarnation:
            self.history.clear()
            self.required = None
        self.info = info
        at = info.read_at.timestamp()
        self.history.append((at, info.applied, info.stale, info.takes))
        while len(self.history) > 2 and self.history[0][0] < at - WINDOW:
            self.history.popleft()
        if info.waiting:
            self.required = info.waiting[0].num_required

    @property
    def rates(self) -> tuple[float, float, float]:
        """Gradients applied, stale gradients and rounds taken, each per second."""
        first, last = self.history[0], self.history[-1]
        seconds = last[0] - first[0]
        if seconds <= 0:
            return 0.0, 0.0, 0.0
        applied, stale, takes = ((last[n] - first[n]) / seconds for n in (1, 2, 3))
        return applied, stale, takes
