"""Traces of several processes, and processes without OpenTelemetry."""

import json
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from support.warm_python import WarmPython

import redisacc

PROGRAM = Path(__file__).with_name("traced_process.py")

pytestmark = pytest.mark.servers("valkey", "redis62")


def run(*arguments):
    return WarmPython([str(PROGRAM), *arguments], stdout=PIPE, stderr=sys.stderr, text=True)


def spans_of(process):
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return json.loads(out)


def test_a_take_links_the_spans_of_other_processes(real_server, real_client):
    chief = run(real_server.url, "chief", "take")
    workers = [run(real_server.url, what, what) for what in ("in_place", "inline", "parts")]
    (take,) = spans_of(chief)
    applies = [span for worker in workers for span in spans_of(worker)]
    assert [span["name"] for span in applies] == 3 * ["apply w"]
    assert sorted(take["links"]) == sorted([span["trace"], span["span"]] for span in applies)
    assert len({span["trace"] for span in [take, *applies]}) == 4
    assert take["parent"] is None
    redisacc.ConditionalAccumulator("float32", [2000], "w", redis=real_client).delete()


LATE = """
import sys
import redisacc
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from redisacc._telemetry import spans

assert spans.SDK_IS_KNOWN
with redisacc.ConditionalAccumulator("float32", [1], "late", redis=sys.argv[1]) as acc:
    acc.apply_grad([1.0])
    assert acc._observe("apply") is spans.NOT_OBSERVED
    memory, reader, provider = InMemorySpanExporter(), InMemoryMetricReader(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    for what in sys.argv[2:]:
        if what == "spans":
            trace.set_tracer_provider(provider)
        else:
            metrics.set_meter_provider(MeterProvider([reader]))
    acc.apply_grad([1.0])
    acc.take_grad(2)
    acc.delete()
data = reader.get_metrics_data()
counted = [] if data is None else data.resource_metrics[0].scope_metrics[0].metrics
print([span.name for span in memory.get_finished_spans()], sorted(metric.name[10:] for metric in counted))
"""


@pytest.mark.slow
@pytest.mark.parametrize("sdk", [["spans"], ["metrics"], ["spans", "metrics"]])
def test_an_sdk_that_is_set_up_later_records_from_then_on(real_server, sdk):
    found = subprocess.run(
        [sys.executable, "-c", LATE, real_server.url, *sdk], capture_output=True, text=True, timeout=60, check=True
    )
    spans = ["apply late", "take late"] if "spans" in sdk else []
    counted = ["client.consumed.messages", "client.operation.duration", "client.sent.messages"]
    assert found.stdout.strip() == f"{spans} {counted if 'metrics' in sdk else []}"


WITHOUT = """
import sys
sys.modules["opentelemetry"] = None
import redisacc
with redisacc.ConditionalAccumulator("float32", [1], redis=sys.argv[1]) as acc:
    acc.apply_grad([1.0])
    print(acc.take_grad(1).tolist())
"""


@pytest.mark.slow
def test_it_works_without_opentelemetry(real_server):
    # Not by a fork of a process that has imported it.
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT, real_server.url], capture_output=True, text=True, timeout=60, check=True
    )
    assert (found.stdout, found.stderr) == ("[1.0]\n", "")
