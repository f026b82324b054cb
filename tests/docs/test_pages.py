"""Every code block of the documentation is run, or says why not."""

from __future__ import annotations

import gc
import os
import re
import shutil
from pathlib import Path

import pytest
from pages import DOCS, Block, Reader, blocks_of, run_by
from support.selection import thorough

from redisacc.embedded import Server

PAGES = sorted(DOCS.rglob("*.md"))
OURS = [page for page in PAGES if run_by(page) is None and blocks_of(page)]
EXCUSED = [(page, block) for page in OURS for block in blocks_of(page) if block.excuse is not None]


def _name(value: object) -> str | None:
    return str(value.relative_to(DOCS)) if isinstance(value, Path) else f"line-{value.line}"  # type: ignore[attr-defined]


# They train for many seconds. The README has a quick start of its own, which is run as well.
LONG = [
    page
    for page in OURS
    if page.name in ("quick-start.md", "processes.md", "from-sync-replicas.md")
    or (page.parent.name == "recipes" and page.name != "synchronous-sgd.md")
]


@pytest.mark.parametrize("page", thorough(OURS, usual=[page for page in OURS if page not in LONG]), ids=_name)
def test_what_a_page_says_can_be_done(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    blocks = blocks_of(page)
    for command in ("redis-cli", "redis-server"):
        if any(f"$ {command}" in block.text for block in blocks) and shutil.which(command) is None:
            # Where tests are to run on a redis-server of the PATH, it and its client have to be there.
            if os.environ.get("CI", "").lower() in ("true", "1") and "redis7" in pytestconfig.getoption("--servers"):
                pytest.fail(f"no {command}")
            pytest.skip(f"no {command}")
    with Server() as server:
        monkeypatch.setenv("REDISACC_URL", server.url)
        monkeypatch.chdir(tmp_path)
        Reader(page, tmp_path, server.url).read(blocks)
        # Handles that the page left open are closed while their server is there.
        gc.collect()


@pytest.mark.parametrize(("page", "block"), EXCUSED, ids=_name)
def test_a_block_that_is_not_run_says_why(page: Path, block: Block) -> None:
    assert block.excuse
    assert len(block.excuse.split()) > 2, f"{page.name}, line {block.line}"


@pytest.mark.parametrize("page", [page for page in PAGES if run_by(page) is not None], ids=_name)
def test_the_test_that_is_said_to_run_a_page_names_it(page: Path) -> None:
    test = DOCS.parent / str(run_by(page))
    assert page.name in test.read_text()


# The reader itself: it notices mistakes.


def _read(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    (tmp_path / "here").mkdir(exist_ok=True)
    shutil.rmtree(tmp_path / "here" / ".bin", ignore_errors=True)
    Reader(page, tmp_path / "here", "redis://nowhere").read(blocks_of(page))


GOOD = """
```python
print(1 + 1)  # 2
```
```python
# file.py
print("one\\ntwo\\n3.25 ms")
```
```console
$ python file.py
one
…
3.… ms
```
<!-- not run: it can't be -->
```python
raise SystemExit
```
"""


def test_reader_is_content_with_a_good_page(tmp_path: Path) -> None:
    _read(tmp_path, GOOD)
    assert [(block.language, block.file, block.excuse) for block in blocks_of(tmp_path / "page.md")] == [
        ("python", None, None),
        ("python", "file.py", None),
        ("console", None, None),
        ("python", None, "it can't be"),
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# 2", "# 3"),
        ("1 + 1", "1 + nothing"),
        ("\none\n", "\ntwo\n"),
        ("3.… ms", "3.… s"),
        ("$ python file.py\none", "$ python file.py; false\none"),
        ("$ python file.py\none\n…\n3.… ms", "$ true"),
        ("```python", "```lua"),
    ],
)
def test_reader_notices(tmp_path: Path, before: str, after: str) -> None:
    assert before in GOOD
    with pytest.raises((AssertionError, NameError)):
        _read(tmp_path, GOOD.replace(before, after, 1))


@pytest.mark.skipif(not DOCS.is_dir(), reason="the documentation isn't part of an installation")
def test_there_are_pages() -> None:
    assert len(OURS) >= 2


@pytest.mark.skipif(not PAGES, reason="the documentation isn't part of an installation")
def test_the_index_links_every_page_and_the_sidebar_has_each_once() -> None:
    text = (DOCS / "index.md").read_text()
    pages = sorted(str(page.relative_to(DOCS)) for page in PAGES if page.name != "index.md")
    tables = text.partition("## All pages")[2].partition("```")[0]
    assert sorted(re.findall(r"\]\(([^)]+\.md)\)", tables)) == pages
    trees = re.findall(r"```\{toctree\}\n(?::[^\n]*\n)*\n(.*?)```", text, re.DOTALL)
    entries = [re.sub(r".*<(.*)>", r"\1", line) for tree in trees for line in tree.split("\n") if line]
    assert sorted(f"{entry}.md" for entry in entries) == pages
