"""The steps of a training, read again and again, and only what is new; and as curves of a few points."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from redisacc._format.history_entries import PastStep
from redisacc._format.keys import ParameterKeys
from redisacc._protocol.parameters.history import read_history
from redisacc._protocol.parameters.info import ParametersInfo
from redisacc._redis.transport import Transport

# Maximum number of steps that are kept. Then, they are read as Redis has thinned them meanwhile.
MOST = 1500


class StepHistory:
    """The history of a training, as far as it was read.

    Args:
        transport: the way to the server.
        keys: the keys of the parameters.

    Attributes:
        steps: the steps, the first one first.
    """

    def __init__(self, transport: Transport, keys: ParameterKeys) -> None:
        self._transport, self._keys = transport, keys
        self._incarnation = ""
        self.steps: list[PastStep] = []

    def refresh(self, parameters: ParametersInfo) -> None:
        """Reads what is new, given the latest state of the parameters.

        Raises:
            CorruptDataError: Redis holds what redisacc did not write.
            ServerUnavailableError: the server does not answer.
        """
        latest = None if parameters.latest is None else parameters.latest.step
        known = self.steps[-1].step if self.steps else None
        if parameters.incarnation == self._incarnation and latest == known:
            return
        if (
            parameters.incarnation != self._incarnation
            or latest is None
            or known is None
            or latest < known
            or len(self.steps) >= MOST
        ):
            self._incarnation = parameters.incarnation
            self.steps = read_history(self._transport, self._keys)
            return
        before = self.steps[-1]
        new = read_history(self._transport, self._keys, after=known)
        if new:
            # How long the first of them took follows from the one before.
            first = max(new[0].time - before.time, 0.0) / (new[0].step - before.step)
            self.steps += [dataclasses.replace(new[0], seconds=first), *new[1:]]


def curves(steps: Sequence[PastStep], names: Sequence[str], most: int) -> tuple[list[int], list[list[float | None]]]:
    """Returns the curves of metrics, and of the time of a step, with few points, each the mean of some steps.

    The boundaries between points depend on the steps alone, so that points do not move as the training continues.

    Args:
        steps: the steps, the first one first.
        names: the names of the metrics.
        most: maximum number of points.

    Returns:
        The last step of each point; and for each metric, and then for the seconds of a step, a value at each point:
        the mean of the finite ones, None without any.
    """
    if not steps:
        return [], []
    width = 1
    while steps[-1].step // width - steps[0].step // width >= most:
        width *= 2
    groups: dict[int, list[PastStep]] = {}
    for step in steps:
        groups.setdefault(step.step // width, []).append(step)
    values = [[_mean([of.metrics.get(name, math.nan) for of in group]) for group in groups.values()] for name in names]
    values.append([_mean([of.seconds for of in group]) for group in groups.values()])
    return [group[-1].step for group in groups.values()], values


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    # Without an overflow of the sum.
    return sum(value / len(finite) for value in finite) if finite else None
