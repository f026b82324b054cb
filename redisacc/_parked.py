"""Parked gradients: held whole, as raw arrays in string keys, with a header that says what they are.

The client stages a large gradient's parts by plain SET and a small script then takes them in (``lua/park.lua``), so
that none of its bytes passes through Lua. A small one comes with the script's arguments and is a field of a hash: that
copies it twice, and saves half of the commands and a round trip of the taker's. What is read back is checked before it
is believed: anybody who can write to the database may have written it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import msgpack
import numpy as np

from redisacc._arguments import INT64_MAX, Array
from redisacc._dtypes import EXACT_IN_DOUBLE, DType
from redisacc._keys import Keys
from redisacc._link import Link
from redisacc._wire import Command
from redisacc.errors import CorruptDataError

# Larger strings cost redis-py more copies, smaller ones more commands: see docs/measurements.md. A little less than
# 2 MiB, for the server's allocator has blocks of 2 MiB, and the next are of 2.5: a string has a head and a final zero.
PART_BYTES = 2 * 2**20 - 64

# Gradients of up to so many bytes are small; those without any always are.
SMALL_BYTES = 64 * 1024

# A staged part that nobody took in goes after this time.
STAGING_MS = 60_000

_HEADER_VERSION = 1

# Lists of lengths in a header, in the order of their parts.
_SECTIONS = ("indices", "counts", "values")
INDEX = np.dtype("<i8")
COUNT = np.dtype("<u8")


@dataclass(slots=True)
class Gradient:
    """A gradient as it goes to the server and comes back.

    Attributes:
        values: dense: the array. Sparse: the rows, ``[n, *row]``.
        indices: sparse: strictly increasing int64 ``[n]``. Dense: None.
        counts: sparse, and the sum of several gradients: uint64 ``[n]``, how many held each index. Else None.
        number: how many gradients it is the sum of.
        ours: whether the arrays are memory of our own, which may be written to and handed out; a caller's is not.
    """

    values: Array
    indices: Array | None = None
    counts: Array | None = None
    number: int = 1
    ours: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        size: int = self.values.nbytes
        if self.indices is not None:
            size += self.indices.nbytes
        if self.counts is not None:
            size += self.counts.nbytes
        return size


@dataclass(slots=True)
class Parked:
    """A parked gradient as the ``parked`` hash describes it, checked."""

    id: str
    order: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    number: int
    small: bool
    index_lengths: tuple[int, ...]
    count_lengths: tuple[int, ...]
    value_lengths: tuple[int, ...]

    @property
    def sections(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Bytes of each part, of the indices, of the counts and of the values."""
        return self.index_lengths, self.count_lengths, self.value_lengths

    @property
    def lengths(self) -> tuple[int, ...]:
        """Bytes of each part, in the order of their keys."""
        return self.index_lengths + self.count_lengths + self.value_lengths

    @property
    def nbytes(self) -> int:
        return sum(self.lengths)


class PartMissing(Exception):
    """A part isn't there (any more)."""

    def __str__(self) -> str:
        return f"{self.args[0]} is gone: evicted (set maxmemory-policy noeviction) or removed by hand"


def _cut(total: int, unit: int) -> list[int]:
    """Lengths of the parts of ``total`` bytes: about PART_BYTES each, cut between units (rows) where they fit."""
    size = max(PART_BYTES // unit, 1) * unit if 0 < unit <= PART_BYTES else PART_BYTES
    return [min(size, total - start) for start in range(0, total, size)]


def _bytes_of(values: Array | None, dtype: np.dtype[Any]) -> memoryview:
    if values is None:
        return memoryview(b"")
    flat = np.ascontiguousarray(values, dtype).reshape(-1)
    return flat.view(np.uint8).data


class Staged(NamedTuple):
    """A gradient on its way to the server.

    Attributes:
        header: for the ``parked`` hash.
        data: all of a small gradient, for the ``small`` hash.
        lengths: of the parts of a large one.
        commands: what puts the parts where the script expects them.
    """

    header: bytes
    data: bytes
    lengths: list[int]
    commands: list[Command]


@lru_cache(maxsize=256)
def _header(
    dtype: np.dtype[Any], shape: tuple[int, ...], number: int, small: bool, sections: tuple[tuple[int, ...], ...]
) -> bytes:
    """What ``_parse_header`` reads. Kept, because most gradients of an accumulator look the same."""
    packed: bytes = msgpack.packb(
        {
            "version": _HEADER_VERSION,
            "dtype": dtype.name,
            "shape": list(shape),
            "gradients": number,
            "small": small,
            **{name: list(lengths) for name, lengths in zip(_SECTIONS, sections, strict=True)},
        }
    )
    return packed


def stage(keys: Keys, gradient_id: str, gradient: Gradient) -> Staged:
    """Cuts a gradient into what travels."""
    if gradient.nbytes <= SMALL_BYTES:
        return _stage_small(gradient)
    values = gradient.values
    dtype = values.dtype.newbyteorder("<")
    row_bytes = dtype.itemsize * (1 if gradient.indices is None else math.prod(values.shape[1:]))
    sections = [
        (data, _cut(len(data), unit))
        for data, unit in (
            (_bytes_of(gradient.indices, INDEX), INDEX.itemsize),
            (_bytes_of(gradient.counts, COUNT), COUNT.itemsize),
            (_bytes_of(values, dtype), row_bytes),
        )
    ]
    lengths_of = tuple(tuple(lengths) for _, lengths in sections)
    header = _header(values.dtype, values.shape, gradient.number, False, lengths_of)
    commands: list[Command] = []
    for data, lengths in sections:
        start = 0
        for length in lengths:
            part = data[start : start + length]
            commands.append(("SET", keys.staged(gradient_id, len(commands)), part, "PX", STAGING_MS))
            start += length
    return Staged(header, b"", [length for _, lengths in sections for length in lengths], commands)


def _stage_small(gradient: Gradient) -> Staged:
    values = gradient.values
    pieces = (_raw(gradient.indices), _raw(gradient.counts), _raw(values))
    lengths = tuple([(len(piece),) if piece else () for piece in pieces])
    return Staged(_header(values.dtype, values.shape, gradient.number, True, lengths), b"".join(pieces), [], [])


def _raw(array: Array | None) -> bytes:
    """Its elements in row-major order, little-endian. Small ones are copied sooner than looked at through a view."""
    if array is None:
        return b""
    return (array if sys.byteorder == "little" else array.astype(array.dtype.newbyteorder("<"))).tobytes()


def parse(
    keys: Keys, fields: Mapping[bytes, bytes], *, dtype: DType, sparse: bool, round_shape: tuple[int, ...]
) -> list[Parked]:
    """The parked gradients of a round, in order of arrival.

    Raises:
        CorruptDataError: an entry that redisacc didn't write.
    """
    parked = []
    for field, entry in fields.items():
        try:
            parked.append(_parse_one(field, entry, dtype, sparse, round_shape))
        except (ValueError, TypeError, KeyError, OverflowError, msgpack.UnpackException) as error:
            raise CorruptDataError(
                f"{keys.current.parked}: gradient {field[:64].decode(errors='backslashreplace')} has a header that "
                f"redisacc didn't write: {error}"
            ) from error
    parked.sort(key=lambda gradient: gradient.order)
    return parked


# All of Parked behind its order.
_Description = tuple[np.dtype[Any], tuple[int, ...], int, bool, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _parse_one(field: bytes, entry: bytes, dtype: DType, sparse: bool, round_shape: tuple[int, ...]) -> Parked:
    if len(field) > 64 or not field.replace(b"-", b"").isalnum():
        raise ValueError("not an id")
    order, _, packed = entry.partition(b" ")
    if not (order.isdigit() and len(order) <= 15):
        raise ValueError("no order")
    described = _parse_header if len(packed) <= CACHED_BYTES else _parse_header.__wrapped__
    return Parked(field.decode(), int(order), *described(packed, dtype, sparse, round_shape))


# A header says what a gradient looks like, and most gradients of an accumulator look the same. Longer ones aren't kept.
CACHED_BYTES = 1024


@lru_cache(maxsize=256)
def _parse_header(packed: bytes, dtype: DType, sparse: bool, round_shape: tuple[int, ...]) -> _Description:
    header = msgpack.unpackb(packed)
    if not isinstance(header, dict) or header["version"] != _HEADER_VERSION:
        raise ValueError("an unknown version")
    wire = dtype.parked_dtype(header["dtype"])
    shape, *sections = (_lengths(header[name], name) for name in ("shape", *_SECTIONS))
    indices, counts, values = sections
    number, small = header["gradients"], header["small"]
    if type(number) is not int or not 1 <= number <= EXACT_IN_DOUBLE:
        raise ValueError("not a number of gradients")
    rows = shape[:1] if sparse else []
    if tuple(shape[len(rows) :]) != round_shape or (sparse and not rows):
        raise ValueError(f"shape {shape} in a round of {list(round_shape)}")
    if sum(indices) != (rows[0] * INDEX.itemsize if sparse else 0):
        raise ValueError(f"indices of {sum(indices)} bytes")
    if sum(counts) != (sum(indices) if number > 1 else 0):
        raise ValueError(f"counts of {sum(counts)} bytes")
    if sum(values) != math.prod(shape) * wire.itemsize:
        raise ValueError(f"values of {sum(values)} bytes")
    if not all(map(all, sections)):
        raise ValueError("an empty part")
    if type(small) is not bool or not (small or indices or values):
        raise ValueError("neither small nor large")
    return wire, tuple(shape), number, small, tuple(indices), tuple(counts), tuple(values)


def _lengths(value: object, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(v) is int and 0 <= v <= INT64_MAX for v in value):
        raise ValueError(f"{name} is no list of sizes")
    return value


def part_lengths(entry: bytes) -> list[int] | None:
    """Bytes of the parts that an entry of the ``parked`` hash names; None where the entry can't be read."""
    try:
        header = msgpack.unpackb(entry.partition(b" ")[2])
        if header["small"] is True:
            return []
        return [length for name in _SECTIONS for length in _lengths(header[name], name)]
    except (ValueError, TypeError, KeyError, msgpack.UnpackException):
        return None


def number_of_parts(entry: bytes) -> int | None:
    """How many parts an entry of the ``parked`` hash has, for cleaning up; None where the entry can't be read."""
    lengths = part_lengths(entry)
    return None if lengths is None else len(lengths)


def part_keys(keys: Keys, parked: Parked) -> list[str]:
    """The keys of all its parts; a small one has none."""
    return [] if parked.small else [keys.part(parked.id, number) for number in range(len(parked.lengths))]


# What scripts free themselves, in bytes: lua/include/drop.lua.
DROPPED_BYTES = 4 * 2**20


def remove_large(link: Link, keys: Keys, parked: Sequence[Parked]) -> None:
    """Frees what a script has just dropped and left to us: one part to a command, so that others get between.

    The script gave them an expiry, so that nothing stays if this doesn't happen.
    """
    if sum(gradient.nbytes for gradient in parked if not gradient.small) > DROPPED_BYTES:
        link.pipeline([("UNLINK", key) for gradient in parked for key in part_keys(keys, gradient)])
