"""A small text to train on, and its corpus: made up, but with words that go together."""

from __future__ import annotations

import numpy as np

from redisacc.demo.exchange import Settings
from redisacc.demo.text import Corpus, build_corpus, tokenise

TOPICS = (
    "ship sea sail wind harbour wave anchor storm",
    "bread oven flour butter salt sugar yeast dough",
    "tree forest leaf root branch moss bird nest",
    "king queen crown castle sword horse knight throne",
)


def small_text(sentences: int = 400) -> str:
    generator = np.random.default_rng(7)
    lines = []
    for _ in range(sentences):
        words = TOPICS[generator.integers(len(TOPICS))].split()
        lines.append("the " + " and ".join(generator.permutation(words)[:5]) + ".")
    return "\n".join(lines)


def small_corpus() -> Corpus:
    return build_corpus(tokenise(small_text()), 1000)


def settings_for(corpus: Corpus, **changes: object) -> Settings:
    values: dict[str, object] = {
        "workers": 2,
        "steps": 12,
        "words": len(corpus.words),
        "vocabulary": 1000,
        "dim": 8,
        "window": 3,
        "negatives": 5,
        "shared_negatives": 16,
        "batch": 64,
        "seed": 3,
        "subsampling": 1e-2,
        "rate": 0.15,
        "digest": corpus.digest,
    }
    return Settings(**(values | changes))
