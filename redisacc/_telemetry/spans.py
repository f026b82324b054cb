"""Spans and metrics by OpenTelemetry's API. Names follow its semantic conventions for messaging.

To these conventions, an accumulator is a destination, a gradient is a message, whoever applies it is a producer, and a
taker is a consumer, whose span links the producers' spans. docs/guides/opentelemetry.md lists everything that is
recorded.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from functools import lru_cache
from types import TracebackType
from typing import Any

from opentelemetry import context, metrics, trace
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from redisacc._telemetry.operation import NOT_OBSERVED, Name, Operation
from redisacc._telemetry.traceparent import TraceParent
from redisacc._text import printable
from redisacc._version import __version__
from redisacc.errors import RedisAccError

if "explicit_bucket_boundaries_advisory" not in inspect.signature(metrics.Meter.create_histogram).parameters:
    raise ImportError("redisacc needs opentelemetry-api 1.30 or later")

# Maximum number of spans that the span of a take links.
MOST_LINKS = 128

_SYSTEM = "redisacc"
_OPERATION_TYPES: dict[Name, str] = {
    "apply": "send",
    "take": "receive",
    "recover": "receive",
    "publish": "send",
    "wait": "receive",
}
_KINDS: dict[Name, SpanKind] = {
    "apply": SpanKind.PRODUCER,
    "take": SpanKind.CONSUMER,
    "recover": SpanKind.CONSUMER,
    "compact": SpanKind.INTERNAL,
    "publish": SpanKind.PRODUCER,
    "wait": SpanKind.CONSUMER,
}

# The bounds of the histogram's buckets, in seconds: an apply takes a tenth of a millisecond, and a take may wait for
# minutes.
_DURATIONS = (
    *(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1),
    *(0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0),
)


class Instruments:
    """What records.

    Args:
        tracers: provides the tracer, which makes spans.
        meters: provides the meter, which makes the instruments of the metrics.

    Attributes:
        tracer: the tracer.
        duration: the duration of operations in seconds, waiting included.
        sent: the number of gradients that were sent, whether they were accepted or dropped.
        received: the number of gradients in rounds that were taken or recovered.
    """

    def __init__(self, tracers: trace.TracerProvider, meters: metrics.MeterProvider) -> None:
        self.tracer = tracers.get_tracer(_SYSTEM, __version__)
        meter = meters.get_meter(_SYSTEM, __version__)
        self.duration = meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "How long operations took, waiting included.",
            explicit_bucket_boundaries_advisory=_DURATIONS,
        )
        self.sent = meter.create_counter(
            "messaging.client.sent.messages",
            "{message}",
            "Gradients that were sent, whether they were accepted or dropped.",
        )
        self.received = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Gradients in rounds that were taken or recovered."
        )


@lru_cache(maxsize=1)
def _instruments_of(tracers: trace.TracerProvider, meters: metrics.MeterProvider) -> Instruments:
    return Instruments(tracers, meters)


def _instruments() -> Instruments:
    """Returns the instruments of the SDK that the application has set up: until it has, they record nothing."""
    return _instruments_of(trace.get_tracer_provider(), metrics.get_meter_provider())


# This sets up an SDK that the environment names.
_instruments()

# Where the API keeps the SDK that the application has set up. Its public functions make ten calls to return it, which
# is much for a small gradient. If a version of the API keeps it elsewhere, every operation is observed.
_metrics_internal: Any = getattr(metrics, "_internal", None)
SDK_IS_KNOWN = hasattr(trace, "_TRACER_PROVIDER") and hasattr(_metrics_internal, "_METER_PROVIDER")

Attributes = dict[str, Any]


class Target:
    """What operations of one handle have in common.

    Args:
        kind, name, is_private, address: as for ``observer``.

    Attributes:
        span_names: the name of the span of each operation.
    """

    def __init__(self, kind: str, name: str, *, is_private: bool, address: str) -> None:
        label = "(temporary)" if is_private else printable(name)
        self.span_names: dict[Name, str] = {operation: f"{operation} {label}" for operation in _KINDS}
        self._attributes: Attributes = {
            "messaging.system": _SYSTEM,
            "messaging.destination.name": printable(name),
            "db.system.name": "redis",
            "redisacc.kind": kind,
            **_server_attributes(address),
        }
        if is_private:
            self._attributes |= {"messaging.destination.anonymous": True, "messaging.destination.temporary": True}
        # What has been made before: a handle has one client, and another one after a fork.
        self._of_operations: dict[tuple[Name, str], Attributes] = {}

    def observe(self, name: Name, client: str = "") -> Operation:
        """Returns an operation, as ``Observe`` says.

        An application may set up an SDK at any time, so every call looks for one.
        """
        if SDK_IS_KNOWN and trace._TRACER_PROVIDER is None and _metrics_internal._METER_PROVIDER is None:
            return NOT_OBSERVED
        return ObservedOperation(name, self, client)

    def span_attributes(self, name: Name, client: str) -> Attributes:
        """Returns what is known of an operation before it begins."""
        attributes = self._of_operations.get((name, client))
        if attributes is None:
            attributes = self._attributes | _METRIC_ATTRIBUTES[name]
            if client:
                attributes["messaging.client.id"] = client
            self._of_operations[name, client] = attributes
        return attributes


def _server_attributes(address: str) -> Attributes:
    """Returns what a transport's address says: "host:port/database", "unix://path", or the seeds of a cluster."""
    if address.startswith("unix://"):
        return {"server.address": address.removeprefix("unix://")}
    place, _, database = address.partition("/")
    host, _, port = place.rpartition(":")
    if not (host and port.isdigit()) or "," in host:
        return {"server.address": address}
    attributes: Attributes = {"server.address": host, "server.port": int(port)}
    return attributes | {"db.namespace": database} if database else attributes


def _metric_attributes(name: Name) -> Attributes:
    attributes: Attributes = {"messaging.system": _SYSTEM, "messaging.operation.name": name}
    if name in _OPERATION_TYPES:
        attributes["messaging.operation.type"] = _OPERATION_TYPES[name]
    return attributes


# Names of accumulators, workers and servers are not among the attributes of metrics, because anybody may add some.
_METRIC_ATTRIBUTES: dict[Name, Attributes] = {name: _metric_attributes(name) for name in _KINDS}


class ObservedOperation(Operation):
    """An operation with a span and metrics.

    Args:
        name: what is done.
        target: what it is done with.
        client: the name of who does it; "" if it has none.
    """

    __slots__ = ("_client", "_instruments", "_name", "_span", "_started", "_target", "_token")

    def __init__(self, name: Name, target: Target, client: str) -> None:
        self._name = name
        self._target = target
        self._client = client
        self._instruments = _instruments()
        self._token: Any = None

    def __enter__(self) -> ObservedOperation:
        self._started = time.perf_counter()
        name, target = self._name, self._target
        self._span = self._instruments.tracer.start_span(
            target.span_names[name], kind=_KINDS[name], attributes=target.span_attributes(name, self._client)
        )
        if self._span.get_span_context().is_valid:
            # Also if it records nothing: then spans within it record nothing either.
            self._token = context.attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the span, with the status of the error if there is one, and records the duration."""
        attributes = _METRIC_ATTRIBUTES[self._name]
        if error is not None:
            error_type = _error_type(error)
            attributes = {**attributes, "error.type": error_type}
            self._span.set_attribute("error.type", error_type)
            # Only of our own messages is it known that they hold no secrets.
            text = printable(str(error)) if isinstance(error, RedisAccError) else None
            self._span.set_status(Status(StatusCode.ERROR, text))
        if self._token is not None:
            context.detach(self._token)
        self._span.end()
        self._instruments.duration.record(time.perf_counter() - self._started, attributes)

    @property
    def trace(self) -> str:
        """The text with which another process links this span; "" if nothing records it."""
        if not self._span.is_recording():
            return ""
        own = self._span.get_span_context()
        return str(TraceParent(own.trace_id, own.span_id, own.trace_flags))

    def note_gradient(self, nbytes: int, local_step: int, outcome: str, global_step: int) -> None:
        """Notes whether a gradient that was sent was counted."""
        self._instruments.sent.add(1, {**_METRIC_ATTRIBUTES["apply"], "redisacc.outcome": outcome})
        if self._span.is_recording():
            self._span.set_attributes(
                {
                    "redisacc.outcome": outcome,
                    "messaging.message.body.size": nbytes,
                    "redisacc.local_step": local_step,
                    "redisacc.global_step": global_step,
                }
            )

    def note_round(self, *, number: int, global_step: int, traces: Sequence[TraceParent]) -> None:
        """Notes a round that was received, and links the spans that applied its gradients, MOST_LINKS at most."""
        self._instruments.received.add(number, _METRIC_ATTRIBUTES[self._name])
        if self._span.is_recording():
            self._span.set_attributes({"messaging.batch.message_count": number, "redisacc.global_step": global_step})
            for found in traces[:MOST_LINKS]:
                self._span.add_link(
                    SpanContext(found.trace_id, found.span_id, is_remote=True, trace_flags=TraceFlags(found.flags))
                )

    def note(self, attribute: str, value: int) -> None:
        """Notes what else is known of it."""
        self._span.set_attribute(attribute, value)


def _error_type(error: BaseException) -> str:
    """Returns the name of an error's class, one of a bounded number of names."""
    kind = type(error)
    if isinstance(error, RedisAccError):
        # Not the name of a class that only redisacc uses.
        return next(each.__name__ for each in kind.__mro__ if each.__module__ == RedisAccError.__module__)
    return kind.__qualname__ if kind.__module__ == "builtins" else "_OTHER"
