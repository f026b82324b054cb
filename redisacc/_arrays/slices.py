"""A gradient that holds a few rows of a large array."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from redisacc._arrays.validation import Array, array, integer, shape, shape_text
from redisacc.errors import InvalidArgumentError


class IndexedSlices:
    """Rows of a larger array, like TensorFlow's class of that name: ``values[i]`` is the row at ``indices[i]``.

    Each argument may also be a dense torch, JAX or TensorFlow array.

    Args:
        values: array-like of shape ``[n, *row]``.
        indices: integer vector of length ``n``.
        dense_shape: the shape of the whole array, or None if it is unknown.

    Attributes:
        values: the rows as a numpy array.
        indices: the indices as a numpy array.
        dense_shape: the shape as a numpy array, or None. If a sparse accumulator returned it, dimension 0 is -1 unless
            that was declared.

    Raises:
        InvalidArgumentError: numpy cannot make an array of an argument.

    Example:
        >>> import redisacc
        >>> slices = redisacc.IndexedSlices(values=[[1, 2], [3, 4]], indices=[0, 2], dense_shape=[3, 2])
        >>> slices.to_dense()
        array([[1, 2],
               [0, 0],
               [3, 4]])
        >>> redisacc.IndexedSlices.from_dense([[0, 0], [5, 6]]).indices
        array([1])
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, values: npt.ArrayLike, indices: npt.ArrayLike, dense_shape: npt.ArrayLike | None = None) -> None:
        # Results of takes are arrays already.
        self.values: Array = values if type(values) is np.ndarray else array(values, "values")
        self.indices: Array = indices if type(indices) is np.ndarray else array(indices, "indices")
        self.dense_shape: Array | None = None
        if dense_shape is not None:
            self.dense_shape = dense_shape if type(dense_shape) is np.ndarray else array(dense_shape, "dense_shape")

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
        """Returns the whole array, with zeros where there is no row. Rows of the same index are added up.

        Args:
            dense_shape: the shape of the result. None means the attribute's.

        Raises:
            InvalidArgumentError: the shape is unknown, or the rows do not fit into it.
        """
        given = self.dense_shape if dense_shape is None else dense_shape
        dims = shape(None if given is None else array(given, "dense_shape").tolist(), "dense_shape")
        if dims is None or None in dims:
            raise InvalidArgumentError(
                f"dense_shape must have no unknown dimension if an array is made from it, not {shape_text(dims)}"
            )
        if self.values.ndim == 0 or tuple(self.values.shape[1:]) != dims[1:]:
            raise InvalidArgumentError(
                f"values must be rows that fit into dense_shape {shape_text(dims)}, not an array of shape "
                f"{shape_text(self.values.shape)}"
            )
        if self.indices.shape != self.values.shape[:1]:
            raise InvalidArgumentError(
                f"indices must be a vector of length {len(self.values)}, one for each row of values, not of shape "
                f"{shape_text(self.indices.shape)}"
            )
        if self.indices.size:
            integer(int(self.indices.min()), "an index", low=0)
            integer(int(self.indices.max()), "an index", high=int(dims[0] or 0) - 1)
        dense: Array = np.zeros([int(d or 0) for d in dims], self.dtype)
        np.add.at(dense, self.indices, self.values)
        return dense

    @classmethod
    def from_dense(cls, dense: npt.ArrayLike) -> IndexedSlices:
        """Returns the rows of an array that hold anything but zeros.

        Args:
            dense: array-like of rank 1 or more.

        Raises:
            InvalidArgumentError: ``dense`` is a scalar, or numpy cannot make an array of it.
        """
        whole = array(dense, "dense")
        if whole.ndim == 0:
            raise InvalidArgumentError("dense must be an array of rank 1 or more, not a scalar")
        rows = np.flatnonzero((whole != 0).reshape(len(whole), -1).any(axis=1)).astype(np.int64)
        return cls(whole[rows], rows, np.array(whole.shape, np.int64))
