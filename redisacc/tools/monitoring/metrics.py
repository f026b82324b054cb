"""What Prometheus gets: a row for each metric of an accumulator, and the text that it reads."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from redisacc._format.entries import GONE, LATE
from redisacc._format.keys import Keys
from redisacc._text import printable
from redisacc._wire.transport import Transport, limited
from redisacc.errors import RedisAccError, ServerUnavailableError
from redisacc.tools.admin.memory import Memory, memory
from redisacc.tools.monitoring.monitor import Monitor, View
from redisacc.tools.monitoring.rounds import HISTOGRAMS, Histogram

logger = logging.getLogger("redisacc")


@dataclass(frozen=True)
class Series:
    """A metric of each accumulator.

    Attributes:
        name: its name without the prefix.
        text: what it is.
        read: where its value is, such as "info.takes", of a list its length; or what returns it. None if there is no
            value; with a label, pairs of a label's value and the metric's.
        label: the name of a label that it has besides the accumulator; "" if it has none.
        is_counter: whether it only grows.
    """

    name: str
    text: str
    read: str | Callable[[View], Any]
    label: str = ""
    is_counter: bool = False

    def values(self, view: View) -> Iterable[tuple[dict[str, str], float]]:
        """Returns its own labels, and the value that it has for them."""
        if callable(self.read):
            value = self.read(view)
        else:
            value = view
            for name in self.read.split("."):
                value = None if value is None else getattr(value, name)
            if isinstance(value, (list, dict)):
                value = len(value)
        if self.label:
            return [({self.label: label}, of) for label, of in value]
        return [] if value is None else [({}, value)]


def _of_workers(field: str) -> Callable[[View], Iterator[tuple[str, float]]]:
    return lambda view: ((worker.name, getattr(worker, field)) for worker in view.info.known_workers)


def _missing(view: View) -> Iterator[tuple[str, int]]:
    for state, workers in view.info.states.items():
        yield from ((worker.name, int(state in (LATE, GONE) and not view.is_over)) for worker in workers)


SERIES = (
    Series("global_step", "Current step.", "info.global_step"),
    Series("accumulated", "Gradients in the current round.", "info.num_accumulated"),
    Series(
        "required",
        "Gradients that the first waiting taker requires; 0 if no taker is waiting.",
        lambda view: view.info.waiting[0].num_required if view.info.waiting else 0,
    ),
    Series("waiting_takers", "Takers waiting in the queue.", "info.waiting"),
    Series("unacknowledged_rounds", "Rounds taken but not acknowledged.", "info.unacknowledged"),
    Series("buffered_bytes", "Bytes of buffered gradients in the current round.", "info.buffered_bytes"),
    Series("buffer_limit_bytes", "Maximum of redisacc_buffered_bytes.", "info.buffer_limit"),
    Series(
        "reducers",
        "Partitions on which a reducer works; without partitions, 1 or 0.",
        lambda view: 0 if view.info.reducer is None else max(len(view.info.partitions), 1) - view.info.reducer.missing,
    ),
    Series("workers", "Workers with a gradient in the current round.", "info.workers"),
    Series(
        "expected_workers",
        "Workers that have yet to send a gradient for the current round, and are neither late nor gone.",
        "info.expected",
    ),
    Series("late_workers", "Workers that others have waited for, and that are not gone.", "info.late"),
    Series(
        "gone_workers",
        "Workers whose lease has ended, or that were not seen for long.",
        "info.gone",
    ),
    Series(
        "last_activity_timestamp_seconds",
        "Time of the last activity, by the server's clock.",
        lambda view: view.info.last_activity.timestamp(),
    ),
    Series("parameters_step", "Step of the latest parameters.", "parameters.step"),
    Series("until", "Last step of the run, if its chief knows.", "parameters.until"),
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
    Series("worker_applied", "Gradients accepted from a worker.", _of_workers("applied"), "worker", True),
    Series(
        "worker_stale",
        "Gradients from a worker dropped because they were too stale.",
        _of_workers("stale"),
        "worker",
        is_counter=True,
    ),
    Series(
        "worker_seen_timestamp_seconds",
        "Time of a worker's last request.",
        lambda view: ((worker.name, worker.seen_at.timestamp()) for worker in view.info.known_workers),
        "worker",
    ),
    Series(
        "metric",
        "Mean of a metric over the gradients of the latest round that had any.",
        lambda view: view.info.metrics.items(),
        "metric",
    ),
    Series("worker_missing", "1 if a worker is late or gone, and the run is not finished.", _missing, "worker"),
    Series(
        "missing_workers",
        "Workers that are late or gone; none once the run is finished.",
        lambda view: sum(missing for _, missing in _missing(view)),
    ),
)

# Seconds after which the server counts as down. By default, Prometheus gives up a scrape after ten.
_TIMEOUT = 3.0

# What Prometheus gets of a server: an attribute of ``Node`` → a name and a text.
_NODES = {
    "used_memory": ("server_memory_bytes", "Memory that the server uses."),
    "maxmemory": ("server_memory_limit_bytes", "Memory that the server may use; 0: no limit."),
}

# A suffix of the name, labels, and a value. A metric has a name, a type and a text, and samples.
_Sample = tuple[str, dict[str, str], float]
_Family = tuple[str, str, str, Iterable[_Sample]]


class Metrics:
    """Reads the server each time that metrics are asked for. One thread at a time may use it.

    The labels are ``accumulator`` and, for some metrics, ``worker`` or ``metric``. Every worker's name that ever
    applied a gradient is a label, so a fleet whose workers are called "host:pid" adds labels with each restart.

    Args:
        transport: the way to the server.
        monitor: reads it, and listens to events in between.
    """

    def __init__(self, transport: Transport, monitor: Monitor) -> None:
        self._transport = transport
        self._monitor = monitor

    def text(self) -> str:
        """Returns all metrics, read now, in Prometheus' text format."""
        started = time.perf_counter()
        up = ("up", "gauge", "Whether the server answered.")
        try:
            with self._monitor.lock:
                families = list(self._families())
        except RedisAccError as error:
            logger.warning("%s", error)
            return "".join(_lines(*up, [("", {}, 0)]))
        took = time.perf_counter() - started
        known: list[_Family] = [
            (*up, [("", {}, 1)]),
            ("scrape_seconds", "gauge", "Time it took to read the server.", [("", {}, took)]),
        ]
        return "".join(line for family in (*known, *families) for line in _lines(*family))

    def _families(self) -> Iterator[_Family]:
        """Reads the server, and yields name, type, text and samples of each metric."""
        monitor = self._monitor
        monitor.refresh(timeout=_TIMEOUT)
        for problem in monitor.problems:
            logger.warning("%s", problem)
        views = {printable(name): view for name, view in monitor.views.items()}
        for series in SERIES:
            kind = "counter" if series.is_counter else "gauge"
            yield (
                series.name,
                kind,
                series.text,
                [
                    ("", {"accumulator": name, **labels}, value)
                    for name, view in views.items()
                    for labels, value in series.values(view)
                ],
            )
        sizes = self._sizes(monitor.views)
        yield (
            "memory_bytes",
            "gauge",
            "Memory in Redis by kind of key.",
            [("", {"accumulator": printable(name), "what": sort.what}, sort.nbytes) for name, sort in sizes],
        )
        for name, (text, _) in HISTOGRAMS.items():
            found = [(of, view.heard.histograms[name]) for of, view in views.items()]
            yield name, "histogram", text, [sample for of in found if any(of[1].counts) for sample in _buckets(*of)]
        for attribute, (name, text) in _NODES.items():
            values = [(node.address, getattr(node, attribute)) for node in monitor.nodes]
            yield name, "gauge", text, [("", {"node": where}, value) for where, value in values if value is not None]

    def _sizes(self, names: Iterable[str]) -> list[tuple[str, Memory]]:
        sizes: list[tuple[str, Memory]] = []
        with limited(_TIMEOUT):
            for name in names:
                try:
                    sizes += [(name, sort) for sort in memory(self._transport, Keys(name))]
                except ServerUnavailableError:
                    # The others would wait for as long, one after the other.
                    raise
                except RedisAccError as error:
                    logger.warning("%s", error)
        return sizes


def _buckets(name: str, histogram: Histogram) -> Iterator[_Sample]:
    number = 0
    for bound, count in zip([*histogram.bounds, math.inf], histogram.counts, strict=True):
        number += count
        yield "_bucket", {"accumulator": name, "le": _number(bound)}, number
    yield "_count", {"accumulator": name}, number
    yield "_sum", {"accumulator": name}, histogram.total


def _lines(name: str, kind: str, text: str, samples: Iterable[_Sample]) -> Iterator[str]:
    """Yields the lines of a metric in Prometheus' text format."""
    name = f"redisacc_{name}_total" if kind == "counter" else f"redisacc_{name}"
    yield f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
    for suffix, labels, value in samples:
        named = ",".join(f'{label}="{_quoted(printable(of))}"' for label, of in labels.items())
        yield f"{name}{suffix}{{{named}}} {_number(value)}\n" if named else f"{name}{suffix} {_number(value)}\n"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _number(value: float) -> str:
    text = str(float(value))
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(text, text)
