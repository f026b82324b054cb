"""The walk through the code in docs/contributing.md names what there is."""

from __future__ import annotations

import re

import pytest
from pages import DOCS

ROOT = DOCS.parent
TEXT = (DOCS / "contributing.md").read_text() if DOCS.is_dir() else ""
STEPS = re.findall(r"^\d+\. `([\w/.]+)`, `(\w+)`:", TEXT, re.MULTILINE)


def test_there_are_steps() -> None:
    if not TEXT:
        pytest.skip("the documentation isn't part of an installation")
    assert len(STEPS) == len(re.findall(r"^\d+\. ", TEXT, re.MULTILINE)) >= 20


@pytest.mark.parametrize(("file", "name"), STEPS)
def test_a_step_names_what_there_is(file: str, name: str) -> None:
    assert re.search(rf"(?:def|class|function|local) {name}\b", (ROOT / file).read_text())


@pytest.mark.parametrize("file", sorted(set(re.findall(r"`((?:lua|tests|redisacc)/[\w/.]+\.\w+)`", TEXT))))
def test_files_that_are_mentioned_exist(file: str) -> None:
    assert (ROOT / file).is_file()
