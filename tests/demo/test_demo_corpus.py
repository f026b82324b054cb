"""Text as word numbers."""

import sys

import pytest

from redisacc.tools.cli.demo import _WORDS as WORDS_SHOWN
from redisacc.tools.demo import DemoError
from redisacc.tools.demo.text import build_corpus, read_text

WORDS = [f"w{i:02}" for i in range(20)]


def corpus_of(words, vocabulary=1000):
    return build_corpus(" ".join(words), vocabulary)


def test_words():
    sentence = "The __init__ of x1 isn't 42, 3rd or “Über-Größe”_!"
    found = build_corpus(" ".join([sentence] * 3 + WORDS * 4), 1000)
    assert [found.words[token] for token in found.tokens[:9]] == [
        *("the", "__init__", "of", "x1", "isn't", "rd", "or", "über", "größe"),
    ]


def test_vocabulary():
    # w00 … w17 three times, w18 and w19 four times, and two words that are too rare.
    # The text has them backwards, because the order of first occurrence must not matter.
    backwards = WORDS[::-1]
    corpus = corpus_of(["rare", *backwards * 3, "rare", "w19", "w18", "once"])
    assert corpus.words == ("w18", "w19", *WORDS[:18])
    assert corpus.counts.tolist() == [4, 4] + [3] * 18
    assert [corpus.words[token] for token in corpus.tokens] == [*backwards * 3, "w19", "w18"]


def test_too_small():
    with pytest.raises(DemoError, match="and 19 do"):
        corpus_of(WORDS[:19] * 3 + ["rare"] * 2, 99)


def test_the_text_is_the_language_reference():
    corpus = build_corpus(read_text(), 3000)
    assert len(corpus.tokens) > 40_000
    assert {"__init__", "coroutine", "the", *WORDS_SHOWN} <= set(corpus.words)


def test_the_text_may_be_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DemoError, match="install all of Python"):
        read_text()
