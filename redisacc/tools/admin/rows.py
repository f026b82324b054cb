"""Reads rows of the current round as a take would return them now, without taking the round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from redisacc._arrays.spec import AccumulatorSpec, Leaf
from redisacc._arrays.sums import RoundSum, SparseSum
from redisacc._arrays.validation import Array
from redisacc._format.keys import DELETING, Keys
from redisacc._format.record import Record
from redisacc._protocol.rounds.current_round import RecordReader, read_round
from redisacc._text import listed, shown
from redisacc._wire.transport import Transport
from redisacc.errors import InvalidArgumentError, NotFoundError

# How many paths an error names at most.
_NAMED_PATHS = 5


@dataclass(frozen=True)
class Rows:
    """Rows of the current round, or of a leaf of its trees.

    Attributes:
        has_means: whether a take returns means.
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

    has_means: bool
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
        InvalidArgumentError: there is none. The message names some of all.
    """
    number = spec.structure.numbers.get(path)
    if number is not None:
        return spec.leaves[number]
    named = listed(spec.structure.paths, _NAMED_PATHS, shown)
    raise InvalidArgumentError(f"the tree has no leaf with the path {shown(path)}; there are {named}")


def read_spec(transport: Transport, keys: Keys) -> AccumulatorSpec:
    """Returns the specification of an accumulator. For a tree, this reads the description of every leaf.

    Raises:
        NotFoundError: there is no such accumulator.
        CorruptDataError: redisacc did not write its record.
    """
    return _spec_of(transport, keys, Record(keys, transport.call(*Record.command(keys))))


def _spec_of(transport: Transport, keys: Keys, record: Record) -> AccumulatorSpec:
    return record.spec(transport.call(*Record.tree_command(keys)) if record.kind == "tree" else b"")


def read_rows(transport: Transport, keys: Keys, path: str | None = None) -> Rows:
    """Returns the rows of the current round. A dense gradient becomes rows along its first dimension, a scalar one row.

    Everything that the round holds is read, as ``peek()`` does.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        path: the path of a leaf, if its gradients are trees; None for another accumulator.

    Raises:
        NotFoundError: there is no such accumulator.
        InvalidArgumentError: it has no such leaf, or a path is missing or surplus.
        WaitTimeoutError: gradients kept arriving for 30 seconds and interrupted every attempt.
    """
    record = Record(keys, transport.call(*Record.command(keys)))
    if record.incarnation.startswith(DELETING):
        raise NotFoundError(f"accumulator {shown(keys.name)} is being deleted")
    keys = Keys(keys.name, record.partitions)
    spec = _spec_of(transport, keys, record)
    if spec.kind == "tree" and path is None:
        raise InvalidArgumentError(
            f"the gradients of {shown(keys.name)} are trees, whose leaves have rows of their own: choose a "
            f"leaf by its path, such as {shown(spec.structure.paths[0])}"
        )
    if spec.kind != "tree" and path is not None:
        raise InvalidArgumentError(f"the gradients of {shown(keys.name)} are not trees, so they have no leaves")
    leaf = spec.leaves[0] if path is None else find_leaf(spec, path)

    def reduce(round_sum: RoundSum, divisor: float) -> tuple[Array, Array, Array, Array, float]:
        section, holders = round_sum.sections[leaf.section], divisor
        if spec.missing == "skip":
            holders = type(divisor)(spec.present(round_sum, divisor)[spec.structure.numbers[leaf.path]])
        held = section.sum()
        with np.errstate(all="ignore"):
            # A copy, because the memory of the sum becomes that of the results.
            sums = held.values.astype(leaf.dtype.storage)
        if isinstance(section, SparseSum):
            assert held.counts is not None
            indices, results = section.result(spec.reduction_type, holders, spec.sparse_mean)
            return indices, held.counts, sums, results, holders
        results = section.result(spec.reduction_type, holders)
        if path is not None:
            sums, results = (
                values[leaf.start : leaf.start + leaf.size].reshape(leaf.known_shape) for values in (sums, results)
            )
        # A take returns None for a leaf that no gradient has.
        number = len(np.atleast_1d(sums)) if holders else 0
        sums, results = (np.atleast_1d(values)[:number] for values in (sums, results))
        return np.arange(number), np.full(number, holders), sums, results, holders

    found = read_round(RecordReader(transport, keys, record.incarnation), spec, reduce)
    nothing = np.empty((0, 0), leaf.dtype.storage)
    nobody = np.empty(0, np.int64), np.empty(0, np.uint64), nothing, nothing, 0
    indices, counts, sums, results, present = found.gradient or nobody
    return Rows(
        spec.reduction_type == "MEAN",
        indices,
        counts,
        sums,
        results,
        found.global_step,
        found.num_accumulated,
        present,
        found.total_weight,
    )
