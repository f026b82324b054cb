"""A small text to train on, and its corpus: made up, but with words that go together."""

import numpy as np

from redisacc.tools.demo.settings import Settings
from redisacc.tools.demo.text import build_corpus

TOPICS = (
    "ship sea sail wind harbour wave anchor storm",
    "bread oven flour butter salt sugar yeast dough",
    "tree forest leaf root branch moss bird nest",
    "king queen crown castle sword horse knight throne",
)


def small_text(sentences=400):
    generator = np.random.default_rng(7)
    lines = []
    for _ in range(sentences):
        words = TOPICS[generator.integers(len(TOPICS))].split()
        lines.append("the " + " and ".join(generator.permutation(words)[:5]) + ".")
    return "\n".join(lines)


def small_corpus():
    return build_corpus(small_text(), 1000)


SMALL = Settings(workers=2, steps=12, dim=8, batch=64, vocabulary=1000, window=3, subsampling=1e-2, seed=3, kill=False)
