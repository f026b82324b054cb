"""Records the spans and metrics of this process in memory, without OpenTelemetry's global state."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler

from redisacc._telemetry import spans


class Recorded:
    """What was recorded."""

    def __init__(self, sampler: Sampler = ALWAYS_ON) -> None:
        self._exporter, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        self._tracers = TracerProvider(sampler=sampler)
        self._tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._meters = MeterProvider([self._reader])
        self.tracer = self._tracers.get_tracer("test")
        self.instruments = spans.Instruments(self.tracer, self._meters.get_meter("test"))

    def spans(self, name: str = "") -> list[Any]:
        """Returns the spans that have ended, of one operation or of all."""
        return [span for span in self._exporter.get_finished_spans() if span.name.partition(" ")[0] == name or not name]

    def metrics(self) -> dict[str, list[Any]]:
        """Returns the name of each metric and its data points."""
        data = self._reader.get_metrics_data()
        found = {} if data is None else data.resource_metrics[0].scope_metrics[0].metrics
        return {metric.name: list(metric.data.data_points) for metric in found}

    def close(self) -> None:
        """Ends the recording."""
        self._tracers.shutdown()
        self._meters.shutdown()


@pytest.fixture
def record(monkeypatch):
    """Records until the test ends. Optionally takes a sampler."""
    made = []

    def start(*sampler):
        recorded = Recorded(*sampler)
        made.append(recorded)
        monkeypatch.setattr(spans, "_instruments", recorded.instruments)
        return recorded

    yield start
    for recorded in made:
        recorded.close()


@pytest.fixture
def recorded(record):
    return record()
