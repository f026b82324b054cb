"""Checks what callers give us, and turns it into what we work with, before anything leaves the process."""

from __future__ import annotations

import math
import numbers
import operator
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from redisacc._dtypes import DType
from redisacc._shown import shown
from redisacc.errors import InvalidArgumentError

Array = npt.NDArray[Any]

# A shape as given at creation: None where the rank is unknown, None for a dimension that is.
Shape = tuple[int | None, ...] | None

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
_INT64 = np.dtype(np.int64)

# So few indices are looked at as Python's integers: with cold caches numpy's code took four times as long.
FEW = 128


def integer(value: object, what: str, *, low: int = INT64_MIN, high: int = INT64_MAX) -> int:
    """An integer scalar: Python's or numpy's, or an array of rank 0 that holds one."""
    if type(value) is int and low <= value <= high:
        return value
    number: int | None = None
    if isinstance(value, np.ndarray):
        if value.ndim == 0 and value.dtype.kind in "iu":
            number = int(value)
    elif not isinstance(value, (bool, np.bool_)):
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001 - whatever somebody else's __index__ raises, it is no integer
            number = None
    if number is None:
        raise InvalidArgumentError(f"{what} must be an integer scalar, not {shown(value)}")
    if not low <= number <= high:
        raise InvalidArgumentError(f"{what} must be in [{low}, {high}], not {shown(number)}")
    return number


def timeout(value: object) -> float | None:
    """Seconds to wait, at least 0; None and infinity: without end."""
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise InvalidArgumentError(f"timeout must be None or a number of seconds, not {shown(value)}")
    try:
        seconds = float(value)
    except OverflowError:
        # A whole number beyond all floats: forever, or refused below.
        seconds = math.copysign(math.inf, 1 if value > 0 else -1)  # type: ignore[operator]
    if not seconds >= 0:
        raise InvalidArgumentError(f"timeout must be at least 0 seconds, not {shown(value)}")
    return None if math.isinf(seconds) else seconds


def text(value: object, what: str, *, max_bytes: int) -> str:
    """A name that can stand in a key and on a line of its own: no braces, no control characters."""
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{what} must be text, not {shown(value)}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"{what} must be valid Unicode, not {shown(value)}") from None
    if not 0 < size <= max_bytes:
        raise InvalidArgumentError(f"{what} must have 1 to {max_bytes} bytes in UTF-8, not {size}: {shown(value)}")
    for character in value:
        if character in "{}" or unicodedata.category(character) in ("Cc", "Zl", "Zp"):
            raise InvalidArgumentError(
                f"{what} must have no braces and no control characters, not {character!r} as in {shown(value)}"
            )
    return value


def label(value: object) -> str | None:
    """The ``name=`` of an operation, which labels its log records."""
    if value is None or isinstance(value, str):
        return value
    raise InvalidArgumentError(f"name must be text or None, not {shown(value)}")


def shape(value: object, what: str = "shape") -> Shape:
    """None (unknown rank), or a tuple with None for every unknown dimension (given as None or -1)."""
    if value is None:
        return None
    as_list = getattr(value, "as_list", None)
    if callable(as_list):
        # TensorFlow's TensorShape, which refuses to list its dimensions where even their number is unknown.
        if getattr(value, "rank", 0) is None:
            return None
        value = as_list()
    elif isinstance(value, np.ndarray) and value.ndim == 1:
        value = value.tolist()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidArgumentError(f"{what} must be None or a sequence of dimensions, not {shown(value)}")
    dims = tuple(
        None if dim is None else integer(dim, f"dimension {axis} of {what}", low=-1) for axis, dim in enumerate(value)
    )
    dims = tuple(None if dim == -1 else dim for dim in dims)
    if math.prod(dim for dim in dims if dim is not None) > INT64_MAX:
        raise InvalidArgumentError(f"{what} {shown(value)} has more elements than an int64 can count")
    return dims


def shape_text(dims: Sequence[int | None] | None) -> str:
    """A shape as records and messages show it: "[100,-1]", or "unknown"."""
    return "unknown" if dims is None else _dims_text(tuple(dims))


@lru_cache(maxsize=256)
def _dims_text(dims: tuple[int | None, ...]) -> str:
    return "[" + ",".join("-1" if d is None else str(d) for d in dims) + "]"


def reduction_type(value: object) -> str:
    """ "MEAN" or "SUM"; None means MEAN."""
    if value is None:
        return "MEAN"
    if isinstance(value, str) and value in ("MEAN", "SUM"):
        return value
    raise InvalidArgumentError(f"reduction_type must be 'MEAN' or 'SUM', not {shown(value)}")


def array(value: object, what: str) -> Array:
    """Anything that numpy makes an array of; ragged lists, masked arrays and objects are refused."""
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidArgumentError(f"{what} is a masked array, whose mask would be lost; fill it first")
    try:
        return np.asarray(value)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise InvalidArgumentError(f"{what} can't be made an array: {shown(value)}: {shown(str(error))}") from error


def _rank(dtype: np.dtype[Any]) -> int:
    """Where a dtype stands in the order of numpy's kinds: a "same_kind" cast never goes down."""
    if dtype.kind in "biufc":
        return "buifc".index(dtype.kind)
    try:
        if ml_dtypes.finfo(dtype).bits:  # type: ignore[no-untyped-call]
            return "buifc".index("f")
    except ValueError:
        pass
    return -1


def is_untyped(value: object) -> bool:
    """Whether a value carries no dtype of its own: Python numbers and lists of them."""
    return not hasattr(value, "dtype")


def cast(given: Array, dtype: DType, what: str, *, value: object) -> Array:
    """Elements converted to the storage dtype, where numpy's "same_kind" cast allows and nothing wraps.

    A list of ints is fine for every integer type that can hold them. The result may be the caller's own memory. Check
    shapes before: conversion may need as much memory as the caller claims to have.

    Args:
        value: what the caller gave, of which ``given`` was made.
    """
    if given.dtype == dtype.storage:
        return given
    if given.dtype == dtype.public:
        return given.view(dtype.storage)
    untyped = is_untyped(value)
    if untyped and given.size == 0:
        return given.astype(dtype.storage)
    have, need = _rank(given.dtype), _rank(dtype.storage)
    if have < 0 or (have > need and not (untyped and given.dtype.kind == "i" and dtype.is_integer)):
        raise InvalidArgumentError(
            f"{what} must be {dtype.name} or what casts to it within its kind, not {given.dtype}: {shown(given)}"
        )
    if dtype.is_integer and given.dtype.kind in "iu" and given.size:
        bounds = np.iinfo(dtype.storage)
        for extreme in (int(given.min()), int(given.max())):
            if not bounds.min <= extreme <= bounds.max:
                raise InvalidArgumentError(f"{what} holds {extreme}, which {dtype.name} can't")
    return given.astype(dtype.storage)


def indices(value: object, what: str = "grad_indices") -> tuple[Array, int, bool]:
    """Indices of rows: an int64 vector, none of them negative.

    Returns:
        The vector, the largest index in it (-1: there is none), and whether they ascend strictly, so that none stands
        twice.
    """
    given = array(value, what)
    if given.ndim != 1:
        raise InvalidArgumentError(f"{what} must be a vector, not of shape {shape_text(given.shape)}")
    if given.size == 0 and is_untyped(value):
        return np.empty(0, np.int64), -1, True
    if given.dtype.kind not in "iu":
        raise InvalidArgumentError(f"{what} must be integers, not {given.dtype}: {shown(value)}")
    if given.size == 0:
        return given.astype(np.int64, copy=False), -1, True
    # Where they ascend, as they mostly do, the ends are the bounds.
    if given.size <= FEW:
        listed = given.tolist()
        ascending = all(map(operator.lt, listed, listed[1:]))
        least, last = (listed[0], listed[-1]) if ascending else (min(listed), max(listed))
    else:
        # Not .all(), which goes through a function in Python.
        ascending = bool(np.logical_and.reduce(given[1:] > given[:-1]))
        least, last = (int(given[0]), int(given[-1])) if ascending else (int(given.min()), int(given.max()))
    if last > INT64_MAX:
        raise InvalidArgumentError(f"{what} holds {last}, which int64 can't")
    if least < 0:
        raise InvalidArgumentError(f"{what} must not be negative, and holds {least}")
    return given if given.dtype == _INT64 else given.astype(np.int64), last, ascending
