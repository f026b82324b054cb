"""Encodings: gradients of float32 that travel with fewer bytes.

``encoding="bfloat16"`` rounds each element to the nearest bfloat16, ties to even: 2 bytes instead of 4, with 8
significant bits of 24. ``encoding="int8"`` divides the elements, in row-major order, into blocks of BLOCK. A block is a
float32 *scale*, which is the largest magnitude in the block divided by 127, and one int8 for each element, which
multiplies the scale. The last block of a section is filled up. A section of fewer elements than a block stays float32,
because it could become larger. The error of an element is at most (1 + 2**-14) / 254 of the largest magnitude M in its
block: half a step of M / 127, and the rounding of the scale, of its inverse, of the two products and of the result,
which together are less than 764 * 2**-24 of that half step. If the scale would be subnormal, all elements of the block
become zero.

A gradient is encoded once, before anything is sent, so that a request that is sent again has identical bytes. Readers
widen it to float32 before they add it: a bfloat16 is a float32, and the product of an int8 and its scale is rounded
once, as in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast, get_args

import ml_dtypes
import numpy as np

from redisacc._arrays.dtypes import DType
from redisacc._arrays.gradient import Gradient, Section
from redisacc._arrays.spec import AccumulatorSpec
from redisacc._arrays.validation import Array
from redisacc._text import shown
from redisacc.errors import CorruptDataError, InvalidArgumentError

# How elements of float32 travel.
Encoding = Literal["float32", "bfloat16", "int8"]

# The number of elements that share a scale: docs/explanations/benchmarks.md.
BLOCK = 256

# A block as it is stored. A section of float32 whose header says "int8" is a vector of these.
BLOCKS = np.dtype([("scale", "<f4"), ("steps", "i1", (BLOCK,))])

# How many blocks are encoded or decoded at once: 64 Ki elements, which fit into a processor's cache.
_AT_ONCE = 65536 // BLOCK

# The number of elements that are checked together: their truth values stay in the processor's cache.
_CHECKED_AT_ONCE = 1 << 18

# The smallest float32 that bfloat16 rounds to infinity: halfway between the largest finite bfloat16, which is about
# 3.39e38, and the next power of two. A tie goes to the even one, which is infinity.
_INFINITE_IN_BFLOAT16 = np.uint32(0x7F7F8000).view(np.float32)

_FLOAT32 = np.dtype(np.float32)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

_STEPS = np.float32(127)
# A block is sent as zeros if its scale would be a subnormal number, whose few digits would make steps larger than 127.
_SMALLEST_SCALE = np.finfo(np.float32).tiny


def _largest_scale() -> np.float32:
    """Returns the largest float32 whose 127-fold is finite."""
    scale = np.float32(np.finfo(np.float32).max / 127)
    with np.errstate(over="ignore"):
        while np.isinf(scale * _STEPS):
            scale = np.nextafter(scale, np.float32(0))
    return scale


_LARGEST_SCALE = _largest_scale()


def checked_encoding(value: object, dtypes: Sequence[DType]) -> Encoding:
    """Returns how elements of float32 travel.

    Args:
        value: what the caller has given. None means as they are.
        dtypes: the element types of all sections of the accumulator.

    Raises:
        InvalidArgumentError: it is not an encoding, or none of the sections can be encoded so.
    """
    if value is None:
        return "float32"
    known = get_args(Encoding)
    names = {dtype.name for dtype in dtypes}
    if isinstance(value, str):
        if value in known and "float32" in names:
            return cast(Encoding, str(value))
        if names == {value}:
            return "float32"
        if value in known:
            raise InvalidArgumentError(
                f"encoding must be None, not {shown(value)}: only float32 is encoded, and the gradients of this "
                f"accumulator are {', '.join(sorted(names))}"
            )
    raise InvalidArgumentError(f"encoding must be one of {', '.join(known)}, or None, not {shown(value)}")


# Stored sections, which numpy's dtypes describe: a plain one of the elements, or BLOCKS.

# What elements of float32 may be stored as besides float32.
ENCODED = (_BFLOAT16, BLOCKS)


def stored_dtype(dtype: DType, name: object) -> np.dtype[Any]:
    """Returns the little-endian dtype of what a buffered section consists of, given its name in the header.

    Raises:
        ValueError: it is not the name of the storage dtype, of the sum dtype, or of an encoding.
    """
    known = {dtype.storage.name: dtype.storage, dtype.sum.name: dtype.sum}
    if dtype.storage == _FLOAT32:
        known |= {"bfloat16": _BFLOAT16, "int8": BLOCKS}
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"it stores elements as {shown(name)}, and this version of redisacc reads {', '.join(known)}")
    return known[name].newbyteorder("<")


def stored_name(stored: np.dtype[Any]) -> str:
    """Returns the name in a header of what a section consists of."""
    return "int8" if stored == BLOCKS else stored.name


def per_item(stored: np.dtype[Any]) -> int:
    """Returns how many elements an item of a stored section holds."""
    # Comparing dtypes takes longer, and only blocks have fields.
    return 1 if stored.names is None else BLOCK


def stored_bytes(stored: np.dtype[Any], elements: int) -> int:
    """Returns the bytes of a stored section."""
    return elements * stored.itemsize if stored.names is None else -(-elements // per_item(stored)) * stored.itemsize


class BlockSection(Section):
    """A section of float32 that is encoded in blocks.

    Args:
        blocks: the blocks, a vector of BLOCKS.
        shape: the shape of the values.
        indices: as for ``Section``.
        counts: as for ``Section``.
    """

    __slots__ = ()

    def __init__(
        self, blocks: Array, shape: tuple[int, ...], indices: Array | None = None, counts: Array | None = None
    ) -> None:
        super().__init__(blocks, indices, counts)
        self.shape = shape
        self.size = math.prod(shape)

    @property
    def values(self) -> Array:
        """The values as float32."""
        return decode(self.arrays[0], self.size, "a gradient of this process").reshape(self.shape)


def encoded_dtype(dtype: DType, size: int, encoding: Encoding) -> np.dtype[Any]:
    """Returns what ``encode`` makes of a section of that many elements."""
    if dtype.storage != _FLOAT32 or encoding == "float32" or (encoding == "int8" and size < BLOCK):
        return dtype.storage
    return _BFLOAT16 if encoding == "bfloat16" else BLOCKS


def encode(gradient: Gradient, encoding: Encoding, spec: AccumulatorSpec) -> Gradient:
    """Returns a gradient with its sections of float32 encoded, in its own memory. The others stay as they are.

    Args:
        gradient: the gradient. Rows of float16 that were added up are stored as float32, but that is not their type.
        encoding: how it travels.
        spec: what it is a gradient of.

    Raises:
        InvalidArgumentError: "int8", and an element is infinite or NaN.
    """
    if encoding == "float32":
        return gradient
    encoded = {
        number: encode_run(section, encoded_dtype(spec.dtypes[number], section.size, encoding), encoding, name_of)
        for number, section, name_of in _of_float32(gradient, spec)
    }
    sections = [encoded.get(number, section) for number, section in enumerate(gradient.sections)]
    return replace(gradient, sections=tuple(sections))


def encode_run(section: Section, stored: np.dtype[Any], encoding: Encoding, name_of: Callable[[int], str]) -> Section:
    """Returns some elements of a section of float32 as they are stored.

    Args:
        section: the elements. Unless they are the last ones, whole blocks.
        stored: what ``encoded_dtype`` says of the whole section.
        encoding: how they travel: not as float32.
        name_of: given the place of an element, returns what errors call the array that it is in.
    """
    if stored == BLOCKS:
        return _in_blocks(section, name_of)
    if encoding == "int8":
        _check_finite(section, name_of)
        return section
    with np.errstate(all="ignore"):
        arrays = [array.astype(_BFLOAT16, order="C") for array in section.arrays]
    return Section(arrays, section.indices, section.counts)


def check_encodable(gradient: Gradient, encoding: Encoding, spec: AccumulatorSpec) -> None:
    """Raises the errors of ``encode``."""
    if encoding == "int8":
        for _, section, name_of in _of_float32(gradient, spec):
            _check_finite(section, name_of)


def _of_float32(gradient: Gradient, spec: AccumulatorSpec) -> Iterator[tuple[int, Section, Callable[[int], str]]]:
    for number, (section, dtype) in enumerate(zip(gradient.sections, spec.dtypes, strict=True)):
        if dtype.storage == _FLOAT32:
            yield number, section, partial(spec.name_of, number)


def first_not_finite(section: Section, *, rounds: bool = False) -> tuple[int, Any] | None:
    """Returns the place and the value of the first element that is not finite; None means all are.

    Args:
        section: its values are floating-point numbers.
        rounds: whether a float32 that bfloat16 rounds to infinity counts as well.
    """
    start = 0
    for array in section.arrays:
        flat = array.reshape(-1)
        for first in range(0, flat.size, _CHECKED_AT_ONCE):
            some = flat[first : first + _CHECKED_AT_ONCE]
            # NaN is on neither side.
            right = (some > -_INFINITE_IN_BFLOAT16) & (some < _INFINITE_IN_BFLOAT16) if rounds else np.isfinite(some)
            if not np.logical_and.reduce(right):
                place = int(np.argmin(right))
                return start + first + place, some[place]
        start += flat.size
    return None


def _check_finite(section: Section, name_of: Callable[[int], str]) -> None:
    found = first_not_finite(section)
    if found is not None:
        raise InvalidArgumentError(
            f"{name_of(found[0])} must be finite for encoding='int8', but holds {found[1]}: nothing was sent. "
            "encoding='bfloat16' keeps NaN and infinities"
        )


def _in_blocks(section: Section, name_of: Callable[[int], str]) -> Section:
    values = np.ascontiguousarray(section.values).reshape(-1)
    blocks = np.empty(-(-values.size // BLOCK), BLOCKS)
    scratch = np.empty((_AT_ONCE, BLOCK), np.float32)
    for start in range(0, len(blocks), _AT_ONCE):
        some = blocks[start : start + _AT_ONCE]
        rows = values[start * BLOCK : (start + len(some)) * BLOCK]
        if rows.size < some.size * BLOCK:
            rows = np.concatenate([rows, np.zeros(some.size * BLOCK - rows.size, np.float32)])
        if not _encode_blocks(rows.reshape(-1, BLOCK), some, scratch[: len(some)]):
            _check_finite(section, name_of)
    return BlockSection(blocks, section.shape, section.indices, section.counts)


def _encode_blocks(rows: Array, blocks: Array, scratch: Array) -> bool:
    """Encodes rows, one for each block. Returns False if an element is infinite or NaN.

    Args:
        rows: float32 ``[n, BLOCK]``.
        blocks: gets the result.
        scratch: memory like the rows.
    """
    np.abs(rows, out=scratch)
    # NaN is larger than everything else here.
    largest = np.maximum.reduce(scratch, axis=1)
    if not np.logical_and.reduce(np.isfinite(largest)):
        return False
    scale = np.minimum(largest / _STEPS, _LARGEST_SCALE)
    usual = scale >= _SMALLEST_SCALE
    inverse = np.zeros(len(rows), np.float32)
    np.divide(np.float32(1), scale, out=inverse, where=usual)
    blocks["scale"] = np.where(usual, scale, np.float32(0))
    np.multiply(rows, inverse[:, None], out=scratch)
    np.rint(scratch, out=scratch)
    blocks["steps"] = scratch
    return True


def decode(blocks: Array, size: int, where: str) -> Array:
    """Returns the elements of blocks as a vector of float32, in its own memory.

    Args:
        blocks: a vector of BLOCKS.
        size: the number of elements. The padding of the last block is left out.
        where: the source of the blocks, for errors.

    Raises:
        CorruptDataError: a scale is one that redisacc does not write.
    """
    elements = np.empty((len(blocks), BLOCK), np.float32)
    for start in range(0, len(blocks), _AT_ONCE):
        _decode_blocks(blocks[start : start + _AT_ONCE], elements[start : start + _AT_ONCE], where)
    return elements.reshape(-1)[:size]


def decode_by_piece(blocks: Array, size: int, where: str) -> Iterator[tuple[int, Array]]:
    """Yields the elements of blocks in pieces that fit into the processor's cache, each with its first place.

    Each piece is in the same memory as the one before. Arguments and errors are as for ``decode``.
    """
    scratch = np.empty((min(_AT_ONCE, len(blocks)), BLOCK), np.float32)
    for start in range(0, len(blocks), _AT_ONCE):
        some = blocks[start : start + _AT_ONCE]
        _decode_blocks(some, scratch[: len(some)], where)
        first = start * BLOCK
        yield first, scratch.reshape(-1)[: min(len(some) * BLOCK, size - first)]


def _decode_blocks(blocks: Array, elements: Array, where: str) -> None:
    scales = blocks["scale"]
    # NaN is neither.
    foreign = ~((scales >= 0) & (scales <= _LARGEST_SCALE))
    if np.logical_or.reduce(foreign):
        scale = scales[foreign][0]
        raise CorruptDataError(
            f"{where}: a block of int8 has the scale {scale}, but scales are from 0 to {_LARGEST_SCALE}"
        )
    np.multiply(blocks["steps"], scales[:, None], out=elements, dtype=np.float32)
