"""`redisacc export`: metrics for Prometheus."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import click

from redisacc._info import AccumulatorInfo, Worker, read_info
from redisacc._keys import Keys
from redisacc._link import Link
from redisacc._looking import list_names, memory
from redisacc.cli._common import (
    EXIT_CODES,
    USAGE,
    fail,
    link_of,
    names_argument,
    redis_option,
    reported,
    safe,
)
from redisacc.errors import AccumulatorNotFoundError, RedisAccError

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError:
    fail("export needs prometheus-client: pip install 'redisacc[export]'", USAGE)

__all__ = ["export"]


@click.command(epilog=EXIT_CODES)
@names_argument
@click.option("--port", type=click.IntRange(0, 65535), default=9464, show_default=True, help="0: a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0: all.")
@redis_option
@reported
def export(*, names: tuple[str, ...], port: int, host: str, url: str | None) -> None:
    """Serve metrics for Prometheus at http://HOST:PORT/metrics: of all accumulators, or of those that are named.

    They are read from the server each time that somebody asks. Names may be globs as for ls. Ctrl-C ends it.
    """
    link = link_of(url)
    registry = CollectorRegistry()
    registry.register(Metrics(link, names))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        fail(f"no way to listen on {host}:{port}: {error}")
    click.echo(f"metrics of {link.address} at http://{host}:{server.server_port}/metrics, Ctrl-C ends")
    try:
        # Not without end: Ctrl-C must get through on every platform.
        while thread.is_alive():
            threading.Event().wait(1.0)
    finally:
        server.shutdown()
        server.server_close()


# Name, help, and what of the info it is.
_GAUGES: tuple[tuple[str, str, Callable[[AccumulatorInfo], float]], ...] = (
    ("global_step", "Current step.", lambda info: info.global_step),
    ("accumulated", "Gradients in the current round.", lambda info: info.num_accumulated),
    (
        "required",
        "Gradients that the first waiting taker asks for; 0: nobody waits.",
        lambda info: info.waiting[0].num_required if info.waiting else 0,
    ),
    ("waiting_takers", "Takers in the queue.", lambda info: len(info.waiting)),
    ("unacknowledged_rounds", "Rounds taken and not acknowledged.", lambda info: len(info.unacknowledged)),
    ("parked_bytes", "Bytes of gradients held whole in the current round.", lambda info: info.parked_bytes),
    ("parked_limit_bytes", "Bytes that they may have.", lambda info: info.parked_limit),
    ("workers", "Workers with a gradient in the current round.", lambda info: len(info.workers)),
    (
        "last_activity_timestamp_seconds",
        "When somebody last did something, by the server's clock.",
        lambda info: info.last_activity.timestamp(),
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[AccumulatorInfo], float]], ...] = (
    ("applied", "Gradients accepted.", lambda info: info.applied),
    ("stale", "Gradients dropped because their step had passed.", lambda info: info.stale),
    ("duplicates", "Requests that came again and were recognised.", lambda info: info.duplicates),
    ("takes", "Rounds taken.", lambda info: info.takes),
)
_WORKERS: tuple[tuple[str, str, Callable[[Worker], float]], ...] = (
    ("worker_applied", "Gradients accepted from a worker.", lambda worker: worker.applied),
    ("worker_stale", "Gradients of a worker dropped because their step had passed.", lambda worker: worker.stale),
)


class Metrics(Collector):
    """Reads the server each time that metrics are collected.

    Labels: ``accumulator`` and, for some, ``worker``. Workers are as many as there were names; a fleet whose workers
    are called "host:pid" gets a new one with every restart.
    """

    def __init__(self, link: Link, patterns: Sequence[str]) -> None:
        self._link = link
        self._patterns = patterns or ["*"]

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering it must not need a server."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics, as they are now."""
        up = GaugeMetricFamily("redisacc_up", "Whether the server answered.")
        started = time.perf_counter()
        try:
            infos, sizes = self._read()
        except RedisAccError as error:
            click.echo(f"redisacc: {safe(str(error))}", err=True)
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        yield GaugeMetricFamily(
            "redisacc_scrape_seconds", "How long it took to read all this.", value=time.perf_counter() - started
        )
        label = ["accumulator"]
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(f"redisacc_{name}", text, labels=label)
            for info in infos:
                gauge.add_metric([safe(info.name)], read(info))
            yield gauge
        size = GaugeMetricFamily("redisacc_memory_bytes", "Memory by sort of key.", labels=["accumulator", "what"])
        for name, sorts in sizes.items():
            for what, nbytes in sorts.items():
                size.add_metric([safe(name), what], nbytes)
        yield size
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(f"redisacc_{name}", text, labels=label)
            for info in infos:
                counter.add_metric([safe(info.name)], read(info), created=info.created_at.timestamp())
            yield counter
        both = ["accumulator", "worker"]
        for name, text, read_worker in _WORKERS:
            counter = CounterMetricFamily(f"redisacc_{name}", text, labels=both)
            for info in infos:
                for worker in info.known_workers:
                    counter.add_metric([safe(info.name), safe(worker.name)], read_worker(worker))
            yield counter
        seen = GaugeMetricFamily(
            "redisacc_worker_seen_timestamp_seconds", "When a worker was last heard of.", labels=both
        )
        missing = GaugeMetricFamily(
            "redisacc_worker_missing", "1 if a worker has no gradient in the current round.", labels=both
        )
        for info in infos:
            for worker in info.known_workers:
                seen.add_metric([safe(info.name), safe(worker.name)], worker.seen_at.timestamp())
                missing.add_metric([safe(info.name), safe(worker.name)], 0 if worker.in_round else 1)
        yield seen
        yield missing

    def _read(self) -> tuple[list[AccumulatorInfo], dict[str, dict[str, int]]]:
        # A scrape has a time limit, mostly of ten seconds.
        self._link.call("PING", patience=3.0)
        names = {name for pattern in self._patterns for name in list_names(self._link, pattern)}
        infos: list[AccumulatorInfo] = []
        sizes: dict[str, dict[str, int]] = {}
        for name in sorted(names):
            try:
                infos.append(read_info(self._link, Keys(name)))
                sizes[name] = {sort.what: sort.nbytes for sort in memory(self._link, Keys(name))}
            except AccumulatorNotFoundError:
                continue
            except RedisAccError as error:
                click.echo(f"redisacc: {safe(str(error))}", err=True)
        return infos, sizes
