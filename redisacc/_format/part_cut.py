"""The cut of a buffered gradient: which elements of its dense sections each part holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from redisacc._data.encodings import BLOCKS, decode_by_piece, per_item, stored_bytes
from redisacc._data.validation import Array
from redisacc._format.buffered import BufferedGradient


class Piece(NamedTuple):
    """Consecutive elements of a dense section in a part.

    Attributes:
        section: the number of the section.
        dtype: what they are stored as: elements, or BLOCKS.
        first: the place of the first element in the section.
        number: the number of elements.
        start: their first byte in the part.
    """

    section: int
    dtype: np.dtype[Any]
    first: int
    number: int
    start: int

    @property
    def nbytes(self) -> int:
        """The bytes that the elements have in the part."""
        return stored_bytes(self.dtype, self.number)

    def elements(self, part: Array, where: str) -> Iterator[tuple[int, Array]]:
        """Yields the elements, maybe in pieces, each with the place of its first element in the section.

        Args:
            part: the bytes of the part.
            where: the key of the part, for errors.
        """
        stored = part[self.start : self.start + self.nbytes].view(self.dtype)
        if self.dtype == BLOCKS:
            for first, elements in decode_by_piece(stored, self.number, where):
                yield self.first + first, elements
        else:
            yield self.first, stored


# For each part with elements of dense sections, the pieces of these sections in it.
Cut = tuple[tuple[Piece, ...], ...]


def cut_of(gradient: BufferedGradient) -> tuple[int, Cut] | None:
    """Returns how many parts hold the sparse sections of a gradient, and what each part after these holds.

    Returns None if the gradient is inline, if a part holds bytes of both, or if one ends within an element or a block.
    """
    if gradient.inline:
        return None
    sparse_parts = start = 0
    while start < gradient.sparse_bytes and sparse_parts < len(gradient.lengths):
        start += gradient.lengths[sparse_parts]
        sparse_parts += 1
    if start != gradient.sparse_bytes:
        return None
    every: list[tuple[Piece, ...]] = []
    for length in gradient.lengths[sparse_parts:]:
        stop = start + length
        pieces = []
        for number, section in enumerate(gradient.sections):
            if section.is_sparse:
                continue
            offset, size = section.values[0], section.dtype.itemsize
            low, high = max(start, offset), min(stop, section.values[1])
            if low < high:
                if (low - offset) % size or (high - low) % size:
                    return None
                first, end = [(at - offset) // size * per_item(section.dtype) for at in (low, high)]
                end = min(end, math.prod(section.shape))
                pieces.append(Piece(number, section.dtype, first, end - first, low - start))
        every.append(tuple(pieces))
        start = stop
    return sparse_parts, tuple(every)
