"""The table of tests/mutants: each rule has a place in the package, and tests."""

import shlex
from pathlib import Path

import pytest
from mutants.rules import RULES
from support.rows import every_row

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not (ROOT / "lua").is_dir(), reason="the package isn't beside the tests in an installation"
)


@every_row("file", sorted({rule.file for rule in RULES}))
def test_places_exist_once(file):
    text = (ROOT / file).read_text()
    assert [rule.promise for rule in RULES if rule.file == file and text.count(rule.old) != 1] == []


def test_files_of_tests_exist():
    files = {word for rule in RULES for word in shlex.split(rule.tests) if word.endswith(".py")}
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []


def test_there_are_sixty_and_each_breaks_something():
    assert len({rule.promise for rule in RULES}) == len(RULES) == 60
    assert [rule.promise for rule in RULES if rule.old == rule.new] == []
