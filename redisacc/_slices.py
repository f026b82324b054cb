"""A gradient of few rows of a large array."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from redisacc._arguments import Array, array, integer, shape, shape_text
from redisacc.errors import InvalidArgumentError


class IndexedSlices:
    """Rows of a larger array: ``values[i]`` is the row at ``indices[i]``. TensorFlow's class of that name.

    Attributes:
        values: array of shape ``[n, *row]``.
        indices: integer vector of length ``n``.
        dense_shape: shape of the whole array, or None where it isn't known. As a sparse accumulator returns it,
            dimension 0 is -1 where it wasn't declared.
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, values: npt.ArrayLike, indices: npt.ArrayLike, dense_shape: npt.ArrayLike | None = None) -> None:
        self.values: Array = array(values, "values")
        self.indices: Array = array(indices, "indices")
        self.dense_shape: Array | None = None if dense_shape is None else array(dense_shape, "dense_shape")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self.values.dtype

    def __repr__(self) -> str:
        whole = "unknown" if self.dense_shape is None else self.dense_shape.tolist()
        return (
            f"IndexedSlices({len(self.indices)} rows of {self.dtype}{list(self.values.shape[1:])}, dense_shape={whole})"
        )

    def to_dense(self, dense_shape: npt.ArrayLike | None = None) -> Array:
        """The whole array, with zeros where there is no row. Rows of the same index are added up.

        Args:
            dense_shape: the shape of the result; None takes the attribute's.

        Raises:
            InvalidArgumentError: the shape isn't known, or the rows don't fit into it.
        """
        given = self.dense_shape if dense_shape is None else dense_shape
        dims = shape(None if given is None else np.asarray(given).tolist(), "dense_shape")
        if dims is None or None in dims:
            raise InvalidArgumentError(f"dense_shape must be known to make an array of it, not {shape_text(dims)}")
        if self.values.ndim == 0 or tuple(self.values.shape[1:]) != dims[1:]:
            raise InvalidArgumentError(
                f"rows of shape {shape_text(self.values.shape[1:])} don't fit into dense_shape {shape_text(dims)}"
            )
        if self.indices.shape != self.values.shape[:1]:
            raise InvalidArgumentError(f"{self.indices.shape} indices for {self.values.shape[0]} rows")
        if self.indices.size:
            integer(int(self.indices.min()), "an index", low=0)
            integer(int(self.indices.max()), "an index", high=int(dims[0] or 0) - 1)
        dense: Array = np.zeros([int(d or 0) for d in dims], self.dtype)
        np.add.at(dense, self.indices, self.values)
        return dense

    @classmethod
    def from_dense(cls, dense: npt.ArrayLike) -> IndexedSlices:
        """The rows of an array of rank 1 or more that hold anything but zeros."""
        whole = array(dense, "dense")
        if whole.ndim == 0:
            raise InvalidArgumentError("dense must have rows, and a scalar has none")
        rows = np.flatnonzero((whole != 0).reshape(len(whole), -1).any(axis=1)).astype(np.int64)
        return cls(whole[rows], rows, np.array(whole.shape, np.int64))
