"""A process that traces what it does, as an application would set it up, and prints its spans as JSON.

Arguments: the server's URL, the worker's name, and what to do.
"""

import json
import sys

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import redisacc


def main(url, name, what):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # Handles that are opened before are traced as well.
    acc = redisacc.ConditionalAccumulator("float32", [2000], "w", redis=url, worker=name)
    trace.set_tracer_provider(provider)
    if what == "take":
        acc.take_grad(3, timeout=60)
    else:
        limits = redisacc.Limits(in_place=2000 if what == "in_place" else 0, inline=0 if what == "parts" else None)
        with redisacc.ConditionalAccumulator("float32", [2000], "w", redis=url, worker=name, limits=limits) as mine:
            mine.apply_grad([1.0] * 2000)
    acc.close()
    found = [
        {
            "name": span.name,
            "trace": span.context.trace_id,
            "span": span.context.span_id,
            "parent": span.parent and span.parent.span_id,
            "links": [(link.context.trace_id, link.context.span_id) for link in span.links],
        }
        for span in exporter.get_finished_spans()
    ]
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
