"""Everything that CONTRIBUTING.md names exists: files, folders, functions, targets and options."""

import re
import subprocess
from functools import cache

import pytest
from pages import DOCS
from support.rows import every_row

ROOT = DOCS.parent
PAGE = ROOT / "CONTRIBUTING.md"
TEXT = PAGE.read_text() if PAGE.is_file() else ""
STEPS = re.findall(r"^\d+\. `([\w/.]+)`, `(\w+)`:", TEXT, re.MULTILINE)
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", TEXT)))
PATHS = [text for text in QUOTED if "/" in text and " " not in text]
COMMANDS = [text for text in QUOTED if text.startswith("make ")]
NAMES = [text for text in QUOTED if text not in PATHS and text not in COMMANDS]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not TEXT, reason="CONTRIBUTING.md isn't part of an installation")]


@cache
def words_of_the_code():
    """Every identifier in the code, the scripts and the build files."""
    files = [path for folder in ("redisacc", "lua", "tests") for path in (ROOT / folder).rglob("*")]
    files += [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci" / "run"]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".lua", ".toml", "") and path.is_file()]
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


def test_there_are_steps():
    assert len(STEPS) == len(re.findall(r"^\d+\. ", TEXT, re.MULTILINE)) >= 20


@every_row("file, name", STEPS)
def test_a_step_names_what_there_is(file, name):
    assert re.search(rf"(?:def|class|function|local) {name}\b", (ROOT / file).read_text())


@every_row("path", PATHS)
def test_paths_exist(path):
    assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file()


@pytest.mark.slow
def test_targets_exist():
    # In one go, because make asks two interpreters for their versions whenever it starts.
    goals = {
        command: [word for word in command.partition("=")[0].split()[1:] if word.islower()] for command in COMMANDS
    }
    assert [] not in goals.values()
    asked = subprocess.run(
        ["make", "--dry-run", "--keep-going", *sorted({goal for found in goals.values() for goal in found})],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr


@pytest.mark.slow
@pytest.mark.parametrize("text", NAMES)
def test_identifiers_exist(text):
    missing = [word for word in re.findall(r"[A-Za-z_]\w+", text) if word not in words_of_the_code()]
    assert missing == []
