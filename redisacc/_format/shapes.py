"""Shapes as they are written in Redis."""

from __future__ import annotations

import math
import re
from functools import lru_cache

import numpy as np

from redisacc._arrays.validation import INT64_MAX, MAX_RANK, Shape, shape_text
from redisacc._format.keys import Keys
from redisacc._format.stored_text import parsed

# The longest text of a shape that redisacc writes: brackets, and numbers of 19 digits with their commas.
LONGEST_SHAPE = 2 + MAX_RANK * 20

# The text that a tree has in place of a shape.
_LEAVES = re.compile(r"(1) leaf|([0-9]{1,6}) leaves")

_SHAPE = re.compile(r"\[(?:(?:-1|[0-9]{1,19})(?:,(?:-1|[0-9]{1,19}))*)?\]")


def parse_shape(text: str) -> Shape:
    """Returns a declared shape: None if the rank is unknown, with None for each unknown dimension.

    Raises:
        ValueError: redisacc writes no such text.
    """
    # The length is checked first: the text may be of any size, and so may the cache.
    if len(text) > LONGEST_SHAPE:
        raise ValueError("the text is longer than that of any shape")
    return None if text == "unknown" else _parsed(text)


@lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[int | None, ...]:
    # A regular expression knows no nesting, unlike a parser of JSON, which a deep enough one exhausts.
    if _SHAPE.fullmatch(text) is None:
        raise ValueError("the text is not a list of dimensions")
    dims = [int(dim) for dim in text[1:-1].split(",") if dim]
    shape = tuple(None if dim == -1 else dim for dim in dims)
    if len(dims) > MAX_RANK or max(dims, default=0) > INT64_MAX or shape_text(shape) != text:
        raise ValueError("the text is not a shape as redisacc writes it")
    return shape


def parse_leaves(text: str) -> int:
    """Returns how many leaves a tree has, of a text such as "7 leaves".

    Raises:
        ValueError: redisacc writes no such text.
    """
    match = _LEAVES.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return int(match[1] or match[2])


def parse_round_shape(text: str) -> tuple[int, ...] | None:
    """Returns the shape that binds a round, or None for an empty round.

    Raises:
        ValueError: no round has such a shape.
    """
    if len(text) > LONGEST_SHAPE:
        raise ValueError("the text is longer than that of any shape")
    return _known_dims(text) if text else None


def round_shape_of(keys: Keys, text: str) -> tuple[int, ...] | None:
    """Returns the same of a field of the record; CorruptDataError: redisacc did not write it."""
    return parsed(keys.record, "round_shape", text, parse_round_shape)


@lru_cache(maxsize=256)
def _known_dims(text: str) -> tuple[int, ...]:
    shape = _parsed(text)
    dims = tuple(dim for dim in shape if dim is not None)
    # numpy refuses shapes whose dimensions multiply beyond an int64, even if one of them is 0.
    if len(dims) < len(shape) or math.prod(dim or 1 for dim in dims) > INT64_MAX // 16:
        raise ValueError("an array cannot have this shape")
    # It also refuses more dimensions than it can count, and knows best how many those are.
    np.empty((0, *dims[1:]))
    return dims
