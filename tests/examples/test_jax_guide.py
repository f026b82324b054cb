"""Runs docs/guides/jax.md, whose code needs JAX, optax, Flax and Equinox."""

import gc

from pages import DOCS, Reader, blocks_of

from redisacc.embedded import Server

PAGE = DOCS / "guides" / "jax.md"


def test_what_the_page_says_can_be_done(tmp_path, monkeypatch):
    with Server() as server:
        monkeypatch.setenv("REDISACC_URL", server.url)
        monkeypatch.chdir(tmp_path)
        Reader(PAGE, tmp_path, server.url).read(blocks_of(PAGE))
        # Handles that the page left open are closed while their server is there.
        gc.collect()
