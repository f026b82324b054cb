"""Records the spans and metrics of this process in memory, by the SDK of OpenTelemetry."""

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON


class Recorded:
    """What was recorded."""

    def __init__(self, sampler=ALWAYS_ON):
        self._exporter, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers = TracerProvider(sampler=sampler)
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.meters = MeterProvider([self._reader])
        self.tracer = self.tracers.get_tracer("test")

    def spans(self, name=""):
        """Returns the spans that have ended, of one operation or of all."""
        return [span for span in self._exporter.get_finished_spans() if span.name.partition(" ")[0] == name or not name]

    def metrics(self):
        """Returns the name of each metric and its data points."""
        data = self._reader.get_metrics_data()
        found = {} if data is None else data.resource_metrics[0].scope_metrics[0].metrics
        return {metric.name: list(metric.data.data_points) for metric in found}

    def close(self):
        """Ends the recording."""
        self.tracers.shutdown()
        self.meters.shutdown()


@pytest.fixture
def record(monkeypatch):
    """Records until the test ends. Optionally takes a sampler."""
    made = []

    def start(*sampler):
        recorded = Recorded(*sampler)
        made.append(recorded)
        # An application may do this only once, by set_tracer_provider and set_meter_provider.
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", recorded.tracers)
        monkeypatch.setattr(metrics._internal, "_METER_PROVIDER", recorded.meters)
        return recorded

    yield start
    for recorded in made:
        recorded.close()


@pytest.fixture
def recorded(record):
    return record()
