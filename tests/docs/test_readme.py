"""The README's quick start, run as typed, with the deaths that it describes; and its other blocks."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.selection import thorough

from redisacc.embedded import Server

README = Path(__file__).parents[2] / "README.md"

_RUN = "$ redisacc run "
_STEP = re.compile(r"^chief    \| (step \d+: .*)$", re.MULTILINE)
_BEGINS = re.compile(r"process (\d+) begins at step (\d+)")


def _blocks(language: str) -> list[str]:
    if not README.is_file():
        pytest.skip("the README isn't part of an installation")
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def blocks() -> list[str]:
    return _blocks("python")


@pytest.fixture
def run_as_typed(tmp_path: Path, blocks: list[str]) -> Iterator[Callable[[], tuple[subprocess.Popen[bytes], Path]]]:
    """Starts the quick start's run, as a process of its own; returns it and the file to which it writes."""
    [line] = {line for block in _blocks("console") for line in block.splitlines() if line.startswith(_RUN)}
    # What the reader's PATH would find.
    python = shlex.quote(sys.executable)
    arguments = line[2:].replace(" python ", f" {python} ").replace("redisacc", f"exec {python} -m redisacc", 1)
    (tmp_path / "train.py").write_text(next(block for block in blocks if block.startswith("# train.py")))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REDISACC_")}
    runs: list[subprocess.Popen[bytes]] = []

    def start() -> tuple[subprocess.Popen[bytes], Path]:
        out = tmp_path / f"run-{len(runs)}"
        with out.open("wb") as file:
            run = subprocess.Popen(arguments, shell=True, cwd=tmp_path, env=environment, stdout=file, stderr=file)
        runs.append(run)
        return run, out

    yield start
    for run in runs:
        # Its guard ends whatever it has started.
        with contextlib.suppress(ProcessLookupError):
            run.kill()
        run.wait()


def _wait_for(text: str, run: subprocess.Popen[bytes], out: Path) -> None:
    deadline = time.monotonic() + 60
    while text not in out.read_text():
        assert run.poll() is None, out.read_text()
        assert time.monotonic() < deadline, out.read_text()
        time.sleep(0.02)


@pytest.mark.timeout(240)
def test_quick_start_survives_what_the_readme_does_to_it(
    run_as_typed: Callable[[], tuple[subprocess.Popen[bytes], Path]],
) -> None:
    run, out = run_as_typed()
    _wait_for("step 20:", run, out)
    os.kill(int(_BEGINS.findall(out.read_text())[0][0]), signal.SIGKILL)
    _wait_for("step 40:", run, out)
    run.kill()
    run.wait()
    first = out.read_text()
    assert "redisacc | chief was killed by SIGKILL; it starts again in 0.5 s" in first
    [(_, zero), (_, after_death)] = _BEGINS.findall(first)
    assert int(zero) == 0
    assert 20 <= int(after_death) < 40

    run, out = run_as_typed()
    assert run.wait(120) == 0, out.read_text()
    [(_, after_all_died)] = _BEGINS.findall(out.read_text())
    assert int(after_all_died) >= 40
    # However it was disturbed, it prints what the README says: the numbers depend on the deaths in no way.
    assert _STEP.findall(first + out.read_text()) == [
        line for block in _blocks("console") for line in _STEP.findall(block)
    ]


@pytest.mark.parametrize(
    "name",
    thorough(
        ["ConditionalAccumulator(", "SparseConditionalAccumulator(", "Parameters("],
        usual=["SparseConditionalAccumulator("],
    ),
)
def test_parts_print_what_their_comments_say(blocks: list[str], name: str) -> None:
    first = next(block for block in blocks if "redisacc.ConditionalAccumulator(" in block)
    imports = "".join(line for line in first.splitlines(keepends=True) if line.startswith("import "))
    code = next(block for block in blocks if f"redisacc.{name}" in block)
    with Server() as server:
        printed = subprocess.run(
            [sys.executable, "-c", imports + code],
            env={**os.environ, "REDISACC_URL": server.url},
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.splitlines() == re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)


def test_every_python_block_is_run_by_one_of_these(blocks: list[str]) -> None:
    assert len(blocks) == 4


def test_links_work_on_pypi_too() -> None:
    """PyPI shows the README without the repository, so its links are absolute. Each leads to something that exists."""
    _blocks("python")
    text = README.read_text()
    assert not re.findall(r"\]\((?!https://)[^)]*\)", text), "links that are relative"
    linked = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, re.MULTILINE))
    used = {label or words for words, label in re.findall(r"\[([^\]\n]+)\]\[([^\]\n]*)\]", text)}
    assert {label.lower() for label in used} == linked.keys()
    project = tomllib.loads((README.parent / "pyproject.toml").read_text())["project"]
    repository = project["urls"]["Repository"]
    for url in [*linked.values(), *project["urls"].values()]:
        found = re.fullmatch(rf"{repository}(?:/(issues)|/(blob|tree)/main/(\S+))?", url)
        assert found is not None, url
        if found[3] is not None:
            path = README.parent / found[3]
            assert path.is_dir() if found[2] == "tree" else path.is_file(), url


def test_every_extra_is_described() -> None:
    _blocks("python")
    extras = tomllib.loads((README.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    install = README.read_text().partition("## Install")[2].partition("\n## ")[0]
    assert [extra for extra in extras if f"`{extra}`" not in install] == []
