"""The programs of the comparison with DDP train the same model, and a kill ends only one of them. No time is judged."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.comparison import __main__ as comparison  # noqa: E402
from benchmarks.comparison.report import NAMES  # noqa: E402


@pytest.mark.timeout(900)
def test_a_short_run(tmp_path):
    few = ["--hosts", "0", "--epochs", "4", "--repeats", "1", "--models", "digits"]
    assert comparison.main([*few, "--out", str(tmp_path)]) == 0
    programs = json.loads((tmp_path / NAMES[0]).read_text())["programs"]
    assert all(programs[name]["accuracy"] > 0.7 for name in ("alone", "with_redisacc", "ddp"))
    assert programs["with_redisacc"]["kill"]["weights"] == [programs["with_redisacc"]["weights"]]
    assert programs["ddp"]["kill"]["ended"] is not None
    page = (tmp_path / NAMES[1]).read_text()
    assert "Both end with the weights of an undisturbed run, bit for bit." in page
    assert "the other one ends after" in page
