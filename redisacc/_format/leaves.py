"""The leaves of trees of values: arrays, the texts that describe them, and their places in a blob."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any

import numpy as np

from redisacc._arrays.dtypes import TABLE, find_dtype
from redisacc._arrays.trees import Structure, parse_structure
from redisacc._arrays.validation import Array, array, shape_text
from redisacc._format.part_cut import GRADIENT_ALIGNMENT, Dense, offsets_of
from redisacc._format.stored_text import parse_round_shape
from redisacc._text import shown
from redisacc._wire.sockets import GATHER_BYTES
from redisacc.errors import InvalidArgumentError

# Every leaf of a blob begins at a multiple of this many bytes, which suits every element type.
ALIGNMENT = 16

# numpy counts the bytes of an array in an int64. Each leaf may have this many, so that no sum over leaves overflows.
MAX_LEAF_BYTES = 2**45

# Ascending ranges of leaf numbers, such as "0-3,7".
_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")

# Besides the element types of gradients, values may be booleans.
_BOOL = np.dtype(np.bool_)


@dataclass(frozen=True)
class Leaf:
    """The dtype and the shape of an array of a tree.

    Attributes:
        dtype: the name of the element type: one of the accumulators', or "bool".
        shape: its shape.
    """

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, values: Array, what: str) -> Leaf:
        """Returns the leaf that describes an array.

        Raises:
            InvalidArgumentError: its elements have no type that redisacc stores, or it is too large.
        """
        if values.dtype == _BOOL:
            leaf = cls("bool", values.shape)
        else:
            try:
                leaf = cls(find_dtype(values.dtype).name, values.shape)
            except InvalidArgumentError:
                known = ", ".join(sorted([*TABLE, "bool"]))
                raise InvalidArgumentError(f"{what} must have one of the dtypes {known}, not {values.dtype}") from None
        if leaf.nbytes > MAX_LEAF_BYTES:
            raise InvalidArgumentError(f"{what} must have at most {MAX_LEAF_BYTES} bytes, not {leaf.nbytes}")
        return leaf

    @classmethod
    def parse(cls, text: str) -> Leaf:
        """Returns the leaf that a text describes.

        Raises:
            ValueError: redisacc did not write this text.
        """
        dtype, _, shape = text.partition(" ")
        dims = parse_round_shape(shape)
        if dims is None or (dtype not in TABLE and dtype != "bool"):
            raise ValueError(f"{shown(text)} does not describe an array")
        leaf = cls(dtype, dims)
        if leaf.nbytes > MAX_LEAF_BYTES:
            raise ValueError(f"{shown(text)} does not describe an array that can exist")
        return leaf

    @property
    def text(self) -> str:
        """Returns the text that describes it, such as "float32 [128,128]"."""
        return f"{self.dtype} {shape_text(self.shape)}"

    @cached_property
    def stored(self) -> np.dtype[Any]:
        """The dtype of its elements in Redis, little-endian."""
        dtype = _BOOL if self.dtype == "bool" else TABLE[self.dtype].storage
        return dtype.newbyteorder("<")

    @cached_property
    def given(self) -> np.dtype[Any]:
        """The dtype of the arrays that readers get."""
        return _BOOL if self.dtype == "bool" else TABLE[self.dtype].public

    @cached_property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.stored.itemsize

    @cached_property
    def row_bytes(self) -> int:
        """The size of a row, which is an entry of the first dimension, in bytes."""
        return math.prod(self.shape[1:]) * self.stored.itemsize

    def bytes_of(self, values: Array) -> Array:
        """Returns the elements in row-major order, little-endian, as a flat array of bytes; a view if possible.

        Elements of float32 are rounded to nearest even if the leaf is one of bfloat16.
        """
        if values.dtype != self.stored:
            # A quantised type is stored without its structure; a big-endian array is turned round.
            # Elements that are encoded are rounded, maybe to infinity.
            with np.errstate(all="ignore"):
                values = values.astype(self.given, copy=False) if values.dtype != self.given else values
            values = np.ascontiguousarray(values).view(self.stored.newbyteorder("=")).astype(self.stored, copy=False)
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


@dataclass(frozen=True)
class Layout:
    """The places of leaves in a blob, in ascending order of their numbers.

    Attributes:
        leaves: their numbers.
        offsets: where each begins, in bytes.
        nbytes: the length of the blob: at least 1, because Redis has no empty strings.
    """

    leaves: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @cached_property
    def offset_of(self) -> dict[int, int]:
        """Number of a leaf → where it begins."""
        return dict(zip(self.leaves, self.offsets, strict=True))


# Compared by identity, because it is the key of a cache.
@dataclass(frozen=True, eq=False)
class Flat:
    """Some leaves one after the other, the leaves of a dtype together, as a gradient has its dense leaves.

    Attributes:
        sections: the leaves of each dtype, as one section, in the order in which the dtypes occur.
        offsets: where each section begins, in bytes.
        places: for each of these leaves, the number of its section, and the place of its first element there.
        layout: the places of the leaves in a blob.
    """

    sections: tuple[Dense, ...]
    offsets: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    layout: Layout


class Schema:
    """The structure of a tree, and the dtypes and shapes of its leaves.

    Args:
        structure: the structure.
        leaves: the leaves, in the order of the structure.

    Attributes:
        structure: the structure.
        leaves: the same leaves.
        nbytes: the size of all leaves together in bytes.
        layout: given leaves as ``ranges_text`` lists them, returns their places in a blob.
        flat: given the same, returns these leaves one after the other.
        shares: given the leaves of several blobs, returns for each those that count there: no later blob has them.

    The last three raise ValueError if redisacc did not write such a text.
    """

    def __init__(self, structure: Structure, leaves: Sequence[Leaf]) -> None:
        self.structure = structure
        self.leaves = tuple(leaves)
        self.nbytes = sum(leaf.nbytes for leaf in self.leaves)
        self._encoded: Schema | None = None
        # Versions of a training list the same leaves over and over.
        self.layout = lru_cache(64)(self._layout)
        self.flat = lru_cache(64)(self._flat)
        self.shares = lru_cache(64)(self._shares)

    @classmethod
    def parse(cls, text: str) -> Schema:
        """Parses a text of ``text``.

        Raises:
            ValueError: redisacc did not write this text.
        """
        structure, texts = parse_structure(text)
        return cls(structure, [Leaf.parse(leaf) for leaf in texts])

    def stand_in(self) -> Any:
        """Returns a tree with this schema, whose arrays take no memory."""
        return self.structure.build([np.broadcast_to(leaf.given.type(0), leaf.shape) for leaf in self.leaves])

    def stored(self, encoding: str) -> Schema:
        """Returns the schema of the leaves in blobs. For "bfloat16", leaves of float32 become leaves of bfloat16."""
        if encoding == "float32":
            return self
        if self._encoded is None:
            leaves = [replace(leaf, dtype=encoding) if leaf.dtype == "float32" else leaf for leaf in self.leaves]
            self._encoded = Schema(self.structure, leaves)
        return self._encoded

    @cached_property
    def booleans(self) -> frozenset[int]:
        """The numbers of the leaves that are booleans."""
        return frozenset([number for number, leaf in enumerate(self.leaves) if leaf.dtype == "bool"])

    @cached_property
    def text(self) -> str:
        """The structure as JSON, with a text for each leaf."""
        return self.structure.text([leaf.text for leaf in self.leaves])

    def arrays_of(self, tree: object, what: str) -> list[Array]:
        """Returns the leaves of a tree as arrays.

        Raises:
            InvalidArgumentError: the tree has another structure, or a leaf another dtype or shape. The message names
                the first path that differs.
        """
        arrays = []
        for path, leaf, value in zip(
            self.structure.paths, self.leaves, self.structure.leaves_of(tree, what), strict=True
        ):
            values = value if type(value) is np.ndarray else array(value, f"{what} at {shown(path)}")
            if values.shape != leaf.shape or (
                values.dtype != leaf.given and Leaf.of(values, f"{what} at {shown(path)}") != leaf
            ):
                found = f"{values.dtype} {shape_text(values.shape)}"
                raise InvalidArgumentError(f"{what} at {shown(path)} must be {leaf.text}, not {found}")
            arrays.append(values)
        return arrays

    def _layout(self, leaves_text: str) -> Layout:
        numbers = self._numbers(leaves_text)
        offsets, end = offsets_of([self.leaves[number].nbytes for number in numbers], ALIGNMENT)
        return Layout(tuple(numbers), offsets, max(end, 1))

    def _numbers(self, leaves_text: str) -> list[int]:
        return parse_ranges(leaves_text, len(self.leaves)) if leaves_text else []

    def _shares(self, leaves_texts: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        every = [self.layout(text).leaves for text in leaves_texts]
        last = {leaf: place for place, leaves in enumerate(every) for leaf in leaves}
        return tuple([tuple([leaf for leaf in leaves if last[leaf] == place]) for place, leaves in enumerate(every)])

    def _flat(self, leaves_text: str) -> Flat:
        numbers = self._numbers(leaves_text)
        sizes: dict[np.dtype[Any], int] = {}
        places = []
        for leaf in [self.leaves[number] for number in numbers]:
            start = sizes.setdefault(leaf.stored, 0)
            places.append((list(sizes).index(leaf.stored), start))
            sizes[leaf.stored] = start + math.prod(leaf.shape)
        sections = tuple([Dense(dtype, size) for dtype, size in sizes.items()])
        offsets, end = offsets_of([section.size * section.dtype.itemsize for section in sections], GRADIENT_ALIGNMENT)
        starts = [offsets[section] + start * sections[section].dtype.itemsize for section, start in places]
        return Flat(sections, offsets, tuple(places), Layout(tuple(numbers), tuple(starts), max(end, 1)))


def arrays_in(schema: Schema, layout: Layout, data: Array) -> dict[int, Array]:
    """Returns the leaves in a blob, by their numbers, as views of its bytes."""
    return {
        number: np.ndarray(schema.leaves[number].shape, schema.leaves[number].given, data, offset)
        for number, offset in zip(layout.leaves, layout.offsets, strict=True)
    }


def ranges_text(numbers: Sequence[int]) -> str:
    """Returns ascending numbers as a text, such as "0-3,7"."""
    texts, start = [], 0
    for place, number in enumerate(numbers):
        if place + 1 == len(numbers) or numbers[place + 1] != number + 1:
            texts.append(str(number) if place == start else f"{numbers[start]}-{number}")
            start = place + 1
    return ",".join(texts)


def parse_ranges(text: str, limit: int) -> list[int]:
    """Returns the numbers, all below ``limit``, of a text of ``ranges_text``.

    Raises:
        ValueError: redisacc did not write this text.
    """
    numbers: list[int] = []
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise ValueError(f"{shown(text)} is not a list of leaves")
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        # Checked before the range is expanded: each number occurs once, so there are no more numbers than leaves.
        if not (numbers[-1] if numbers else -1) < first <= last < limit:
            raise ValueError(f"{shown(text)} is not a list of leaves of a tree with {limit}")
        numbers.extend(range(first, last + 1))
    return numbers


def packed(schema: Schema, arrays: Sequence[Array] | Mapping[int, Array], layout: Layout) -> list[memoryview]:
    """Returns the bytes of a blob of whole leaves, in pieces.

    Large leaves are not copied, so they must not be written to until the pieces have been sent.

    Args:
        schema: the schema of the leaves.
        arrays: the leaves, by their numbers.
        layout: which of them the blob has, and where.
    """
    pieces: list[memoryview] = []
    # The small leaves since the last large one, and where that ended.
    waiting: list[tuple[int, Array]] = []
    end = 0
    # A flat blob has the leaves of each dtype together, so they need not lie in the order of their numbers.
    for leaf, offset in sorted(zip(layout.leaves, layout.offsets, strict=True), key=itemgetter(1)):
        data = schema.leaves[leaf].bytes_of(arrays[leaf])
        if data.nbytes < GATHER_BYTES:
            waiting.append((offset, data))
            continue
        if end < offset:
            pieces.append(_together(end, offset, waiting))
            waiting = []
        pieces.append(data.data)
        end = offset + data.nbytes
    if end < layout.nbytes:
        pieces.append(_together(end, layout.nbytes, waiting))
    return pieces


def _together(start: int, stop: int, leaves: Sequence[tuple[int, Array]]) -> memoryview:
    """Returns the bytes of a blob between two places, given the leaves there and where they begin."""
    data = np.zeros(stop - start, np.uint8)
    for offset, leaf in leaves:
        data[offset - start : offset - start + leaf.nbytes] = leaf
    return data.data


def packed_rows(schema: Schema, rows: Iterable[tuple[int, Array, Array]]) -> list[memoryview]:
    """Returns the bytes of a blob of changed rows, in pieces.

    Args:
        schema: the schema of the leaves.
        rows: leaves in ascending order, each with the indices of its rows, which ascend, and the rows.
    """
    pieces = []
    for leaf, indices, values in rows:
        pieces.append(indices.astype("<i8", copy=False).view(np.uint8).data)
        pieces.append(schema.leaves[leaf].bytes_of(values).data)
    return pieces
