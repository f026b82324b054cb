"""The command `redisacc export`: serves metrics for Prometheus."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from redisacc._admin.memory import memory
from redisacc._format.keys import Keys
from redisacc._monitoring.histogram import Histogram
from redisacc._monitoring.metrics import SERIES
from redisacc._monitoring.monitor import Monitor
from redisacc._monitoring.nodes import Node
from redisacc._monitoring.round_history import Figures
from redisacc._monitoring.view import View
from redisacc._redis.transport import Transport, limited
from redisacc._text import printable
from redisacc.cli.shared.failures import EXIT_CODES, USAGE, fail, report_failures
from redisacc.cli.shared.options import names_argument, port_option, redis_option, targets_of, transport_of
from redisacc.errors import RedisAccError, ServerUnavailableError

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector as MetricsCollector
except ImportError:
    fail("export needs prometheus-client: pip install 'redisacc[export]'", USAGE)

__all__ = ["export"]

# Seconds after which the server counts as down. By default, Prometheus gives up a scrape after ten.
_TIMEOUT = 3.0
# Maximum number of metrics of an accumulator whose names become labels, and of the names that a message lists.
_MOST_METRICS, _NAMED = 32, 10


@click.command(epilog=EXIT_CODES)
@names_argument
@port_option(9464)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 means all.")
@redis_option
@report_failures
def export(*, names: tuple[str, ...], port: int, host: str, url: str | None) -> None:
    """Serve metrics for Prometheus at http://HOST:PORT/metrics.

    They are the metrics of all accumulators, or of the named ones; NAME may be a glob, as for ls. Each scrape reads
    the server again. The histograms count what happened since the command was started. Of each accumulator, the first
    32 names of metrics that workers give to their gradients become labels; a message names those that are left out.
    Ctrl-C stops the command.

    \b
      redisacc export 'train-*' --port 9464
    """
    transport = transport_of(url)
    with contextlib.closing(Metrics(transport, names)) as metrics:
        registry = CollectorRegistry()
        registry.register(metrics)
        try:
            server, thread = start_http_server(port, host, registry)
        except (OSError, UnicodeError) as error:
            # The name of a host that no domain can have raises a UnicodeError.
            fail(f"cannot listen on {host}:{port}: {error}")
        click.echo(f"metrics of {transport.address} at http://{host}:{server.server_port}/metrics, Ctrl-C stops")
        try:
            # Short waits, because an endless one blocks Ctrl-C on some platforms.
            while thread.is_alive():
                threading.Event().wait(1.0)
        finally:
            server.shutdown()
            server.server_close()


_HISTOGRAMS: tuple[tuple[str, str, Callable[[Figures], Histogram]], ...] = (
    ("round_seconds", "Time from one take to the next.", lambda figures: figures.round_seconds),
    (
        "gathering_seconds",
        "Time from the first gradient of a round to the last one.",
        lambda figures: figures.gathering_seconds,
    ),
    ("take_wait_seconds", "Time that a take waited in the queue.", lambda figures: figures.wait_seconds),
    (
        "staleness_steps",
        "Steps by which accepted gradients were late, if staleness allows any.",
        lambda figures: figures.staleness,
    ),
    ("round_bytes", "Bytes of the gradients of a round.", lambda figures: figures.round_bytes),
)
_NODES: tuple[tuple[str, str, Callable[[Node], float | None]], ...] = (
    ("server_memory_bytes", "Memory that the server uses.", lambda node: node.used_memory),
    ("server_memory_limit_bytes", "Memory that the server may use; 0: no limit.", lambda node: node.maxmemory),
)


class Metrics(MetricsCollector):
    """Reads the server each time that metrics are collected, and listens to events in between. Close it.

    The labels are ``accumulator`` and, for some metrics, ``worker`` or ``metric``. Every worker's name that ever
    applied a gradient is a label, so a fleet whose workers are called "host:pid" adds labels with each restart.

    Args:
        transport: to the server.
        names: names and globs of accumulators; none means all.
    """

    def __init__(self, transport: Transport, names: Sequence[str]) -> None:
        self._transport = transport
        self._monitor = Monitor(transport, *targets_of(names))
        # Prometheus may ask again while it is being answered.
        self._lock = threading.Lock()
        # Accumulator's name → names of metrics that are labels, and those that are left out.
        self._names: dict[str, tuple[set[str], set[str]]] = {}

    def close(self) -> None:
        """Stops listening."""
        self._monitor.close()

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, so that registering the collector does not need a server."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics, read now."""
        up = GaugeMetricFamily("redisacc_up", "Whether the server answered.")
        started = time.perf_counter()
        try:
            with self._lock:
                views, sizes, figures, nodes = self._read()
                values = self._metrics(views)
        except RedisAccError as error:
            click.echo(f"redisacc: {printable(str(error))}", err=True)
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        yield GaugeMetricFamily(
            "redisacc_scrape_seconds", "Time it took to read the server.", value=time.perf_counter() - started
        )
        yield from _of_accumulators(views)
        yield from values
        yield _memory(sizes)
        yield from _histograms(figures)
        yield from _of_nodes(nodes)

    def _metrics(self, views: Sequence[View]) -> list[Metric]:
        """Returns the metrics that workers have given to the gradients of the latest rounds."""
        value = GaugeMetricFamily(
            "redisacc_metric",
            "Mean of a metric over the gradients of the latest round that had any.",
            labels=["accumulator", "metric"],
        )
        left_out = GaugeMetricFamily(
            "redisacc_metrics_left_out", "Names of metrics that are no labels.", labels=["accumulator"]
        )
        self._names = {view.info.name: self._names.get(view.info.name, (set(), set())) for view in views}
        for view in views:
            name, (kept, others) = printable(view.info.name), self._names[view.info.name]
            added = []
            for metric, mean in view.info.metrics.items():
                if metric not in kept and len(kept) < _MOST_METRICS:
                    kept.add(metric)
                if metric in kept:
                    value.add_metric([name, metric], mean)
                elif metric not in others and len(others) < _MOST_METRICS:
                    others.add(metric)
                    added.append(metric)
            if added:
                more = f" and {len(added) - _NAMED} more" if len(added) > _NAMED else ""
                left = ", ".join(added[:_NAMED]) + more
                text = f"{name} has more than {_MOST_METRICS} metrics, the most that are exported; left out: {left}"
                click.echo(f"redisacc: {text}", err=True)
            left_out.add_metric([name], len(others))
        return [value, left_out]

    def _read(self) -> tuple[list[View], dict[str, dict[str, int]], dict[str, Figures], list[Node]]:
        monitor = self._monitor
        monitor.refresh(timeout=_TIMEOUT)
        for problem in monitor.problems:
            click.echo(f"redisacc: {printable(problem)}", err=True)
        sizes: dict[str, dict[str, int]] = {}
        with limited(_TIMEOUT):
            for name in monitor.views:
                try:
                    sizes[name] = {sort.what: sort.nbytes for sort in memory(self._transport, Keys(name))}
                except ServerUnavailableError:
                    # The others would wait for as long, one after the other.
                    raise
                except RedisAccError as error:
                    click.echo(f"redisacc: {printable(str(error))}", err=True)
        return list(monitor.views.values()), sizes, monitor.figures, monitor.nodes


def _of_accumulators(views: Sequence[View]) -> Iterator[Metric]:
    for series in SERIES:
        labels = ["accumulator", *filter(None, [series.label])]
        family: Any = (CounterMetricFamily if series.is_counter else GaugeMetricFamily)(
            f"redisacc_{series.name}", series.text, labels=labels
        )
        for view in views:
            created = {"created": view.info.created_at.timestamp()} if series.is_counter and not series.label else {}
            for label, value in series.values(view):
                family.add_metric([printable(view.info.name), *map(printable, label)], value, **created)
        yield family


def _memory(sizes: Mapping[str, Mapping[str, int]]) -> Metric:
    size = GaugeMetricFamily("redisacc_memory_bytes", "Memory in Redis by kind of key.", labels=["accumulator", "what"])
    for name, sorts in sizes.items():
        for what, nbytes in sorts.items():
            size.add_metric([printable(name), what], nbytes)
    return size


def _histograms(figures: Mapping[str, Figures]) -> Iterator[Metric]:
    for name, text, read in _HISTOGRAMS:
        family = HistogramMetricFamily(f"redisacc_{name}", text, labels=["accumulator"])
        for of, found in figures.items():
            histogram = read(found)
            if any(histogram.counts):
                bounds = [*map(str, map(float, histogram.bounds)), "+Inf"]
                buckets = list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))
                family.add_metric([printable(of)], buckets, histogram.total)
        yield family


def _of_nodes(nodes: Sequence[Node]) -> Iterator[Metric]:
    for name, text, read in _NODES:
        gauge = GaugeMetricFamily(f"redisacc_{name}", text, labels=["node"])
        for node in nodes:
            if (value := read(node)) is not None:
                gauge.add_metric([node.address], value)
        yield gauge
