"""tests/README.md says for each module of the protocol where its tests are, unless they have its name."""

import re

import pytest
from pages import DOCS
from support.rows import every_row

ROOT = DOCS.parent
PAGE = ROOT / "tests" / "README.md"
ROWS = re.findall(r"^\| (`\w+/\w*`.*) \| (`\w.*\.py`) \|$", PAGE.read_text(), re.MULTILINE)
MODULES = [module for modules, _ in ROWS for module in re.findall(r"`([^`]+)`", modules)]
FILES = sorted({file for _, files in ROWS for file in re.findall(r"`([^`]+)`", files)})
PROTOCOL = ROOT / "redisacc" / "_protocol"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROTOCOL.is_dir(), reason="the package isn't beside the tests in an installation"),
]


@every_row("file", FILES)
def test_files_of_the_table_exist(file):
    assert (ROOT / "tests" / file).is_file()


@every_row("module", MODULES)
def test_modules_of_the_table_exist(module):
    assert (PROTOCOL / module).is_dir() if module.endswith("/") else (PROTOCOL / f"{module}.py").is_file()


def test_each_module_has_tests_that_can_be_found():
    names = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    found = [path.relative_to(PROTOCOL) for path in PROTOCOL.rglob("*.py") if path.stem != "__init__"]
    without = [
        str(path)
        for path in found
        if str(path.with_suffix("")) not in MODULES
        and f"{path.parent}/" not in MODULES
        and not any(path.stem in name for name in names)
    ]
    assert without == []
