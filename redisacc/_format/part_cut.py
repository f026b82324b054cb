"""How bytes are cut into parts, and which elements of a gradient's dense sections each part holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from redisacc._arrays.encodings import BLOCKS, decode_by_piece, per_item, stored_bytes
from redisacc._arrays.validation import Array

# The counts of a sparse sum.
COUNT = np.dtype("<u8")


class BufferedSection(NamedTuple):
    """Where a section lies in the bytes of its gradient.

    Attributes:
        is_sparse: whether it consists of rows and their indices.
        dtype: the dtype of what its values are stored as, little-endian: elements, or BLOCKS.
        shape: the shape of its values.
        indices: the first byte of its indices, and the one after the last; equal if it has none.
        counts: the same for its counts.
        values: the same for its values.
        counts_dtype: whether its counts are numbers of gradients (COUNT) or sums of their weights (WEIGHT).
    """

    is_sparse: bool
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    indices: tuple[int, int]
    counts: tuple[int, int]
    values: tuple[int, int]
    counts_dtype: np.dtype[Any] = COUNT


class Piece(NamedTuple):
    """Consecutive elements of a dense section in a part.

    Attributes:
        section: the number of the section.
        dtype: the dtype they are stored in: the dtype of elements, or BLOCKS.
        first: the place of the first element in the section.
        number: the number of elements.
        start: their first byte in the part.
        nbytes: the bytes that they have in the part.
    """

    section: int
    dtype: np.dtype[Any]
    first: int
    number: int
    start: int
    nbytes: int

    @property
    def span(self) -> tuple[int, int, int]:
        """Returns which elements these are: the section, the place of the first one, and how many."""
        return self.section, self.first, self.number

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


# For each part with elements of dense sections, the pieces of sections in it.
Cut = tuple[tuple[Piece, ...], ...]


def have_same_elements(one: Cut, other: Cut) -> bool:
    """Returns whether each part holds the same elements in both cuts, however they are stored."""
    return one is other or [[piece.span for piece in part] for part in one] == [
        [piece.span for piece in part] for part in other
    ]


# A remainder of at most this share of a part makes the last part longer, because a part of a few bytes costs as
# many commands as a whole one: four million bytes and a few are four parts, not five.
RUNT = 1 / 8


def part_lengths(nbytes: int, size: int, *, runts: bool = False) -> list[int]:
    """Returns the lengths of the parts into which bytes are cut.

    Args:
        nbytes: how many bytes.
        size: the length of every part but the last.
        runts: whether the last part may be as short as it happens to be. Otherwise, a rest of at most RUNT of a part
            belongs to the part before it.
    """
    full, rest = divmod(nbytes, size)
    lengths = [size] * full
    if rest and full and not runts and rest <= size * RUNT:
        lengths[-1] += rest
    elif rest:
        lengths.append(rest)
    return lengths


def cut_of(sections: Sequence[BufferedSection], lengths: Sequence[int], sparse_bytes: int) -> tuple[int, Cut] | None:
    """Returns how many parts hold the sparse sections of a gradient, and the contents of each part after them.

    Returns None if a part holds bytes of both, or if one ends within an element or a block.

    Args:
        sections: the sections, with their places in the bytes of the gradient.
        lengths: the length of each part in bytes.
        sparse_bytes: how many bytes come before the first dense section.
    """
    sparse_parts = start = 0
    while start < sparse_bytes and sparse_parts < len(lengths):
        start += lengths[sparse_parts]
        sparse_parts += 1
    if start != sparse_bytes:
        return None
    dense = [(number, section) for number, section in enumerate(sections) if not section.is_sparse]
    every: list[tuple[Piece, ...]] = []
    for length in lengths[sparse_parts:]:
        stop = start + length
        pieces = []
        for number, section in dense:
            offset, size = section.values[0], section.dtype.itemsize
            low, high = max(start, offset), min(stop, section.values[1])
            if low < high:
                if (low - offset) % size or (high - low) % size:
                    return None
                first, end = [(at - offset) // size * per_item(section.dtype) for at in (low, high)]
                end = min(end, math.prod(section.shape))
                nbytes = stored_bytes(section.dtype, end - first)
                pieces.append(Piece(number, section.dtype, first, end - first, low - start, nbytes))
        every.append(tuple(pieces))
        start = stop
    return sparse_parts, tuple(every)
