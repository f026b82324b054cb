"""Text as word numbers."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from redisacc.tools.demo import DemoError

IntArray = npt.NDArray[np.int64]

# A word starts with a letter or, like __init__, with underscores before a letter. Digits alone are not a word.
_WORD = re.compile(r"_*[^\W\d_]\w*(?:'\w+)?")


class Corpus(NamedTuple):
    """A text as word numbers."""

    tokens: IntArray  # a number for each word of the text that is in the vocabulary, in the order of the text
    words: tuple[str, ...]  # the vocabulary, most frequent first; the number of a word is its place here
    counts: IntArray  # how often each word of the vocabulary occurs


def read_text() -> str:
    """Returns Python's language reference."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out of their smallest Python package
        raise DemoError("this Python has no pydoc_data.topics, the text of the demo: install all of Python") from None
    # Sorted by name, because every process must read the same text, and the order in the module is not fixed.
    return "\n".join(topics[name] for name in sorted(topics))


def build_corpus(text: str, vocabulary: int) -> Corpus:
    """Numbers the ``vocabulary`` most frequent words that occur at least three times, and drops the others.

    Words are in lower case. Equally frequent ones are in alphabetical order, so that equal text gives equal numbers
    everywhere. Fewer than 20 words are too few to learn from.
    """
    sequence = _WORD.findall(text.lower())
    frequent = [(word, count) for word, count in Counter(sequence).items() if count >= 3]
    frequent.sort(key=lambda item: (-item[1], item[0]))
    del frequent[vocabulary:]
    if len(frequent) < 20:
        raise DemoError(f"the text is too small: 20 words must occur at least three times, and {len(frequent)} do")
    number = {word: place for place, (word, _) in enumerate(frequent)}
    tokens = np.array([number[word] for word in sequence if word in number], dtype=np.int64)
    return Corpus(tokens, tuple(number), np.array([count for _, count in frequent], dtype=np.int64))
