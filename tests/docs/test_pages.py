"""Every code block of the documentation is run, or says why not."""

import gc
import os
import re
import shutil
from pathlib import Path

import pytest
from pages import DOCS, Reader, blocks_of, run_by
from support.rows import every_row
from support.selection import thorough

from redisacc.embedded import Server

PAGES = sorted(DOCS.rglob("*.md"))
SECTIONS = ["start", "guides", "reference", "explanations", "internals"]
REPOSITORY = "https://github.com/redisacc/redisacc"
OURS = [page for page in PAGES if run_by(page) is None and blocks_of(page)]
EXCUSED = [(page, block) for page in OURS for block in blocks_of(page) if block.excuse is not None]


def _name(value):
    return str(value.relative_to(DOCS)) if isinstance(value, Path) else f"line-{value.line}"


# They train for many seconds.
LONG = [
    DOCS / name
    for name in (
        "start/quick-start.md",
        "guides/asynchronous-training.md",
        "guides/fault-tolerance.md",
        "guides/federated-averaging.md",
        "guides/from-sync-replicas.md",
        "guides/gradient-compression.md",
        "guides/processes.md",
        "guides/stragglers.md",
        "guides/stream-statistics.md",
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("page", thorough(OURS, usual=[page for page in OURS if page not in LONG]), ids=_name)
def test_what_a_page_says_can_be_done(page, tmp_path, monkeypatch, pytestconfig):
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


@every_row("page, block", EXCUSED)
def test_a_block_that_is_not_run_says_why(page, block):
    assert block.excuse
    assert len(block.excuse.split()) > 2, f"{page.name}, line {block.line}"


@every_row("page", [page for page in PAGES if run_by(page) is not None])
def test_the_test_that_is_said_to_run_a_page_names_it(page):
    test = DOCS.parent / str(run_by(page))
    assert page.name in test.read_text()


# The reader itself: it notices mistakes.


def _read(tmp_path, text):
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


def test_reader_is_content_with_a_good_page(tmp_path):
    _read(tmp_path, GOOD)
    assert [(block.language, block.file, block.excuse) for block in blocks_of(tmp_path / "page.md")] == [
        ("python", None, None),
        ("python", "file.py", None),
        ("console", None, None),
        ("python", None, "it can't be"),
    ]


@every_row(
    "before, after",
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
def test_reader_notices(tmp_path, before, after):
    assert before in GOOD
    with pytest.raises((AssertionError, NameError)):
        _read(tmp_path, GOOD.replace(before, after, 1))


@pytest.mark.skipif(not DOCS.is_dir(), reason="the documentation isn't part of an installation")
def test_there_are_pages():
    assert len(OURS) >= 2


@pytest.mark.skipif(not PAGES, reason="the documentation isn't part of an installation")
def test_the_manual_has_five_sections():
    assert {page.relative_to(DOCS).parts[0] for page in PAGES} == {"index.md", *SECTIONS}
    text = (DOCS / "index.md").read_text()
    assert set(_links(text)) >= {f"{section}/index.md" for section in SECTIONS}
    assert _entries(text) == [f"{section}/index.md" for section in SECTIONS]


@every_row("section", SECTIONS)
def test_the_index_of_a_section_links_each_of_its_pages_and_the_sidebar_has_each_once(section):
    index = DOCS / section / "index.md"
    if not index.is_file():
        pytest.skip("the documentation isn't part of an installation")
    pages = sorted(str(page.relative_to(DOCS / section)) for page in PAGES if page.is_relative_to(DOCS / section))
    pages.remove("index.md")
    text = index.read_text()
    assert sorted(link for link in set(_links(text)) if "/" not in link) == pages
    assert sorted(_entries(text)) == pages


def test_links_out_of_the_manual_lead_to_something():
    """They are absolute, because a built manual has no repository around it."""
    for page in PAGES:
        for kind, path in re.findall(rf"\]\({REPOSITORY}/(blob|tree)/main/([^)#\s]+)", page.read_text()):
            found = DOCS.parent / path
            assert found.is_dir() if kind == "tree" else found.is_file(), f"{page.name}: {path}"


def _links(text):
    return re.findall(r"\]\(([^)#]+\.md)[^)]*\)", text)


def _entries(text):
    """The pages of all toctrees, in order."""
    trees = re.findall(r"```\{toctree\}\n(?::[^\n]*\n)*\n(.*?)```", text, re.DOTALL)
    return [re.sub(r".*<(.*)>", r"\1", line) + ".md" for tree in trees for line in tree.split("\n") if line]
