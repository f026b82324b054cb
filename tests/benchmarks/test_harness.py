"""The benchmarks run, measure what they say, and notice wrong results. No time is judged."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.selection import thorough

from benchmarks import against, models
from benchmarks.crew import BenchmarkError, Crew
from benchmarks.goodput import __main__ as goodput
from benchmarks.workloads import TINY, Workload, write
from redisacc._wire import script_loader
from redisacc.embedded import Server

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def numbers(value):
    if isinstance(value, dict | list):
        return [number for one in (value.values() if isinstance(value, dict) else value) for number in numbers(one)]
    return [value] if isinstance(value, float) else []


@pytest.fixture
def run(tmp_path):
    """Runs sections of the smallest benchmark. Returns its results and its page."""

    def run(*sections):
        command = [sys.executable, "-m", "benchmarks", "--tiny", "--no-plots", "--out", str(tmp_path)]
        command += [word for section in sections for word in ("--only", section)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode:
            return done.returncode, None
        return json.loads((tmp_path / "results.json").read_text()), (tmp_path / "README.md").read_text()

    return run


@pytest.mark.thorough
def test_the_smallest_run_writes_results_and_report(run):
    results, page = run("six-rows", "growth", "longest", "steps", "cluster")
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
    buffered = results["growth"]["curves"]["gradients of 10x16, buffered"][-1]
    # Eight gradients of 720 bytes each must have crossed the wire, in both directions.
    assert (buffered["gradients"], min(buffered["bytes_in"], buffered["bytes_out"]) > 8 * 720) == (8, True)
    # Calls are counted on the servers that ran them.
    calls = {server["server"]: server["evalsha_calls"] for server in results["scripts"]}
    assert calls["six rows, as embedded"] > 3 * 2 * len(TINY)
    # Every script was called on the planted accumulator.
    assert set(script_loader.names()) <= results["longest"]["runs"]["alone"].keys()
    steps = results["steps"]
    assert set(steps["in memory"]["peers"]) == {"direct", "loop", "updates", "bare"}
    assert set(steps["as embedded"]["peers"]) == set(steps["durable"]["peers"]) == {"direct", "loop", "updates"}
    for operations in results["cluster"]["rows"].values():
        assert all(set(found["seconds"]) == {"standalone", "again", "cluster"} for found in operations.values())
    headings = ("A round of four workers", "Growth", "Longest scripts", "Longest calls on large keys", "Redis Cluster")
    assert all(f"## {heading}" in page for heading in (*headings, "A training step of four workers"))


def test_an_unknown_section_is_refused(run):
    assert run("nonsense")[0] == 2


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["worker", "any", "reducer"])
def test_a_short_run_of_goodput(tmp_path, victim):
    arguments = ["--seconds", "3", "--every", "2", "--backup", "1", "--only", victim, "--out", str(tmp_path)]
    assert goodput.main(arguments) == 0
    (crew,) = json.loads((tmp_path / "goodput.json").read_text())["crews"]
    assert crew["rows"][0]["kills"] >= 1
    assert crew["steps"] > 3
    assert "had the same bits in every run" in (tmp_path / "goodput.md").read_text()


# What is compared


def test_each_side_of_a_comparison_imports_the_package_of_its_own_folder(tmp_path, capsys):
    (tmp_path / "redisacc").mkdir()
    (tmp_path / "redisacc" / "__init__.py").write_text("class Chief: ...")
    for folder in (tmp_path, ROOT):
        code = "import redisacc; print(redisacc.__file__)"
        command = [*against.package_of(folder), sys.executable, "-P", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert Path(done.stdout.strip()).is_relative_to(folder / "redisacc")
        assert against.has_trainings(folder)
    assert against.main(["no-such-commit"]) == 2
    assert "git knows no commit no-such-commit" in capsys.readouterr().err


@pytest.mark.parametrize(("indices", "union"), [("random", None), ("identical", 10), ("disjoint", 40)])
def test_indices_are_ascending_and_as_described(indices, union):
    workload = Workload("w", "sparse", (100, 2), 10, indices)
    drawn = [workload.gradient(worker, 0)[0] for worker in range(4)]
    assert all((np.diff(one) > 0).all() and one[0] >= 0 and one[-1] < 100 for one in drawn)
    assert union in (None, len(set(np.concatenate(drawn).tolist())))
    # The two sets of arrays must differ, or leftovers of an earlier round would go unnoticed.
    assert not np.array_equal(workload.gradient(0, 0)[1], workload.gradient(0, 1)[1])


# What is checked


@pytest.fixture(scope="module")
def server():
    with Server() as server:
        yield server


def damage(path, name):
    """Changes one element of an array of a file by the smallest step that an element can have."""
    with np.load(path) as file:
        arrays = dict(file)
    arrays[name].flat[-1] += 1 / 64
    np.savez(path, **arrays)


@pytest.mark.parametrize("program", thorough(["direct", "loop", "updates", "bare"], usual=["updates"]))
def test_correct_steps_pass_and_wrong_weights_end_the_run(program, server, tmp_path):
    model = replace(models.tiny(), name=f"steps-{program}")
    models.write(tmp_path, [model], 2)
    # The weights are wrong from the second step on.
    damage(tmp_path / model.name / "mean-1.npz", "w")
    settings = {"arrays": str(tmp_path), "workloads": [], "model": model.name, "url": server.url, "method": program}
    peer = "bare_steps" if program == "bare" else "redisacc_steps"
    with Crew("test", sys.executable, peer, workers=2, settings=settings, directory=tmp_path) as members:
        members.round("", repeat=1)
        # Checks the weights of the first step, which do not depend on the second mean.
        timing = members.round("", repeat=1)
        assert 0 < timing.elapsed <= timing.finished
        with pytest.raises(BenchmarkError, match="wrong values"):
            members.round("", repeat=1)


def crew(server, directory, workload, program="redisacc_peer", method=""):
    write(directory, [workload], [1, 2])
    settings = {"arrays": str(directory), "workloads": [workload.to_json()], "url": server.url, "method": method}
    return Crew("test", sys.executable, program, workers=2, settings=settings, directory=directory)


@pytest.mark.parametrize(
    ("program", "kind"),
    thorough([("redisacc_peer", 0), ("watch", 0), ("hincrbyfloat", 1)], usual=[("redisacc_peer", 0)]),
)
def test_correct_rounds_pass_and_a_wrong_one_ends_the_run(program, kind, server, tmp_path):
    workload = TINY[kind]
    of = program if program == "redisacc_peer" else "by_hand"
    with crew(server, tmp_path, workload, of, program) as members:
        for _ in range(3):
            timing = members.round(workload.name)
            assert 0 < max(timing.applies) < timing.elapsed + max(timing.applies)
        damage(tmp_path / workload.name / "expected-1-1.npz", "mean")
        with pytest.raises(BenchmarkError, match="wrong values"):
            members.round(workload.name, active=1)


@pytest.mark.thorough
def test_a_process_that_dies_ends_the_run(server, tmp_path):
    with crew(server, tmp_path, Workload("dies", "dense", (3,))) as members:
        members.round("dies")
        os.kill(members._members[0].pid, 9)
        with pytest.raises(BenchmarkError, match=r"redisacc_peer worker 0 (ended|is gone)"):
            members.round("dies")
