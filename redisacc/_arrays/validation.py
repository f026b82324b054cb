"""Checks and converts arguments before anything leaves the process.

Every function raises InvalidArgumentError with the name of the argument, ``what``, in the message.
"""

from __future__ import annotations

import math
import numbers
import operator
import sys
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from redisacc._arrays import foreign
from redisacc._arrays.dtypes import DType
from redisacc._interrupts import interrupt_in
from redisacc._text import is_unicode, shown
from redisacc.errors import InvalidArgumentError

Array = npt.NDArray[Any]

# A declared shape: None if the rank is unknown, with None for each unknown dimension.
Shape = tuple[int | None, ...] | None

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
# The largest number of declared dimensions, which is TensorFlow's.
MAX_RANK = 254
_INT64 = np.dtype(np.int64)

# Up to this many indices are checked as Python integers: with cold caches, numpy's code took four times as long.
FEW_INDICES = 128


def integer(value: object, what: str, *, low: int = INT64_MIN, high: int = INT64_MAX) -> int:
    """Returns an integer scalar as a Python int.

    Args:
        value: a Python or numpy integer, or an integer array of rank 0, of any library. Booleans are refused.
        what: the argument's name in errors.
        low: the smallest value that is allowed.
        high: the largest value that is allowed.
    """
    if type(value) is int and low <= value <= high:
        return value
    number: int | None = None
    value = unmasked(foreign.host_array(value, what), what)
    if isinstance(value, np.ndarray):
        if value.ndim == 0 and value.dtype.kind in "iu":
            number = int(value)
    elif not isinstance(value, (bool, np.bool_)):
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except Exception as error:  # if somebody else's __index__ raises, it is not an integer
            if interrupt_in(error) is not None:
                raise
            number = None
    if number is None:
        raise InvalidArgumentError(f"{what} must be an integer scalar, not {shown(value)}")
    if not low <= number <= high:
        raise InvalidArgumentError(f"{what} must be in [{low}, {high}], not {shown(number)}")
    return number


def flag(value: object, what: str) -> bool:
    """Returns True or False. Numbers are refused, because they may be meant for another argument."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgumentError(f"{what} must be True or False, not {shown(value)}")
    return bool(value)


def real(value: object, what: str) -> float:
    """Returns a real number as a float; an infinity if it is beyond all floats; NaN if it is none, as True is none.

    An array of rank 0, of any library, is a number as well. ``what`` is the argument's name in errors.
    """
    value = unmasked(foreign.host_array(value, what), what)
    if not isinstance(value, np.generic) and getattr(value, "ndim", None) == 0:
        # JAX has no class of its own for such arrays.
        value = np.asarray(value).item()
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, 1 if value > 0 else -1)  # type: ignore[operator]


def timeout(value: object, what: str = "timeout") -> float | None:
    """Returns a number of seconds, at least 0. None and infinity become None, which means forever."""
    if value is None:
        return None
    seconds = real(value, what)
    if not seconds >= 0:
        raise InvalidArgumentError(f"{what} must be None or a number of seconds that is at least 0, not {shown(value)}")
    return None if math.isinf(seconds) else seconds


def seconds(value: object, what: str, *, high: float) -> float:
    """Returns a number of seconds in [0, high]."""
    number = real(value, what)
    if not 0 <= number <= high:
        raise InvalidArgumentError(f"{what} must be a number of seconds in [0, {high:.0f}], not {shown(value)}")
    return number


def text(value: object, what: str, *, max_bytes: int) -> str:
    """Returns a name that fits into a key and on one line: text without braces and control characters.

    Args:
        value: the name.
        what: the argument's name in errors.
        max_bytes: the largest length in UTF-8; the smallest is 1.
    """
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{what} must be text, not {shown(value)}")
    size = _utf8_bytes(value, what)
    if not 0 < size <= max_bytes:
        raise InvalidArgumentError(f"{what} must have 1 to {max_bytes} bytes in UTF-8, not {size}: {shown(value)}")
    for character in value:
        if character in "{}" or unicodedata.category(character) in ("Cc", "Zl", "Zp"):
            raise InvalidArgumentError(
                f"{what} must have no braces and no control characters, but {shown(value)} has {shown(character)}"
            )
    return value


def _utf8_bytes(value: str, what: str) -> int:
    """Returns the length in UTF-8. A lone surrogate, which bytes that were not UTF-8 leave, cannot be written there."""
    if not is_unicode(value):
        raise InvalidArgumentError(f"{what} must be valid Unicode, not {shown(value)}")
    return len(value.encode())


def label(value: object) -> str | None:
    """Returns the ``name=`` of an operation, which labels its log records: text or None."""
    if value is None:
        return value
    if isinstance(value, str):
        _utf8_bytes(value, "name")
        return value
    raise InvalidArgumentError(f"name must be text or None, not {shown(value)}")


def shape(value: object, what: str = "shape") -> Shape:
    """Returns a declared shape: None if the rank is unknown, or a tuple with None for each unknown dimension.

    Args:
        value: None, a sequence of integers (None or -1 for an unknown dimension), or TensorFlow's TensorShape.
        what: the argument's name in errors.
    """
    if value is None:
        return None
    as_list = getattr(value, "as_list", None)
    if callable(as_list):
        # TensorFlow's TensorShape, which refuses to list its dimensions if their number is unknown.
        if getattr(value, "rank", 0) is None:
            return None
        value = as_list()
    elif isinstance(value, np.ndarray) and value.ndim == 1:
        value = value.tolist()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidArgumentError(f"{what} must be None or a sequence of dimensions, not {shown(value)}")
    if len(value) > MAX_RANK:
        raise InvalidArgumentError(f"{what} must have at most {MAX_RANK} dimensions, not {len(value)}: {shown(value)}")
    dims = tuple(
        None if dim is None else integer(dim, f"dimension {axis} of {what}", low=-1) for axis, dim in enumerate(value)
    )
    dims = tuple(None if dim == -1 else dim for dim in dims)
    if math.prod(dim for dim in dims if dim is not None) > INT64_MAX:
        raise InvalidArgumentError(f"{what} must have at most {INT64_MAX} elements, but {shown(value)} has more")
    return dims


@lru_cache(maxsize=256)
def shape_text(dims: tuple[int | None, ...] | None) -> str:
    """Returns a shape as records and messages show it: "[100,-1]", or "unknown" for None."""
    return "unknown" if dims is None else "[" + ",".join("-1" if d is None else str(d) for d in dims) + "]"


def array(value: object, what: str) -> Array:
    """Converts anything that numpy can turn into an array, and dense arrays of other libraries.

    An array in host memory is returned as it is, not copied. Ragged lists, masked and sparse arrays are refused, and
    arrays of Python objects.
    """
    if type(value) is np.ndarray:
        return value
    value = foreign.host_array(value, what)
    if type(value) is np.ndarray:
        return value
    unmasked(value, what)
    if _has_missing(value):
        raise InvalidArgumentError(
            f"{what} must not have missing values (NA, null), because they would become numbers: fill them first"
        )
    try:
        given = np.asarray(value)
    except MemoryError:
        raise
    except Exception as error:  # somebody else's __array__ may raise anything
        if interrupt_in(error) is not None:
            raise
        raise InvalidArgumentError(
            f"{what} must be an array, but numpy cannot make one from {shown(value)}: {shown(str(error))}"
        ) from error
    if given.dtype.kind == "O":
        raise InvalidArgumentError(f"{what} must be an array of numbers, but numpy finds objects in {shown(value)}")
    return given


def unmasked(value: object, what: str) -> object:
    """Returns a value that is no masked array.

    Raises:
        InvalidArgumentError: it is one.
    """
    # numpy imports numpy.ma only when somebody asks for it. A process that was forked during that import by another
    # thread would wait for its lock forever, so we never ask: before the import, nobody can have a masked array.
    if isinstance(value, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
        raise InvalidArgumentError(
            f"{what} must not be a masked array, because its mask would be lost: call filled() first"
        )
    return value


def _has_missing(value: object) -> bool:
    """Returns whether a column of pandas, Arrow or Polars, or a table of pandas, has missing values.

    They tell a missing value from NaN, and numpy's conversion would not. The columns are recognized by what they offer,
    so none of these packages is imported. A plain numpy column of pandas has no missing values, only NaN.
    """
    if isinstance(value, (list, tuple, np.generic)):
        return False
    try:
        missing = getattr(value, "null_count", 0)
        if callable(missing):
            missing = missing()
        if isinstance(missing, int) and missing > 0:
            return True
        dtypes = getattr(value, "dtypes", None)
        kinds = [getattr(value, "dtype", None)] if dtypes is None or not hasattr(dtypes, "__iter__") else list(dtypes)
        if any(hasattr(kind, "na_value") for kind in kinds):
            return bool(np.any(np.asarray(value.isna())))  # type: ignore[attr-defined]
    except Exception as error:  # somebody else's object is no such column if it raises here
        if interrupt_in(error) is not None:
            raise
        return False
    return False


def _rank(dtype: np.dtype[Any]) -> int:
    """Returns the place of a dtype in the order of kinds that a "same_kind" cast never goes down; -1 if it has none."""
    if dtype.kind in "biufc":
        return "buifc".index(dtype.kind)
    try:
        if ml_dtypes.finfo(dtype).bits:  # type: ignore[no-untyped-call]
            return "buifc".index("f")
    except ValueError:
        pass
    return -1


def is_untyped(value: object) -> bool:
    """Returns whether a value has no dtype of its own, like Python numbers and lists of them."""
    return not hasattr(value, "dtype")


def cast(given: Array, dtype: DType, what: str, *, value: object) -> Array:
    """Returns elements in the storage dtype, if numpy's "same_kind" cast allows the conversion and no integer wraps.

    A list of Python ints is accepted for every integer type that can hold them. The result may be the caller's own
    memory. Check shapes first, because a conversion may need as much memory as the claimed shape has elements.

    A number beyond a narrower floating-point type becomes infinite, silently, as in TensorFlow.

    Args:
        given: the array.
        dtype: the element type to convert to.
        what: the array's name in errors.
        value: the caller's argument from which ``given`` was made.
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
            f"{what} must be {dtype.name} or a dtype that casts to it within its kind, not {given.dtype}: "
            f"{shown(given)}"
        )
    if dtype.is_integer and given.dtype.kind in "iu" and given.size:
        bounds = np.iinfo(dtype.storage)
        for extreme in (int(given.min()), int(given.max())):
            if not bounds.min <= extreme <= bounds.max:
                raise InvalidArgumentError(
                    f"{what} must be in [{bounds.min}, {bounds.max}] for {dtype.name}, but holds {extreme}"
                )
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return given.astype(dtype.storage)


def indices(value: object, what: str = "grad_indices") -> tuple[Array, int, bool]:
    """Returns indices of rows as an int64 vector without negative numbers, and what is known about them.

    Args:
        value: the indices.
        what: their name in errors.

    Returns:
        The vector, its largest index (-1 if it is empty), and whether the indices are strictly increasing, in which
        case none of them is repeated.
    """
    given = value if type(value) is np.ndarray else array(value, what)
    if given.ndim != 1:
        raise InvalidArgumentError(f"{what} must be a vector, not of shape {shape_text(given.shape)}")
    if given.size == 0 and is_untyped(value):
        return np.empty(0, np.int64), -1, True
    if given.dtype.kind not in "iu":
        raise InvalidArgumentError(f"{what} must be integers, not {given.dtype}: {shown(value)}")
    if given.size == 0:
        return given.astype(np.int64, copy=False), -1, True
    # Indices mostly ascend, and then the first and the last of them are the bounds.
    if given.size <= FEW_INDICES:
        listed = given.tolist()
        ascending = all(map(operator.lt, listed, listed[1:]))
        least, last = (listed[0], listed[-1]) if ascending else (min(listed), max(listed))
    else:
        # .all() would be slower, because it goes through a Python function.
        ascending = bool(np.logical_and.reduce(given[1:] > given[:-1]))
        least, last = (int(given[0]), int(given[-1])) if ascending else (int(given.min()), int(given.max()))
    if last > INT64_MAX:
        raise InvalidArgumentError(f"{what} must be at most {INT64_MAX}, but holds {last}")
    if least < 0:
        raise InvalidArgumentError(f"{what} must not be negative, but holds {least}")
    return given if given.dtype == _INT64 else given.astype(np.int64), last, ascending
