"""What an update has to know of a run, and how it computes a part."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np

from redisacc._arrays.validation import Array
from redisacc._format.buffered import INLINE_BYTES, PART_MS, part_size
from redisacc._format.keys import ParameterKeys
from redisacc._format.leaves import Flat, Schema, arrays_in, ranges_text
from redisacc._format.parameter_record import Blob, flat_cut, flat_lengths
from redisacc._format.part_cut import Cut, Piece, Run
from redisacc._format.update_order import Order
from redisacc._wire.sockets import Command
from redisacc.errors import InvalidArgumentError
from redisacc.optim import Optimizer
from redisacc.optim.algorithms import MeanGradient
from redisacc.optim.kernel import sum_of_squares, update_part

# The sort of the blob that workers read, and of the one with the weights themselves if those in the first are rounded.
FLAT, EXACT = "flat", "exact"


def added_in_order(numbers: Iterable[float]) -> float:
    """Returns a sum that is the same in all versions of Python. From 3.12 on, the built-in one compensates rounding."""
    return reduce(operator.add, numbers, 0.0)


class _Segment(NamedTuple):
    """Consecutive elements of a part whose leaves are in one group of the optimizer.

    Attributes:
        run: the number of the run of the part.
        first: the place of the first element in the run.
        size: how many elements.
        start: their first byte in the part, in float32 or float64.
        group: the number of the group.
    """

    run: int
    first: int
    size: int
    start: int
    group: int


# The bytes of a part of each blob, by the sort of the blob.
PartValues = Mapping[str, Array]


def store_commands(keys: ParameterKeys, version: str, number: int, values: PartValues) -> list[Command]:
    """Returns the commands that store a part of a version.

    NX: it may be there, also in use, if it was computed twice or a copy of this arrives late. It must not expire then.
    """
    return [
        ("SET", keys.part(f"{version}-{sort}", number), data.data, "NX", "PX", PART_MS) for sort, data in values.items()
    ]


def check_leaves(schema: Schema, optimizer: Optimizer) -> None:
    """Checks that an optimizer can update these leaves.

    Raises:
        InvalidArgumentError: it cannot update one of them, or has a pattern of paths that matches none.
    """
    for path, leaf in zip(schema.structure.paths, schema.leaves, strict=True):
        if leaf.dtype not in ("float32", "float64"):
            raise InvalidArgumentError(
                f"an optimizer updates leaves of float32 and float64, not {leaf.dtype} at {path!r}. Keep such a "
                "leaf out of the parameters, or update the parameters yourself in a loop over rounds()"
            )
    optimizer.groups(schema.structure.paths)


@dataclass(frozen=True)
class UpdateModel:
    """The leaves of a run, how they are cut, and the optimizer.

    Attributes:
        schema: the leaves: float32 or float64.
        optimizer: the optimizer.
        keys: the keys of the parameters, with their partitions.
        encoding: how the leaves of float32 travel to workers, "float32" or "bfloat16".
        part_bytes: the bytes of float32 in each part but the last.
        tables: the numbers of the leaves whose gradients are rows, ascending. They are in no part: see ``tables.py``.
    """

    schema: Schema
    optimizer: Optimizer
    keys: ParameterKeys
    encoding: str
    part_bytes: int
    tables: tuple[int, ...] = ()

    @classmethod
    def new(
        cls,
        schema: Schema,
        optimizer: Optimizer,
        keys: ParameterKeys,
        encoding: str,
        tables: tuple[int, ...] = (),
    ) -> UpdateModel:
        """Returns the model of a run whose parts are cut as its gradients are.

        Raises:
            InvalidArgumentError: the optimizer cannot update a leaf, or has a pattern of paths that matches no leaf.
        """
        check_leaves(schema, optimizer)
        # Smaller gradients are not cut.
        partitions = len(keys.partitions) or 1
        nbytes = schema.nbytes - sum([schema.leaves[leaf].nbytes for leaf in tables])
        size = part_size(nbytes, partitions if nbytes > INLINE_BYTES else 1)
        return cls(schema, optimizer, keys, encoding, size, tables)

    @cached_property
    def config(self) -> str:
        """The optimizer's name and options, as the record holds them."""
        return json.dumps(self.optimizer.to_config(), separators=(",", ":"))

    @property
    def is_mean(self) -> bool:
        """Whether each version is the mean gradient of its step, so that it follows from no other one."""
        return isinstance(self.optimizer, MeanGradient)

    @cached_property
    def optimizer_digest(self) -> str:
        """A digest of the optimizer's name and options."""
        return hashlib.blake2b(self.config.encode(), digest_size=16).hexdigest()

    @cached_property
    def dense(self) -> str:
        """The leaves whose gradients are dense, as ``ranges_text`` writes them."""
        return ranges_text([leaf for leaf in range(len(self.schema.leaves)) if leaf not in self.tables])

    @cached_property
    def flat(self) -> Flat:
        """These leaves, as a blob of weights or of a slot has them."""
        return self.schema.flat(self.dense)

    @cached_property
    def sent_flat(self) -> Flat:
        """These leaves, as the blob that workers read has them."""
        return self.schema.stored(self.encoding).flat(self.dense)

    @cached_property
    def sections(self) -> tuple[tuple[int, ...], dict[int, int]]:
        """The number of each section of ``flat`` in a gradient, and those of the tables."""
        dense: dict[np.dtype[Any], int] = {}
        tables: dict[int, int] = {}
        for number, leaf in enumerate(self.schema.leaves):
            if number in self.tables:
                tables[number] = len(dense) + len(tables)
            elif leaf.stored not in dense:
                dense[leaf.stored] = len(dense) + len(tables)
        return tuple(dense.values()), tables

    @cached_property
    def parts(self) -> tuple[tuple[Run, ...], ...]:
        """The runs of elements in each part: a single part without any if there are no elements."""
        return flat_cut(self.flat, self.part_bytes, self._partitions).parts or ((),)

    @property
    def form(self) -> tuple[object, ...]:
        """Versions of two models have the same form if this is equal."""
        return self.schema.text, self.encoding, self.part_bytes, self.keys.partitions, self.tables

    @property
    def _partitions(self) -> int:
        return len(self.keys.partitions)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The bytes of each part of the weights themselves, and of each slot."""
        return flat_lengths(self.flat, self.part_bytes, self._partitions)

    @cached_property
    def sent_lengths(self) -> tuple[int, ...]:
        """The bytes of each part of the blob that workers read."""
        return flat_lengths(self.sent_flat, self.part_bytes, self._partitions)

    @property
    def is_rounded(self) -> bool:
        """Whether workers read rounded weights."""
        return self.encoding != "float32" and any(leaf.dtype == "float32" for leaf in self.schema.leaves)

    @cached_property
    def sorts(self) -> dict[str, tuple[int, ...]]:
        """The sorts of blobs that a version has → the bytes of each part. The one that workers read comes first."""
        kept = (EXACT, *self.optimizer.slots) if self.is_rounded else self.optimizer.slots
        return {FLAT: self.sent_lengths, **dict.fromkeys(kept, self.lengths)}

    def blobs(self, version: str) -> list[Blob]:
        """Returns the blobs of these leaves that a version with this id brings. The one that workers read comes first.

        They are cut by elements.
        """
        return [Blob(f"{version}-{sort}", sum(lengths), lengths, len(lengths)) for sort, lengths in self.sorts.items()]

    def keys_of(self, version: str, number: int, sorts: Iterable[str]) -> list[tuple[str, int]]:
        """Returns the key of a part of a version for each sort of blob, and how many bytes it has."""
        return [(self.keys.part(f"{version}-{sort}", number), self.sorts[sort][number]) for sort in sorts]

    @property
    def full_sorts(self) -> tuple[str, ...]:
        """The sorts of blobs that hold float32 or float64 as they are, the weights first."""
        return (self.base, *self.optimizer.slots)

    @property
    def num_kept(self) -> int:
        """How many arrays workers do not read: the slots, and the weights themselves if theirs are rounded."""
        return len(self.sorts) - 1

    @property
    def base(self) -> str:
        """The sort of the blob that has the weights themselves."""
        return EXACT if self.is_rounded else FLAT

    @cached_property
    def _spans(self) -> tuple[tuple[Run, ...], ...]:
        """The runs of elements in each part, with the numbers of sections in a gradient."""
        dense, _ = self.sections
        return tuple([tuple([run._replace(section=dense[run.section]) for run in runs]) for runs in self.parts])

    def fits(self, number: int, pieces: Sequence[Piece]) -> bool:
        """Returns whether a part of a gradient has the elements of the part with this number."""
        return number < len(self.parts) and tuple([piece.span for piece in pieces]) == self._spans[number]

    def fits_all(self, cut: tuple[int, Cut] | None) -> bool:
        """Returns whether the dense parts of a gradient have the elements of the parts of the model.

        They are in the same partitions as well, and nothing is in them besides.
        """
        if cut is None or cut[0] % (self._partitions or 1) or len(cut[1]) != len(self.parts):
            return False
        return all(map(self.fits, range(len(self.parts)), cut[1]))

    @cached_property
    def _segments(self) -> tuple[tuple[_Segment, ...], ...]:
        groups, _ = self.optimizer.groups(self.schema.structure.paths)
        flat, begins = self.flat, 0
        every = [(self.schema.leaves[leaf], groups[leaf]) for leaf in flat.layout.leaves]
        found = []
        for runs, length in zip(self.parts, self.lengths, strict=False):
            segments: list[_Segment] = []
            for run, (section, first, size) in enumerate(runs):
                itemsize = flat.sections[section].dtype.itemsize
                start = flat.offsets[section] + first * itemsize - begins
                for (of, low), (leaf, group) in zip(flat.places, every, strict=True):
                    high = low + leaf.nbytes // itemsize
                    begin, end = max(first, low), min(first + size, high)
                    if of != section or begin >= end:
                        continue
                    last = segments[-1] if segments else None
                    if last and last.run == run and last.group == group:
                        segments[-1] = last._replace(size=last.size + end - begin)
                    else:
                        at = begin - first
                        segments.append(_Segment(run, at, end - begin, start + at * itemsize, group))
            found.append(tuple(segments))
            begins += length
        return tuple(found)

    def updated(self, number: int, values: PartValues, gradient: Sequence[Array], order: Order) -> dict[str, Array]:
        """Returns a part of the version that an order makes.

        Args:
            number: the number of the part.
            values: that part of the version before, of each blob but a rounded one.
            gradient: the sum of the gradients, for each run of the part.
            order: the order.

        Returns:
            The bytes of the part for each sort of blob.
        """
        slots = self.optimizer.slots
        # Bytes between sections are 0. Most parts have none, and memory that is cleared first costs twice as much.
        is_full = order.divisor and sum([elements.nbytes for elements in gradient]) == self.lengths[number]
        make = np.empty if is_full else np.zeros
        found = {sort: make(self.lengths[number], np.uint8) for sort in (self.base, *slots)}
        if not (order.divisor or self.is_mean):
            found = {sort: values[sort].copy() for sort in found}
        for segment in self._segments[number] if order.divisor else ():
            elements = gradient[segment.run][segment.first : segment.first + segment.size]
            span = slice(segment.start, segment.start + elements.nbytes)
            update_part(
                self.optimizer,
                values[self.base][span].view(elements.dtype),
                elements,
                [values[slot][span].view(elements.dtype) for slot in slots],
                scalars=order.scalars[segment.group],
                divisor=order.divisor,
                clip=order.clip,
                out_weights=found[self.base][span].view(elements.dtype),
                out_state=[found[slot][span].view(elements.dtype) for slot in slots],
            )
        if self.is_rounded:
            found[FLAT] = self.rounded(number, found[EXACT])
        return found

    def rounded(self, number: int, exact: Array) -> Array:
        """Returns a part of the blob that workers read, given that part of the weights themselves."""
        wide, narrow = self.flat, self.sent_flat
        sent = np.zeros(self.sent_lengths[number], np.uint8)
        begins, to = sum(self.lengths[:number]), sum(self.sent_lengths[:number])
        for section, first, size in self.parts[number]:
            dtype, stored = wide.sections[section].dtype, narrow.sections[section].dtype
            start = wide.offsets[section] + first * dtype.itemsize - begins
            at = narrow.offsets[section] + first * stored.itemsize - to
            elements = exact[start : start + size * dtype.itemsize].view(dtype)
            # Elements are rounded, maybe to infinity.
            with np.errstate(all="ignore"):
                sent[at : at + size * stored.itemsize] = elements.astype(stored).view(np.uint8)
        return sent

    def squares(self, gradient: Sequence[Array], divisor: float) -> float:
        """Returns the sum of the squares of a part of the mean."""
        return added_in_order([sum_of_squares(elements, divisor) for elements in gradient])

    def unflatten(self, parts: Sequence[Array]) -> dict[int, Array]:
        """Returns the dense leaves, by their numbers, given all parts of a blob in float32 or float64."""
        return arrays_in(self.schema, self.flat.layout, np.concatenate(parts))
