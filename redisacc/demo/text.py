"""Text as word numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from redisacc.demo import DemoError

IntArray = npt.NDArray[np.int64]

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
    """

    tokens: IntArray
    words: tuple[str, ...]
    counts: IntArray


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


def build_corpus(text: str, vocabulary: int) -> Corpus:
    """Numbers the ``vocabulary`` most frequent words that occur at least three times, and drops the others.

    Words are in lower case. Equally frequent ones are in alphabetical order, so that equal text gives equal numbers
    everywhere.

    Raises:
        DemoError: fewer than 20 words remain, too few to learn from.
    """
    sequence = _WORD.findall(text.lower())
    frequent = [(word, count) for word, count in Counter(sequence).items() if count >= _MIN_COUNT]
    frequent.sort(key=lambda item: (-item[1], item[0]))
    del frequent[vocabulary:]
    if len(frequent) < 20:
        raise DemoError(
            f"the text is too small: 20 different words must occur at least {_MIN_COUNT} times, and {len(frequent)} do"
        )
    number = {word: place for place, (word, _) in enumerate(frequent)}
    tokens = np.array([number[word] for word in sequence if word in number], dtype=np.int64)
    return Corpus(tokens, tuple(number), np.array([count for _, count in frequent], dtype=np.int64))
