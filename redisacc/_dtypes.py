"""The element types: how each is given, sent, added up and returned.

The table is that of the design's section "Numbers". What TensorFlow's documentation lists for the accumulators works,
also the types that TensorFlow itself accepts and then fails to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from redisacc._shown import shown
from redisacc.errors import InvalidArgumentError

# Doubles hold every integer up to here exactly. They hold 2**53 as well, but a sum of 2**53 + 1 rounds to it: a
# result above this bound may have lost digits.
EXACT_IN_DOUBLE = 2**53 - 1


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        name: as the record shows it.
        public: what ``accumulator.dtype`` says.
        storage: the elements of gradients and results.
        sum: the elements of sums formed in numpy, wide enough to round once at the end.
        in_place: how Lua adds them: 'f' (float32), 'd' (float64), or None where no type of Lua's is exact.
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
        """Real numbers in an element: 2 for complex types."""
        return 2 if self.storage.kind == "c" else 1

    @cached_property
    def in_place_dtype(self) -> np.dtype[Any]:
        """The real numbers that Lua packs and unpacks, little-endian."""
        return np.dtype("<f4" if self.in_place == "f" else "<f8")

    @cached_property
    def is_integer(self) -> bool:
        """Whether results are integers, for which a mean truncates toward zero."""
        return self.storage.kind in "iu"

    def parked_dtype(self, name: object) -> np.dtype[Any]:
        """The dtype behind the name that a parked gradient's header gives; ValueError for any but our two."""
        for dtype in (self.storage, self.sum):
            if name == dtype.name:
                return dtype.newbyteorder("<")
        raise ValueError(f"parked elements of dtype {name!r}")


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
                # TensorFlow's quantised types: numpy sees them as a structure with one field of that name.
                name = f"q{sign}int{bits}"
                add(name, storage, np.int64, "d", limit=EXACT_IN_DOUBLE, public=np.dtype([(name, storage)]))
    add("int64", np.int64, np.int64, None)
    add("uint64", np.uint64, np.uint64, None)
    add("complex64", np.complex64, np.complex64, "f")
    add("complex128", np.complex128, np.complex128, "d")
    return table


TABLE = _table()

_ALIASES = {"half": "float16", "float": "float32", "double": "float64"}


def find(dtype: object) -> DType:
    """The entry for anything that names one: a name, a numpy dtype or scalar type, TensorFlow's DType.

    A reference type of TensorFlow ("float32_ref") and a big-endian numpy dtype stand for the plain one.
    """
    if dtype is None:
        # numpy would read None as float64.
        raise InvalidArgumentError(f"dtype must be one of {', '.join(sorted(TABLE))}, not None")
    name: object = dtype if isinstance(dtype, str) else None
    if name is None and not isinstance(dtype, (np.dtype, type)):
        # TensorFlow's DType; its numpy dtype for q types is a structure, its name is plain.
        name = getattr(dtype, "name", None)
    if isinstance(name, str):
        name = _ALIASES.get(name, name).removesuffix("_ref")
        if name in TABLE:
            return TABLE[name]
    try:
        numpy_dtype = np.dtype(dtype)  # type: ignore[call-overload]
    except Exception:  # noqa: BLE001 - numpy asks the object, which may raise what it likes
        numpy_dtype = None
    if numpy_dtype is not None:
        native = numpy_dtype.newbyteorder("=")
        for entry in TABLE.values():
            if native == entry.public:
                return entry
    raise InvalidArgumentError(f"dtype must be one of {', '.join(sorted(TABLE))}, not {shown(dtype)}")
