"""Sparse gradients as callers give them: indices in any order, and their rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from redisacc._data import validation
from redisacc._data.dtypes import DType
from redisacc._data.gradient import Section
from redisacc._data.validation import Array, Shape, shape_text
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError


def sparse_section(indices: object, values: object, dtype: DType, declared: Shape, names: tuple[str, str]) -> Section:
    """Returns rows as a section with strictly increasing indices: sorted, and with the rows of each index added up.

    Args:
        indices: integer vector ``[n]``, in any order and with repetitions.
        values: array-like of shape ``[n, *row]``.
        dtype: the element type.
        declared: the shape of the whole array; None, or with None, as far as it is unknown.
        names: what errors call the indices and the values.

    Raises:
        InvalidArgumentError: the indices or the rows are invalid, or do not fit the declared shape.
    """
    checked, last, are_ascending = validation.indices(indices, names[0])
    given = values if type(values) is np.ndarray else validation.array(values, names[1])
    _check_rows(len(checked), last, given, declared or (), names)
    rows = given if given.dtype == dtype.storage else validation.cast(given, dtype, names[1], value=values)
    return Section(rows, checked) if are_ascending else ascending(checked, rows, dtype)


def _check_rows(
    number: int, last: int, values: Array, declared: tuple[int | None, ...], names: tuple[str, str]
) -> None:
    """Checks that ``values`` has a row for each of ``number`` indices; the largest index is ``last``."""
    if values.ndim == 0:
        raise InvalidArgumentError(f"{names[1]} must have one row for each index, and a scalar has none")
    if len(values) != number:
        raise InvalidArgumentError(
            f"{names[1]} must have one row for each of the {number} {names[0]}, not {len(values)} rows"
        )
    if values.shape[1:] != declared[1:] and not agrees(values.shape[1:], declared[1:]):
        raise InvalidArgumentError(
            f"{names[1]} must fit the declared shape {shape_text(declared)}, unlike rows of shape "
            f"{shape_text(values.shape[1:])}"
        )
    if declared and declared[0] is not None and last >= declared[0]:
        raise InvalidArgumentError(
            f"{names[0]} must be below {declared[0]}, dimension 0 of the declared shape, but {last} is not"
        )


def check_whole(given: object, declared: Shape, what: str) -> None:
    """Checks the shape of the whole array that a caller gives against the declared one.

    Args:
        given: integer vector. It may have more dimensions than declared; -1 is not a wildcard.
        declared: the declared shape.
        what: its name in errors.
    """
    whole = validation.array(given, what)
    if whole.ndim != 1 or (whole.size and whole.dtype.kind not in "iu"):
        raise InvalidArgumentError(f"{what} must be None or an integer vector, not {shown(given)}")
    dims = whole.tolist()
    if declared is not None and not agrees(dims, declared):
        raise InvalidArgumentError(
            f"{what} must agree with the declared shape {shape_text(declared)}, unlike {shown(dims)}"
        )


def agrees(dims: Sequence[int], declared: Sequence[int | None]) -> bool:
    """Returns whether dimensions are as declared; more of them may follow."""
    return len(dims) >= len(declared) and all(
        want is None or want == have for want, have in zip(declared, dims, strict=False)
    )


def ascending(indices: Array, values: Array, dtype: DType) -> Section:
    """Returns the section with strictly increasing indices: sorted, and with the rows of each index added up."""
    order = np.argsort(indices, kind="stable")
    indices, values = indices[order], values[order]
    starts = np.flatnonzero(np.concatenate(([True], indices[1:] != indices[:-1])))
    if len(starts) == len(indices):
        return Section(values, indices)
    with np.errstate(over="ignore", invalid="ignore"):
        rows = np.add.reduceat(values.astype(dtype.sum, copy=False), starts, axis=0, dtype=dtype.sum)
    return Section(rows, indices[starts])
