"""Where the leaves of a tree go in the parts of its gradient, so that a part can leave as soon as it is complete.

The bytes of each part are those that ``buffered.py`` would make of the whole gradient, whichever leaf comes first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from redisacc._arrays.encodings import Encoding, encode_run, encoded_dtype
from redisacc._arrays.gradient import Section
from redisacc._arrays.spec import AccumulatorSpec
from redisacc._arrays.validation import Array
from redisacc._format import attempts
from redisacc._format import buffered as buffered_format
from redisacc._format.part_cut import Dense
from redisacc._wire.sockets import Pieces


class _Extent(NamedTuple):
    """Where the elements of a leaf are.

    Attributes:
        section: the number of its section.
        start: the place of its first element in the section.
        size: the number of its elements.
    """

    section: int
    start: int
    size: int


class UploadLayout:
    """The parts of each gradient of a tree without sparse leaves.

    Args:
        spec: what the accumulator was created as.
        encoding: how elements of float32 travel.
        partitions: among how many partitions the parts are spread; 1: all are in one slot.

    Attributes:
        header: the entry of a gradient in the ``buffered`` hash.
        lengths: the length of each part in bytes.
        leaves_of: for each part, the numbers of the leaves in it. What is noted of missing leaves comes after the last
            leaf.
        parts_of: for each of these leaves, the numbers of the parts that it is in.
    """

    def __init__(self, spec: AccumulatorSpec, encoding: Encoding, partitions: int) -> None:
        assert spec.shapes is not None
        self._spec = spec
        self._encoding = encoding
        extents = [_Extent(leaf.section, leaf.start, leaf.size) for leaf in spec.leaves]
        if spec.missing == "skip":
            extents.append(_Extent(len(spec.sections) - 1, 0, len(spec.leaves)))
        self._extents = extents
        sizes = [math.prod(shape) for shape in spec.shapes]
        stored = [
            encoded_dtype(section.dtype, size, encoding) for section, size in zip(spec.sections, sizes, strict=True)
        ]
        # Sections without elements are in no part.
        self._sections = [number for number, size in enumerate(sizes) if size]
        dense = tuple([Dense(stored[number], sizes[number]) for number in self._sections])
        self._stored = [section.dtype for section in dense]
        self._cut = cut = buffered_format.dense_cut(dense, partitions)
        self.lengths = cut.lengths
        self.header = buffered_format.header_of(tuple(zip(stored, spec.shapes, strict=True)), self.lengths)
        self.leaves_of = [self._leaves_in(part) for part in range(len(cut.parts))]
        self.parts_of: list[list[int]] = [[] for _ in extents]
        for part, leaves in enumerate(self.leaves_of):
            for leaf in leaves:
                self.parts_of[leaf].append(part)

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return sum(self.lengths)

    def _leaves_in(self, part: int) -> list[int]:
        runs = [(self._sections[run.section], run.first, run.first + run.size) for run in self._cut.parts[part]]

        def is_in(leaf: _Extent) -> bool:
            stop = leaf.start + leaf.size
            return any(leaf.section == of and leaf.start < end and start < stop for of, start, end in runs)

        return [number for number, leaf in enumerate(self._extents) if is_in(leaf)]

    def part(self, number: int, leaves: Mapping[int, Array]) -> memoryview | Pieces:
        """Returns the bytes of a part. What is not encoded is not copied.

        Args:
            number: the number of the part.
            leaves: the elements of each leaf in it, as vectors.

        Raises:
            InvalidArgumentError: the encoding is "int8", and an element is infinite or NaN.
        """
        pieces: list[memoryview] = []
        runs = self._cut.parts[number]
        first = begin = self._cut.byte_of(runs[0].section, runs[0].first)
        for run in runs:
            place = self._cut.byte_of(run.section, run.first)
            if place > begin:
                pieces.append(memoryview(bytes(place - begin)))
            for array in self._elements(number, run.section, run.first, run.first + run.size, leaves):
                pieces.append(array.view(np.uint8).data)
                place += array.nbytes
            begin = place
        if begin - first < self.lengths[number]:
            pieces.append(memoryview(bytes(self.lengths[number] - (begin - first))))
        return pieces[0] if len(pieces) == 1 else Pieces(pieces)

    def _elements(self, part: int, run: int, start: int, stop: int, leaves: Mapping[int, Array]) -> list[Array]:
        """Returns the elements of a section from ``start`` to ``stop``, as they are stored."""
        section = self._sections[run]
        arrays = []
        for number in self.leaves_of[part]:
            leaf = self._extents[number]
            if leaf.section == section:
                some = leaves[number][max(start - leaf.start, 0) : max(stop - leaf.start, 0)]
                if some.size:
                    arrays.append(some)
        if self._encoding != "float32" and self._spec.sections[section].dtype.storage == np.float32:

            def name_of(place: int) -> str:
                return self._spec.name_of(section, start + place)

            arrays = list(encode_run(Section(arrays), self._stored[run], self._encoding, name_of).arrays)
        return [array.astype(array.dtype.newbyteorder("<"), copy=False) for array in arrays]


def layout_of(spec: AccumulatorSpec, encoding: Encoding, partitions: int, announced_bytes: int) -> UploadLayout | None:
    """Returns the layout of the gradients of an accumulator; None if they do not leave part by part."""
    if spec.kind != "tree" or spec.fixed_shapes is None:
        return None
    layout = UploadLayout(spec, encoding, partitions)
    # Small ones leave when they are complete.
    return layout if layout.nbytes >= announced_bytes and len(layout.lengths) <= attempts.MOST_PARTS else None
