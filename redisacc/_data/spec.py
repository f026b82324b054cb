"""The specification of an accumulator: its schema, and how its rounds are reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from redisacc._data.dtypes import DType
from redisacc._data.reducers import DenseReducer, Reducer, SparseReducer
from redisacc._data.slices import IndexedSlices
from redisacc._data.validation import Shape
from redisacc.errors import CorruptDataError

Kind = Literal["dense", "sparse"]

# What the sum of a row is divided by for "MEAN": the number of gradients that held its index, or that of the round.
SparseMean = Literal["index", "round"]

# The number of elements in a row of a dense gradient that is summed in place. A row costs Redis 2 to 3 microseconds, so
# it is long enough for the additions to outweigh that, and short enough to be read with HGET.
CHUNK = 256


@dataclass(frozen=True, slots=True)
class AccumulatorSpec:
    """Everything about an accumulator that never changes.

    Attributes:
        kind: "dense" or "sparse".
        dtype: the element type.
        shape: the declared shape of a dense gradient, or of the array of which a sparse gradient holds rows. None if
            the rank is unknown, with None for each unknown dimension.
        reduction_type: "MEAN" or "SUM".
        sparse_mean: what the sum of a row is divided by: the number of gradients that held its "index", or of all
            gradients of the "round". Without meaning for a dense accumulator.
        chunk: the number of elements of a dense gradient that one field of the ``sums`` hash holds.
    """

    kind: Kind
    dtype: DType
    shape: Shape
    reduction_type: str
    sparse_mean: SparseMean = "index"
    chunk: int = CHUNK

    @property
    def is_sparse(self) -> bool:
        """Whether gradients consist of rows and their indices."""
        return self.kind == "sparse"

    @property
    def bound(self) -> int | None:
        """The declared dimension 0 of a sparse accumulator, below which all indices are; None if it is unknown."""
        return self.shape[0] if self.shape else None

    def reducer(self, round_shape: tuple[int, ...], *, where: str) -> Reducer:
        """Returns an empty reducer for the gradients of one round.

        Args:
            round_shape: the shape of each dense gradient, or of each row of a sparse one.
            where: the source of the gradients, for errors.
        """
        if self.is_sparse:
            _check_rows(round_shape, where)
            return SparseReducer(self.dtype, round_shape, bound=self.bound, where=where)
        return DenseReducer(self.dtype, round_shape)

    def result(self, reducer: Reducer, num_accumulated: int) -> Any:
        """Returns the reduced gradient: an array for a dense accumulator, ``IndexedSlices`` for a sparse one.

        Args:
            reducer: a reducer from ``reducer()``. It cannot be used afterwards, because its memory may be reused.
            num_accumulated: how many gradients the round holds.
        """
        if isinstance(reducer, DenseReducer):
            return reducer.result(self.reduction_type, num_accumulated)
        indices, values = reducer.result(self.reduction_type, num_accumulated, self.sparse_mean)
        whole = np.array([-1 if self.bound is None else self.bound, *values.shape[1:]], np.int64)
        return IndexedSlices(values, indices, whole)


def _check_rows(row_shape: tuple[int, ...], where: str) -> None:
    """Raises CorruptDataError if numpy cannot count the dimensions of rows of this shape, and one more."""
    try:
        np.empty((0, *row_shape))
    except ValueError:
        raise CorruptDataError(f"{where}: rows cannot have {len(row_shape)} dimensions") from None
