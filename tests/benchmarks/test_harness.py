"""Tests of the benchmarks' harness: it runs, measures what it says, and notices wrong results. No time is judged."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.selection import thorough

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not part of an installed package", allow_module_level=True)
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import models, plots  # noqa: E402
from benchmarks.crew import BenchmarkError, Crew  # noqa: E402
from benchmarks.markdown import ms, times  # noqa: E402
from benchmarks.report import render  # noqa: E402
from benchmarks.stats import inverse, ratio, summary  # noqa: E402
from benchmarks.workloads import TINY, Workload, write  # noqa: E402
from redisacc._redis import script_loader  # noqa: E402
from redisacc.embedded import Server  # noqa: E402

pytestmark = pytest.mark.slow


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", "--tiny", "--no-plots", "--out", str(out), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for one in value.values() for number in numbers(one)]
    if isinstance(value, list):
        return [number for one in value for number in numbers(one)]
    return [value] if isinstance(value, float) else []


@pytest.mark.thorough
def test_the_smallest_run_writes_results_and_report(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "six-rows", "--only", "growth", "--only", "longest")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    if sys.platform == "linux":
        # On other systems the server's CPU time is unknown.
        assert all(math.isfinite(number) for number in numbers(results))
    rows = results["six-rows"]["rows"]
    assert list(rows) == [workload.name for workload in TINY]
    for row in rows.values():
        encoded = {"redisacc-bfloat16"} if row is rows["tiny-dense"] else set()
        assert set(row["peers"]) == {"redisacc", "bare"} | encoded
        for peer in row["peers"].values():
            # At least three, because a slow machine ends a row early.
            assert len(peer["rounds"]) == peer["seconds"]["n"] >= 3
            assert peer["apply_seconds"]["n"] == 2 * peer["seconds"]["n"]
    curves = results["growth"]["curves"]
    buffered = curves["gradients of 10x16, buffered"]
    # Eight gradients of 720 bytes each must have crossed the wire, in both directions.
    assert buffered[-1]["gradients"] == 8
    assert buffered[-1]["bytes_in"] > 8 * 720
    assert buffered[-1]["bytes_out"] > 8 * 720
    # Calls are counted on the servers that ran them.
    calls = {server["server"]: server["evalsha_calls"] for server in results["scripts"]}
    assert calls["six rows, as embedded"] > 3 * 2 * len(TINY)
    # Every script was called on the planted accumulator.
    assert set(script_loader.names()) <= results["longest"]["runs"]["alone"].keys()
    report = (tmp_path / "README.md").read_text()
    for heading in ("A round of four workers", "Growth", "Longest scripts", "Longest calls on large keys"):
        assert f"## {heading}" in report


@pytest.mark.thorough
def test_the_smallest_run_of_steps(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "steps")
    assert done.returncode == 0, done.stderr
    steps = json.loads((tmp_path / "results.json").read_text())["steps"]
    assert set(steps["in memory"]["peers"]) == {"direct", "loop", "updates", "bare"}
    assert set(steps["as embedded"]["peers"]) == set(steps["durable"]["peers"]) == {"direct", "loop", "updates"}
    assert [point["arrays"] for point in steps["growth"]] == [1, 4]
    assert "## A training step of four workers" in (tmp_path / "README.md").read_text()


@pytest.mark.thorough
def test_the_smallest_run_on_a_cluster(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "cluster")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["cluster"]["rows"]
    for operations in rows.values():
        for found in operations.values():
            assert set(found["seconds"]) == {"standalone", "again", "cluster"}
            assert len({seconds["n"] for seconds in found["seconds"].values()}) == 1
    assert "## Redis Cluster" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("program", thorough(["direct", "loop", "updates", "bare"], usual=["updates"]))
def test_correct_steps_pass_and_wrong_weights_end_the_run(program: str, server: Server, tmp_path: Path) -> None:
    model = replace(models.tiny(), name=f"steps-{program}")
    models.write(tmp_path / "models", [model], 2)
    # Changes one element of the second mean, so the weights are wrong from the second step on.
    path = tmp_path / "models" / model.name / "mean-1.npz"
    with np.load(path) as file:
        arrays = dict(file)
    arrays["w"].flat[-1] += 1 / 64
    np.savez(path, **arrays)
    settings = {
        "arrays": str(tmp_path / "models"),
        "workloads": [],
        "model": model.name,
        "url": server.url,
        "method": program,
    }
    peer = "bare_steps" if program == "bare" else "redisacc_steps"
    with Crew("test", sys.executable, peer, workers=2, settings=settings, directory=tmp_path) as members:
        members.round("", repeat=1)
        # Checks the weights of the first step, which do not depend on the second mean.
        timing = members.round("", repeat=1)
        assert 0 < timing.elapsed <= timing.finished
        with pytest.raises(BenchmarkError, match="wrong values"):
            members.round("", repeat=1)


def test_a_mean_divides_by_the_number_of_workers() -> None:
    model = models.Model("m", (models.Leaf("w", (2,)), models.Leaf("t", (3, 1), 1)))
    gradients = [
        {"w": np.array([1.0, 2.0]), "t": np.array([[4.0]]), "t indices": np.array([0])},
        {"w": np.array([3.0, 4.0]), "t": np.array([[8.0]]), "t indices": np.array([2])},
    ]
    mean = model.mean(gradients)
    assert mean["w"].tolist() == [2.0, 3.0]
    assert mean["t"].tolist() == [[2.0], [0.0], [4.0]]


def test_an_unknown_section_is_refused(tmp_path: Path) -> None:
    assert run(tmp_path, "--only", "nonsense").returncode == 2


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


def crew(server: Server, directory: Path, workload: Workload, program: str = "redisacc_peer", **more: Any) -> Crew:
    write(directory / "arrays", [workload], [1, 2])
    settings = {"arrays": str(directory / "arrays"), "workloads": [workload.to_json()], "url": server.url, **more}
    return Crew("test", sys.executable, program, workers=2, settings=settings, directory=directory)


@pytest.mark.parametrize(
    ("program", "kind"),
    thorough([("redisacc_peer", 0), ("watch", 0), ("hincrbyfloat", 1)], usual=[("redisacc_peer", 0)]),
)
def test_correct_rounds_pass_and_a_wrong_one_ends_the_run(
    program: str, kind: int, server: Server, tmp_path: Path
) -> None:
    workload = TINY[kind]
    by_hand = {} if program == "redisacc_peer" else {"program": "by_hand", "method": program}
    with crew(server, tmp_path, workload, **by_hand) as members:
        for _ in range(3):
            timing = members.round(workload.name)
            assert 0 < max(timing.applies) < timing.elapsed + max(timing.applies)
        # Changes one element of one expected mean by the smallest step that an element can have.
        path = tmp_path / "arrays" / workload.name / "expected-1-1.npz"
        with np.load(path) as file:
            arrays = dict(file)
        arrays["mean"].flat[-1] += 1 / 64
        np.savez(path, **arrays)
        with pytest.raises(BenchmarkError, match="wrong values"):
            members.round(workload.name, active=1)


@pytest.mark.thorough
def test_a_process_that_dies_ends_the_run(server: Server, tmp_path: Path) -> None:
    workload = Workload("dies", "dense", (3,))
    with crew(server, tmp_path, workload) as members:
        members.round(workload.name)
        os.kill(members._members[0].pid, 9)
        with pytest.raises(BenchmarkError, match=r"redisacc_peer worker 0 (ended|is gone)"):
            members.round(workload.name)


def test_expected_means_divide_by_how_many_held_a_row() -> None:
    workload = Workload("w", "sparse", (4, 1), 2)
    gradients = [
        (np.array([0, 2]), np.array([[1.0], [2.0]], np.float32)),
        (np.array([2, 3]), np.array([[4.0], [5.0]], np.float32)),
    ]
    held, mean, counts = workload.expected(gradients)
    assert held.tolist() == [0, 2, 3]
    assert mean.tolist() == [[1.0], [3.0], [5.0]]
    assert counts.tolist() == [1, 2, 1]


@pytest.mark.parametrize("indices", ["random", "identical", "disjoint"])
def test_indices_are_ascending_and_as_described(indices: str) -> None:
    workload = Workload("w", "sparse", (100, 2), 10, indices)
    drawn = [workload.gradient(worker, 0)[0] for worker in range(4)]
    assert all((np.diff(one) > 0).all() and one[0] >= 0 and one[-1] < 100 for one in drawn)
    union = len(set(np.concatenate(drawn).tolist()))
    assert union == {"identical": 10, "disjoint": 40}.get(indices, union)
    # The two sets of arrays must differ, or leftovers of an earlier round would go unnoticed.
    assert not np.array_equal(workload.gradient(0, 0)[1], workload.gradient(0, 1)[1])


def test_ratios_say_how_many_times_as_long() -> None:
    found = ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert found == {"of_medians": 2.0, "median": 2.0, "q1": 2.0, "q3": 2.0}
    found = ratio([1.0, 8.0, 9.0], [1.0, 2.0, 9.0])
    assert found == {"of_medians": 4.0, "median": 1.0, "q1": 1.0, "q3": 2.5}
    assert inverse(found) == {"of_medians": 0.25, "median": 1.0, "q1": 0.4, "q3": 1.0}
    found = summary([3.0, 1.0, 2.0])
    assert found == {"n": 3, "median": 2.0, "q1": 1.5, "q3": 2.5, "min": 1.0, "max": 3.0}


def test_a_median_outside_its_quartiles_is_an_error() -> None:
    assert times({"median": 2.0, "of_medians": 9.0, "q1": 1.0, "q3": 3.0}) == "2x (1 to 3)"
    with pytest.raises(ValueError, match=r"the median 0.11 lies outside its quartiles, 0.124 to 0.139"):
        times({"median": 0.11, "of_medians": 0.13, "q1": 0.124, "q3": 0.139})
    with pytest.raises(ValueError, match="lies outside its quartiles"):
        ms({"median": 0.11, "q1": 0.124, "q3": 0.139})
    # Results of older runs have no median of ratios, so the quartiles may be those of another figure.
    assert times({"of_medians": 0.13, "q1": 0.124, "q3": 0.139}) == "0.13x (0.124 to 0.139)"
    assert times({"of_medians": 0.11, "q1": 0.124, "q3": 0.139}) == "0.11x"


def test_the_page_is_what_its_results_give(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "benchmarks" / "results"
    monkeypatch.setattr("benchmarks.plots.paint_file", lambda _out, name, *_: f"{name}.svg")
    results = json.loads((folder / "results.json").read_text())
    page = render(results, plots.draw(results, tmp_path))
    assert page == (folder / "README.md").read_text()
    conclusion = page.partition("\n## ")[0]
    assert len(re.findall(r"^- ", conclusion, re.MULTILINE)) == 5
    assert re.findall(r"!\[.*?\]\((.*?)\)", conclusion) == ["conclusion.svg"]
    for name in re.findall(r"!\[.*?\]\((.*?)\)", page):
        assert (folder / name).is_file()
    # A row says so if it misses its bar, and none is wider than a page.
    assert max(line.count("|") for line in page.splitlines()) <= 10
    (ratio,) = re.findall(r"^\| dense-4MB \| \S+ \([^|]+\|[^|]+\| (\S+)x \([^|]+\| (.+?) \|", page, re.MULTILINE)
    assert ratio[1] == ("1.2x" if float(ratio[0]) >= 1.2 else "**1.2x, missed**")


def test_a_run_without_peers_can_be_reported() -> None:
    results = {
        "when": "2000-01-01",
        "seconds": 1,
        "machine": {"cpu": "x", "cores": 1, "memory_bytes": None, "system": "y", "load_before": 0.0},
        "versions": {"python": "3"},
        "quick": True,
        "scripts": [],
    }
    assert "A quick run" in render(results, {})
