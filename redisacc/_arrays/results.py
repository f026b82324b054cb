"""The objects that accumulators return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

G_co = TypeVar("G_co", covariant=True)


@dataclass(frozen=True)
class ApplyResult:
    """The outcome of applying a gradient. It is true if the gradient was accepted.

    Attributes:
        outcome: "applied"; "stale" if the gradient was dropped because its step was more than ``staleness`` below
            the accumulator's; "repeated" if it was dropped because the round already had a gradient of this worker, and
            accepts only one; or "skipped", in a training run only: the worker's gradient was left out of the step,
            which does not wait for it.
        global_step: the accumulator's step at that moment.
        num_accumulated: the number of gradients in the current round, this one included if it was accepted.

    Example:
        >>> import redisacc
        >>> accumulator = redisacc.ConditionalAccumulator("float32", shape=[2])
        >>> accumulator.apply_grad([1.0, 2.0], local_step=0)
        ApplyResult(outcome='applied', global_step=0, num_accumulated=1)
        >>> accumulator.set_global_step(5)
        >>> if not (result := accumulator.apply_grad([1.0, 2.0], local_step=4)):
        ...     print(f"{result.outcome}: the step is {result.global_step}")
        stale: the step is 5
    """

    outcome: Literal["applied", "stale", "repeated", "skipped"]
    global_step: int
    num_accumulated: int

    def __bool__(self) -> bool:
        return self.outcome == "applied"


@dataclass(frozen=True)
class Tally:
    """The outcomes of the gradients that a thread has applied through a handle.

    Attributes:
        applied: the number of gradients that were accepted.
        stale: the number of gradients that were dropped because their step had passed.
        repeated: the number of gradients that were dropped because the round had one of their worker.
        unknown: the number of gradients whose outcome can no longer be known: their apply was interrupted, and then the
            accumulator was deleted, or the server lost its data, or an hour passed before ``settle()`` was called.

    Example:
        >>> import redisacc
        >>> accumulator = redisacc.ConditionalAccumulator("float32", shape=[2])
        >>> result = accumulator.apply_grad([1.0, 2.0])
        >>> accumulator.settle()
        Tally(applied=1, stale=0, repeated=0, unknown=0)
    """

    applied: int
    stale: int
    repeated: int
    unknown: int


@dataclass(frozen=True)
class Round(Generic[G_co]):
    """A round: the reduced gradient of one step, and where it came from.

    Attributes:
        gradient: an array from a dense accumulator, ``IndexedSlices`` with sorted unique indices from a sparse one, or
            a tree of both from a ``TreeAccumulator``. None if nothing has been accumulated, which only ``peek()`` can
            find.
        global_step: the step that the take closed; from ``peek()``, the current step.
        num_accumulated: how many gradients the round holds.
        workers: which workers they came from: worker's name → number of gradients.
        staleness: how stale they were: number of steps → number of gradients. A gradient counts under 0 if its
            ``local_step`` was not below the step when it was accepted, as all are unless the accumulator has a
            ``staleness``.
        total_weight: the sum of their weights; ``num_accumulated`` if all are 1.
        metrics: the mean of each metric, over the gradients that have it, by the weights that were given with them;
            NaN if one of these values is. If a worker has several gradients in the round, metrics count that fit into
            2,048 bytes as text, together with what else the round keeps of it.

    Example:
        >>> import redisacc
        >>> accumulator = redisacc.ConditionalAccumulator("float32", shape=[2], worker="ann")
        >>> accumulator.apply_grad([1.0, 2.0]).outcome
        'applied'
        >>> with accumulator.take(1) as taken:
        ...     print(taken.gradient, taken.global_step, taken.num_accumulated, taken.workers)
        [1. 2.] 0 1 {'ann': 1}
    """

    gradient: G_co
    global_step: int
    num_accumulated: int
    workers: dict[str, int] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    total_weight: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
