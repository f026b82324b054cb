"""A gradient in memory."""

from __future__ import annotations

from dataclasses import dataclass

from redisacc._data.validation import Array


@dataclass(slots=True)
class Section:
    """A dense array, or rows of a larger one, in a gradient.

    Attributes:
        values: the array of a dense section, or the rows ``[n, *row]`` of a sparse one.
        indices: strictly increasing int64 ``[n]`` of a sparse section; None for a dense one.
        counts: uint64 ``[n]``: how many gradients held each index, if this is a sparse sum of several; else None.
        ours: whether the arrays are our own memory, which may be written to and handed out. A caller's arrays are not.
    """

    values: Array
    indices: Array | None = None
    counts: Array | None = None
    ours: bool = False

    @property
    def nbytes(self) -> int:
        """The size of its arrays in bytes."""
        size: int = self.values.nbytes
        if self.indices is not None:
            size += self.indices.nbytes
        if self.counts is not None:
            size += self.counts.nbytes
        return size


@dataclass(slots=True)
class Gradient:
    """A gradient on its way to the server or back, or the sum of several.

    Attributes:
        sections: one for a dense or a sparse accumulator. The gradient of a tree has one for all dense leaves of a
            dtype, and one for each sparse leaf (``TreeSpec``).
        number: how many gradients this is the sum of.
    """

    sections: tuple[Section, ...]
    number: int = 1

    @property
    def nbytes(self) -> int:
        """The size of its arrays in bytes."""
        return sum([section.nbytes for section in self.sections])
