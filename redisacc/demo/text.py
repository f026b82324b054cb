"""From text to word numbers: tokens, vocabulary, subsampling of frequent words, the table for negatives."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from redisacc.demo import DemoError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# A word starts with a letter or, as __init__ does, with underscores before one; digits alone are no words.
_WORD = re.compile(r"_*[^\W\d_]\w*(?:'\w+)?")

# A word that occurs once or twice has no context to learn from.
_MIN_COUNT = 3


@dataclass(frozen=True)
class Corpus:
    """A text as word numbers.

    ``tokens``: int64, one number for each word of the text that is in the vocabulary, in the order of the
    text. ``words``: the vocabulary, most frequent first; a word's number is its place here. ``counts``:
    int64, how often each occurs. ``digest``: hex digest of vocabulary and tokens: equal digests mean that two
    machines train on the same thing.
    """

    tokens: IntArray
    words: tuple[str, ...]
    counts: IntArray
    digest: str


def read_text(files: Sequence[Path]) -> str:
    """The text of the files one after the other (UTF-8); of CPython's language reference when there are none.

    Raises DemoError when a file can't be read or isn't UTF-8.
    """
    if not files:
        try:
            from pydoc_data.topics import topics
        except ImportError:  # some distributions leave it out of their smallest Python package
            raise DemoError(
                "this Python came without pydoc_data.topics, the default text; give a file with --text"
            ) from None
        # By name: the order inside the module is nobody's promise, and every process must read the same text.
        return "\n".join(topics[name] for name in sorted(topics))
    parts = []
    for file in files:
        try:
            parts.append(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise DemoError(f"can't read {file}: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise DemoError(f"{file} isn't UTF-8 text: {error.reason} at byte {error.start}") from None
    return "\n".join(parts)


def tokenise(text: str) -> list[str]:
    """The words of a text in lower case, in order."""
    return _WORD.findall(text.lower())


def build_corpus(words: Iterable[str], vocabulary_size: int) -> Corpus:
    """Number the words: the ``vocabulary_size`` most frequent ones that occur at least three times; drop the
    others.

    Ties are broken by alphabet, so that equal text gives equal numbers everywhere.
    Raises DemoError when fewer than 20 words remain: nothing could be learnt from it.
    """
    sequence = list(words)
    frequent = [(word, count) for word, count in Counter(sequence).items() if count >= _MIN_COUNT]
    frequent.sort(key=lambda item: (-item[1], item[0]))
    del frequent[vocabulary_size:]
    if len(frequent) < 20:
        raise DemoError(
            f"the text is too small: {len(frequent)} different words occur at least {_MIN_COUNT} times, 20 are needed"
        )
    number = {word: place for place, (word, _) in enumerate(frequent)}
    tokens = np.array([number[word] for word in sequence if word in number], dtype=np.int64)
    vocabulary = tuple(number)
    digest = hashlib.sha256("\n".join(vocabulary).encode())
    digest.update(tokens.astype("<i8").tobytes())
    counts = np.array([count for _, count in frequent], dtype=np.int64)
    return Corpus(tokens, vocabulary, counts, digest.hexdigest())


def keep_probabilities(counts: IntArray, threshold: float) -> FloatArray:
    """The probability with which an occurrence of each word stays in the text of one epoch.

    As word2vec does it: a word of relative frequency f stays with (sqrt(f/t) + 1) · t/f, at most 1. "The"
    says little about its neighbours, and without this most of the work would go into it.
    """
    ratio = counts / counts.sum() / threshold
    probabilities: FloatArray = np.minimum(1.0, (np.sqrt(ratio) + 1.0) / ratio)
    return probabilities


class NegativeTable:
    """Draws words in proportion to count^0.75: rare words come more often than their share of the text."""

    def __init__(self, counts: IntArray) -> None:
        cumulative = np.cumsum(counts.astype(np.float64) ** 0.75)
        self._cumulative = cumulative / cumulative[-1]

    def draw(self, generator: np.random.Generator, number: int) -> IntArray:
        """``number`` word numbers, int64; a word may come more than once."""
        return np.searchsorted(self._cumulative, generator.random(number), side="right").astype(np.int64)
