"""Text as word numbers: tokens, vocabulary, subsampling of frequent words, the table for negatives."""

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

# A word starts with a letter or, like __init__, with underscores before a letter. Digits alone are not a word.
_WORD = re.compile(r"_*[^\W\d_]\w*(?:'\w+)?")

# A word that occurs once or twice has no context to learn from.
_MIN_COUNT = 3


@dataclass(frozen=True)
class Corpus:
    """A text as word numbers.

    Attributes:
        tokens: int64, a number for each word of the text that is in the vocabulary, in the order of the text.
        words: the vocabulary, most frequent first; the number of a word is its place here.
        counts: int64, how often each word of the vocabulary occurs.
        digest: SHA-256 of vocabulary and tokens; if it is equal, two machines train on the same text.
    """

    tokens: IntArray
    words: tuple[str, ...]
    counts: IntArray
    digest: bytes


def read_text(files: Sequence[Path]) -> str:
    """Returns the text of the files, one after the other; without files, Python's language reference.

    Raises:
        DemoError: a file cannot be read or is not UTF-8, or Python came without its language reference.
    """
    if not files:
        try:
            from pydoc_data.topics import topics
        except ImportError:  # some distributions leave it out of their smallest Python package
            raise DemoError("this Python has no pydoc_data.topics, the default text; give a file with --text") from None
        # Sorted by name, because every process must read the same text, and the order in the module is not fixed.
        return "\n".join(topics[name] for name in sorted(topics))
    parts = []
    for file in files:
        try:
            parts.append(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise DemoError(f"cannot read {file}: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise DemoError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    return "\n".join(parts)


def tokenise(text: str) -> list[str]:
    """Returns the words of a text in lower case, in order."""
    return _WORD.findall(text.lower())


def build_corpus(words: Iterable[str], vocabulary_size: int) -> Corpus:
    """Numbers the ``vocabulary_size`` most frequent words that occur at least three times, and drops the others.

    Equally frequent words are in alphabetical order, so that equal text gives equal numbers everywhere.

    Raises:
        DemoError: fewer than 20 words remain, too few to learn from.
    """
    sequence = list(words)
    frequent = [(word, count) for word, count in Counter(sequence).items() if count >= _MIN_COUNT]
    frequent.sort(key=lambda item: (-item[1], item[0]))
    del frequent[vocabulary_size:]
    if len(frequent) < 20:
        raise DemoError(
            f"the text is too small: 20 different words must occur at least {_MIN_COUNT} times, and {len(frequent)} do"
        )
    number = {word: place for place, (word, _) in enumerate(frequent)}
    tokens = np.array([number[word] for word in sequence if word in number], dtype=np.int64)
    vocabulary = tuple(number)
    digest = hashlib.sha256("\n".join(vocabulary).encode())
    digest.update(tokens.astype("<i8").tobytes())
    counts = np.array([count for _, count in frequent], dtype=np.int64)
    return Corpus(tokens, vocabulary, counts, digest.digest())


def keep_probabilities(counts: IntArray, threshold: float) -> FloatArray:
    """Returns for each word the probability that an occurrence stays in the text of an epoch.

    As in word2vec, a word of relative frequency f stays with probability (sqrt(f/t) + 1) · t/f, at most 1. "The" says
    little about its neighbours, and without this rule most of the work would go into it.
    """
    ratio = counts / counts.sum() / threshold
    probabilities: FloatArray = np.minimum(1.0, (np.sqrt(ratio) + 1.0) / ratio)
    return probabilities
