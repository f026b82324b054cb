"""Pages on PyTorch: all blocks of each are run where torch is installed (`make examples`)."""

import gc
import importlib.util

import pytest
from pages import DOCS, Reader, blocks_of

from redisacc.embedded import Server

NAMES = (
    "evaluation.md",
    "learning-rate.md",
    "pytorch.md",
    "pytorch-details.md",
    "resume.md",
)
PAGES = [path for name in NAMES if (path := DOCS / "guides" / name).is_file()]
HERE = PAGES if importlib.util.find_spec("torch") is not None else []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", HERE, ids=lambda page: page.stem)
def test_what_a_page_says_can_be_done(page, tmp_path, monkeypatch):
    with Server() as server:
        monkeypatch.setenv("REDISACC_URL", server.url)
        monkeypatch.chdir(tmp_path)
        Reader(page, tmp_path, server.url).read(blocks_of(page))
        # Handles that the page left open are closed while their server is there.
        gc.collect()
