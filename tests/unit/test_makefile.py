"""The Makefile sets up the environment that the tests run in."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[2] / "Makefile"
CLEARS = "rm -rf .venv\n"

pytestmark = pytest.mark.skipif(
    shutil.which("make") is None or not MAKEFILE.exists(), reason="needs make and the checkout"
)


def commands(folder, python):
    """Returns what `make test` would run in a folder whose environment has this as its Python."""
    shutil.copy(MAKEFILE, folder)
    (folder / "pyproject.toml").touch()
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").write_text(f"#!/bin/sh\n{python}\n")
    (folder / ".venv" / "bin" / "python").chmod(0o755)
    (folder / ".venv" / ".test").touch()
    done = subprocess.run(
        ["make", "-n", "test", f"PYTHON={sys.executable}"], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_an_environment_of_the_same_python_is_used(tmp_path):
    text = commands(tmp_path, f'exec {sys.executable} "$@"')
    assert CLEARS not in text
    assert "-m venv" not in text
    assert "-m pytest" in text


@pytest.mark.parametrize("python", ["echo /usr/local 3 9", "exit 127"], ids=["another", "broken"])
def test_an_environment_of_another_python_is_made_again(tmp_path, python):
    text = commands(tmp_path, python)
    clears, makes, uses = text.index(CLEARS), text.index("-m venv .venv"), text.index("-m pytest")
    assert clears < makes < uses
