"""Histograms as Prometheus defines them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Upper bounds of durations, in seconds.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
# Upper bounds of sizes, in bytes: 1 KiB to 16 GiB, each four times the one before.
BYTES = tuple(4**power for power in range(5, 18))
# Upper bounds of a number of steps.
STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass
class Histogram:
    """How many values were at most as large as each of some bounds.

    Attributes:
        bounds: the bounds, ascending. A value counts under the first bound that is greater than or equal to it.
        counts: the number of values under each bound, and last, of those above all of them.
        total: the sum of all values.
    """

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Counts a value."""
        place = next((n for n, bound in enumerate(self.bounds) if value <= bound), len(self.bounds))
        self.counts[place] += 1
        self.total += value

    def copy(self) -> Histogram:
        """Returns a histogram with the same values."""
        return Histogram(self.bounds, list(self.counts), self.total)
