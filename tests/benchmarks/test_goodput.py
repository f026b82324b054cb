"""Tests of the benchmark of goodput: what it counts, and what its page says. No time is judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not part of an installed package", allow_module_level=True)
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.goodput import __main__ as goodput  # noqa: E402
from benchmarks.goodput.measure import seconds_until_back  # noqa: E402
from benchmarks.goodput.report import NAMES, render  # noqa: E402

pytestmark = pytest.mark.slow


def row(**more: Any) -> dict[str, Any]:
    return {"victim": "worker", "every": 30, "kills": 4, "goodput": 0.96, "lost": 1.2, "back": 1.1, **more}


def page(*rows: dict[str, Any], different: int = 0, **crew: Any) -> str:
    of = {
        "cluster": False,
        "training": False,
        "backup": 0,
        "undisturbed": [6.0, 5.4],
        "rows": rows,
        "steps": 700,
        **crew,
    }
    machine = {"cpu": "a processor", "cores": 2, "load_before": 0.5}
    results = {"machine": machine, "when": "2026-11-24T00:00:00", "seconds": 60, "needed": 3, "options": ""}
    return render({**results, "crews": [{**of, "different": different}]}, {})


def test_the_page_marks_bars_that_are_missed() -> None:
    assert "| 96.0% | 95% | 1.20 s | 1.10 s |" in page(row())
    assert "| 94.9% | **95%, missed** | 1.20 s | 1.10 s |" in page(row(goodput=0.949))
    assert "| 96.0% | **98%, missed** |" in page(row(), backup=1)
    assert "| 96.0% |  | 1.20 s | **1.60 s** |" in page(row(every=10, back=1.6))
    assert "| a cluster | node | 30 s | 4 | 40.0% |  | 1.20 s |  |" in page(
        row(victim="node", goodput=0.4, back=None), cluster=True
    )
    assert "| one host, `Training` | any | 30 s | 4 | 94.9% | **95%, missed** |" in page(
        row(victim="any", goodput=0.949, back=None), training=True
    )
    assert "10.0% at most" in page(row())


def test_the_page_says_whether_bits_differ() -> None:
    assert "The parameters of all 700 steps had the same bits in every run." in page(row())
    assert "**3 of them differed**" in page(row(), different=3)


def test_a_worker_is_back_with_the_first_step_of_another_process() -> None:
    killed = [[1, 0, 10.0, 77], [2, 0, 11.0, 77], [2, 0, 13.5, 78], [3, 0, 13.9, 78]]
    another = [[1, 0, 10.0, 79], [2, 0, 11.1, 79], [3, 0, 13.8, 79]]
    assert seconds_until_back([another, killed], 12.0) == 1.5
    assert seconds_until_back([another, killed], 13.6) is None


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["worker", "any", "reducer"])
def test_a_short_run(tmp_path: Path, victim: str) -> None:
    arguments = ["--seconds", "3", "--every", "2", "--backup", "1", "--only", victim, "--out", str(tmp_path)]
    assert goodput.main(arguments) == 0
    (crew,) = json.loads((tmp_path / NAMES[0]).read_text())["crews"]
    assert crew["rows"][0]["kills"] >= 1
    assert crew["steps"] > 3
    assert "had the same bits in every run" in (tmp_path / NAMES[1]).read_text()
