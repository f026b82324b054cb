"""Tests of the simulated steps: what they send is what a training sends, and the page says what the results are."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not part of an installed package", allow_module_level=True)
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.scale import report  # noqa: E402
from benchmarks.scale.costs import Costs  # noqa: E402
from benchmarks.scale.model import Arrangement, Network, simulate  # noqa: E402
from benchmarks.scale.observation import observe  # noqa: E402
from benchmarks.scale.step import Step, automatic  # noqa: E402

pytestmark = pytest.mark.slow

COSTS = Costs(server_call=1e-5, server_in=2e-10, server_out=2e-10, delivery=3e-6, call=2e-5, message=8e-6, add=5e-11)


@pytest.mark.servers("valkey")
def test_a_step_sends_what_the_simulation_assumes(real_client: redis.Redis) -> None:
    url = "redis://{host}:{port}/{db}".format(**real_client.connection_pool.connection_kwargs)
    step = Step(workers=2, partitions=3, nbytes=600_000)
    (found,) = observe(
        lambda: redis.Redis.from_url(url),
        [real_client],
        workers=step.workers,
        partitions=step.partitions,
        nbytes=step.nbytes,
        steps=12,
    )
    expected = step.executed()
    assert {name: found[name] for name in expected} == dict(expected)


def test_a_large_step_takes_the_time_of_its_link() -> None:
    # 8 MB through a link of 1 Gbit/s, for each of four workers.
    one = simulate(Arrangement(Step(4, 1, 8_000_000)), Network(1.0), COSTS)
    assert one.seconds == pytest.approx(4 * 8e6 / 125e6, rel=0.35)
    assert one.full.startswith("leader's link")
    nodes = simulate(Arrangement(Step(4, 4, 8_000_000), beside=True), Network(1.0), COSTS)
    assert nodes.seconds == pytest.approx(2 * 3 / 4 * 8e6 / 125e6, rel=0.35)
    # Without links, the processors are what takes time.
    assert "processor" in simulate(Arrangement(Step(4, 4, 8_000_000)), Network(float("inf")), COSTS).full
    halved = Arrangement(Step(4, 1, 8_000_000), share=0.5)
    assert simulate(halved, Network(1.0), COSTS).seconds == pytest.approx(one.seconds / 2, rel=0.1)


def test_many_small_messages_fill_the_leader() -> None:
    many = Arrangement(Step(200, 64, 2_000_000), beside=True)
    found = simulate(many, Network(100.0), replace(COSTS, scripts={"commit": (2e-4, 0.0)}), steps=3)
    assert found.full == "leader's processor"
    assert simulate(replace(many, direct=True), Network(100.0), COSTS, steps=3).seconds < found.seconds


def test_automatic_partitions_are_those_of_the_library() -> None:
    assert [automatic(nodes, 31_600_000) for nodes in (1, 8, 1000)] == [1, 8, 64]
    assert automatic(64, 600_000) == 2
    assert automatic(64, 100_000) == 1
    assert automatic(1000, 400_000_000) == 381


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "scale.json").read_text())
    return found


def test_the_page_is_what_its_results_give(results: dict[str, Any]) -> None:
    page = ROOT / "benchmarks" / "results" / "scale.md"
    assert report.render(results, {report.TITLE: "scale.svg"}) == page.read_text()
    assert page.with_name("scale.svg").is_file()


def test_the_manual_quotes_the_results(results: dict[str, Any]) -> None:
    page = ROOT / "docs" / "explanations" / "measurements.md"
    text = page.read_text().partition("## Large groups of hosts")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([\d,]+ MB), (\d+) Gbit/s \| (.*?) \|$", text, re.MULTILINE)
    assert len(rows) == 4
    for model, gigabits, cells in rows:
        runs = [run for run in results["runs"]["grown"] if (run["model"], run["gigabits"]) == (model, int(gigabits))]
        times = [report.milliseconds(run["seconds"]) for run in runs]
        # Last is the wire, rounded.
        assert times == cells.split(" | ")[:-1]
