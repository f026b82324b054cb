"""Checks the options of optimizers.

They may come from the record of a run, so whatever is read back passes through the same checks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from redisacc._arrays.trees import MAX_PATH_BYTES
from redisacc._arrays.validation import real
from redisacc._text import is_unicode, shown
from redisacc.errors import InvalidArgumentError

# More patterns than this are refused: each is compared with the path of every leaf.
MAX_PATTERNS = 1000


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
