"""The state of a worker: in the round, expected, late or gone. Whatever names a state asks here."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass, field

from redisacc._clock import durations
from redisacc._format.entries import WorkerInfo

IN_THE_ROUND, EXPECTED, LATE, GONE = "in the round", "expected", "late", "gone"

# A worker without a lease that was last seen this many seconds ago, or longer, is gone. The server knows no more about
# it than when it was seen, so a worker that computes for longer looks gone.
GONE_AFTER = 600.0


@dataclass(frozen=True)
class WorkersByState:
    """The workers that an accumulator knows, by state.

    Attributes:
        in_the_round: those with a gradient in the current round, by name.
        expected: those that are neither late nor gone. In this list and the next two, the one that was seen most
            recently comes first.
        late: the workers that the others had to wait for.
        gone: the workers that are not worth waiting for.
    """

    in_the_round: list[WorkerInfo] = field(default_factory=list)
    expected: list[WorkerInfo] = field(default_factory=list)
    late: list[WorkerInfo] = field(default_factory=list)
    gone: list[WorkerInfo] = field(default_factory=list)

    def items(self) -> list[tuple[str, list[WorkerInfo]]]:
        """Returns each state and its workers, the state that needs attention first."""
        return [(LATE, self.late), (EXPECTED, self.expected), (IN_THE_ROUND, self.in_the_round), (GONE, self.gone)]


def workers_by_state(known: Iterable[WorkerInfo], global_step: int, now: datetime.datetime) -> WorkersByState:
    """Returns the workers by their state.

    Args:
        known: the workers.
        global_step: the current step.
        now: the time of the server's clock.
    """
    known = list(known)
    latest = max((worker.seen_at for worker in known if worker.in_round), default=None)
    found = WorkersByState()
    lists = dict(found.items())
    for worker in known:
        lists[_state_of(worker, global_step, latest, now)].append(worker)
    for state in (EXPECTED, LATE, GONE):
        lists[state].sort(key=lambda worker: worker.seen_at, reverse=True)
    return found


def _state_of(worker: WorkerInfo, global_step: int, latest: datetime.datetime | None, now: datetime.datetime) -> str:
    """Returns the state of a worker, as the table in docs/explanations/concepts.md defines it.

    Args:
        worker: the worker.
        global_step: the current step.
        latest: when the workers of the round were last seen; None if the round is empty.
        now: the time of the server's clock.
    """
    if worker.in_round:
        return IN_THE_ROUND
    silent = (now - worker.seen_at).total_seconds()
    if silent >= GONE_AFTER if worker.lease_ends_at is None else worker.lease_ends_at <= now:
        return GONE
    if silent < durations.late:
        return EXPECTED
    if worker.last_step is not None and worker.last_step < global_step - 1:
        # A whole round was taken without it.
        return LATE
    # Steps may take any time, so the time that the others needed is the measure.
    if latest is not None and latest > worker.seen_at and now - latest >= latest - worker.seen_at:
        return LATE
    return EXPECTED
