"""Where dense sections are cut into parts: by elements, so that a part holds the same ones however they are encoded.

Part K of a gradient of float32, of one whose elements travel as bfloat16 or in blocks, and of the parameters and the
state of an optimiser of the same model hold the same elements, and lie in the same partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from redisacc._arrays.encodings import BLOCK, ENCODED, per_item, stored_bytes
from redisacc._format.part_cut import part_lengths

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
