"""The command `redisacc export`: serves metrics for Prometheus."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import click

from redisacc._admin.catalogue import list_names
from redisacc._admin.memory import memory
from redisacc._format.entries import WorkerInfo
from redisacc._format.keys import Keys
from redisacc._protocol.info import AccumulatorInfo, read_info
from redisacc._redis.transport import Transport
from redisacc._text import printable
from redisacc.cli.failures import EXIT_CODES, USAGE, fail, report_failures
from redisacc.cli.options import names_argument, redis_option, transport_of
from redisacc.errors import AccumulatorNotFoundError, RedisAccError

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError:
    fail("export needs prometheus-client: pip install 'redisacc[export]'", USAGE)

__all__ = ["export"]

# Seconds after which the server counts as down. By default, Prometheus gives up a scrape after ten.
_TIMEOUT = 3.0


@click.command(epilog=EXIT_CODES)
@names_argument
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=9464,
    show_default=True,
    help="Port to listen on; 0 picks a free one.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 means all.")
@redis_option
@report_failures
def export(*, names: tuple[str, ...], port: int, host: str, url: str | None) -> None:
    """Serve metrics for Prometheus at http://HOST:PORT/metrics.

    They are the metrics of all accumulators, or of the named ones; NAME may be a glob, as for ls. Each scrape reads
    the server again. Ctrl-C stops the command.

    \b
      redisacc export 'train-*' --port 9464
    """
    transport = transport_of(url)
    registry = CollectorRegistry()
    registry.register(Metrics(transport, names))
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


# The name without its prefix, the help text, and how to read the value.
_GAUGES: tuple[tuple[str, str, Callable[[AccumulatorInfo], float]], ...] = (
    ("global_step", "Current step.", lambda info: info.global_step),
    ("accumulated", "Gradients in the current round.", lambda info: info.num_accumulated),
    ("accumulated_weight", "Sum of the weights of these gradients.", lambda info: info.total_weight),
    (
        "required",
        "Gradients that the first waiting taker requires; 0 if no taker is waiting.",
        lambda info: info.waiting[0].num_required if info.waiting else 0,
    ),
    (
        "required_weight",
        "Sum of weights that the first waiting taker requires; 0 if it requires none.",
        lambda info: info.waiting[0].min_weight if info.waiting else 0,
    ),
    ("waiting_takers", "Takers waiting in the queue.", lambda info: len(info.waiting)),
    ("unacknowledged_rounds", "Rounds taken but not acknowledged.", lambda info: len(info.unacknowledged)),
    ("buffered_bytes", "Bytes of buffered gradients in the current round.", lambda info: info.buffered_bytes),
    ("buffer_limit_bytes", "Maximum of redisacc_buffered_bytes.", lambda info: info.buffer_limit),
    ("reducers", "Reducers that work on the accumulator: 0 or 1.", lambda info: int(info.reducer is not None)),
    (
        "reducer_late_rounds",
        "Rounds for which the reducer that works now was too late; 0 if there is none.",
        lambda info: info.reducer.late if info.reducer is not None else 0,
    ),
    ("max_staleness", "Steps by which a gradient may be late.", lambda info: info.max_staleness),
    ("workers", "Workers with a gradient in the current round.", lambda info: len(info.workers)),
    (
        "last_activity_timestamp_seconds",
        "Time of the last activity, by the server's clock.",
        lambda info: info.last_activity.timestamp(),
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[AccumulatorInfo], float]], ...] = (
    ("applied", "Gradients accepted.", lambda info: info.applied),
    ("stale", "Gradients dropped because they were too stale.", lambda info: info.stale),
    ("repeated", "Gradients dropped because the round had one of their worker.", lambda info: info.repeated),
    ("duplicates", "Requests that arrived twice and were executed once.", lambda info: info.duplicates),
    ("takes", "Rounds taken.", lambda info: info.takes),
)
_WORKERS: tuple[tuple[str, str, Callable[[WorkerInfo], float]], ...] = (
    ("worker_applied", "Gradients accepted from a worker.", lambda worker: worker.applied),
    ("worker_stale", "Gradients from a worker dropped because they were too stale.", lambda worker: worker.stale),
)


class Metrics(Collector):
    """Reads the server each time that metrics are collected.

    The labels are ``accumulator`` and, for some metrics, ``worker``. Every worker's name that ever applied a gradient
    is a label, so a fleet whose workers are called "host:pid" adds labels with each restart.

    Args:
        transport: to the server.
        patterns: globs of the accumulators' names; none means all.
    """

    def __init__(self, transport: Transport, patterns: Sequence[str]) -> None:
        self._transport = transport
        self._patterns = patterns or ["*"]

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, so that registering the collector does not need a server."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics, read now."""
        up = GaugeMetricFamily("redisacc_up", "Whether the server answered.")
        started = time.perf_counter()
        try:
            infos, sizes = self._read()
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
        label = ["accumulator"]
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(f"redisacc_{name}", text, labels=label)
            for info in infos:
                gauge.add_metric([printable(info.name)], read(info))
            yield gauge
        yield _staleness(infos)
        size = GaugeMetricFamily(
            "redisacc_memory_bytes", "Memory in Redis by kind of key.", labels=["accumulator", "what"]
        )
        for name, sorts in sizes.items():
            for what, nbytes in sorts.items():
                size.add_metric([printable(name), what], nbytes)
        yield size
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(f"redisacc_{name}", text, labels=label)
            for info in infos:
                counter.add_metric([printable(info.name)], read(info), created=info.created_at.timestamp())
            yield counter
        both = ["accumulator", "worker"]
        for name, text, read_worker in _WORKERS:
            counter = CounterMetricFamily(f"redisacc_{name}", text, labels=both)
            for info in infos:
                for worker in info.known_workers:
                    counter.add_metric([printable(info.name), printable(worker.name)], read_worker(worker))
            yield counter
        seen = GaugeMetricFamily(
            "redisacc_worker_seen_timestamp_seconds", "Time of a worker's last request.", labels=both
        )
        missing = GaugeMetricFamily(
            "redisacc_worker_missing", "1 if a worker has no gradient in the current round.", labels=both
        )
        for info in infos:
            for worker in info.known_workers:
                seen.add_metric([printable(info.name), printable(worker.name)], worker.seen_at.timestamp())
                missing.add_metric([printable(info.name), printable(worker.name)], 0 if worker.in_round else 1)
        yield seen
        yield missing

    def _read(self) -> tuple[list[AccumulatorInfo], dict[str, dict[str, int]]]:
        self._transport.call("PING", timeout=_TIMEOUT)
        names = {name for pattern in self._patterns for name in list_names(self._transport, pattern)}
        infos: list[AccumulatorInfo] = []
        sizes: dict[str, dict[str, int]] = {}
        for name in sorted(names):
            try:
                infos.append(read_info(self._transport, Keys(name)))
                sizes[name] = {sort.what: sort.nbytes for sort in memory(self._transport, Keys(name))}
            except AccumulatorNotFoundError:
                continue
            except RedisAccError as error:
                click.echo(f"redisacc: {printable(str(error))}", err=True)
        return infos, sizes


def _staleness(infos: Sequence[AccumulatorInfo]) -> Metric:
    """Returns the metric of how late gradients were, of the accumulators that accept late ones."""
    gauge = GaugeMetricFamily(
        "redisacc_accumulated_staleness",
        "Gradients in the current round by the number of steps by which they were late.",
        labels=["accumulator", "staleness"],
    )
    for info in infos:
        if info.max_staleness:
            for steps, number in info.staleness.items():
                gauge.add_metric([printable(info.name), str(steps)], number)
    return gauge
