"""Reads rows of the current round as a take would return them now, without taking the round."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from redisacc._arrays.dtypes import DType
from redisacc._arrays.gradient import Section
from redisacc._arrays.spec import AccumulatorSpec, Leaf
from redisacc._arrays.sums import DenseSum, RoundSum, SparseSum
from redisacc._arrays.validation import INT64_MAX, Array
from redisacc._format import buffered as buffered_format
from redisacc._format import in_place
from redisacc._format.keys import DELETING, Keys
from redisacc._format.record import Record
from redisacc._protocol.parts.inline import InlineReader
from redisacc._protocol.rounds.current_round import RecordReader, StartedRead, read_round, snapshot
from redisacc._protocol.sums.buffered_sections import whole_gradient
from redisacc._text import EVICTED, shown
from redisacc._wire.scans import scan
from redisacc._wire.transport import Transport
from redisacc.errors import CorruptDataError, InvalidArgumentError, NotFoundError
from redisacc.tools.admin.parts import PIPELINED_COMMANDS, PartReader, Target

# How many paths an error names at most, and how many are compared with the one that was given: 0.4 s.
_NAMED_PATHS, _COMPARED_PATHS = 5, 2000


@dataclass(frozen=True)
class Rows:
    """Rows of the current round, or of a leaf of its trees.

    Attributes:
        indices: int64 ``[n]``, ascending. Indices that no gradient held are left out.
        counts: ``[n]``: how many gradients held each index or, if a weight differs from 1 and means are divided by
            weights, the sum of their weights.
        sums: ``[n, *row]``: the sums of the rows, in the dtype of the elements.
        results: ``[n, *row]``: the sums or means that a take would return now.
        global_step: the step at that moment.
        num_accumulated: the number of gradients at that moment.
        num_present: how many of them have the leaf, or the sum of their weights like ``counts``. Less than all only for
            a tree with ``missing="skip"``.
        total_weight: the sum of the weights of the gradients.
    """

    indices: Array
    counts: Array
    sums: Array
    results: Array
    global_step: int
    num_accumulated: int
    num_present: float
    total_weight: float


def find_leaf(spec: AccumulatorSpec, path: str) -> Leaf:
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
    """Returns the specification of an accumulator. For a tree, this reads the description of every leaf.

    Raises:
        NotFoundError: there is no such accumulator.
        CorruptDataError: redisacc did not write its record.
    """
    return _spec_of(transport, keys, Record(keys, transport.call(*Record.command(keys))))


def _spec_of(transport: Transport, keys: Keys, record: Record) -> AccumulatorSpec:
    return record.spec(transport.call(*Record.tree_command(keys)) if record.kind == "tree" else b"")


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
        NotFoundError: there is no such accumulator.
        InvalidArgumentError: it has no such leaf, or a path is missing or surplus.
    """

    def __init__(self, transport: Transport, keys: Keys, path: str | None = None) -> None:
        record = Record(keys, transport.call(*Record.command(keys)))
        if record.incarnation.startswith(DELETING):
            raise NotFoundError(f"accumulator {shown(keys.name)} is being deleted")
        keys = Keys(keys.name, record.partitions)
        spec = _spec_of(transport, keys, record)
        self.leaf: Leaf | None = None
        if spec.kind == "tree":
            if path is None:
                raise InvalidArgumentError(
                    f"the gradients of {shown(keys.name)} are trees, whose leaves have rows of their own: choose a "
                    f"leaf by its path, such as {shown(spec.structure.paths[0])}"
                )
            self.leaf = find_leaf(spec, path)
            self._target = Target.of_leaf(spec, self.leaf)
        else:
            if path is not None:
                raise InvalidArgumentError(f"the gradients of {shown(keys.name)} are not trees, so they have no leaves")
            self._target = Target(0, spec.sections[0])
        self._spec = spec
        self.is_sparse = self._target.spec.is_sparse
        self.reduction_type = spec.reduction_type
        self._transport = transport
        self._keys = keys
        self._records = RecordReader(transport, keys, record.incarnation)

    def all(self) -> Rows:
        """Returns the whole round. A dense gradient becomes rows along its first dimension, a scalar one row.

        Of a dense leaf, only its own elements are read; otherwise, everything that the round holds.

        Raises:
            WaitTimeoutError: gradients kept arriving for 30 seconds and disturbed every attempt.
        """
        if self.leaf is not None and not self.is_sparse:
            return self._read_snapshot([])

        def reduce(round_sum: RoundSum, divisor: float) -> tuple[Array, Array, Array, Array, float]:
            present = round_sum.sections[self._target.present[0]] if self._target.present else None
            return self._reduce(round_sum.sections[self._target.section], present, divisor)

        found = read_round(self._transport, self._keys, self._spec, self._records, reduce)
        if found.gradient is None:
            return self._empty(found.global_step)
        indices, counts, sums, results, present = found.gradient
        return Rows(
            indices, counts, sums, results, found.global_step, found.num_accumulated, present, found.total_weight
        )

    def some(self, indices: Sequence[int]) -> Rows:
        """Returns rows, if gradients hold rows. Nothing else is read: buffered gradients are searched for the indices.

        Args:
            indices: the indices of the rows, each in [0, 2**63 - 1].

        Raises:
            InvalidArgumentError: an index is out of range.
            WaitTimeoutError: gradients kept arriving for 30 seconds and disturbed every attempt.
        """
        for index in indices:
            if not 0 <= index <= INT64_MAX:
                raise InvalidArgumentError(f"an index must be in [0, {INT64_MAX}], not {index}")
        return self._read_snapshot(sorted(set(indices)))

    def _read_snapshot(self, wanted: list[int]) -> Rows:
        """Reads only rows with these indices; of a dense leaf, only its elements."""

        def begin() -> StartedRead[Rows]:
            record = self._records.read()
            return record, lambda: (self._read_wanted(record, wanted), False)

        return snapshot(self._records, begin, self._keys)

    def _read_wanted(self, record: Record, wanted: list[int]) -> Rows:
        shape, number = record.round_shape, record.num_accumulated
        if number == 0 or shape is None:
            return self._empty(record.global_step)
        transport, keys, target = self._transport, self._keys, self._target
        gradients = buffered_format.parse(keys, scan(transport, keys.current.buffered), self._spec, shape)
        reduced_shape = self._spec.section_shapes(shape)[target.section] if target.shape is None else target.shape
        round_sum = RoundSum(
            [target.spec.empty_sum(reduced_shape, keys.current.sums, self._spec.normalize)], keys.current.sums
        )
        if target.present:
            of_present = self._spec.sections[target.present[0]]
            round_sum.sections.append(of_present.empty_sum((1,), keys.current.sums, self._spec.normalize))
        reader = PartReader(transport, keys, target, wanted)
        places = reader.find([gradient for gradient in gradients if not gradient.inline])
        inline = InlineReader(transport, keys.current, gradients)
        # A take adds them in the same order.
        for gradient in gradients:
            if gradient.inline:
                whole = whole_gradient(gradient, inline.read(gradient), inline.where(gradient))
                round_sum.add(reader.of_whole(whole))
            else:
                round_sum.add(reader.read(gradient, places[gradient.id]))
        if self.is_sparse:
            self._add_rows(round_sum, wanted, number, reduced_shape)
        else:
            self._add_elements(round_sum, number)
        if target.present:
            found = self._elements_in_place(target.present[0], target.present[1], 1)
            if found is not None:
                round_sum.sections[1].add(Section(found[0]))
        present = round_sum.sections[1] if target.present else None
        weight = self._spec.weight_of(round_sum, record.given_weight)
        divisor = self._spec.divisor(number, weight)
        indices, counts, sums, results, holders = self._reduce(round_sum.sections[0], present, divisor)
        total = float(number) if weight is None else weight
        return Rows(indices, counts, sums, results, record.global_step, number, holders, total)

    def _add_rows(self, round_sum: RoundSum, wanted: list[int], number: int, row_shape: tuple[int, ...]) -> None:
        """Adds rows that the server summed in place."""
        target, where = self._target, self._keys.current.sums
        found = self._transport.call("HMGET", where, *[f"{target.prefix}{index}" for index in wanted])
        rows = {str(index).encode(): row for index, row in zip(wanted, found, strict=True) if row is not None}
        if rows:
            by_weights = self._spec.normalize == "weights"
            section, _ = in_place.unpack_rows(rows, number, target.spec, row_shape, where, by_weights=by_weights)
            round_sum.sections[0].add(section)

    def _add_elements(self, round_sum: RoundSum, number: int) -> None:
        """Adds the elements of a dense leaf that the server summed in place."""
        target = self._target
        assert target.shape is not None
        size = math.prod(target.shape)
        found = self._elements_in_place(target.section, target.start, size)
        if found is not None:
            elements, summed = found
            round_sum.sections[0].add(Section(elements.reshape(target.shape)))
            round_sum.number += summed
        if size and round_sum.number != number:
            raise CorruptDataError(
                f"{self._keys.record}: of {number} gradients only {round_sum.number} were found: keys were "
                f"{EVICTED} or removed by hand"
            )

    def _elements_in_place(self, number: int, start: int, size: int) -> tuple[Array, int] | None:
        """Returns elements of a dense section that the server summed in place, and of how many gradients.

        None if there are none.
        """
        where, chunk, spec = self._keys.current.sums, self._spec.chunk, self._spec.sections[number]
        total = math.prod(self._spec.section_shapes(())[number])
        first = start // chunk
        chunks = range(first, -(-(start + size) // chunk))
        fields = [f"{spec.label}:{place}" for place in chunks]
        rows: list[bytes | None] = []
        for at in range(0, len(fields), PIPELINED_COMMANDS):
            rows += self._transport.call("HMGET", where, *fields[at : at + PIPELINED_COMMANDS])
        unpacked = [
            in_place.unpack_chunk(row, spec, min(chunk, total - place * chunk), where)
            for place, row in zip(chunks, rows, strict=True)
            if row is not None
        ]
        if not unpacked:
            return None
        elements = np.concatenate([elements for elements, _ in unpacked])[start - first * chunk :][:size]
        summed = {number for _, number in unpacked}
        if len(summed) != 1 or len(elements) != size:
            raise CorruptDataError(f"{where}: the rows of {spec.label} do not belong together")
        return elements, summed.pop()

    def _empty(self, step: int) -> Rows:
        nothing = np.empty((0, 0), self._target.spec.dtype.storage)
        return Rows(np.empty(0, np.int64), np.empty(0, np.uint64), nothing, nothing, step, 0, 0, 0.0)

    def _reduce(
        self, section: DenseSum | SparseSum, present: DenseSum | SparseSum | None, divisor: float
    ) -> tuple[Array, Array, Array, Array, float]:
        """Returns indices, counts, sums and results, and how many gradients have the leaf, or the sum of their weights.

        Args:
            section: the sum of the section.
            present: the sum of the section that says which leaves gradients have, or of the element of this leaf.
            divisor: the number of gradients, or the sum of their weights.
        """
        target, dtype = self._target, self._target.spec.dtype
        holders = divisor
        if present is not None:
            assert target.present is not None
            every = present.sum().values
            holders = min(type(divisor)(every[target.present[1] if len(every) > 1 else 0]), divisor)
        held = section.sum()
        if isinstance(section, SparseSum):
            assert held.indices is not None
            assert held.counts is not None
            sums = _stored(held.values, dtype)
            indices, results = section.result(self._spec.reduction_type, holders, self._spec.sparse_mean)
            return indices, held.counts, sums, results, holders
        sums = _stored(held.values, dtype)
        results = section.result(self._spec.reduction_type, holders)
        if not section.shape:
            sums, results = sums.reshape(1), results.reshape(1)
        if not holders:
            # A take returns None for such a leaf.
            sums, results = sums[:0], results[:0]
        return np.arange(len(sums)), np.full(len(sums), holders), sums, results, holders


def _stored(sums: Array, dtype: DType) -> Array:
    with np.errstate(all="ignore"):
        return sums.astype(dtype.storage)
