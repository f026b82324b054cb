"""What an accumulator was created as, and how its rounds are reduced."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from redisacc._data.dtypes import DType
from redisacc._data.slices import IndexedSlices
from redisacc._data.sums import DenseSum, RoundSum, SparseSum
from redisacc._data.validation import Shape, shape_text
from redisacc.errors import CorruptDataError

Kind = Literal["dense", "sparse", "tree"]

# What the sum of a row is divided by for "MEAN": the number of gradients that held its index, or of all in the round.
SparseMean = Literal["index", "round"]

# What the mean of a leaf divides by if some gradients lack it: the number of all gradients, or of those that have it.
Missing = Literal["zero", "skip"]

# What a mean divides by: the sum of the weights of gradients, or their number.
Normalize = Literal["weights", "count"]

# The order in which the gradients of a round are added: that in which they arrive, or that of their workers' numbers.
Order = Literal["arrival", "worker"]

# The number of elements in a row of a dense section that is summed in place. A row costs Redis 2 to 3 microseconds, so
# it is long enough for the additions to outweigh that, and short enough to be read with HGET.
CHUNK = 256


# The number of dimensions that every version of numpy can count: 32 before version 2, and 64 since then.
LEAST_MOST_DIMENSIONS = 32

# The label of the section that says which leaves of a tree a gradient has: what the means of leaves are divided by.
PRESENT = "present"


# Compared by identity, because specifications are keys of caches on the way of every gradient.
@dataclass(frozen=True, eq=False)
class SectionSpec:
    """What a section of every gradient is.

    Attributes:
        label: begins the fields of the section in the ``sums`` hash; empty for the only section of an accumulator.
        dtype: the element type.
        is_sparse: whether the section consists of rows and their indices.
        bound: dimension 0 of the array whose rows a sparse section holds: all indices are below it. None if it is
            unknown.
    """

    label: str
    dtype: DType
    is_sparse: bool
    bound: int | None = None

    def empty_sum(self, shape: tuple[int, ...], where: str, normalize: Normalize = "weights") -> DenseSum | SparseSum:
        """Returns an empty sum for this section of the gradients of one round.

        Args:
            shape: the shape of the section, or of each row of a sparse one.
            where: the source of the gradients, for errors.
            normalize: what means are divided by.
        """
        by_weights = normalize == "weights"
        if self.is_sparse:
            if len(shape) >= LEAST_MOST_DIMENSIONS:
                _check_rows(shape, where)
            return SparseSum(self.dtype, shape, bound=self.bound, where=where, counts_weights=by_weights)
        return DenseSum(self.dtype, shape, has_weights=by_weights or self.label != PRESENT)


@dataclass(frozen=True, eq=False)
class AccumulatorSpec(ABC):
    """Everything about an accumulator that never changes.

    Attributes:
        reduction_type: "MEAN" or "SUM".
        sparse_mean: what the sum of a row is divided by: the number of gradients that held its "index", or of all
            gradients of the "round". Without meaning for a dense accumulator.
        normalize: what means are divided by: the sum of the "weights" of gradients, or their "count".
        order: the order in which the gradients of a round are added: of their "arrival", or of the numbers of their
            "worker".
        chunk: the number of elements of a dense section that one field of the ``sums`` hash holds.
    """

    reduction_type: str
    sparse_mean: SparseMean
    chunk: int
    normalize: Normalize = field(default="weights", kw_only=True)
    order: Order = field(default="arrival", kw_only=True)

    @property
    @abstractmethod
    def kind(self) -> Kind:
        """Which class of accumulator it is."""

    @property
    @abstractmethod
    def sections(self) -> tuple[SectionSpec, ...]:
        """The sections of every gradient, in order."""

    @cached_property
    def dtypes(self) -> tuple[DType, ...]:
        """The element type of each section."""
        return tuple([section.dtype for section in self.sections])

    @property
    @abstractmethod
    def schema(self) -> dict[str, str]:
        """The fields of the record that describe it, as text. Two handles agree if all fields are equal."""

    @abstractmethod
    def section_shapes(self, round_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Returns the shape of each section in a round, or of the rows of a sparse one.

        Args:
            round_shape: the shape that binds the round.
        """

    @property
    @abstractmethod
    def fixed_shapes(self) -> tuple[tuple[int, ...], ...] | None:
        """The shape of each section if that is the same in all gradients; None if it is not."""

    @property
    def gradient_bytes(self) -> int | None:
        """The bytes of a gradient; None if gradients differ in that."""
        shapes = self.fixed_shapes
        if shapes is None:
            return None
        pairs = zip(self.sections, shapes, strict=True)
        return sum(math.prod(shape) * section.dtype.storage.itemsize for section, shape in pairs)

    @abstractmethod
    def name_of(self, section: int, element: int) -> str:
        """Returns what errors call the array that an element of a gradient is in.

        Args:
            section: the number of the section.
            element: its place in the section, in row-major order.
        """

    @abstractmethod
    def path_of(self, section: int, element: int) -> str | None:
        """Returns the path of the leaf that an element of a gradient is in; None if gradients are not trees."""

    @abstractmethod
    def extent_of(self, section: int, element: int) -> tuple[int, tuple[int, ...] | None]:
        """Returns where the array begins that an element of a dense section is in, and its shape.

        The shape is None if it is the section's. The arguments are as for ``name_of``.
        """

    @abstractmethod
    def result(self, round_sum: RoundSum, divisor: float) -> Any:
        """Returns the reduced gradient, in the form in which a take hands it out.

        Args:
            round_sum: a sum from ``empty_sum()``. It cannot be used afterwards, because its memory may be reused.
            divisor: what ``divisor`` returns for the round.
        """

    def divisor(self, number: int, weight: float | None) -> float:
        """Returns what the mean of a round is divided by: the number of gradients (int), or their weights (float).

        Args:
            number: how many gradients the round holds.
            weight: the sum of their weights; None if all are 1.
        """
        return number if weight is None or self.normalize == "count" else weight

    def weight_of(self, round_sum: RoundSum, counted: float | None) -> float | None:
        """Returns the sum of the weights of a round, added in the order of its gradients; None if all are 1.

        Args:
            round_sum: the sum of the round.
            counted: the sum of the weights as the server has counted it, in the order of arrival.
        """
        return round_sum.weight if self.order == "worker" else counted

    @cached_property
    def can_weigh(self) -> bool:
        """Whether gradients may have other weights than 1: not if a result is an integer."""
        return not any(section.dtype.is_integer for section in self.sections)

    def empty_sum(self, round_shape: tuple[int, ...], *, where: str) -> RoundSum:
        """Returns an empty sum for the gradients of one round.

        Args:
            round_shape: the shape that binds the round.
            where: the source of the gradients, for errors.
        """
        pairs = zip(self.sections, self.section_shapes(round_shape), strict=True)
        return RoundSum([section.empty_sum(shape, where, self.normalize) for section, shape in pairs], where)


@dataclass(frozen=True, eq=False)
class ArraySpec(AccumulatorSpec):
    """What a dense or a sparse accumulator was created as: its gradients have one section.

    Attributes:
        section: the section.
        shape: the declared shape of a dense gradient, or of the array whose rows a sparse gradient holds. None if
            the rank is unknown, with None for each unknown dimension.
    """

    section: SectionSpec
    shape: Shape

    @classmethod
    def of(
        cls,
        kind: Literal["dense", "sparse"],
        dtype: DType,
        shape: Shape,
        *,
        reduction_type: str,
        sparse_mean: SparseMean = "index",
        chunk: int = CHUNK,
    ) -> ArraySpec:
        """Returns the specification of an accumulator of this kind."""
        section = SectionSpec("", dtype, kind == "sparse", shape[0] if kind == "sparse" and shape else None)
        return cls(reduction_type, sparse_mean, chunk, section, shape)

    @cached_property
    def kind(self) -> Literal["dense", "sparse"]:
        """Either "dense" or "sparse"."""
        return "sparse" if self.section.is_sparse else "dense"

    @cached_property
    def dtype(self) -> DType:
        """The element type."""
        return self.section.dtype

    @cached_property
    def sections(self) -> tuple[SectionSpec, ...]:
        """The only section."""
        return (self.section,)

    @property
    def schema(self) -> dict[str, str]:
        """The fields of the record that describe it, as text."""
        return {
            "kind": self.kind,
            "dtype": self.dtype.name,
            "shape": shape_text(self.shape),
            "reduction_type": self.reduction_type,
            "sparse_mean": self.sparse_mean,
            "missing": "zero",
            "tree": "",
        }

    def section_shapes(self, round_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Returns the shape of the round."""
        return (round_shape,)

    def empty_sum(self, round_shape: tuple[int, ...], *, where: str) -> RoundSum:
        """Returns an empty sum for the gradients of one round."""
        return RoundSum([self.section.empty_sum(round_shape, where, self.normalize)], where)

    @property
    def fixed_shapes(self) -> tuple[tuple[int, ...], ...] | None:
        """The declared shape of a dense array, if no dimension is open."""
        if self.section.is_sparse or self.shape is None:
            return None
        known = tuple(dim for dim in self.shape if dim is not None)
        return (known,) if len(known) == len(self.shape) else None

    def name_of(self, section: int, element: int) -> str:  # noqa: ARG002 - there is only one
        """Returns the name of the argument that holds the values."""
        return "grad_values" if self.section.is_sparse else "grad"

    def path_of(self, section: int, element: int) -> None:
        """Returns None: the gradient is one array."""

    def extent_of(self, section: int, element: int) -> tuple[int, None]:  # noqa: ARG002 - there is only one
        """Returns the beginning of the only array."""
        return 0, None

    def result(self, round_sum: RoundSum, divisor: float) -> Any:
        """Returns an array for a dense accumulator, and ``IndexedSlices`` for a sparse one."""
        (section,) = round_sum.sections
        if isinstance(section, DenseSum):
            return section.result(self.reduction_type, divisor)
        indices, values = section.result(self.reduction_type, divisor, self.sparse_mean)
        return sparse_result(indices, values, self.section.bound)


def sparse_result(indices: Any, values: Any, bound: int | None) -> IndexedSlices:
    """Returns reduced rows as ``IndexedSlices``, whose dimension 0 is -1 unless it was declared."""
    whole = np.array([-1 if bound is None else bound, *values.shape[1:]], np.int64)
    return IndexedSlices(values, indices, whole)


def _check_rows(row_shape: tuple[int, ...], where: str) -> None:
    """Raises CorruptDataError if numpy cannot count the dimensions of rows of this shape, and one more."""
    try:
        np.empty((0, *row_shape))
    except ValueError:
        raise CorruptDataError(f"{where}: rows cannot have {len(row_shape)} dimensions") from None
