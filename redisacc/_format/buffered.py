"""Buffered gradients: stored one by one, as raw arrays, with a header that describes them.

The arrays of a gradient follow one another in its *bytes*: for each sparse section the indices, the counts if it is a
sum, and the values; then the values of each dense section; each at the next multiple of eight. If there are few bytes,
they travel inline, among the script's arguments, and become a field of a hash. That copies them twice, but saves half
of the commands and one of the taker's round trips. Otherwise they are cut into parts, the sparse sections apart from
the dense ones. The parts are written by plain SET, and then a small script counts them (``lua/commit.lua``), so that
none of them passes through Lua.

Everything that is read back is checked before it is trusted, because any client with write access may have written it.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import msgpack
import numpy as np

from redisacc._arrays.dtypes import EXACT_IN_DOUBLE
from redisacc._arrays.encodings import BLOCKS, decode, stored_bytes, stored_dtype, stored_name
from redisacc._arrays.gradient import Gradient, Section
from redisacc._arrays.spec import AccumulatorSpec, SectionSpec
from redisacc._arrays.validation import INT64_MAX, Array
from redisacc._arrays.weights import LEAST_WEIGHT, MOST_WEIGHT
from redisacc._format import attempts
from redisacc._format.keys import Keys
from redisacc._format.part_cut import ALIGNMENT as ELEMENTS_ALIGNMENT
from redisacc._format.part_cut import (
    COUNT,
    LEAST_ALIGNED,
    BufferedSection,
    Cut,
    Dense,
    ElementCut,
    cut_of,
    part_lengths,
)
from redisacc._format.part_cut import GRADIENT_ALIGNMENT as ALIGNMENT
from redisacc._format.stored_text import parse_weight, weight_text
from redisacc._text import EVICTED, printable, shown
from redisacc._wire.sockets import Pieces
from redisacc.errors import CorruptDataError, InvalidArgumentError

# A taker adds a part as soon as it has arrived, so a gradient is cut into about this many.
PARTS = 8
# Smaller parts cost more commands; larger ones leave the processor's cache before they are added, and cost redis-py
# more copies: see docs/explanations/benchmarks.md. The server's allocator has blocks of these sizes plus 64 bytes,
# which are left for the string's header and its final zero.
PART_SIZES = tuple([size * 2**10 - 64 for size in (256, 512, 1024, 2048)])

# Gradients of up to this many bytes travel inline, unless a handle has another limit.
INLINE_BYTES = 64 * 1024

# A gradient of so many times the limit is announced before it is uploaded, so that a waiting taker adds its parts up
# while they arrive. Smaller ones wake the taker only together.
ANNOUNCED_INLINES = 8
ANNOUNCED_BYTES = ANNOUNCED_INLINES * INLINE_BYTES

# The expiry with which a part is written, in milliseconds, in case no script counts it; and how slowly parts that are
# sent together may be uploaded, in bytes per millisecond, so that the first ones last until the last ones are there.
PART_MS = 60_000
SLOWEST_UPLOAD = 1000

# The length of a part in a partition is a multiple of this many bytes, the size of the largest element.
PART_ALIGNMENT = 16

_HEADER_VERSION = 2
# The version of a sum with weights in its values. Earlier versions of redisacc know no weights, and refuse it.
_WEIGHTED_VERSION = 3

INDEX = np.dtype("<i8")
WEIGHT = np.dtype("<f8")


def part_ms(nbytes: int) -> int:
    """Returns the expiry of parts, in milliseconds.

    Args:
        nbytes: how many bytes are sent together with them.
    """
    return max(PART_MS, nbytes // SLOWEST_UPLOAD)


@dataclass(slots=True)
class BufferedGradient:
    """A buffered gradient as its entry in the ``buffered`` hash describes it, checked.

    Attributes:
        id: the gradient's id, which is the field of the hash.
        order: its place in the order of the round.
        factor: the factor to apply to its values: its weight. In a sum, the values already contain the weights.
        number: the number of gradients in it, if it is a sum; otherwise 1.
        weight: the sum of their weights, if it is a sum and one of them differs from 1; else None.
        inline: whether its bytes are a field of the ``inline`` hash; otherwise they are in parts.
        sections: the places of its sections in its bytes.
        lengths: the length of each part in bytes; empty for an inline gradient.
        sparse_bytes: how many bytes come before the first dense section.
        nbytes: the length of all its bytes.
        cut: the contents of its parts, as ``cut_of`` returns them; None if it is inline, or cut in another way.
        header_digest: a digest of the header. Gradients of one round with the same digest are laid out in the same way.
    """

    id: str
    order: int
    factor: float
    number: int
    weight: float | None
    inline: bool
    sections: tuple[BufferedSection, ...]
    lengths: tuple[int, ...]
    sparse_bytes: int
    nbytes: int
    header_digest: str
    cut: tuple[int, Cut] | None

    @property
    def total_weight(self) -> float:
        """The sum of the weights of the gradients that it is the sum of."""
        return self.number * self.factor if self.weight is None else self.weight


class PartMissingError(Exception):
    """A part of a buffered gradient, or of a version of parameters, is missing. The argument is its key."""

    @property
    def gradient(self) -> str:
        """The id of the gradient."""
        return str(self.args[0]).split(":")[-2]

    def __str__(self) -> str:
        return f"{self.args[0]} is missing: it was {EVICTED} or removed by hand"


def _lay_out(
    described: Sequence[tuple[np.dtype[Any], tuple[int, ...]]],
    specs: Sequence[SectionSpec],
    number: int,
    counts_dtype: np.dtype[Any],
) -> tuple[tuple[BufferedSection, ...], int, int]:
    """Returns the places of sections in the bytes of a gradient, the bytes before the dense ones, and all bytes.

    Args:
        described: the stored dtype and the shape of the values of each section.
        specs: the specifications of the sections.
        number: the number of gradients in it, if it is a sum; otherwise 1. Sparse sections of a sum have counts.
        counts_dtype: the dtype of these counts.
    """
    end = 0

    def place(nbytes: int) -> tuple[int, int]:
        nonlocal end
        start = -(-end // ALIGNMENT) * ALIGNMENT if nbytes else end
        end = start + nbytes
        return start, end

    sections: list[Any] = [None] * len(specs)
    sparse_bytes = 0
    for is_sparse in (True, False):
        if not is_sparse and any(map(_has_values, described, specs)):
            end += -end % ALIGNMENT
        sparse_bytes = end
        for at, ((dtype, shape), spec) in enumerate(zip(described, specs, strict=True)):
            if spec.is_sparse == is_sparse:
                indices = place(shape[0] * INDEX.itemsize if is_sparse else 0)
                counts = place(shape[0] * COUNT.itemsize if is_sparse and number > 1 else 0)
                values = place(stored_bytes(dtype, math.prod(shape)))
                sections[at] = BufferedSection(is_sparse, dtype, shape, indices, counts, values, counts_dtype)
    return tuple(sections), sparse_bytes, end


def _has_values(described: tuple[np.dtype[Any], tuple[int, ...]], spec: SectionSpec) -> bool:
    """Returns whether a section is dense and has elements."""
    return not spec.is_sparse and math.prod(described[1]) > 0


class PackedGradient(NamedTuple):
    """The bytes of a gradient, as they are sent.

    Attributes:
        header: the entry for the ``buffered`` hash.
        data: all bytes of an inline gradient, for the ``inline`` hash; else empty.
        parts: the bytes of each part, in their order; empty for an inline gradient.
        lengths: the length of each part in bytes.
    """

    header: bytes
    data: bytes
    parts: Sequence[memoryview | Pieces] = ()
    lengths: Sequence[int] = ()


@lru_cache(maxsize=256)
def header_of(
    described: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...],
    parts: tuple[int, ...],
    number: int = 1,
    weight: float | None = None,
) -> bytes:
    """Returns a header for ``_parse_header``. It is cached, because most gradients of an accumulator have the same.

    Args:
        described: the stored dtype and the shape of the values of each section.
        parts: the length of each part in bytes; empty for an inline gradient.
        number: how many gradients it is the sum of.
        weight: the sum of their weights; None if all are 1.
    """
    packed: bytes = msgpack.packb(
        {
            "version": _HEADER_VERSION if weight is None else _WEIGHTED_VERSION,
            "sections": [[stored_name(dtype), list(shape)] for dtype, shape in described],
            "gradients": number,
            **({} if weight is None else {"weight": weight}),
            "parts": list(parts),
        }
    )
    return packed


def pack(keys: Keys, gradient: Gradient, inline_bytes: int = INLINE_BYTES) -> PackedGradient:
    """Returns the bytes of a gradient: inline if there are so few, otherwise in parts for the partitions of the keys.

    Raises:
        InvalidArgumentError: it is too large for partitions.
    """
    data, parts = b"", list[memoryview | Pieces]()
    if gradient.nbytes > inline_bytes:
        parts = _parts(gradient, len(keys.partitions) or 1)
        if keys.partitions and len(parts) > attempts.MOST_PARTS:
            raise InvalidArgumentError(
                f"a gradient in partitions must have at most {attempts.MOST_PARTS} parts, but this one of "
                f"{gradient.nbytes} bytes has {len(parts)}"
            )
    else:
        sparse, dense = _arrays(gradient)
        arrays = [*sparse, *dense]
        data = b"".join([array.tobytes() for array in arrays[0]] if len(arrays) == 1 else _aligned(arrays))
    lengths = tuple([part.nbytes for part in parts]) if parts else ()
    described = tuple([(section.dtype, section.shape) for section in gradient.sections])
    return PackedGradient(header_of(described, lengths, gradient.number, gradient.weight), data, parts, lengths)


# After this many bytes of parts, a message says that they have arrived. It takes a taker about as long as fetching
# 64 KiB.
MESSAGE_BYTES = PART_SIZES[0] // 2


def part_size(nbytes: int, partitions: int = 1) -> int:
    """Returns the length of the parts into which that many bytes are cut.

    Args:
        nbytes: how many bytes, before elements are encoded.
        partitions: among how many partitions the parts are spread. They get equally many, so that the same one always
            has the same elements and no node has more to do than the others.
    """
    for size in PART_SIZES:
        if size * PARTS >= nbytes:
            break
    if partitions == 1:
        return size - size % ELEMENTS_ALIGNMENT if size >= LEAST_ALIGNED else size
    parts = partitions * max(-(-nbytes // (size * partitions)), 1)
    size = max(-(-nbytes // parts), 1)
    # No part ends within an element.
    alignment = ELEMENTS_ALIGNMENT if size >= LEAST_ALIGNED else PART_ALIGNMENT
    return -(-size // alignment) * alignment


def _parts(gradient: Gradient, partitions: int = 1) -> list[memoryview | Pieces]:
    """Returns the parts of a gradient. The sparse sections have parts of their own."""
    sparse, dense = _arrays(gradient)
    parts: list[memoryview | Pieces] = []
    if sparse:
        # They are padded, so that the dense sections are aligned.
        pieces = _aligned([*sparse, ()] if dense else sparse)
        nbytes = sum(map(len, pieces))
        parts += cut(pieces, _sparse_lengths(nbytes, partitions))
    if dense:
        parts += cut(_aligned(dense), _dense_lengths(gradient, partitions))
    return parts


def _sparse_lengths(nbytes: int, partitions: int) -> list[int]:
    """Returns the length of each part of the sparse sections: as many in each partition, so that dense parts follow."""
    size = part_size(nbytes, partitions)
    if partitions == 1:
        return part_lengths(nbytes, size)
    # Sparse sections are put together before they are used, so a part may end anywhere.
    number = partitions * -(-nbytes // (size * partitions))
    least, rest = divmod(nbytes, number)
    return [least + (place < rest) for place in range(number) if least or place < rest]


def _dense_lengths(gradient: Gradient, partitions: int) -> list[int]:
    """Returns the length of each part of the dense sections."""
    sections = [section for section in gradient.sections if section.indices is None and section.size]
    dense = tuple([Dense(section.dtype, math.prod(section.shape)) for section in sections])
    return list(dense_cut(dense, partitions).lengths)


@lru_cache(maxsize=64)
def dense_cut(sections: tuple[Dense, ...], partitions: int) -> ElementCut:
    """Returns how dense sections are cut into parts.

    Args:
        sections: the dense sections.
        partitions: among how many partitions the parts are spread; 1: all are in one slot.
    """
    nbytes = sum([section.size * section.width for section in sections])
    return ElementCut(sections, part_size(nbytes, partitions), runts=partitions > 1)


def _bytes_of(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _arrays(gradient: Gradient) -> tuple[list[Sequence[Array]], list[Sequence[Array]]]:
    """Returns the arrays of the sparse sections and of the dense ones, little-endian. Empty ones are left out.

    Each array may be in several pieces.
    """
    sparse: list[Sequence[Array]] = []
    dense: list[Sequence[Array]] = []
    for section in gradient.sections:
        if section.indices is None:
            dense.append(section.arrays)
        else:
            counts = [] if section.counts is None or gradient.number == 1 else [(section.counts,)]
            sparse += [(section.indices,), *counts, section.arrays]
    return _little_endian(sparse), _little_endian(dense)


def _little_endian(arrays: list[Sequence[Array]]) -> list[Sequence[Array]]:
    if not arrays:
        return arrays
    found = [
        [array.astype(array.dtype.newbyteorder("<"), copy=False) for array in pieces if array.nbytes]
        for pieces in arrays
    ]
    return [pieces for pieces in found if pieces]


def _aligned(arrays: Sequence[Sequence[Array]]) -> list[memoryview]:
    """Returns the bytes of arrays, with zeros between them, so that each begins at a multiple of ALIGNMENT."""
    aligned: list[memoryview] = []
    end = 0
    for pieces in arrays:
        if end % ALIGNMENT:
            aligned.append(memoryview(bytes(-end % ALIGNMENT)))
            end += -end % ALIGNMENT
        for array in pieces:
            aligned.append(_bytes_of(array))
            end += array.nbytes
    return aligned


def cut(pieces: Sequence[memoryview], lengths: Sequence[int]) -> list[memoryview | Pieces]:
    """Cuts bytes, given piece after piece, into parts of these lengths. Nothing is copied."""
    parts: list[memoryview | Pieces] = []
    left = iter(pieces)
    piece = memoryview(b"")
    for length in lengths:
        waiting: list[memoryview] = []
        missing = length
        while missing:
            piece = piece or next(left)
            waiting.append(piece[:missing])
            missing -= len(waiting[-1])
            piece = piece[len(waiting[-1]) :]
        parts.append(waiting[0] if len(waiting) == 1 else Pieces(waiting))
    return parts


def parse(
    keys: Keys, fields: Mapping[bytes, bytes], spec: AccumulatorSpec, round_shape: tuple[int, ...]
) -> list[BufferedGradient]:
    """Returns the buffered gradients of a round, in the order of their places.

    Args:
        keys: the keys of the accumulator.
        fields: all fields of the ``buffered`` hash.
        spec: the specification of the accumulator.
        round_shape: the shape that binds the round.

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
    buffered.sort(key=attrgetter("order"))
    return buffered


# The fields of BufferedGradient after its order.
_Description = tuple[
    int, float | None, bool, tuple[BufferedSection, ...], tuple[int, ...], int, int, str, tuple[int, Cut] | None
]


def _parse_one(field: bytes, entry: bytes, spec: AccumulatorSpec, round_shape: tuple[int, ...]) -> BufferedGradient:
    if len(field) > 64 or not field.replace(b"-", b"").isalnum():
        raise ValueError("the field is not an id")
    place, _, packed = entry.partition(b" ")
    order, has_factor, factor_text = place.partition(b"*")
    if not (order.isdigit() and len(order) <= 15):
        raise ValueError("the order is missing")
    factor = parse_weight(factor_text.decode()) if has_factor else 1.0
    described = _parse_header if len(packed) <= CACHED_BYTES else _parse_header.__wrapped__
    gradient = BufferedGradient(field.decode(), int(order), factor, *described(packed, spec, round_shape))
    if factor != 1 and (gradient.number > 1 or not spec.can_weigh):
        raise ValueError("it has a weight, and is a sum or has integers")
    return gradient


# The largest header that is parsed, in bytes: a tree of 100,000 leaves needs about four times as much as one of 10,000.
LONGEST_HEADER = 4 * 2**20
# A header is a dict with a few fields. msgpack bounds strings and lists by the header's length.
_MAX_FIELDS = 16

# Parsed headers of up to this many bytes are cached, because most gradients of an accumulator have the same header.
CACHED_BYTES = 1024


@lru_cache(maxsize=256)
def _parse_header(packed: bytes, spec: AccumulatorSpec, round_shape: tuple[int, ...]) -> _Description:
    header = _unpacked(packed)
    if not isinstance(header, dict) or header["version"] not in (_HEADER_VERSION, _WEIGHTED_VERSION):
        raise ValueError("its version is unknown")
    number, listed, weight = header["gradients"], header["sections"], None
    if header["version"] == _WEIGHTED_VERSION:
        weight = header["weight"]
        if type(weight) is not float or not LEAST_WEIGHT <= weight <= MOST_WEIGHT or not spec.can_weigh:
            raise ValueError("its weight is invalid")
    if type(number) is not int or not 1 <= number <= EXACT_IN_DOUBLE:
        raise ValueError("its number of gradients is invalid")
    if not isinstance(listed, list) or len(listed) != len(spec.sections):
        raise ValueError("it has another number of sections")
    shapes = spec.section_shapes(round_shape)
    described = [_described(*parts) for parts in zip(listed, spec.sections, shapes, strict=True)]
    counts_dtype = COUNT if weight is None or spec.normalize == "count" else WEIGHT
    sections, sparse_bytes, nbytes = _lay_out(described, spec.sections, number, counts_dtype)
    parts = _sizes(header["parts"], "parts")
    if parts and (sum(parts) != nbytes or not all(parts)):
        raise ValueError(f"its parts cannot have {sum(parts)} bytes")
    digest = hashlib.blake2b(packed, digest_size=16).hexdigest()
    cut_into = cut_of(sections, parts, sparse_bytes) if parts else None
    return number, weight, not parts, sections, tuple(parts), sparse_bytes, nbytes, digest, cut_into


def _described(listed: Any, spec: SectionSpec, shape: tuple[int, ...]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Returns the stored dtype and the shape of the values of a section, checked.

    Args:
        listed: the entry of the section in the header.
        spec: the specification of the section.
        shape: the shape of the section, or of each of its rows.
    """
    if not isinstance(listed, list) or len(listed) != 2:
        raise ValueError("a section is not a pair")
    dtype = stored_dtype(spec.dtype, listed[0])
    found = _sizes(listed[1], "shape")
    rows = found[:1] if spec.is_sparse else []
    if tuple(found[len(rows) :]) != shape or (spec.is_sparse and not rows):
        raise ValueError(f"its shape is {shown(found)} in a round of {list(shape)}")
    return dtype, tuple(found)


def _unpacked(packed: bytes) -> Any:
    """Unpacks a header.

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


def _sizes(value: object, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(v) is int and 0 <= v <= INT64_MAX for v in value):
        raise ValueError(f"{name} is not a list of sizes")
    return value


def listed_lengths(entry: bytes) -> list[int] | None:
    """Returns the bytes of each part that an entry of the ``buffered`` hash lists, None if it is unreadable."""
    try:
        return _sizes(_unpacked(entry.partition(b" ")[2])["parts"], "parts")
    except (ValueError, TypeError, KeyError, msgpack.UnpackException):
        return None


def number_of_parts(entry: bytes) -> int | None:
    """Returns how many parts an entry of the ``buffered`` hash lists, for cleaning up; None if it is unreadable."""
    lengths = listed_lengths(entry)
    return None if lengths is None else len(lengths)


def listed_part_keys(keys: Keys, field: bytes, entry: bytes) -> list[str]:
    """Returns the keys of all parts that an entry of the ``buffered`` hash lists, for cleaning up; [] if unreadable."""
    gradient = field.decode(errors="replace")
    return keys.parts(gradient, number_of_parts(entry) or 0)


def part_keys(keys: Keys, buffered: BufferedGradient) -> list[str]:
    """Returns the keys of all parts of a buffered gradient; an inline one has none."""
    return keys.parts(buffered.id, len(buffered.lengths))


def section_view(section: BufferedSection, data: Any, where: str) -> Section:
    """Returns a section of a gradient, given its bytes. Its arrays are views of the bytes, or decoded blocks.

    Indices and counts are not yet checked.

    Args:
        section: the section.
        data: a buffer with the bytes of the gradient, at least up to the end of the section.
        where: the source of the bytes, for errors.

    Raises:
        CorruptDataError: a block has a scale that redisacc does not write.
    """
    has_counts = section.counts[0] < section.counts[1]
    values = _view(data, section.dtype, section.values)
    if section.dtype == BLOCKS:
        values = decode(values, math.prod(section.shape), where)
    return Section(
        values.reshape(section.shape),
        _view(data, INDEX, section.indices) if section.is_sparse else None,
        _view(data, section.counts_dtype, section.counts) if has_counts else None,
    )


def _view(data: Any, dtype: np.dtype[Any], place: tuple[int, int]) -> Array:
    start, stop = place
    # frombuffer refuses to make an array without elements.
    return np.frombuffer(data, dtype, (stop - start) // dtype.itemsize, start) if stop > start else np.empty(0, dtype)


# The digest of gradients, under which a reducer stores their sum. A taker computes that of the gradients in its round
# itself, so it never uses the sum of other gradients, and need not trust any message. It has 16 bytes: two rounds never
# have the same by chance.
DIGEST = re.compile(r"[0-9a-f]{32}")


def digest_of(gradients: Iterable[BufferedGradient]) -> str:
    """Returns the digest of gradients in this order, as hexadecimal digits.

    It covers the id of each, which no two gradients share, its place, its weight, and its header: the number of
    gradients that it is the sum of and their weight, the dtype and shape of each section, and the length of each part.
    """
    found = hashlib.blake2b(digest_size=16)
    for gradient in gradients:
        place = f"{gradient.order}*{weight_text(gradient.factor)}"
        found.update(f"{gradient.id} {place} {gradient.header_digest} ".encode())
    return found.hexdigest()
