"""Pages on other libraries: each block is run where the library that it imports is installed (`make foreign`)."""

import gc
import importlib.util
import re

import pytest
from pages import DOCS, Reader, blocks_of

from redisacc.embedded import Server

PAGE = DOCS / "guides" / "arrays.md"
LIBRARIES = ("jax", "scipy", "tensorflow", "torch")


def library_of(block):
    imported = re.findall(r"^import (\w+)", block.text, re.MULTILINE)
    (library,) = set(imported) & set(LIBRARIES)
    assert library in LIBRARIES
    return library


BLOCKS = blocks_of(PAGE) if PAGE.is_file() else []
HERE = [block for block in BLOCKS if importlib.util.find_spec(library_of(block)) is not None]


def name_of(block):
    return f"{library_of(block)}-line-{block.line}"


@pytest.mark.skipif(not BLOCKS, reason="the documentation isn't part of an installation")
def test_each_library_has_a_block():
    assert {library_of(block) for block in BLOCKS} == set(LIBRARIES)


@pytest.mark.parametrize("block", HERE, ids=name_of)
def test_a_block_does_what_it_says(block, tmp_path, monkeypatch):
    with Server() as server:
        monkeypatch.setenv("REDISACC_URL", server.url)
        monkeypatch.chdir(tmp_path)
        Reader(PAGE, tmp_path, server.url).read([block])
        gc.collect()
