"""Sparse arrays whose entries have coordinates, as rows: the form in which sparse accumulators add."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from redisacc.errors import InvalidArgumentError

_Array = npt.NDArray[Any]


class Rows(NamedTuple):
    """Rows of a larger array, not checked yet. Each field is whatever numpy can turn into an array.

    Attributes:
        indices: integer vector ``[n]``, in any order and with repetitions.
        values: the rows ``[n, *row]``.
        dense_shape: integer vector: the shape of the whole array. None if it is unknown.
    """

    indices: Any
    values: Any
    dense_shape: Any


def rows_of_elements(coordinates: Sequence[_Array], values: _Array, dense_shape: Sequence[int], what: str) -> Rows:
    """Returns the rows that hold any entry of a sparse array.

    With one coordinate, the entries are the rows, and nothing is copied. With more of them, each row is made dense; its
    other elements become 0. An entry that is 0 counts as an entry. Entries of the same coordinates are added up in a
    wider type, so their order and number cost no digits and no integer wraps before it has to.

    Args:
        coordinates: an integer vector ``[n]`` for each of the first dimensions.
        values: the entries ``[n, *rest]``, where ``rest`` are the dimensions without coordinates.
        dense_shape: the shape of the whole array.
        what: its name in errors.

    Returns:
        Rows, with ascending indices if there is more than one coordinate.

    Raises:
        InvalidArgumentError: there is no coordinate, the lengths or shapes disagree, a coordinate is outside of the
            shape, or the rows do not fit into memory.
    """
    shape = tuple(dense_shape)
    if not coordinates:
        raise InvalidArgumentError(f"{what} must have at least one sparse dimension, whose coordinates are the indices")
    if len(coordinates) == 1:
        return Rows(coordinates[0], values, np.array(shape, np.int64))
    _check(coordinates, values, shape, what)
    indices, places = np.unique(coordinates[0], return_inverse=True)
    inner, rest = shape[1 : len(coordinates)], shape[len(coordinates) :]
    cells = math.prod(inner)
    rows = _zeros((len(indices) * cells, *rest), values.dtype, what)
    if places.size:
        flat = places.astype(np.int64, copy=False) * cells + np.ravel_multi_index(tuple(coordinates[1:]), inner)
        if _is_unique(flat):
            rows[flat] = values
        else:
            rows = _zeros(rows.shape, _wider(values.dtype), what)
            np.add.at(rows, flat, values.astype(rows.dtype, copy=False))
    return Rows(
        indices.astype(np.int64, copy=False),
        rows.reshape(len(indices), *inner, *rest),
        np.array(shape, np.int64),
    )


def _check(coordinates: Sequence[_Array], values: _Array, shape: tuple[int, ...], what: str) -> None:
    number = len(values) if values.ndim else -1
    rest = shape[len(coordinates) :]
    if any(vector.ndim != 1 or len(vector) != number or vector.dtype.kind not in "iu" for vector in coordinates):
        raise InvalidArgumentError(f"{what} must have integer coordinates for each of its {max(number, 0)} entries")
    if len(shape) < len(coordinates) or values.shape[1:] != rest:
        raise InvalidArgumentError(
            f"the entries of {what} must fit its shape {list(shape)} behind the {len(coordinates)} sparse dimensions, "
            f"unlike entries of shape {list(values.shape[1:])}"
        )
    if not number:
        return
    for axis, vector in enumerate(coordinates):
        # numpy would count a negative coordinate from the end.
        least, last = int(vector.min()), int(vector.max())
        if least < 0 or last >= shape[axis]:
            raise InvalidArgumentError(
                f"the coordinates of {what} in dimension {axis} must be in [0, {shape[axis] - 1}], but one of them is "
                f"{least if least < 0 else last}"
            )


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any], what: str) -> _Array:
    try:
        return np.zeros(shape, dtype)
    except (MemoryError, ValueError) as error:
        raise InvalidArgumentError(
            f"{what} does not fit into memory as rows: they have {math.prod(shape)} elements of {dtype}"
        ) from error


def _is_unique(flat: _Array) -> bool:
    """Returns whether no number occurs twice. Most libraries write entries in ascending order."""
    if bool((flat[1:] > flat[:-1]).all()):
        return True
    ordered = np.sort(flat)
    return bool((ordered[1:] != ordered[:-1]).all())


def _wider(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in which repeated entries are added up. A sum is cast back, and range-checked, later."""
    if dtype.kind == "i":
        return np.dtype(np.int64)
    if dtype.kind in "bu":
        return np.dtype(np.uint64)
    if dtype.kind in "fc" and dtype.itemsize >= np.dtype(np.float32).itemsize:
        return dtype
    return np.dtype(np.float32)
