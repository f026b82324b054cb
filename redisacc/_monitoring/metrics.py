"""What Prometheus gets of an accumulator: a row for each metric."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from redisacc._format.entries import WorkerInfo
from redisacc._format.worker_states import GONE, LATE
from redisacc._monitoring.view import View


@dataclass(frozen=True)
class Series:
    """A metric of each accumulator.

    Attributes:
        name: its name without the prefix.
        text: what it is.
        read: where its value is, such as "info.takes"; or what returns it: None if there is none, or with a label,
            pairs of a label's value and the metric's.
        label: the name of a label that it has besides the accumulator; "" if it has none.
        is_counter: whether it only grows.
    """

    name: str
    text: str
    read: str | Callable[[View], Any]
    label: str = ""
    is_counter: bool = False

    def values(self, view: View) -> Iterable[tuple[list[str], float]]:
        """Returns the values of its label, and the value that it has for them."""
        if isinstance(self.read, str):
            value: Any = view
            for name in self.read.split("."):
                value = None if value is None else getattr(value, name)
        else:
            value = self.read(view)
        if self.label:
            return [([label], of) for label, of in value]
        return [] if value is None else [([], value)]


def _of_workers(read: Callable[[WorkerInfo], float]) -> Callable[[View], Iterator[tuple[str, float]]]:
    return lambda view: ((worker.name, read(worker)) for worker in view.info.known_workers)


def _missing(view: View) -> Iterator[tuple[str, int]]:
    # Workers leave a training that is finished, and nobody waits for them.
    is_over = view.parameters is not None and view.parameters.finished
    for state, workers in view.info.states.items():
        yield from ((worker.name, int(state in (LATE, GONE) and not is_over)) for worker in workers)


SERIES = (
    Series("global_step", "Current step.", "info.global_step"),
    Series("accumulated", "Gradients in the current round.", "info.num_accumulated"),
    Series("accumulated_weight", "Sum of the weights of these gradients.", "info.total_weight"),
    Series(
        "required",
        "Gradients that the first waiting taker requires; 0 if no taker is waiting.",
        lambda view: view.info.waiting[0].num_required if view.info.waiting else 0,
    ),
    Series(
        "required_weight",
        "Sum of weights that the first waiting taker requires; 0 if it requires none.",
        lambda view: view.info.waiting[0].min_weight if view.info.waiting else 0,
    ),
    Series("waiting_takers", "Takers waiting in the queue.", lambda view: len(view.info.waiting)),
    Series("unacknowledged_rounds", "Rounds taken but not acknowledged.", lambda view: len(view.info.unacknowledged)),
    Series("buffered_bytes", "Bytes of buffered gradients in the current round.", "info.buffered_bytes"),
    Series("buffer_limit_bytes", "Maximum of redisacc_buffered_bytes.", "info.buffer_limit"),
    Series(
        "reducers",
        "Partitions on which a reducer works; without partitions, 1 or 0.",
        lambda view: 0 if view.info.reducer is None else max(len(view.info.partitions), 1) - view.info.reducer.missing,
    ),
    Series(
        "reducer_late_rounds",
        "Rounds for which the reducer that works now was too late; 0 if there is none; of several, the slowest counts.",
        lambda view: view.info.reducer.late if view.info.reducer is not None else 0,
    ),
    Series("max_staleness", "Steps by which a gradient may be late.", "info.max_staleness"),
    Series("workers", "Workers with a gradient in the current round.", lambda view: len(view.info.workers)),
    Series(
        "expected_workers",
        "Workers that have yet to send a gradient for the current round, and are neither late nor gone.",
        lambda view: len(view.info.expected),
    ),
    Series(
        "late_workers", "Workers that others have waited for, and that are not gone.", lambda view: len(view.info.late)
    ),
    Series(
        "gone_workers",
        "Workers whose lease has ended, or that were not seen for long.",
        lambda view: len(view.info.gone),
    ),
    Series(
        "last_activity_timestamp_seconds",
        "Time of the last activity, by the server's clock.",
        lambda view: view.info.last_activity.timestamp(),
    ),
    Series("parameters_step", "Step of the latest parameters.", "parameters.step"),
    Series("until", "Step with which the training ends, if its chief knows.", "parameters.until"),
    Series("finished", "1 if no more parameters follow.", "parameters.finished"),
    Series("step_seconds", "Time of a step: the mean of the latest ones.", "step_seconds"),
    Series("parameters_bytes", "Bytes of the latest parameters.", "parameters.nbytes"),
    Series("state_bytes", "Bytes of the state of the optimizer, or of the chief.", "parameters.state_bytes"),
    Series(
        "stored_bytes",
        "Bytes of parameters and state, including earlier versions, which slow readers may still need.",
        "parameters.stored_bytes",
    ),
    Series("applied", "Gradients accepted.", "info.applied", is_counter=True),
    Series("stale", "Gradients dropped because they were too stale.", "info.stale", is_counter=True),
    Series(
        "repeated", "Gradients dropped because the round had one of their worker.", "info.repeated", is_counter=True
    ),
    Series("duplicates", "Requests that arrived twice and were executed once.", "info.duplicates", is_counter=True),
    Series("takes", "Rounds taken.", "info.takes", is_counter=True),
    Series(
        "accumulated_staleness",
        "Gradients in the current round by the number of steps by which they were late, if staleness allows any.",
        lambda view: [(str(late), n) for late, n in view.info.staleness.items()] if view.info.max_staleness else [],
        "staleness",
    ),
    Series("worker_applied", "Gradients accepted from a worker.", _of_workers(lambda of: of.applied), "worker", True),
    Series(
        "worker_stale",
        "Gradients from a worker dropped because they were too stale.",
        _of_workers(lambda of: of.stale),
        "worker",
        is_counter=True,
    ),
    Series(
        "worker_seen_timestamp_seconds",
        "Time of a worker's last request.",
        _of_workers(lambda of: of.seen_at.timestamp()),
        "worker",
    ),
    Series("worker_missing", "1 if a worker is late or gone, and the training is not finished.", _missing, "worker"),
    Series(
        "missing_workers",
        "Workers that are late or gone; none once the training is finished.",
        lambda view: sum(missing for _, missing in _missing(view)),
    ),
)
