"""How bytes are cut into parts, and which elements of a gradient's dense sections each part holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from redisacc._arrays.encodings import BLOCK, BLOCKS, ENCODED, decode_by_piece, per_item, stored_bytes
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


# Where dense sections are cut into parts: by elements, so that a part holds the same ones however they are encoded.
#
# Part K of a gradient of float32, of one whose elements travel as bfloat16 or in blocks, and of the parameters and the
# state of an optimizer of the same model hold the same elements, and lie in the same partition.

# The bytes of an element of float32. It counts as many if it travels as bfloat16 or in a block.
_FLOAT32_BYTES = 4
# Parts begin at a multiple of BLOCK elements, so that no part ends within a block, and their size is a multiple of this
# many bytes. That would be too coarse for parts of fewer than LEAST_ALIGNED bytes, which only a small gradient has that
# is spread among many partitions.
ALIGNMENT = BLOCK * _FLOAT32_BYTES
LEAST_ALIGNED = 4 * ALIGNMENT


# Every array of a gradient begins at a multiple of this many bytes, so that numpy reads it where it is.
GRADIENT_ALIGNMENT = 8


class Dense(NamedTuple):
    """A dense section.

    Attributes:
        dtype: the dtype that it is stored in, little-endian, or BLOCKS.
        size: the number of its elements.
    """

    dtype: np.dtype[Any]
    size: int

    @property
    def width(self) -> int:
        """The bytes for which each of its elements counts, however it is encoded."""
        return _FLOAT32_BYTES if self.dtype in ENCODED else self.dtype.itemsize


class Run(NamedTuple):
    """Consecutive elements of a section, in a part.

    Attributes:
        section: the number of the section.
        first: the place of the first element in the section.
        size: the number of elements.
    """

    section: int
    first: int
    size: int


class ElementCut:
    """The parts of some dense sections, which follow one another.

    Args:
        sections: the sections. Those without elements are in no part.
        size: the bytes of each part but the last, before elements are encoded.
        runts: as for ``part_lengths``.

    Attributes:
        parts: the runs of elements in each part.
        offsets: where each section begins, in bytes. Padding before a section belongs to the part before it.
        lengths: the bytes of each part.
    """

    def __init__(self, sections: Sequence[Dense], size: int, *, runts: bool) -> None:
        self._sections = tuple(sections)
        ends = [0, *accumulate([section.size * section.width for section in sections])]
        begins = [0, *accumulate(part_lengths(ends[-1], size, runts=runts))][:-1]
        starts = list(dict.fromkeys([self._place(ends, at, size) for at in begins]))
        stops = starts[1:]
        if starts:
            last = max(number for number, section in enumerate(sections) if section.size)
            stops.append((last, sections[last].size))
        self.parts = tuple([tuple(self._runs(*start, *stop)) for start, stop in zip(starts, stops, strict=True)])
        self.offsets, _ = offsets_of([stored_bytes(*section) for section in sections], GRADIENT_ALIGNMENT)
        edges = [self.byte_of(*at) for at in (*starts, *stops[-1:])]
        self.lengths = tuple([stop - start for start, stop in pairwise(edges)])

    def byte_of(self, section: int, element: int) -> int:
        """Returns where an element of a section begins, in bytes from the first section."""
        return self.offsets[section] + stored_bytes(self._sections[section].dtype, element)

    def _place(self, ends: Sequence[int], at: int, size: int) -> tuple[int, int]:
        """Returns the section, and the place of the element in it, with which the part at some bytes begins."""
        number = next(number for number in range(len(self._sections)) if ends[number + 1] > at)
        section = self._sections[number]
        grain = max(BLOCK if size >= LEAST_ALIGNED else 1, per_item(section.dtype))
        return number, (at - ends[number]) // section.width // grain * grain

    def _runs(self, section: int, first: int, last: int, end: int) -> Iterator[Run]:
        """Yields the runs from an element of one section up to the end of a part, in the same or a later section."""
        for number in range(section, last + 1):
            start = first if number == section else 0
            stop = end if number == last else self._sections[number].size
            if stop > start:
                yield Run(number, start, stop - start)


def offsets_of(sizes: Iterable[int], alignment: int) -> tuple[tuple[int, ...], int]:
    """Returns where things of these sizes begin, each at a multiple of the alignment, and where the last one ends."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end + -end % alignment)
        end = offsets[-1] + size
    return tuple(offsets), end
