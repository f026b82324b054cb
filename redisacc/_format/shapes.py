"""Shapes as they are written in Redis."""

from __future__ import annotations

import json
import math
from functools import lru_cache

from redisacc._data.validation import INT64_MAX, Shape, shape_text
from redisacc._format.keys import Keys
from redisacc.errors import CorruptDataError


def parse_shape(keys: Keys, text: str) -> Shape:
    """Returns a declared shape: None if the rank is unknown, with None for each unknown dimension."""
    if text == "unknown":
        return None
    try:
        return _dims(text)
    except ValueError:
        raise CorruptDataError(f"{keys.record}: shape holds {text!r:.100}, which redisacc did not write") from None


@lru_cache(maxsize=256)
def _dims(text: str) -> tuple[int | None, ...]:
    dims = json.loads(text)
    if not isinstance(dims, list) or not all(type(dim) is int and -1 <= dim < 2**63 for dim in dims):
        raise ValueError(text)
    shape = tuple(None if dim == -1 else dim for dim in dims)
    if shape_text(shape) != text:
        raise ValueError(text)
    return shape


def round_shape_of(keys: Keys, text: str) -> tuple[int, ...] | None:
    """Returns the shape that binds a round, or None for an empty round."""
    if text == "":
        return None
    try:
        return _known_dims(text)
    except ValueError:
        raise CorruptDataError(f"{keys.record}: {text!r:.100} cannot be the shape of a round") from None


@lru_cache(maxsize=256)
def _known_dims(text: str) -> tuple[int, ...]:
    shape = _dims(text)
    dims = tuple(dim for dim in shape if dim is not None)
    # numpy refuses shapes whose dimensions multiply beyond an int64, even if one of them is 0.
    if len(dims) < len(shape) or math.prod(dim or 1 for dim in dims) > INT64_MAX // 16:
        raise ValueError(text)
    return dims
