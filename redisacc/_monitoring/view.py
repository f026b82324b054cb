"""One accumulator that is watched: its latest state, and its rates."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from redisacc._protocol.lifecycle.info import AccumulatorInfo
from redisacc._protocol.parameters.info import ParametersInfo

# Seconds over which rates are averaged.
WINDOW = 5.0


@dataclass
class View:
    """One accumulator that is watched.

    Attributes:
        info: its latest state.
        history: (time in seconds, applied, stale, takes) of the last seconds, the oldest first.
        required: the number of gradients that the last waiting taker required; None if there was none yet.
        parameters: the latest state of the parameters of the same name; None if there are none.
        published: (time in seconds, step) of their versions of the last seconds, the oldest first; at least the last
            two that were seen.
    """

    info: AccumulatorInfo
    history: deque[tuple[float, int, int, int]] = field(default_factory=deque)
    required: int | None = None
    parameters: ParametersInfo | None = None
    published: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, info: AccumulatorInfo, parameters: ParametersInfo | None = None) -> None:
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

        self._add_parameters(parameters)

    def _add_parameters(self, parameters: ParametersInfo | None) -> None:
        before, self.parameters = self.parameters, parameters
        if parameters is None or before is None or before.incarnation != parameters.incarnation:
            self.published.clear()
        if parameters is None:
            return
        at = parameters.published_at.timestamp()
        if not self.published or self.published[-1][1] < parameters.step:
            self.published.append((at, parameters.step))
        elif self.published[-1][1] > parameters.step:
            # The server has lost some versions.
            self.published.clear()
        while len(self.published) > 2 and self.published[0][0] < at - WINDOW:
            self.published.popleft()

    @property
    def step_seconds(self) -> float | None:
        """How long a step of the training takes, in seconds: the mean of the latest ones; None: it is unknown."""
        if len(self.published) > 1:
            (first, low), (last, high) = self.published[0], self.published[-1]
            return max(last - first, 0.0) / (high - low)
        return None if self.parameters is None else self.parameters.step_seconds

    @property
    def rates(self) -> tuple[float, float, float]:
        """Gradients applied, stale gradients and rounds taken, each per second."""
        first, last = self.history[0], self.history[-1]
        seconds = last[0] - first[0]
        if seconds <= 0:
            return 0.0, 0.0, 0.0
        applied, stale, takes = ((last[n] - first[n]) / seconds for n in (1, 2, 3))
        return applied, stale, takes
