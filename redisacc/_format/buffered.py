"""Buffered gradients: stored one by one, as raw arrays, with a header that describes them.

The parts of a large gradient are staged by plain SET, and then a small script admits them (``lua/buffer.lua``), so that
none of their bytes passes through Lua. A small gradient travels inline, among the script's arguments, and becomes a
field of a hash. That copies it twice, but saves half of the commands and one of the taker's round trips. Everything
that is read back is checked before it is trusted, because anybody who can write to the database may have written it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import msgpack
import numpy as np

from redisacc._data.dtypes import EXACT_IN_DOUBLE, DType
from redisacc._data.gradient import Gradient
from redisacc._data.spec import AccumulatorSpec
from redisacc._data.validation import INT64_MAX, Array
from redisacc._format.keys import Keys
from redisacc._redis.fast_socket import Command
from redisacc._text import printable, shown
from redisacc.errors import CorruptDataError

# Larger parts cost redis-py more copies, smaller ones cost more commands: see docs/measurements.md. The server's
# allocator has blocks of 2 MiB and then of 2.5 MiB, so 64 bytes are left for the string's header and final zero.
PART_BYTES = 2 * 2**20 - 64

# Gradients of up to this many bytes travel inline.
INLINE_BYTES = 64 * 1024

# The expiry of a staged part, in milliseconds, in case no script admits it.
STAGING_MS = 60_000

_HEADER_VERSION = 1

# The lists of lengths in a header, in the order of their parts.
_SECTIONS = ("indices", "counts", "values")
INDEX = np.dtype("<i8")
COUNT = np.dtype("<u8")


@dataclass(slots=True)
class BufferedGradient:
    """A buffered gradient as its entry in the ``buffered`` hash describes it, checked.

    Attributes:
        id: the gradient's id, which is the field of the hash.
        order: its place in the order of arrival.
        dtype: the dtype of its elements, little-endian.
        shape: the shape of its values.
        number: how many gradients it is the sum of.
        inline: whether its bytes are a field of the ``inline`` hash; otherwise they are in parts.
        index_lengths: bytes of each part of the indices.
        count_lengths: bytes of each part of the counts.
        value_lengths: bytes of each part of the values.
    """

    id: str
    order: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    number: int
    inline: bool
    index_lengths: tuple[int, ...]
    count_lengths: tuple[int, ...]
    value_lengths: tuple[int, ...]

    @property
    def sections(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The lengths of the parts in bytes: of the indices, of the counts, and of the values."""
        return self.index_lengths, self.count_lengths, self.value_lengths

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of all parts in bytes, in the order of their keys."""
        return self.index_lengths + self.count_lengths + self.value_lengths

    @property
    def nbytes(self) -> int:
        """The size of the whole gradient in bytes."""
        return sum(self.lengths)


class PartMissingError(Exception):
    """A part of a buffered gradient is missing. The argument is its key."""

    def __str__(self) -> str:
        return f"{self.args[0]} is missing: it was evicted (set maxmemory-policy noeviction) or removed by hand"


def _cut(total: int, unit: int) -> list[int]:
    """Returns the lengths of parts of ``total`` bytes: up to PART_BYTES each, cut between units (rows) if they fit."""
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
        header: the entry for the ``buffered`` hash.
        data: all bytes of an inline gradient, for the ``inline`` hash; else empty.
        lengths: the lengths of the parts in bytes, in their order; empty for an inline gradient.
        commands: the commands that store the parts where the script expects them.
    """

    header: bytes
    data: bytes
    lengths: list[int]
    commands: list[Command]


@lru_cache(maxsize=256)
def _header(
    dtype: np.dtype[Any], shape: tuple[int, ...], number: int, inline: bool, sections: tuple[tuple[int, ...], ...]
) -> bytes:
    """Returns a header for ``_parse_header``. It is cached, because most gradients of an accumulator have the same."""
    packed: bytes = msgpack.packb(
        {
            "version": _HEADER_VERSION,
            "dtype": dtype.name,
            "shape": list(shape),
            "gradients": number,
            "inline": inline,
            **{name: list(lengths) for name, lengths in zip(_SECTIONS, sections, strict=True)},
        }
    )
    return packed


def stage(keys: Keys, gradient_id: str, gradient: Gradient) -> Staged:
    """Prepares a gradient for its way to the server: inline if it is small, in parts otherwise."""
    if gradient.nbytes <= INLINE_BYTES:
        return _stage_inline(gradient)
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


def _stage_inline(gradient: Gradient) -> Staged:
    values = gradient.values
    pieces = (_raw(gradient.indices), _raw(gradient.counts), _raw(values))
    lengths = tuple([(len(piece),) if piece else () for piece in pieces])
    return Staged(_header(values.dtype, values.shape, gradient.number, True, lengths), b"".join(pieces), [], [])


def _raw(array: Array | None) -> bytes:
    """Returns the elements in row-major order, little-endian.

    For a small array, this copy is faster than a view.
    """
    if array is None:
        return b""
    return (array if sys.byteorder == "little" else array.astype(array.dtype.newbyteorder("<"))).tobytes()


def parse(
    keys: Keys, fields: Mapping[bytes, bytes], spec: AccumulatorSpec, round_shape: tuple[int, ...]
) -> list[BufferedGradient]:
    """Returns the buffered gradients of a round, in order of arrival.

    Args:
        keys: the keys of the accumulator.
        fields: all fields of the ``buffered`` hash.
        spec: what the accumulator was created as.
        round_shape: the shape of each dense gradient, or of each row of a sparse one.

    Raises:
        CorruptDataError: redisacc did not write an entry.
    """
    buffered = []
    for field, entry in fields.items():
        try:
            buffered.append(_parse_one(field, entry, spec, round_shape))
        except (ValueError, TypeError, KeyError, OverflowError, msgpack.UnpackException) as error:
            raise CorruptDataError(
                f"{keys.current.buffered}: gradient {shown(field)} has a header that "
                f"redisacc did not write: {printable(str(error), 300)}"
            ) from error
    buffered.sort(key=lambda gradient: gradient.order)
    return buffered


# The fields of BufferedGradient after its order.
_Description = tuple[np.dtype[Any], tuple[int, ...], int, bool, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _parse_one(field: bytes, entry: bytes, spec: AccumulatorSpec, round_shape: tuple[int, ...]) -> BufferedGradient:
    if len(field) > 64 or not field.replace(b"-", b"").isalnum():
        raise ValueError("the field is not an id")
    order, _, packed = entry.partition(b" ")
    if not (order.isdigit() and len(order) <= 15):
        raise ValueError("the order is missing")
    described = _parse_header if len(packed) <= CACHED_BYTES else _parse_header.__wrapped__
    return BufferedGradient(field.decode(), int(order), *described(packed, spec.dtype, spec.is_sparse, round_shape))


# The largest header that is parsed, in bytes. It lists the parts of a gradient of some 400 GB.
LONGEST_HEADER = 2**20
# A header is a dict of lists of numbers: two levels, and eight fields. msgpack bounds strings by the header's length.
_MAX_FIELDS = 16

# Parsed headers of up to this many bytes are cached, because most gradients of an accumulator have the same header.
CACHED_BYTES = 1024


@lru_cache(maxsize=256)
def _parse_header(packed: bytes, dtype: DType, sparse: bool, round_shape: tuple[int, ...]) -> _Description:
    header = _unpacked(packed)
    if not isinstance(header, dict) or header["version"] != _HEADER_VERSION:
        raise ValueError("its version is unknown")
    wire = dtype.buffered_dtype(header["dtype"])
    shape, *sections = (_lengths(header[name], name) for name in ("shape", *_SECTIONS))
    indices, counts, values = sections
    number, inline = header["gradients"], header["inline"]
    if type(number) is not int or not 1 <= number <= EXACT_IN_DOUBLE:
        raise ValueError("its number of gradients is invalid")
    rows = shape[:1] if sparse else []
    if tuple(shape[len(rows) :]) != round_shape or (sparse and not rows):
        raise ValueError(f"its shape is {shown(shape)} in a round of {list(round_shape)}")
    if sum(indices) != (rows[0] * INDEX.itemsize if sparse else 0):
        raise ValueError(f"its indices cannot have {sum(indices)} bytes")
    if sum(counts) != (sum(indices) if number > 1 else 0):
        raise ValueError(f"its counts cannot have {sum(counts)} bytes")
    if sum(values) != math.prod(shape) * wire.itemsize:
        raise ValueError(f"its values cannot have {sum(values)} bytes")
    if not all(map(all, sections)):
        raise ValueError("it has an empty part")
    if type(inline) is not bool or not (inline or indices or values):
        raise ValueError("it is neither inline nor in parts")
    return wire, tuple(shape), number, inline, tuple(indices), tuple(counts), tuple(values)


def _unpacked(packed: bytes) -> Any:
    """Returns what a header holds.

    Raises:
        ValueError: it is too long, too deep or not msgpack.
    """
    if len(packed) > LONGEST_HEADER:
        raise ValueError(f"it has {len(packed)} bytes")
    try:
        return msgpack.unpackb(packed, max_map_len=_MAX_FIELDS, max_ext_len=0)
    except RecursionError:
        # msgpack bounds the depth itself where it is compiled, and otherwise leaves that to Python.
        raise ValueError("it is too deep") from None


def _lengths(value: object, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(v) is int and 0 <= v <= INT64_MAX for v in value):
        raise ValueError(f"{name} is not a list of sizes")
    return value


def part_lengths(entry: bytes) -> list[int] | None:
    """Returns the bytes of each part that an entry of the ``buffered`` hash lists, None if it is unreadable."""
    try:
        header = _unpacked(entry.partition(b" ")[2])
        if header["inline"] is True:
            return []
        return [length for name in _SECTIONS for length in _lengths(header[name], name)]
    except (ValueError, TypeError, KeyError, msgpack.UnpackException):
        return None


def number_of_parts(entry: bytes) -> int | None:
    """Returns how many parts an entry of the ``buffered`` hash lists, for cleaning up; None if it is unreadable."""
    lengths = part_lengths(entry)
    return None if lengths is None else len(lengths)


def listed_part_keys(keys: Keys, field: bytes, entry: bytes) -> list[str]:
    """Returns the keys of all parts that an entry of the ``buffered`` hash lists, for cleaning up; [] if unreadable."""
    gradient = field.decode(errors="replace")
    return [keys.part(gradient, number) for number in range(number_of_parts(entry) or 0)]


def part_keys(keys: Keys, buffered: BufferedGradient) -> list[str]:
    """Returns the keys of all parts of a buffered gradient; an inline one has none."""
    return [] if buffered.inline else [keys.part(buffered.id, number) for number in range(len(buffered.lengths))]
