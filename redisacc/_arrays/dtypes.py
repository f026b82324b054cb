"""The element types: how each is given, sent, summed and returned.

docs/reference/semantics.md shows the same table under "Numbers". All types work that TensorFlow's documentation
lists for its accumulators, including those that TensorFlow itself accepts and then fails to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from redisacc._interrupts import interrupt_in
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError

# A double holds every integer up to this bound exactly. It holds 2**53 as well, but a sum of 2**53 + 1 is rounded to
# that, so a result above the bound may have lost digits.
EXACT_IN_DOUBLE = 2**53 - 1


class _TorchDType(Protocol):
    """torch's dtypes, for type checkers."""

    @property
    def is_floating_point(self) -> bool: ...
    @property
    def is_complex(self) -> bool: ...


class _TensorFlowDType(Protocol):
    """TensorFlow's dtypes, for type checkers."""

    @property
    def as_numpy_dtype(self) -> Any: ...


# What denotes an element type.
DTypeLike = npt.DTypeLike | _TorchDType | _TensorFlowDType


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        name: its name in the record.
        public: the dtype that ``accumulator.dtype`` returns.
        storage: the dtype of the elements of gradients and results.
        sum: the dtype of sums in numpy, wide enough that they are rounded only once, at the end.
        in_place: the type in which Lua adds: 'f' (float32), 'd' (float64), or None if neither is exact.
        limit: the largest magnitude of a sum in place that is still exact; None for floating point.
    """

    name: str
    public: np.dtype[Any]
    storage: np.dtype[Any]
    sum: np.dtype[Any]
    in_place: str | None
    limit: int | None = None

    @cached_property
    def components(self) -> int:
        """The number of real numbers in an element: 2 for complex types, else 1."""
        return 2 if self.storage.kind == "c" else 1

    @cached_property
    def in_place_dtype(self) -> np.dtype[Any]:
        """The dtype of the real numbers that Lua packs and unpacks, little-endian."""
        return np.dtype("<f4" if self.in_place == "f" else "<f8")

    @cached_property
    def is_integer(self) -> bool:
        """Whether results are integers, so that a mean truncates toward zero."""
        return self.sum.kind in "iu"


def _table() -> dict[str, DType]:
    table: dict[str, DType] = {}

    def add(name: str, storage: npt.DTypeLike, total: npt.DTypeLike, in_place: str | None, **more: Any) -> None:
        storage = np.dtype(storage)
        public = more.pop("public", storage)
        table[name] = DType(name, public, storage, np.dtype(total), in_place, **more)

    add("float32", np.float32, np.float32, "f")
    add("float64", np.float64, np.float64, "d")
    add("float16", np.float16, np.float32, "f")
    add("bfloat16", ml_dtypes.bfloat16, np.float32, "f")
    for bits in (8, 16, 32):
        for sign in ("", "u"):
            storage = np.dtype(f"{sign}int{bits}")
            add(f"{sign}int{bits}", storage, np.int64, "d", limit=EXACT_IN_DOUBLE)
            if (sign, bits) != ("u", 32):
                # TensorFlow's quantised types: in numpy, they are structures with one field of that name.
                name = f"q{sign}int{bits}"
                add(name, storage, np.int64, "d", limit=EXACT_IN_DOUBLE, public=np.dtype([(name, storage)]))
    add("int64", np.int64, np.int64, None)
    add("uint64", np.uint64, np.uint64, None)
    add("complex64", np.complex64, np.complex64, "f")
    add("complex128", np.complex128, np.complex128, "d")
    return table


TABLE = _table()

# Of the section that says which leaves of a tree a gradient has. Its sums are sums of weights.
PRESENCE = DType("int32", np.dtype(np.int32), np.dtype(np.int32), np.dtype(np.float64), "d")

_ALIASES = {"half": "float16", "float": "float32", "double": "float64"}


def find_dtype(dtype: object) -> DType:
    """Returns the element type that a name, a numpy dtype or scalar type, or a dtype of TensorFlow or torch denotes.

    A reference type of TensorFlow ("float32_ref") and a big-endian numpy dtype denote the plain type.

    Raises:
        InvalidArgumentError: there is no such element type.
    """
    if dtype is None:
        # numpy would read None as float64.
        raise InvalidArgumentError(f"dtype must be one of {', '.join(sorted(TABLE))}, not None")
    name: object = dtype if isinstance(dtype, str) else None
    if name is None and not isinstance(dtype, (np.dtype, type)):
        # TensorFlow's DType. For quantised types, its numpy dtype is a structure, but its name is plain.
        name = getattr(dtype, "name", None)
        if name is None and type(dtype).__module__ == "torch":
            name = str(dtype).removeprefix("torch.")
    if isinstance(name, str):
        name = _ALIASES.get(name, name).removesuffix("_ref")
        if name in TABLE:
            return TABLE[name]
    try:
        numpy_dtype = np.dtype(dtype)  # type: ignore[call-overload]
    except Exception as error:  # numpy asks the object, which may raise anything
        if interrupt_in(error) is not None:
            raise
        numpy_dtype = None
    if numpy_dtype is not None:
        native = numpy_dtype.newbyteorder("=")
        for entry in TABLE.values():
            if native == entry.public:
                return entry
    raise InvalidArgumentError(f"dtype must be one of {', '.join(sorted(TABLE))}, not {shown(dtype)}")
