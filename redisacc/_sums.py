"""Gradients that the server adds up in place: rows, packed for Lua's ``struct``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from redisacc._dtypes import EXACT_IN_DOUBLE, DType
from redisacc._parked import Gradient


@dataclass(slots=True)
class Packed:
    """A gradient as ``lua/apply.lua`` wants it.

    Attributes:
        indices: ascending, as decimal text, parted by ", ": they become names of hash fields, and int64 would lose
            digits as a number in Lua.
        rows: the rows one after the other, little-endian.
        row_bytes: bytes of each but the last, which may be shorter.
    """

    indices: bytes
    rows: bytes
    row_bytes: int


# A row of its own costs the server as much as this many elements: it is looked up, packed and stored.
ROW_COST = 24


def fits(gradient: Gradient, dtype: DType, chunk: int, limit: int) -> bool:
    """Whether a gradient may be added in place: it costs the server no more than ``limit`` elements would, and each
    of its elements is exact as the type that Lua adds in.

    Elements of 32 bits and fewer are exact. Only rows that were summed beforehand, because an index stood more than
    once in a gradient, may be larger.
    """
    values = gradient.values
    rows = math.ceil(values.size / chunk) if gradient.indices is None else len(gradient.indices)
    if values.size + ROW_COST * rows > limit:
        return False
    if dtype.limit is None or values.dtype == dtype.storage or values.size == 0:
        return True
    return int(values.min()) >= -EXACT_IN_DOUBLE and int(values.max()) <= EXACT_IN_DOUBLE


def pack(gradient: Gradient, dtype: DType, chunk: int) -> Packed:
    """The rows of a sparse gradient, or a dense one cut into chunks of ``chunk`` elements."""
    values = gradient.values
    if dtype.components == 2:
        values = np.ascontiguousarray(values).reshape(-1).view(values.real.dtype)
    rows = (values if values.dtype == dtype.in_place_dtype else values.astype(dtype.in_place_dtype)).tobytes()
    element_bytes = dtype.components * dtype.in_place_dtype.itemsize
    if gradient.indices is None:
        return Packed(_numbers(math.ceil(gradient.values.size / chunk)), rows, chunk * element_bytes)
    # What Python writes of a list, without its brackets: a text for each number and joining them took twice as long.
    indices = str(gradient.indices.tolist())[1:-1].encode()
    return Packed(indices, rows, math.prod(gradient.values.shape[1:]) * element_bytes)


@lru_cache(maxsize=16)
def _numbers(count: int) -> bytes:
    return str(list(range(count)))[1:-1].encode()
