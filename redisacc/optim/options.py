"""Checks the options of optimizers, and writes them as values that JSON and MessagePack keep.

Options may come from the record of a run, so whatever is read back passes through the same checks.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from redisacc._arrays.trees import MAX_PATH_BYTES
from redisacc._arrays.validation import real
from redisacc._text import is_unicode, shown
from redisacc.errors import InvalidArgumentError

# More patterns than this are refused: each is compared with the path of every leaf.
MAX_PATTERNS = 1000

# As float.hex writes a finite number.
_HEX = re.compile(r"-?0x[01]\.[0-9a-f]{1,13}p[+-][0-9]{1,4}")


def number(value: object, what: str, *, low: float = 0.0, below: float = math.inf) -> float:
    """Returns a finite number in [low, below).

    Args:
        value: a number, or an array of rank 0 that holds one, of any library. Booleans are refused.
        what: the name of the option in errors.
        low: the smallest value that is allowed.
        below: the smallest value above those that are allowed.

    Raises:
        InvalidArgumentError: it is something else.
    """
    found = real(value, what)
    if not low <= found < below:
        bounds = f"in [{low:g}, {below:g})" if low > -math.inf else "that is finite"
        raise InvalidArgumentError(f"{what} must be a number {bounds}, not {shown(value)}")
    if found == -math.inf:
        raise InvalidArgumentError(f"{what} must be a number that is finite, not {shown(value)}")
    return found


def betas(value: object) -> tuple[float, float]:
    """Returns the pair of decay rates of Adam and Lion, each in [0, 1).

    Raises:
        InvalidArgumentError: it is something else.
    """
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InvalidArgumentError(f"betas must be a pair of numbers in [0, 1), not {shown(value)}")
    return number(value[0], "betas[0]", below=1), number(value[1], "betas[1]", below=1)


def patterns(value: object, what: str) -> tuple[str, ...]:
    """Returns patterns of paths.

    Args:
        value: a sequence of texts.
        what: the name of the option in errors.

    Raises:
        InvalidArgumentError: it is something else, there are more than MAX_PATTERNS, or one is longer than a path.
    """
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidArgumentError(f"{what} must be a sequence of patterns such as '*/bias', not {shown(value)}")
    if len(value) > MAX_PATTERNS:
        raise InvalidArgumentError(f"{what} must have at most {MAX_PATTERNS} patterns, not {len(value)}")
    for place, pattern in enumerate(value):
        if not isinstance(pattern, str) or not is_unicode(pattern) or not 0 < len(pattern.encode()) <= MAX_PATH_BYTES:
            raise InvalidArgumentError(
                f"pattern {place} of {what} must be text of 1 to {MAX_PATH_BYTES} bytes, not {shown(pattern)}"
            )
    return tuple(value)


def factors(value: object, what: str) -> dict[str, float]:
    """Returns a dict of patterns of paths and their factors, each at least 0, in the order given.

    Args:
        value: a mapping.
        what: the name of the option in errors.

    Raises:
        InvalidArgumentError: it is something else.
    """
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(f"{what} must be a dict of patterns and factors, not {shown(value)}")
    keys = patterns(list(value), what)
    return {key: number(value[key], f"{what}[{shown(key)}]") for key in keys}


def hex_text(value: float) -> str:
    """Returns a finite number as text that keeps all of its bits in every language."""
    return value.hex()


def parse_hex(text: object, what: str = "a number") -> float:
    """Returns the number that a text from ``hex_text`` holds.

    Args:
        text: the text.
        what: its name in errors.

    Raises:
        ValueError: redisacc did not write this text.
    """
    if isinstance(text, str) and len(text) <= 32 and _HEX.fullmatch(text):
        with contextlib.suppress(OverflowError):
            value = float.fromhex(text)
            if value.hex() == text:
                return value
    raise ValueError(f"{what} must be a finite number as float.hex writes it, not {shown(text)}")


def encode(value: Any) -> Any:
    """Returns the value of an option as JSON and MessagePack keep it: numbers as text, pairs and patterns as lists."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, dict):
        return [[pattern, hex_text(factor)] for pattern, factor in value.items()]
    if isinstance(value, tuple):
        return [encode(each) for each in value]
    return hex_text(value)


def decode(name: str, value: Any) -> Any:
    """Returns the value of an option from what ``encode`` returned. The constructor checks it after this.

    Args:
        name: the name of the option.
        value: anything.

    Raises:
        ValueError: it cannot be an option of this name.
    """
    if name == "no_decay":
        return value
    if name == "lr_factor":
        return dict(_pair_of_pattern(pair) for pair in _list(value, name))
    if name == "betas":
        return tuple(parse_hex(each, name) for each in _list(value, name))
    return value if value is None or isinstance(value, bool) else parse_hex(value, name)


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > MAX_PATTERNS:
        raise ValueError(f"{name} must be a list of at most {MAX_PATTERNS} entries, not {shown(value)}")
    return value


def _pair_of_pattern(pair: Any) -> tuple[str, float]:
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
        raise ValueError(f"lr_factor must have pairs of a pattern and a factor, not {shown(pair)}")
    return pair[0], parse_hex(pair[1], "lr_factor")
