"""The sums that reducers store part by part, as far as a taker has heard of them and relies on them."""

from __future__ import annotations

from collections.abc import Callable

from redisacc._clock import clock, durations
from redisacc._protocol.sums.reducer_reliance import ReducerReliance
from redisacc._redis.waits import Waits

# How long a take that waits for parts of a sum pauses before it asks again, in seconds.
SUM_PAUSE = 0.002

# Maximum number of parts of sums that are remembered because of messages, which any client can forge.
MOST_STORED = 10_000


class ReducerSums:
    """The parts of sums that are stored, by the digest of the gradients in them.

    Args:
        reliance: notes whether a reducer was in time; None: no reducer's sum is used.
        waits: how ``wait`` pauses.

    Attributes:
        wanted: whether the dense parts of the expected gradients are left to a reducer.
    """

    def __init__(self, reliance: ReducerReliance | None, waits: Waits) -> None:
        self.wanted = False
        self._reliance = reliance
        self._waits = waits
        # Digest -> the numbers of the parts that are stored under it.
        self._numbers: dict[str, set[int]] = {}
        self._num_heard = 0

    def rely(self) -> None:
        """Leaves the dense parts to a reducer, unless no reducer's sum is used."""
        self.wanted = self._reliance is not None

    def hear(self, digest: str, number: int) -> bool:
        """Notes that a part is said to be stored. Returns False if too many are remembered already."""
        if self._num_heard >= MOST_STORED:
            return False
        self._num_heard += 1
        self.suppose(digest, number)
        return True

    def suppose(self, digest: str, number: int) -> None:
        """Takes a part for stored, so that it is requested."""
        self._numbers.setdefault(digest, set()).add(number)

    def has(self, digest: str, number: int) -> bool:
        """Returns whether a part is taken for stored."""
        return number in self._numbers.get(digest, ())

    def lose(self, digest: str, number: int) -> None:
        """Notes that a part is not stored."""
        self._numbers.get(digest, set()).discard(number)

    def distrust(self) -> None:
        """Notes that a reducer's sum was of no use."""
        if self._reliance is not None:
            self._reliance.fail()

    def wait(self, ask: Callable[[], int], total: int) -> None:
        """Waits for the sum of a round that is granted, for a short time, and notes whether it came.

        Args:
            ask: fetches the parts that are there, and returns how many are missing.
            total: the number of parts.
        """
        assert self._reliance is not None
        missing = ask()
        # If nothing of the sum is there, the reducer has probably bet on other gradients.
        if 0 < missing < total or self._numbers:
            deadline = clock.now() + durations.sum_patience
            while missing and self.wanted and clock.now() < deadline:
                self._waits.sleep(SUM_PAUSE)
                missing = ask()
        if missing:
            self._reliance.fail()
        else:
            self._reliance.succeed()
