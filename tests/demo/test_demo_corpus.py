"""Text as word numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from redisacc.demo import DemoError
from redisacc.demo.text import NegativeTable, build_corpus, keep_probabilities, read_text, tokenise

WORDS = [f"w{i:02}" for i in range(20)]


def test_words() -> None:
    assert tokenise("The __init__ of x1 isn't 42, 3rd or “Über-Größe”_!") == [
        *("the", "__init__", "of", "x1", "isn't", "rd", "or", "über", "größe"),
    ]


def test_vocabulary() -> None:
    # w00 … w17 three times, w18 and w19 four times, and two words that are too rare.
    # The text has them backwards, because the order of first occurrence must not matter.
    backwards = WORDS[::-1]
    corpus = build_corpus(["rare", *backwards * 3, "rare", "w19", "w18", "once"], 1000)
    assert corpus.words == ("w18", "w19", *WORDS[:18])
    assert corpus.counts.tolist() == [4, 4] + [3] * 18
    assert [corpus.words[token] for token in corpus.tokens] == [*backwards * 3, "w19", "w18"]


def test_vocabulary_keeps_the_most_frequent() -> None:
    corpus = build_corpus(WORDS * 3 + ["zz"] * 4, 20)
    assert corpus.words == ("zz", *WORDS[:19])
    assert "w19" not in corpus.words
    assert len(corpus.tokens) == 4 + 3 * 19


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([*WORDS[1:], WORDS[0], *WORDS * 2], id="order"),
        pytest.param([word.replace("w19", "w20") for word in WORDS * 3], id="word"),
        pytest.param([*WORDS * 3, "w00"], id="length"),
    ],
)
def test_digest_tells_texts_apart(other: list[str]) -> None:
    assert build_corpus(WORDS * 3, 99).digest == build_corpus(WORDS * 3, 99).digest
    assert build_corpus(WORDS * 3, 99).digest != build_corpus(other, 99).digest


def test_digest_is_the_same_in_another_process() -> None:
    # With another hash seed, an order that depends on hashing would differ.
    code = "from redisacc.demo.text import *; print(build_corpus(tokenise(read_text([])), 500).digest)"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {build_corpus(tokenise(read_text([])), 500).digest + "\n"}


def test_too_small() -> None:
    with pytest.raises(DemoError, match="and 19 do"):
        build_corpus(WORDS[:19] * 3 + ["rare"] * 2, 99)


def test_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("größe one", encoding="utf-8")
    second.write_text("two", encoding="utf-8")
    assert tokenise(read_text([first, second])) == ["größe", "one", "two"]
    second.write_bytes(b"ok \xff")
    with pytest.raises(DemoError, match=r"b\.txt is not UTF-8 text: .* at byte 3"):
        read_text([first, second])
    with pytest.raises(DemoError, match=r"cannot read .*c\.txt: No such file"):
        read_text([tmp_path / "c.txt"])


def test_default_text_is_the_language_reference() -> None:
    corpus = build_corpus(tokenise(read_text([])), 3000)
    assert len(corpus.tokens) > 40_000
    assert {"exception", "__init__", "coroutine", "the"} <= set(corpus.words)


def test_default_text_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DemoError, match="give a file with --text"):
        read_text([])


def test_keep_probabilities() -> None:
    # Relative frequencies 0.9, 0.09, 0.01 at a threshold of 0.09: ratios 10, 1, 1/9.
    found = keep_probabilities(np.array([90, 9, 1]), 0.09)
    assert found == pytest.approx([(10**0.5 + 1) / 10, 1.0, 1.0])


def test_negatives_are_drawn_by_count() -> None:
    counts = np.array([1000, 100, 10, 1])
    drawn = NegativeTable(counts).draw(np.random.default_rng(1), 400_000)
    expected = counts**0.75 / (counts**0.75).sum()
    assert drawn.dtype == np.int64
    # Five standard deviations of a share of 400,000 draws are below 0.004.
    assert np.bincount(drawn, minlength=4) / 400_000 == pytest.approx(expected, abs=0.004)
    assert (np.bincount(drawn, minlength=4) > 0).all()
