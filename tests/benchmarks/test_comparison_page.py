"""Tests of what the comparison with DDP and Horovod counts, and of its page. Its programs run in tests/examples."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not part of an installed package", allow_module_level=True)
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.comparison.crew import OURS  # noqa: E402
from benchmarks.comparison.measure import ALONE, changes, last_error, new_lines  # noqa: E402
from benchmarks.comparison.report import BAR, NAMES, TITLES, render  # noqa: E402

pytestmark = pytest.mark.slow

SURVIVED = {"weights": ["a"], "pause": 2.0, "ended": None, "error": ""}
ENDED = {"weights": [], "pause": None, "ended": 1.5, "error": "Connection reset"}


def page(hosts: int = 4, kill: Any = SURVIVED, **ours: Any) -> str:
    program = {
        "lines": 9,
        "one_host": [[0.9], [0.3, 0.1, 0.2]],
        "between_hosts": [[0.5]],
        "accuracy": 0.9,
        "weights": "a",
    }
    unmeasured = {"lines": 9, "one_host": [], "between_hosts": [], "accuracy": None, "weights": None, "kill": None}
    results: dict[str, Any] = {
        "epochs": 8,
        "repeats": 2,
        "hosts": hosts,
        "rate": 1.0,
        "seconds": 60,
        "options": "",
        "versions": {},
        "machine": {"cpu": "a processor", "cores": 2, "load_before": 0.5},
        "when": "2026-11-25T00:00:00",
        "programs": {
            **dict.fromkeys(TITLES, unmeasured),
            OURS: {**program, "lines": 3, "kill": kill, **ours},
            "ddp": {**program, "kill": ENDED},
        },
    }
    return render(results, {})


def test_few_lines_change() -> None:
    assert new_lines(OURS) <= BAR
    assert len([line for line in changes("ddp") if line.startswith("+")]) == new_lines("ddp")
    assert new_lines(ALONE) == 0


def test_the_documentation_shows_the_lines_and_the_figures() -> None:
    text = (ROOT / "docs" / "explanations" / "should-i-use-this.md").read_text()
    assert "```diff\n" + "\n".join(changes(OURS)) + "\n```" in text
    rows = (ROOT / "benchmarks" / "results" / NAMES[1]).read_text()
    for title in (TITLES[OURS], TITLES["ddp"]):
        lines, one_host, hosts = re.search(rf"\| {title} \| (.*?) \| (.*?) \| (.*?) \|", rows).groups()  # type: ignore[union-attr]
        assert f"| {title} | {lines} | {one_host} | {hosts} |" in text


def test_the_page_has_the_median_of_the_fastest_run_and_marks_what_is_missed() -> None:
    assert "| redisacc | 3 | 0.20 s | 0.50 s | 90.0% |" in page()
    assert "| redisacc | 3 | 0.20 s | 90.0% |" in page(hosts=0)
    assert "| redisacc | **5, at most 4 wanted** |" in page(lines=5)
    assert "| Horovod | 9 |  |  | not run |" in page()


def test_the_page_says_what_a_kill_does() -> None:
    assert "waits 2.0 s for it" in page()
    assert "ends after 1.5 s (“Connection reset”)" in page()
    assert "**the processes end with other weights than without a kill: b.**" in page(
        kill={**SURVIVED, "weights": ["b"]}
    )
    assert "**the training did not come to its end.**" in page(kill={**SURVIVED, "weights": []})


def test_the_message_of_the_last_error() -> None:
    text = "ValueError: no\n[rank0]: RuntimeError: [/a/pair.cc:5] Read error [127.0.0.1]:80: Reset by peer. Look.\nend"
    assert last_error(text) == "Read error: Reset by peer"
    assert last_error("") == "no message"
