"""Tests of the comparison with an earlier commit: it measures both sides, and each with its own code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not part of an installed package", allow_module_level=True)
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import against  # noqa: E402

pytestmark = pytest.mark.slow


def test_each_side_imports_the_package_of_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "redisacc").mkdir()
    (tmp_path / "redisacc" / "__init__.py").write_text("class Chief: ...")
    for folder, place in ((tmp_path, tmp_path), (ROOT, ROOT)):
        code = "import redisacc; print(redisacc.__file__)"
        command = [*against.package_of(folder), sys.executable, "-P", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert Path(done.stdout.strip()).is_relative_to(place / "redisacc")
        assert against.has_trainings(folder)
    (tmp_path / "redisacc" / "__init__.py").write_text("")
    assert not against.has_trainings(tmp_path)


def test_a_ratio_is_the_time_now_divided_by_the_time_then() -> None:
    then = {"seconds": {"median": 0.002}, "totals_a_round": {"scripts": 6, "script_us": 240}}
    now = {"seconds": {"median": 0.001}, "totals_a_round": {"scripts": 4, "script_us": 200}}
    found = against.table("abc", [against.line("a row", then, now)])
    assert found.splitlines()[-1] == "| a row | 2.00 | 1.00 | 0.50 | 6.0, 4.0 | 40.0, 50.0 | 1.25 |"


def test_a_commit_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert against.main(["no-such-commit"]) == 2
    assert "git knows no commit no-such-commit" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the history is not here")
def test_the_smallest_comparison_prints_a_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert against.main(["HEAD", "--tiny"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[2:]] == [
        "| tiny-sparse",
        "| tiny-dense",
        "| step, tree and parameters",
        "| step, Chief and Worker",
    ]
