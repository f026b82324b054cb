"""The manual stays short, and says things once."""

import re

import pytest
from pages import DOCS
from support.rows import every_row

ROOT = DOCS.parent
README = ROOT / "README.md"
QUICK_START = DOCS / "start" / "quick-start.md"
GUIDES = sorted(DOCS.glob("guides/*.md"))
PAGES = sorted(DOCS.rglob("*.md"))
INTERNALS = [page for page in PAGES if page.is_relative_to(DOCS / "internals")]
MANUAL = [README, *(page for page in PAGES if page not in INTERNALS)]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DOCS.is_dir(), reason="the documentation isn't part of an installation"),
]


def words(page):
    """The words of a page, without its code and without signs between words."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [word for word in text.split() if re.search(r"\w", word)]


def runs(page, length=9):
    """Every run of this many words on a page, its code included."""
    found = page.read_text().split()
    return {tuple(found[start : start + length]) for start in range(len(found) - length + 1)}


@every_row("page", GUIDES)
def test_a_guide_has_at_most_900_words(page):
    assert len(words(page)) <= 900


def test_the_readme_has_at_most_800_words():
    assert len(words(README)) <= 800


@every_row("pages, most", [(MANUAL, 30_000), (INTERNALS, 5_000)])
def test_the_manual_stays_short(pages, most):
    assert sum(len(words(page)) for page in pages) <= most


def test_the_quick_start_is_no_second_copy_of_the_readme():
    assert runs(README) & runs(QUICK_START) == set()
