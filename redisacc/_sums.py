"""Gradients that the server adds up in place: rows, packed for Lua's ``struct``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from redisacc._dtypes import EXACT_IN_DOUBLE, DType
from redisacc._parked import Gradient


@dataclass(frozen=True)
class Packed:
    """A gradient as ``lua/apply.lua`` wants it.

    Attributes:
        indices: ascending, as decimal text, parted by spaces: they become names of hash fields, and int64 would lose
            digits as a number in Lua.
        rows: the rows one after the other, little-endian.
        row_bytes: bytes of each but the last, which may be shorter.
    """

    indices: bytes
    rows: bytes
    row_bytes: int


# A row of its own costs the server as much as this many elements: it is looked up, packed and stored.
ROW_COST = 24


def cost(gradient: Gradient, chunk: int) -> int:
    """How long the server would be at it, in elements."""
    size = gradient.values.size
    rows = math.ceil(size / chunk) if gradient.indices is None else len(gradient.indices)
    return size + ROW_COST * rows


def exact(gradient: Gradient, dtype: DType) -> bool:
    """Whether every element is exact as the type that Lua adds in.

    Elements of 32 bits and fewer are. Only rows that were summed beforehand, because an index stood more than once
    in a gradient, may be larger.
    """
    values = gradient.values
    if dtype.limit is None or values.dtype == dtype.storage or values.size == 0:
        return True
    return int(values.min()) >= -EXACT_IN_DOUBLE and int(values.max()) <= EXACT_IN_DOUBLE


def pack(gradient: Gradient, dtype: DType, chunk: int) -> Packed:
    """The rows of a sparse gradient, or a dense one cut into chunks of ``chunk`` elements."""
    values = gradient.values
    if dtype.components == 2:
        values = np.ascontiguousarray(values).reshape(-1).view(values.real.dtype)
    rows = values.astype(dtype.in_place_dtype, copy=False).tobytes()
    element_bytes = dtype.components * dtype.in_place_dtype.itemsize
    if gradient.indices is None:
        return Packed(_numbers(math.ceil(gradient.values.size / chunk)), rows, chunk * element_bytes)
    indices = " ".join(map(str, gradient.indices.tolist())).encode()
    return Packed(indices, rows, math.prod(gradient.values.shape[1:]) * element_bytes)


@lru_cache(maxsize=16)
def _numbers(count: int) -> bytes:
    return " ".join(map(str, range(count))).encode()
