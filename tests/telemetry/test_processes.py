"""Traces of several processes, and processes without OpenTelemetry."""

from __future__ import annotations

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


WITHOUT = """
import sys
sys.modules["opentelemetry"] = None
import redisacc
with redisacc.ConditionalAccumulator("float32", [1], redis=sys.argv[1]) as acc:
    acc.apply_grad([1.0])
    print(acc.take_grad(1).tolist())
"""


def test_it_works_without_opentelemetry(real_server):
    # Not by a fork of a process that has imported it.
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT, real_server.url], capture_output=True, text=True, timeout=60, check=True
    )
    assert (found.stdout, found.stderr) == ("[1.0]\n", "")
