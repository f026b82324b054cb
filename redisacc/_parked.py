"""Parked gradients: held whole, as raw arrays in string keys, with a header that says what they are.

The client stages a large gradient's parts by plain SET and a small script then takes them in (``lua/park.lua``), so
that none of its bytes passes through Lua. A small one comes with the script's arguments and is a field of a hash: that
copies it twice, and saves half of the commands and a round trip of the taker's. What is read back is checked before it
is believed: anybody who can write to the database may have written it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import msgpack
import numpy as np

from redisacc._arguments import INT64_MAX, Array
from redisacc._dtypes import EXACT_IN_DOUBLE, DType
from redisacc._keys import Keys, RoundKeys
from redisacc._link import Link
from redisacc._wire import Command
from redisacc.errors import CorruptDataError

# Larger strings cost redis-py more copies, smaller ones more commands: see docs/measurements.md.
PART_BYTES = 2 * 2**20

# Gradients of up to so many bytes are small.
SMALL_BYTES = 64 * 1024

# A staged part that nobody took in goes after this time.
STAGING_MS = 60_000

# Small gradients that one command fetches.
SMALL_FIELDS = 16

# What is fetched in one round trip, about.
FETCH_BYTES = 16 * 2**20

# Headers that announce more than this are compared with what the server has before memory is set aside.
TRUSTED_BYTES = 64 * 2**20

_HEADER_VERSION = 1

# Lists of lengths in a header, in the order of their parts.
_SECTIONS = ("indices", "counts", "values")
_INDEX = np.dtype("<i8")
_COUNT = np.dtype("<u8")


@dataclass(frozen=True)
class Gradient:
    """A gradient as it goes to the server and comes back.

    Attributes:
        values: dense: the array. Sparse: the rows, ``[n, *row]``.
        indices: sparse: strictly increasing int64 ``[n]``. Dense: None.
        counts: sparse, and the sum of several gradients: uint64 ``[n]``, how many held each index. Else None.
        number: how many gradients it is the sum of.
        ours: whether the values are memory of our own, which may be written to; a caller's is not.
    """

    values: Array
    indices: Array | None = None
    counts: Array | None = None
    number: int = 1
    ours: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in (self.values, self.indices, self.counts) if array is not None)


@dataclass(frozen=True)
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


_NOTHING: Mapping[bytes, bytes] = MappingProxyType({})


class PartMissing(Exception):
    """A part isn't there (any more)."""


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


def stage(keys: Keys, gradient_id: str, gradient: Gradient) -> Staged:
    """Cuts a gradient into what travels."""
    values = gradient.values
    dtype = values.dtype.newbyteorder("<")
    row_bytes = dtype.itemsize * (1 if gradient.indices is None else math.prod(values.shape[1:]))
    sections = [
        (data, _cut(len(data), unit))
        for data, unit in (
            (_bytes_of(gradient.indices, _INDEX), _INDEX.itemsize),
            (_bytes_of(gradient.counts, _COUNT), _COUNT.itemsize),
            (_bytes_of(values, dtype), row_bytes),
        )
    ]
    small = sum(len(data) for data, _ in sections) <= SMALL_BYTES
    header = msgpack.packb(
        {
            "version": _HEADER_VERSION,
            "dtype": values.dtype.name,
            "shape": list(values.shape),
            "gradients": gradient.number,
            "small": small,
            **{name: lengths for name, (_, lengths) in zip(_SECTIONS, sections, strict=True)},
        }
    )
    if small:
        return Staged(header, b"".join(data for data, _ in sections), [], [])
    commands: list[Command] = []
    for data, lengths in sections:
        start = 0
        for length in lengths:
            part = data[start : start + length]
            commands.append(("SET", keys.staged(gradient_id, len(commands)), part, "PX", STAGING_MS))
            start += length
    return Staged(header, b"", [length for _, lengths in sections for length in lengths], commands)


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
    if sum(indices) != (rows[0] * _INDEX.itemsize if sparse else 0):
        raise ValueError(f"indices of {sum(indices)} bytes")
    if sum(counts) != (sum(indices) if number > 1 else 0):
        raise ValueError(f"counts of {sum(counts)} bytes")
    if sum(values) != math.prod(shape) * wire.itemsize:
        raise ValueError(f"values of {sum(values)} bytes")
    if not all(map(all, sections)):
        raise ValueError("an empty part")
    if type(small) is not bool:
        raise ValueError("neither small nor large")
    return wire, tuple(shape), number, small, tuple(indices), tuple(counts), tuple(values)


def _lengths(value: object, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(v) is int and 0 <= v <= INT64_MAX for v in value):
        raise ValueError(f"{name} is no list of sizes")
    return value


def number_of_parts(entry: bytes) -> int | None:
    """How many parts an entry of the ``parked`` hash has, for cleaning up; None where the entry can't be read."""
    try:
        header = msgpack.unpackb(entry.partition(b" ")[2])
        return 0 if header["small"] is True else sum(len(header[name]) for name in _SECTIONS)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException):
        return None


def part_keys(keys: Keys, parked: Parked) -> list[str]:
    """The keys of all its parts; a small one has none."""
    return [] if parked.small else [keys.part(parked.id, number) for number in range(len(parked.lengths))]


# What scripts don't free themselves, in bytes: lua/include/drop.lua.
LARGE_BYTES = 65536


def remove_large(link: Link, keys: Keys, parked: Sequence[Parked]) -> None:
    """Frees the large parts of gradients that a script has just dropped: one to a command, so that others get between.

    The script gave them an expiry, so that nothing stays if this doesn't happen.
    """
    large = [
        ("UNLINK", key)
        for gradient in parked
        if not gradient.small
        for key, length in zip(part_keys(keys, gradient), gradient.lengths, strict=True)
        if length > LARGE_BYTES
    ]
    if large:
        link.pipeline(large)


def fetch(
    link: Link, keys: Keys, of: RoundKeys, parked: Sequence[Parked], known: Mapping[bytes, bytes] = _NOTHING
) -> Iterator[Gradient]:
    """Reads parked gradients, several to a round trip, in the order given.

    Args:
        of: the round that they are in.
        known: fields of its ``small`` hash that have been read already.

    Raises:
        PartMissing: a part isn't there.
        CorruptDataError: a part has another length than its header says, or indices that aren't ascending.
    """
    batch: list[Parked] = []
    size = 0
    for gradient in parked:
        batch.append(gradient)
        size += gradient.nbytes
        if size >= FETCH_BYTES or len(batch) >= 1000:
            yield from _fetch_batch(link, keys, of, batch, known)
            batch, size = [], 0
    if batch:
        yield from _fetch_batch(link, keys, of, batch, known)


def _fetch_batch(
    link: Link, keys: Keys, of: RoundKeys, batch: list[Parked], known: Mapping[bytes, bytes]
) -> Iterator[Gradient]:
    small = _fetch_small(link, of, [gradient for gradient in batch if gradient.small], known)
    large = _fetch_large(link, keys, [gradient for gradient in batch if not gradient.small])
    for gradient in batch:
        indices, counts, values = small[gradient.id] if gradient.small else large[gradient.id]
        where = f"{of.small} {gradient.id}" if gradient.small else keys.part(gradient.id, 0)
        rows = values.view(gradient.dtype).reshape(gradient.shape)
        ascending = indices.view(_INDEX)
        if len(ascending) and (ascending[0] < 0 or not (ascending[1:] > ascending[:-1]).all()):
            raise CorruptDataError(f"{where}: indices that aren't ascending")
        held = counts.view(_COUNT) if gradient.count_lengths else None
        if held is not None and not ((held >= 1) & (held <= gradient.number)).all():
            raise CorruptDataError(f"{where}: counts of a sum of {gradient.number} gradients")
        yield Gradient(rows, ascending, held, gradient.number, ours=rows.flags.writeable)


# Indices, counts and values of a gradient, as bytes.
_Sections = tuple[Array, Array, Array]


def _fetch_small(link: Link, of: RoundKeys, batch: list[Parked], known: Mapping[bytes, bytes]) -> dict[str, _Sections]:
    unknown = [gradient.id for gradient in batch if gradient.nbytes and gradient.id.encode() not in known]
    found = dict(known)
    # Several commands, none of which holds the server long.
    wanted = [unknown[start : start + SMALL_FIELDS] for start in range(0, len(unknown), SMALL_FIELDS)]
    answers = link.pipeline([("HMGET", of.small, *ids) for ids in wanted]) if wanted else []
    for ids, replies in zip(wanted, answers, strict=True):
        found.update(zip(map(str.encode, ids), replies, strict=True))
    sections = {}
    for gradient in batch:
        data = found.get(gradient.id.encode(), None if gradient.nbytes else b"")
        _check_length(f"{of.small} {gradient.id}", -1 if data is None else len(data), gradient.nbytes)
        whole = np.frombuffer(data or b"", np.uint8)
        first, second = sum(gradient.index_lengths), sum(gradient.index_lengths) + sum(gradient.count_lengths)
        sections[gradient.id] = whole[:first], whole[first:second], whole[second:]
    return sections


def _fetch_large(link: Link, keys: Keys, batch: list[Parked]) -> dict[str, _Sections]:
    if sum(gradient.nbytes for gradient in batch) > TRUSTED_BYTES:
        _check_lengths(link, keys, batch)
    found: dict[str, _Sections] = {}
    wanted: list[tuple[str, memoryview]] = []
    for gradient in batch:
        indices, counts, values = (np.empty(sum(lengths), np.uint8) for lengths in gradient.sections)
        found[gradient.id] = indices, counts, values
        arrays = zip(found[gradient.id], gradient.sections, strict=True)
        views = [view for array, lengths in arrays for view in _split(array, lengths)]
        wanted += zip(part_keys(keys, gradient), views, strict=True)
    lengths = link.fetch([key for key, _ in wanted], [view for _, view in wanted]) if wanted else []
    for (key, view), length in zip(wanted, lengths, strict=False):
        _check_length(key, length, len(view))
    return found


def _split(memory: Array, lengths: Sequence[int]) -> list[memoryview]:
    whole, views, start = memory.data, [], 0
    for length in lengths:
        views.append(whole[start : start + length])
        start += length
    return views


def _check_lengths(link: Link, keys: Keys, batch: list[Parked]) -> None:
    """Asks the server for the lengths: a forged header must not make us allocate what isn't there."""
    wanted = [(key, length) for g in batch for key, length in zip(part_keys(keys, g), g.lengths, strict=True)]
    for (key, length), actual in zip(wanted, link.pipeline([("STRLEN", key) for key, _ in wanted]), strict=True):
        _check_length(key, actual or -1, length)


def _check_length(key: str, actual: int, expected: int) -> None:
    if actual == -1:
        raise PartMissing(key)
    if actual != expected:
        raise CorruptDataError(f"{key} has {actual} bytes, and its header says {expected}")
