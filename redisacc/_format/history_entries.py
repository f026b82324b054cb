"""The entries of the history of a run: a step each, as text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from redisacc._arrays.metrics import MOST_BYTES, metrics_text, parse_metrics
from redisacc._format.stored_text import parse_int64, parsed

# An entry has at most this many bytes, so that a whole history has less than a megabyte.
_LONGEST = MOST_BYTES + 64
# The step, the time in milliseconds and the number of gradients, as `keep_history` writes them, and the metrics.
_ENTRY = re.compile(rb"(-?[0-9]{1,19}) ([0-9]{1,15}) ([0-9]{1,15})((?: \S{3,})*)", re.ASCII)


@dataclass(frozen=True)
class PastStep:
    """A step of a run, in its history.

    Example:
        >>> import numpy as np
        >>> import redisacc
        >>> optimizer = redisacc.optim.SGD(0.5)
        >>> with redisacc.Training("docs-history", {"w": np.zeros(2)}, optimizer=optimizer, workers=1) as training:
        ...     for step, weights in training.steps(until=3):
        ...         result = training.apply({"w": weights["w"] - 3}, metrics={"loss": 9 / 4**step})
        ...     [(past.step, past.metrics["loss"]) for past in training.history()]
        ...     training.delete()
        [(0, 9.0), (1, 2.25), (2, 0.5625)]

    Attributes:
        step: the step of its gradients. The parameters that follow from them have the step after it.
        time: when these were published, in seconds since 1970, by the server's clock.
        seconds: the duration of the step; if earlier steps are left out, the mean of theirs and its own. Time for which
            the run was stopped counts. NaN if no earlier step is known.
        num_accumulated: the number of its gradients.
        metrics: the mean of each metric of these gradients, as in ``Round.metrics``. If their names and values have
            more than 768 bytes together, the last names are left out.
    """

    step: int
    time: float
    seconds: float
    num_accumulated: int
    metrics: dict[str, float] = field(default_factory=dict)


def history_text(step: int, number: int, metrics: Mapping[str, float]) -> str:
    """Returns what a chief adds to the history, apart from the time; "" without metrics, which costs nothing.

    Args:
        step: the step of the round.
        number: the number of its gradients.
        metrics: the mean of each metric.
    """
    text = metrics_text(metrics)
    return f"{step} {number} {text}" if text else ""


def parse_history(key: str, entries: Iterable[object], created_ms: int | None) -> list[PastStep]:
    """Returns the steps of a history, each once, the first one first.

    Args:
        key: the key of the history, for messages.
        entries: the entries.
        created_ms: when the first version of the parameters was published, in milliseconds since 1970.

    Raises:
        CorruptDataError: an entry is not one that redisacc writes.
    """
    every = [parsed(key, "an entry", text, _step) for text in entries]
    found = {step: (ms, number, metrics) for step, ms, number, metrics in every}
    steps: list[PastStep] = []
    before = (-1, created_ms) if created_ms is not None and 0 in found else None
    for step, (ms, number, metrics) in sorted(found.items()):
        seconds = math.nan
        if before is not None and before[1] is not None and step > before[0]:
            seconds = max(ms - before[1], 0) / 1000 / (step - before[0])
        steps.append(PastStep(step, ms / 1000, seconds, number, metrics))
        before = step, ms
    return steps


def _step(text: bytes) -> tuple[int, int, int, dict[str, float]]:
    match = _ENTRY.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        raise ValueError("it is no entry")
    return parse_int64(match[1]), int(match[2]), int(match[3]), parse_metrics(match[4].strip())
