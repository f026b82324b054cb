"""Reads rows of the current round as a take would return them now, without taking the round."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from redisacc._data.dtypes import DType
from redisacc._data.gradient import Gradient, Section
from redisacc._data.reducers import DenseReducer, RoundReducer, SparseReducer
from redisacc._data.spec import AccumulatorSpec, SectionSpec
from redisacc._data.tree_spec import Leaf, TreeSpec
from redisacc._data.validation import INT64_MAX, Array
from redisacc._format import buffered as buffered_format
from redisacc._format import in_place
from redisacc._format.buffered import BufferedGradient, PartMissingError
from redisacc._format.keys import DELETING, Keys
from redisacc._format.record import Record
from redisacc._protocol.buffer_reader import add_buffered
from redisacc._protocol.record_reader import RecordReader
from redisacc._protocol.snapshot import StartedRead, read_round, snapshot
from redisacc._redis.hash_scan import scan
from redisacc._redis.transport import Transport
from redisacc._text import shown
from redisacc.errors import AccumulatorNotFoundError, CorruptDataError, InvalidArgumentError

# The number of commands in one pipeline.
PIPELINED_COMMANDS = 500

# How many paths an error names at most, and how many are compared with the one that was given: 0.4 s.
_NAMED_PATHS, _COMPARED_PATHS = 5, 2000


@dataclass(frozen=True)
class Rows:
    """Rows of the current round, or of a leaf of its trees.

    Attributes:
        indices: int64 ``[n]``, ascending. Indices that no gradient held are left out.
        counts: uint64 ``[n]``: how many gradients held each index.
        sums: ``[n, *row]``: the sums of the rows, in the dtype of the elements.
        results: ``[n, *row]``: the sums or means that a take would return now.
        global_step: the step at the same moment.
        num_accumulated: the number of gradients at the same moment.
        num_present: how many of them have the leaf. Less than all only for a tree with ``missing="skip"``.
    """

    indices: Array
    counts: Array
    sums: Array
    results: Array
    global_step: int
    num_accumulated: int
    num_present: int


def find_leaf(spec: TreeSpec, path: str) -> Leaf:
    """Returns the leaf of a path.

    Raises:
        InvalidArgumentError: there is none. The message names similar paths, or some of all.
    """
    number = spec.structure.numbers.get(path)
    if number is not None:
        return spec.leaves[number]
    paths = spec.structure.paths
    below = [other for other in paths if other.startswith(f"{path}/")]
    similar = below or difflib.get_close_matches(path, paths[:_COMPARED_PATHS], _NAMED_PATHS) or paths
    named = ", ".join(map(shown, similar[:_NAMED_PATHS]))
    more = f" and {len(similar) - _NAMED_PATHS} more" if len(similar) > _NAMED_PATHS else ""
    which = "below it are" if below else "there are" if similar is paths else "similar paths are"
    raise InvalidArgumentError(f"the tree has no leaf with the path {shown(path)}; {which} {named}{more}")


def read_spec(transport: Transport, keys: Keys) -> AccumulatorSpec:
    """Returns what an accumulator was created as. For a tree, this reads the description of every leaf.

    Raises:
        AccumulatorNotFoundError: there is no such accumulator.
        CorruptDataError: redisacc did not write its record.
    """
    return _spec_of(transport, keys, Record(keys, transport.call(*Record.command(keys))))


def _spec_of(transport: Transport, keys: Keys, record: Record) -> AccumulatorSpec:
    return record.spec(transport.call(*Record.tree_command(keys)) if record.kind == "tree" else b"")


@dataclass(frozen=True)
class _Target:
    """What is read of each gradient: a section, or the elements of a dense leaf in it.

    Attributes:
        section: the number of the section.
        spec: what the section is.
        start: the place of the first element in a dense section.
        shape: the shape of a dense leaf; None for the shape of the round, or for rows.
        present: the number of the section that says which leaves a gradient has, and the place of this leaf in it.
            None if every gradient counts as having it.
    """

    section: int
    spec: SectionSpec
    start: int = 0
    shape: tuple[int, ...] | None = None
    present: tuple[int, int] | None = None

    @classmethod
    def of_leaf(cls, spec: TreeSpec, leaf: Leaf) -> _Target:
        shape = None if leaf.is_sparse else tuple(dim or 0 for dim in leaf.shape)
        present = (len(spec.sections) - 1, spec.structure.numbers[leaf.path]) if spec.missing == "skip" else None
        return cls(leaf.section, spec.sections[leaf.section], leaf.start, shape, present)

    @property
    def prefix(self) -> str:
        """What the fields of its section in the ``sums`` hash begin with."""
        return f"{self.spec.label}:" if self.spec.label else ""


class CurrentRows:
    """The rows of the current round of one accumulator. Reading them does not take the round.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        path: the path of a leaf, if its gradients are trees; None for another accumulator.

    Attributes:
        leaf: the leaf, if a path was given.
        is_sparse: whether gradients hold rows.
        reduction_type: "MEAN" or "SUM".

    Raises:
        AccumulatorNotFoundError: there is no such accumulator.
        InvalidArgumentError: it has no such leaf, or a path is missing or surplus.
    """

    def __init__(self, transport: Transport, keys: Keys, path: str | None = None) -> None:
        record = Record(keys, transport.call(*Record.command(keys)))
        if record.incarnation.startswith(DELETING):
            raise AccumulatorNotFoundError(f"accumulator {shown(keys.name)} is being deleted")
        spec = _spec_of(transport, keys, record)
        self.leaf: Leaf | None = None
        if isinstance(spec, TreeSpec):
            if path is None:
                raise InvalidArgumentError(
                    f"the gradients of {shown(keys.name)} are trees, whose leaves have rows of their own: choose a "
                    f"leaf by its path, such as {shown(spec.structure.paths[0])}"
                )
            self.leaf = find_leaf(spec, path)
            self._target = _Target.of_leaf(spec, self.leaf)
        else:
            if path is not None:
                raise InvalidArgumentError(f"the gradients of {shown(keys.name)} are no trees, so they have no leaves")
            self._target = _Target(0, spec.sections[0])
        self._spec = spec
        self.is_sparse = self._target.spec.is_sparse
        self.reduction_type = spec.reduction_type
        self._transport = transport
        self._keys = keys
        self._records = RecordReader(transport, keys, record.incarnation)

    def all(self) -> Rows:
        """Returns the whole round. A dense gradient becomes rows along its first dimension, a scalar one row.

        Raises:
            PeekTimeoutError: gradients kept arriving for 30 seconds and disturbed every attempt.
        """

        def reduce(reducer: RoundReducer, number: int) -> tuple[Array, Array, Array, Array, int]:
            present = reducer.sections[self._target.present[0]] if self._target.present else None
            return self._reduce(reducer.sections[self._target.section], present, number)

        found = read_round(self._transport, self._keys, self._spec, self._records, reduce)
        if found.gradient is None:
            return self._empty(found.global_step)
        indices, counts, sums, results, present = found.gradient
        return Rows(indices, counts, sums, results, found.global_step, found.num_accumulated, present)

    def some(self, indices: Sequence[int]) -> Rows:
        """Returns rows, if gradients hold rows. Nothing else is read: buffered gradients are searched for the indices.

        Args:
            indices: the indices of the rows, each in [0, 2**63 - 1].

        Raises:
            InvalidArgumentError: an index is out of range.
            PeekTimeoutError: gradients kept arriving for 30 seconds and disturbed every attempt.
        """
        for index in indices:
            if not 0 <= index <= INT64_MAX:
                raise InvalidArgumentError(f"an index must be in [0, {INT64_MAX}], not {index}")
        wanted = sorted(set(indices))

        def begin() -> StartedRead[Rows]:
            record = self._records.read()
            return StartedRead(record, lambda: (self._some(record, wanted), False))

        return snapshot(self._records, begin, self._keys.name)

    def _some(self, record: Record, wanted: list[int]) -> Rows:
        shape, number = record.round_shape, record.num_accumulated
        if number == 0 or shape is None:
            return self._empty(record.global_step)
        transport, keys, target = self._transport, self._keys, self._target
        gradients = buffered_format.parse(keys, scan(transport, keys.current.buffered), self._spec, shape)
        row_shape = self._spec.section_shapes(shape)[target.section]
        reducer = RoundReducer([target.spec.reducer(row_shape, keys.current.sums)], keys.current.sums)
        if target.present:
            reducer.sections.append(DenseReducer(self._spec.sections[target.present[0]].dtype, (1,)))
        large = [gradient for gradient in gradients if not gradient.inline]
        places = dict(zip((g.id for g in large), _find(transport, keys, large, target, wanted), strict=True))
        # A take adds them in order of arrival.
        for inline, group in itertools.groupby(gradients, lambda gradient: gradient.inline):
            if inline:
                add_buffered(transport, keys, keys.current, list(group), sink=_Filter(reducer, target, wanted))
            else:
                for gradient in group:
                    reducer.add(_read_rows(transport, keys, gradient, target, places[gradient.id]))
        self._add_sums(reducer, wanted, number, row_shape)
        present = reducer.sections[1] if target.present else None
        indices, counts, sums, results, holders = self._reduce(reducer.sections[0], present, number)
        return Rows(indices, counts, sums, results, record.global_step, number, holders)

    def _add_sums(self, reducer: RoundReducer, wanted: list[int], number: int, row_shape: tuple[int, ...]) -> None:
        """Adds rows that the server summed in place."""
        target, where = self._target, self._keys.current.sums
        found = self._transport.call("HMGET", where, *[f"{target.prefix}{index}" for index in wanted])
        rows = {str(index).encode(): row for index, row in zip(wanted, found, strict=True) if row is not None}
        if rows:
            section, _ = in_place.unpack_rows(rows, number, target.spec, row_shape, where)
            reducer.sections[0].add(section)
        if target.present:
            of = self._spec.sections[target.present[0]]
            chunk, place = divmod(target.present[1], self._spec.chunk)
            row = self._transport.call("HGET", where, f"{of.label}:{chunk}")
            if row is not None:
                reducer.sections[1].add(Section(in_place.unpack_chunk(row, of, where)[place : place + 1]))

    def _empty(self, step: int) -> Rows:
        nothing = np.empty((0, 0), self._target.spec.dtype.storage)
        return Rows(np.empty(0, np.int64), np.empty(0, np.uint64), nothing, nothing, step, 0, 0)

    def _reduce(
        self, section: DenseReducer | SparseReducer, present: DenseReducer | SparseReducer | None, number: int
    ) -> tuple[Array, Array, Array, Array, int]:
        """Returns indices, counts, sums and results, and how many gradients have the leaf.

        Args:
            section: the sum of the section.
            present: the sum of the section that says which leaves gradients have, or of the element of this leaf.
            number: the number of gradients.
        """
        target, dtype = self._target, self._target.spec.dtype
        holders = number
        if present is not None:
            assert target.present is not None
            every = present.sum().values
            holders = min(int(every[target.present[1] if len(every) > 1 else 0]), number)
        held = section.sum()
        if isinstance(section, SparseReducer):
            assert held.indices is not None
            assert held.counts is not None
            sums = _stored(held.values, dtype)
            indices, results = section.result(self._spec.reduction_type, holders, self._spec.sparse_mean)
            return indices, held.counts, sums, results, holders
        shape = held.values.shape if target.shape is None else target.shape
        size = int(np.prod(shape, dtype=np.int64))
        elements = held.values.reshape(-1)[target.start : target.start + size].reshape(shape)
        sums = _stored(elements, dtype)
        reducer = DenseReducer(dtype, shape)
        reducer.add(Section(elements))
        results = reducer.result(self._spec.reduction_type, holders)
        if not shape:
            sums, results = sums.reshape(1), results.reshape(1)
        if not holders:
            # A take returns None for such a leaf.
            sums, results = sums[:0], results[:0]
        return np.arange(len(sums)), np.full(len(sums), holders, np.uint64), sums, results, holders


def _stored(sums: Array, dtype: DType) -> Array:
    with np.errstate(all="ignore"):
        return sums.astype(dtype.storage)


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


def _find(
    transport: Transport, keys: Keys, buffered: list[BufferedGradient], target: _Target, wanted: list[int]
) -> list[dict[int, int]]:
    """Returns wanted index → its place, for each gradient. All searches advance together, one step in a round trip."""
    searches = [
        _Search(gradient, index, 0, gradient.sections[target.section].shape[0] - 1)
        for gradient in buffered
        for index in wanted
    ]
    while going := [search for search in searches if not search.done]:
        for start in range(0, len(going), PIPELINED_COMMANDS):
            batch = going[start : start + PIPELINED_COMMANDS]
            firsts = [search.gradient.sections[target.section].indices[0] for search in batch]
            ranges = [
                (search.gradient, first + search.middle * 8, 8) for search, first in zip(batch, firsts, strict=True)
            ]
            for search, data in zip(batch, _read(transport, keys, ranges), strict=True):
                search.compare(int.from_bytes(data, "little", signed=True))
    found: list[dict[int, int]] = [{} for _ in buffered]
    for number, search in enumerate(searches):
        if search.found is not None:
            found[number // len(wanted)][search.index] = search.found
    return found


class _Filter:
    """Passes only the wanted rows of gradients on to a reducer."""

    def __init__(self, reducer: RoundReducer, target: _Target, wanted: list[int]) -> None:
        self._reducer = reducer
        self._target = target
        self._wanted = np.array(wanted, np.int64)

    def add(self, gradient: Gradient) -> None:
        section = gradient.sections[self._target.section]
        assert section.indices is not None
        places = np.flatnonzero(np.isin(section.indices, self._wanted))
        counts = None if section.counts is None else section.counts[places]
        found = [Section(section.values[places], section.indices[places], counts)]
        if self._target.present:
            number, place = self._target.present
            found.append(Section(gradient.sections[number].values[place : place + 1]))
        self._reducer.add(Gradient(tuple(found), gradient.number))


def _read_rows(
    transport: Transport, keys: Keys, gradient: BufferedGradient, target: _Target, places: dict[int, int]
) -> Gradient:
    section = gradient.sections[target.section]
    row_shape = section.shape[1:]
    row = section.dtype.itemsize * int(np.prod(row_shape, dtype=np.int64))
    first = section.values[0]
    values = b"".join(_read(transport, keys, [(gradient, first + place * row, row) for place in places.values()]))
    counts = None
    if gradient.number > 1:
        first = section.counts[0]
        data = b"".join(_read(transport, keys, [(gradient, first + place * 8, 8) for place in places.values()]))
        counts = np.frombuffer(data, "<u8")
        if not ((counts >= 1) & (counts <= gradient.number)).all():
            raise CorruptDataError(f"{keys.part(gradient.id, 0)}: counts of a sum of {gradient.number} gradients")
    rows = np.frombuffer(bytearray(values), section.dtype).reshape(len(places), *row_shape)
    found = [Section(rows, np.array(list(places), np.int64), counts)]
    if target.present:
        number, place = target.present
        of = gradient.sections[number]
        size = of.dtype.itemsize
        (data,) = _read(transport, keys, [(gradient, of.values[0] + place * size, size)])
        found.append(Section(np.frombuffer(data, of.dtype)))
    return Gradient(tuple(found), gradient.number)


def _read(transport: Transport, keys: Keys, ranges: Sequence[tuple[BufferedGradient, int, int]]) -> list[bytes]:
    """Reads pieces of buffered gradients, each given as (gradient, first byte, length)."""
    commands: list[tuple[str | int, ...]] = []
    owners: list[int] = []
    for number, (gradient, first, length) in enumerate(ranges):
        start = 0
        for part, size in enumerate(gradient.lengths):
            low, high = max(first, start), min(first + length, start + size)
            if low < high:
                commands.append(("GETRANGE", keys.part(gradient.id, part), low - start, high - start - 1))
                owners.append(number)
            start += size
    pieces = [b""] * len(ranges)
    for start in range(0, len(commands), PIPELINED_COMMANDS):
        replies = transport.pipeline(commands[start : start + PIPELINED_COMMANDS])
        for number, reply in zip(owners[start : start + PIPELINED_COMMANDS], replies, strict=True):
            pieces[number] += reply
    for (gradient, _, length), piece in zip(ranges, pieces, strict=True):
        if len(piece) != length:
            raise PartMissingError(keys.part(gradient.id, 0))
    return pieces
