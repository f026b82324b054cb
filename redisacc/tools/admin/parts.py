"""Reads rows of buffered gradients, or the elements of a leaf, without reading the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from redisacc._arrays.encodings import BLOCKS, decode, per_item
from redisacc._arrays.gradient import Gradient, Section
from redisacc._arrays.spec import AccumulatorSpec, Leaf, SectionSpec
from redisacc._arrays.validation import Array
from redisacc._format.buffered import BufferedGradient, PartMissingError
from redisacc._format.keys import Keys
from redisacc._format.part_cut import BufferedSection
from redisacc._protocol.sums.buffered_sections import check_counts
from redisacc._wire.transport import Transport

# The number of commands in one pipeline.
PIPELINED_COMMANDS = 500


@dataclass(frozen=True)
class Target:
    """The part of each gradient that is read: a section, or the elements of a dense leaf in it.

    Attributes:
        section: the number of the section.
        spec: the specification of the section.
        start: the place of the first element of a dense leaf in its section.
        shape: the shape of a dense leaf; None for a section that is read whole, or for rows.
        present: the number of the section that says which leaves a gradient has, and the place of this leaf in it.
            None if every gradient counts as having it.
    """

    section: int
    spec: SectionSpec
    start: int = 0
    shape: tuple[int, ...] | None = None
    present: tuple[int, int] | None = None

    @classmethod
    def of_leaf(cls, spec: AccumulatorSpec, leaf: Leaf) -> Target:
        """Returns the target of a leaf."""
        shape = None if leaf.is_sparse else leaf.known_shape
        present = (len(spec.sections) - 1, spec.structure.numbers[leaf.path]) if spec.missing == "skip" else None
        return cls(leaf.section, spec.sections[leaf.section], leaf.start, shape, present)

    def elements(self, section: Array) -> Array:
        """Returns the elements of a dense leaf, given its section."""
        assert self.shape is not None
        return section[self.start : self.start + math.prod(self.shape)].reshape(self.shape)

    @property
    def prefix(self) -> str:
        """The prefix of the fields of its section in the ``sums`` hash."""
        return f"{self.spec.label}:" if self.spec.label else ""


@dataclass
class _Search:
    """A binary search for one index in one gradient, one comparison at a time."""

    gradient: BufferedGradient
    index: int
    low: int
    high: int
    found: int | None = None

    @property
    def done(self) -> bool:
        return self.found is not None or self.low > self.high

    @property
    def middle(self) -> int:
        return (self.low + self.high) // 2

    def compare(self, value: int) -> None:
        middle = self.middle
        if value == self.index:
            self.found = middle
        elif value < self.index:
            self.low = middle + 1
        else:
            self.high = middle - 1


class PartReader:
    """Reads rows with some indices, or the elements of a dense leaf, of buffered gradients.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        target: what is read of each gradient.
        wanted: the indices of the rows.
    """

    def __init__(self, transport: Transport, keys: Keys, target: Target, wanted: list[int]) -> None:
        self._transport, self._keys, self._target, self._wanted = transport, keys, target, wanted

    def find(self, gradients: Sequence[BufferedGradient]) -> dict[str, dict[int, int]]:
        """Searches large gradients for the rows. All searches advance together, one step in a round trip.

        Returns:
            The id of each gradient → index → its place, for each index that the gradient holds.
        """
        number = self._target.section
        searches = [
            _Search(gradient, index, 0, gradient.sections[number].shape[0] - 1)
            for gradient in gradients
            for index in self._wanted
        ]
        while going := [search for search in searches if not search.done]:
            for start in range(0, len(going), PIPELINED_COMMANDS):
                batch = going[start : start + PIPELINED_COMMANDS]
                ranges = [(of.gradient, of.gradient.sections[number].indices[0] + of.middle * 8, 8) for of in batch]
                for search, data in zip(batch, self._read(ranges), strict=True):
                    search.compare(int.from_bytes(data, "little", signed=True))
        found: dict[str, dict[int, int]] = {gradient.id: {} for gradient in gradients}
        for search in searches:
            if search.found is not None:
                found[search.gradient.id][search.index] = search.found
        return found

    def of_whole(self, gradient: Gradient) -> Gradient:
        """Returns the part of a gradient that was read whole."""
        section = gradient.sections[self._target.section]
        if section.indices is None:
            found = [Section(self._target.elements(section.values))]
        else:
            places = np.flatnonzero(np.isin(section.indices, np.array(self._wanted, np.int64)))
            counts = None if section.counts is None else section.counts[places]
            found = [Section(section.values[places], section.indices[places], counts)]
        if self._target.present:
            number, place = self._target.present
            found.append(Section(gradient.sections[number].values[place : place + 1]))
        return replace(gradient, sections=tuple(found))

    def read(self, gradient: BufferedGradient, places: dict[int, int]) -> Gradient:
        """Reads the part of a large gradient. ``places`` has the place of each row, by its index."""
        target = self._target
        section = gradient.sections[target.section]
        if section.is_sparse:
            found = [self._rows(gradient, section, places)]
        else:
            assert target.shape is not None
            elements = self._elements(gradient, section, start=target.start, size=math.prod(target.shape))
            found = [Section(elements.reshape(target.shape))]
        if target.present:
            number, place = target.present
            found.append(Section(self._elements(gradient, gradient.sections[number], start=place, size=1)))
        return Gradient(tuple(found), gradient.number, gradient.weight, gradient.factor)

    def _rows(self, gradient: BufferedGradient, section: BufferedSection, places: dict[int, int]) -> Section:
        row_shape = section.shape[1:]
        row = math.prod(row_shape)
        dtype = np.dtype(np.float32) if section.dtype == BLOCKS else section.dtype
        values = self._values(gradient, section, [(place * row, row) for place in places.values()])
        rows = np.concatenate([np.empty(0, dtype), *values]).reshape(len(places), *row_shape)
        counts = None
        if gradient.number > 1:
            first = section.counts[0]
            data = b"".join(self._read([(gradient, first + place * 8, 8) for place in places.values()]))
            counts = np.frombuffer(data, section.counts_dtype)
            check_counts(counts, gradient, self._keys.part(gradient.id, 0))
        return Section(rows, np.array(list(places), np.int64), counts)

    def _elements(self, gradient: BufferedGradient, section: BufferedSection, *, start: int, size: int) -> Array:
        """Returns consecutive elements of a dense section."""
        return self._values(gradient, section, [(start, size)])[0]

    def _values(
        self, gradient: BufferedGradient, section: BufferedSection, spans: Sequence[tuple[int, int]]
    ) -> list[Array]:
        """Returns elements of the values of a section, for each span: the place of the first, and their number."""
        item, each = section.dtype.itemsize, per_item(section.dtype)
        # Encoded elements can only be read in whole blocks.
        ranges = [(start // each, -(-(start + size) // each) if size else start // each) for start, size in spans]
        found = self._read([(gradient, section.values[0] + low * item, (high - low) * item) for low, high in ranges])
        elements = []
        for (start, size), (low, _), data in zip(spans, ranges, found, strict=True):
            items = np.frombuffer(data, section.dtype)
            if section.dtype == BLOCKS:
                items = decode(items, len(items) * each, self._keys.part(gradient.id, 0))
            elements.append(items[start - low * each :][:size])
        return elements

    def _read(self, ranges: Sequence[tuple[BufferedGradient, int, int]]) -> list[bytes]:
        """Reads pieces of buffered gradients, each given as (gradient, first byte, length)."""
        commands: list[tuple[str | int, ...]] = []
        owners: list[int] = []
        for number, (gradient, first, length) in enumerate(ranges):
            start = 0
            for part, size in enumerate(gradient.lengths):
                low, high = max(first, start), min(first + length, start + size)
                if low < high:
                    key = self._keys.part(gradient.id, part)
                    commands.append(("GETRANGE", key, low - start, high - start - 1))
                    owners.append(number)
                start += size
        found = [b""] * len(ranges)
        for start in range(0, len(commands), PIPELINED_COMMANDS):
            replies = self._transport.pipeline(commands[start : start + PIPELINED_COMMANDS])
            for number, reply in zip(owners[start : start + PIPELINED_COMMANDS], replies, strict=True):
                found[number] += reply
        for (gradient, _, length), data in zip(ranges, found, strict=True):
            if len(data) != length:
                raise PartMissingError(self._keys.part(gradient.id, 0))
        return found
