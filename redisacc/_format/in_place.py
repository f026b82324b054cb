"""The ``sums`` hash: gradients that the server sums in place, as rows that Lua's ``struct`` packs and unpacks.

Each field is an index. Its value is the number of gradients that held the index, a byte that tells the form of the
row, and the sum of their rows. In the form 1, which a row has if a weight of the round differed from 1 when the row was
written, the sum of their weights comes before that; in the form 0, nothing does. A dense section is cut into rows of
``chunk`` elements, which are numbered from 0, and these numbers are its indices. In the gradients of a tree, which have
several sections, the label of the section and a colon come before the index. One more field, ``total``, holds how many
gradients were added, how many rows they had together and, if a weight of the round differs from 1, the sum of their
weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from redisacc._arrays.dtypes import EXACT_IN_DOUBLE, DType
from redisacc._arrays.gradient import Gradient, Section
from redisacc._arrays.spec import AccumulatorSpec, SectionSpec
from redisacc._arrays.validation import Array
from redisacc._arrays.weights import LEAST_WEIGHT, MOST_WEIGHT
from redisacc._format.stored_text import parse_weight
from redisacc._text import EVICTED, shown
from redisacc.errors import CorruptDataError

# The head of a row: how many gradients held it, in 7 bytes, the form and, if that is 1, the sum of their weights. A
# count is far below 2**56, so with the form 0 the first 8 bytes are the count.
_COUNT = np.dtype("<u8")
_WEIGHT = np.dtype("<f8")
_WEIGHTED = np.dtype([("count", _COUNT), ("weight", _WEIGHT)])
_COUNT_BYTES, _IS_WEIGHTED = 7, b"\x01"
# The number of digits of the largest int64.
_DIGITS = 19
# The one field that is not a row: lua/include/sums_total.lua.
_TOTAL = b"total"
_TOTAL_TEXT = re.compile(rb"([0-9]{1,15}) ([0-9]{1,15})(?: ([0-9.e+-]{1,24}))?")

# Up to this number, rows are sorted in Python: with cold caches, numpy's code took longer.
FEW_ROWS = 512


class PackedRows(NamedTuple):
    """A section of a gradient in the form that ``lua/apply.lua`` expects.

    Attributes:
        label: the prefix of the fields of the section.
        element: the type in which Lua adds: "f" or "d".
        limit: the largest magnitude of a sum that is still exact, as text; empty for floating point.
        row_bytes: the length of each row in bytes, as text; the last one may be shorter.
        indices: the indices in ascending order, as decimal numbers separated by ", ". They are text because they become
            names of hash fields, and because an int64 would lose digits as a number in Lua.
        rows: the rows one after the other, little-endian.
    """

    label: str
    element: str
    limit: str
    row_bytes: str
    indices: bytes
    rows: bytes


# Looking up, packing and storing a row costs the server as much as adding this many elements.
ROW_COST = 24

# Multiplying an element by a weight costs the server about as much as adding it.
WEIGHT_COST = 2

# Each further section of a tree's gradient costs as much as three rows, because it is looked up and stored on its own.
SECTION_COST = 3 * ROW_COST


def can_add(spec: AccumulatorSpec) -> bool:
    """Returns whether the server can add the element types of an accumulator exactly."""
    return all(section.dtype.in_place is not None for section in spec.sections)


def pack_rows(
    gradient: Gradient, spec: AccumulatorSpec, limit: int, *, has_weight: bool = False
) -> list[PackedRows] | None:
    """Returns the rows of each sparse section, and of each dense one cut into chunks; None if it must not be added.

    It may if it costs the server no more than ``limit`` elements (0: nothing may), and if each of its elements is exact
    in the type in which Lua adds. Integers of up to 32 bits always are. Only sums of rows can be larger: if a gradient
    repeats an index, its rows were added up beforehand. If it has a weight, by which the server multiplies it, an
    element counts twice.

    Sections without rows are left out: a tree may have thousands of them, and each would cost the server time.
    """
    if not limit:
        return None
    cost = -SECTION_COST
    each = WEIGHT_COST if has_weight else 1
    wanted: list[tuple[Section, SectionSpec, int]] = []
    for section, of in zip(gradient.sections, spec.sections, strict=True):
        size = section.size
        rows = math.ceil(size / spec.chunk) if section.indices is None else len(section.indices)
        if rows:
            cost += each * size + ROW_COST * rows + SECTION_COST
            wanted.append((section, of, rows))
        if cost > limit:
            return None
    packed = []
    for section, of, rows in wanted:
        if of.dtype.limit is not None and not _is_exact(section, of):
            return None
        packed.append(_packed(section, of, spec.chunk, rows))
    return packed


def _is_exact(section: Section, spec: SectionSpec) -> bool:
    dtype = spec.dtype
    if section.dtype == dtype.storage or section.size == 0:
        return True
    values = section.values
    return int(values.min()) >= -EXACT_IN_DOUBLE and int(values.max()) <= EXACT_IN_DOUBLE


def _packed(section: Section, spec: SectionSpec, chunk: int, number: int) -> PackedRows:
    dtype, values = spec.dtype, section.values
    if dtype.components == 2:
        values = np.ascontiguousarray(values).reshape(-1).view(values.real.dtype)
    rows = (values if values.dtype == dtype.in_place_dtype else values.astype(dtype.in_place_dtype)).tobytes()
    row_bytes = dtype.components * dtype.in_place_dtype.itemsize
    if section.indices is None:
        indices = _numbers(number)
        row_bytes *= chunk
    else:
        # The repr of a list without its brackets: making a text of each number and joining them took twice as long.
        indices = str(section.indices.tolist())[1:-1].encode()
        row_bytes *= math.prod(section.shape[1:])
    limit = "" if dtype.limit is None else str(dtype.limit)
    return PackedRows(spec.label, dtype.in_place or "", limit, str(row_bytes), indices, rows)


@lru_cache(maxsize=16)
def _numbers(count: int) -> bytes:
    return str(list(range(count)))[1:-1].encode()


def unpack(fields: Mapping[bytes, bytes], spec: AccumulatorSpec, round_shape: tuple[int, ...], where: str) -> Gradient:
    """Returns the sum in a whole ``sums`` hash, in memory of our own.

    Args:
        fields: all fields of the hash, at least one.
        spec: the specification of the accumulator.
        round_shape: the shape that binds the round.
        where: the hash's name in errors.

    Raises:
        CorruptDataError: the fields are not those that ``total`` promises, or redisacc did not write them.
    """
    rows, number, held, weight = _parse_total(fields, where)
    shapes = spec.section_shapes(round_shape)
    sections, found = [], 0
    for rows_of, section, shape in zip(_by_section(rows, spec, where), spec.sections, shapes, strict=True):
        if section.is_sparse:
            by_weights = spec.normalize == "weights"
            unpacked, rows_held = unpack_rows(rows_of, number, section, shape, where, by_weights=by_weights)
        else:
            unpacked = _unpack_dense(rows_of, (number, weight), section, shape, where, chunk=spec.chunk)
            rows_held = len(rows_of) * number
        found += rows_held
        sections.append(unpacked)
    if found != held:
        raise CorruptDataError(
            f"{where}: only {found} of {held} rows of gradients exist; the others were {EVICTED} or removed by hand"
        )
    return Gradient(tuple(sections), number, weight)


def _by_section(rows: dict[bytes, bytes], spec: AccumulatorSpec, where: str) -> list[dict[bytes, bytes]]:
    """Returns the rows of each section: index → count and packed row."""
    if not spec.sections[0].label:
        return [rows]
    of: dict[bytes, dict[bytes, bytes]] = {section.label.encode(): {} for section in spec.sections}
    for field, row in rows.items():
        label, _, index = field.rpartition(b":")
        if label not in of:
            raise CorruptDataError(f"{where}: {shown(field)} belongs to no leaf of the tree")
        of[label][index] = row
    return list(of.values())


def unpack_rows(
    rows: Mapping[bytes, bytes],
    number: int,
    spec: SectionSpec,
    row_shape: tuple[int, ...],
    where: str,
    *,
    by_weights: bool = True,
) -> tuple[Section, int]:
    """Returns rows of a sparse section, and how many rows of single gradients went into them.

    Args:
        rows: index → head and packed row.
        number: how many gradients were summed in place. No count may exceed it.
        spec: the specification of the section.
        row_shape: the shape of a row.
        where: the hash's name in errors.
        by_weights: whether the counts are sums of weights, if the rows have these.

    Raises:
        CorruptDataError: redisacc did not write these rows.
    """
    dtype = spec.dtype
    if not rows:
        empty = np.empty((0, *row_shape), dtype.sum)
        return Section(empty, np.empty(0, np.int64), np.empty(0, np.uint64), ours=True), 0
    numbers = _parse_indices(rows, where)
    nbytes = math.prod(row_shape) * dtype.components * dtype.in_place_dtype.itemsize
    stored = list(rows.values())
    head: np.dtype[Any] = _COUNT
    if set(map(len, stored)) != {_COUNT.itemsize + nbytes}:
        stored, head = [_weighted(row, nbytes, where) for row in stored], _WEIGHTED
    order = _order(numbers)
    indices = _as_int64([numbers[i] for i in order], where)
    packed = np.frombuffer(b"".join([stored[i] for i in order]), np.uint8).reshape(len(order), head.itemsize + nbytes)
    heads: Array = packed[:, : head.itemsize].copy().view(head).reshape(-1)
    counts = heads if head == _COUNT else heads["count"]
    # Python integers, so that their sum cannot wrap.
    held = counts.tolist()
    if min(held) < 1 or max(held) > number:
        raise CorruptDataError(f"{where}: the count of an index is not between 1 and {number}, the number of gradients")
    if head == _WEIGHTED and by_weights:
        counts = heads["weight"].astype(np.float64)
        if not ((counts >= LEAST_WEIGHT) & (counts <= MOST_WEIGHT)).all():
            raise CorruptDataError(f"{where}: the weight of an index is not one that redisacc writes")
    elements = _elements(packed[:, head.itemsize :].copy().reshape(-1), dtype, where)
    return Section(elements.reshape(len(indices), *row_shape), indices, counts, ours=True), sum(held)


def _weighted(row: bytes, nbytes: int, where: str) -> bytes:
    """Returns a row with a count and a weight as its head. If it has none, all its gradients have the weight 1."""
    count, form = row[:_COUNT_BYTES] + b"\0", row[_COUNT_BYTES : _COUNT.itemsize]
    if len(row) == _WEIGHTED.itemsize + nbytes and form == _IS_WEIGHTED:
        return count + row[_COUNT.itemsize :]
    if len(row) != _COUNT.itemsize + nbytes or form != b"\0":
        raise CorruptDataError(f"{where}: a row has {len(row)} bytes, which is not the length of its form")
    return count + np.array([int.from_bytes(count, "little")], _WEIGHT).tobytes() + row[_COUNT.itemsize :]


def _unpack_dense(
    rows: Mapping[bytes, bytes],
    total: tuple[int, float | None],
    spec: SectionSpec,
    shape: tuple[int, ...],
    where: str,
    *,
    chunk: int,
) -> Section:
    """Returns a dense section. Its rows have ``chunk`` elements, apart from the last one, and the head of the total."""
    dtype, size, (number, weight) = spec.dtype, math.prod(shape), total
    if not size and not rows:
        return Section(np.zeros(shape, dtype.sum), ours=True)
    # A forged shape or chunk may promise any number of bytes, so compare them before allocating anything of that size.
    each = max(min(chunk, size), 1)
    count = -(-size // each)
    last = str(count - 1).encode()
    longest = max(map(len, rows.values()), default=0)
    missing = (count * each - size) * dtype.components * dtype.in_place_dtype.itemsize
    if len(rows) == count and last in rows and longest - len(rows[last]) == missing:
        found, held = unpack_rows({**rows, last: rows[last] + bytes(missing)}, number, spec, (each,), where)
        # Every gradient has every chunk, so their weights agree with the total to the last bit.
        counts = found.counts
        assert found.indices is not None
        assert counts is not None
        is_whole = found.indices[-1] == count - 1 and held == number * count
        if (
            is_whole
            and (counts.dtype == np.float64) == (weight is not None)
            and set(counts.tolist()) == {number if weight is None else weight}
        ):
            return Section(found.arrays[0].reshape(-1)[:size].reshape(shape), ours=True)
    raise CorruptDataError(
        f"{where}: the chunks do not make up a gradient of {size} elements with the counts and weights of the total"
    )


def _parse_total(fields: Mapping[bytes, bytes], where: str) -> tuple[dict[bytes, bytes], int, int, float | None]:
    """Returns the rows of a ``sums`` hash, and the totals that they must add up to.

    The totals are the number of gradients, the number of their rows, and the sum of the weights, None if all are 1.
    """
    rows = dict(fields)
    total = rows.pop(_TOTAL, b"")
    match = _TOTAL_TEXT.fullmatch(total)
    if match is None:
        raise CorruptDataError(
            f"{where}: the field total is {shown(total)}, so the hash was {EVICTED} or removed by hand"
        )
    try:
        weight = None if match[3] is None else parse_weight(match[3].decode())
    except ValueError as error:
        raise CorruptDataError(f"{where}: the field total is {shown(total)}, and {error}") from None
    return rows, int(match[1]), int(match[2]), weight


def _parse_indices(fields: Mapping[bytes, bytes], where: str) -> list[int]:
    """Returns the indices that are the fields of a ``sums`` hash. Only their canonical decimal text is accepted."""
    usual = max(map(len, fields)) <= _DIGITS
    if usual:
        try:
            numbers = list(map(int, fields))
        except ValueError:
            usual = False
        else:
            # The repr of a list without its brackets is the canonical text of all its numbers.
            usual = str(numbers)[1:-1].encode() == b", ".join(fields) and min(numbers) >= 0
    if not usual:
        raise CorruptDataError(f"{where}: {shown(next(filter(_is_no_index, fields)))} is not an index")
    return numbers


def _order(numbers: list[int]) -> list[int]:
    """Returns the places of the numbers, in ascending order of the numbers."""
    if len(numbers) <= FEW_ROWS:
        return sorted(range(len(numbers)), key=numbers.__getitem__)
    order: list[int] = np.array(numbers).argsort().tolist()
    return order


def _as_int64(numbers: list[int], where: str) -> Array:
    try:
        return np.array(numbers, np.int64)
    except OverflowError:
        raise CorruptDataError(f"{where}: an index is above 2**63 - 1") from None


def _is_no_index(field: bytes) -> bool:
    return not field.isdigit() or len(field) > _DIGITS or str(int(field)).encode() != field


def _elements(data: bytearray | Array, dtype: DType, where: str) -> Array:
    """Returns packed real numbers as a flat array of the sum dtype."""
    numbers = np.frombuffer(data, dtype.in_place_dtype)
    if dtype.is_integer:
        if not (np.abs(numbers) <= EXACT_IN_DOUBLE).all() or (numbers != np.trunc(numbers)).any():
            raise CorruptDataError(f"{where}: a sum of {dtype.name} is not an exact integer")
        return numbers.astype(dtype.sum)
    elements: Array = numbers.view(dtype.sum.newbyteorder("<"))
    return elements
