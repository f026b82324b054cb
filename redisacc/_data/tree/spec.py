"""What the accumulator of a tree was created as: the leaves, and the sections into which they are packed."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from redisacc._data import foreign, validation
from redisacc._data.dtypes import PRESENCE, TABLE, DType, find_dtype
from redisacc._data.spec import CHUNK, PRESENT, AccumulatorSpec, Missing, SectionSpec, SparseMean, sparse_result
from redisacc._data.sums import DenseSum, RoundSum, is_above
from redisacc._data.tree.structure import Structure, flatten, parse_structure
from redisacc._data.validation import INT64_MAX, Array, Shape, shape_text
from redisacc._text import shown
from redisacc.errors import CorruptDataError, InvalidArgumentError

# The largest number of elements of all dense leaves of a dtype. numpy counts bytes in an int64, and sums have up to 16
# of them for each element.
MAX_ELEMENTS = INT64_MAX // 16

_LEAF = re.compile(r"(sparse )?([a-z0-9]{1,16}) (\[[0-9,-]*\])")


@dataclass(frozen=True)
class Sparse:
    """A leaf of a tree whose gradients hold rows only, for the specification of a ``TreeAccumulator``.

    Args:
        dtype: the element type, as for ``SparseConditionalAccumulator``.
        shape: the shape of the whole array, of rank 1 or more. Dimension 0 bounds the indices and may be None; the
            others are the shape of a row.

    Example:
        >>> import redisacc
        >>> redisacc.Sparse("float32", (20_000, 32))
        Sparse(dtype='float32', shape=(20000, 32))
    """

    dtype: object
    shape: object


@dataclass(frozen=True)
class Leaf:
    """A leaf of a tree, and where its gradients are.

    Attributes:
        path: the keys on the way to it, such as "layers/0/w".
        dtype: the element type.
        shape: its shape. Only dimension 0 of a sparse leaf can be None.
        is_sparse: whether gradients hold rows of it.
        section: the number of its section.
        start: the place of its first element in its section, if it is dense.
    """

    path: str
    dtype: DType
    shape: tuple[int | None, ...]
    is_sparse: bool
    section: int
    start: int

    @cached_property
    def size(self) -> int:
        """The number of elements of a dense leaf."""
        return math.prod(dim or 0 for dim in self.shape)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a row of a sparse leaf."""
        return tuple(dim or 0 for dim in self.shape[1:])

    @property
    def text(self) -> str:
        """What the record says about it, such as "sparse float32 [20000,32]"."""
        return f"{'sparse ' if self.is_sparse else ''}{self.dtype.name} {shape_text(self.shape)}"


# The kind, dtype and shape of a leaf, before it has a place.
_Described = tuple[bool, DType, tuple[int | None, ...]]


@dataclass(frozen=True, eq=False)
class TreeSpec(AccumulatorSpec):
    """What the accumulator of a tree was created as.

    All dense leaves of a dtype are one section: their elements one after the other, in the order of the leaves. Each
    sparse leaf is a section of its own.

    Attributes:
        missing: what the mean of a leaf divides by if some gradients lack it: "zero" for the number of all gradients,
            "skip" for the number of those that have it.
        structure: how the tree is put together.
        leaves: its leaves.
        packed: the sections.
        shapes: the shape of each section, or of the rows of a sparse one.
    """

    missing: Missing
    structure: Structure
    leaves: tuple[Leaf, ...]
    packed: tuple[SectionSpec, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls,
        structure: Structure,
        described: Sequence[_Described],
        *,
        reduction_type: str,
        sparse_mean: SparseMean = "round",
        missing: Missing = "zero",
        chunk: int = CHUNK,
    ) -> TreeSpec:
        """Returns the specification of an accumulator of trees, given the kind, dtype and shape of each leaf.

        Raises:
            InvalidArgumentError: the dense leaves of a dtype have too many elements together.
        """
        sections: list[SectionSpec] = []
        shapes: list[tuple[int, ...]] = []
        leaves: list[Leaf] = []
        dense: dict[DType, int] = {}
        sizes: dict[int, int] = {}
        for path, (is_sparse, dtype, shape) in zip(structure.paths, described, strict=True):
            if is_sparse or dtype not in dense:
                label = f"sparse:{path}" if is_sparse else f"dense:{dtype.name}"
                sections.append(SectionSpec(label, dtype, is_sparse, shape[0] if is_sparse else None))
                shapes.append(tuple(dim or 0 for dim in shape[1:]) if is_sparse else ())
            number = len(sections) - 1 if is_sparse else dense.setdefault(dtype, len(sections) - 1)
            leaf = Leaf(path, dtype, shape, is_sparse, number, sizes.get(number, 0))
            if not is_sparse:
                sizes[number] = leaf.start + leaf.size
            leaves.append(leaf)
        for number, size in sizes.items():
            if size > MAX_ELEMENTS:
                raise InvalidArgumentError(
                    f"the dense leaves of a dtype must have at most {MAX_ELEMENTS} elements together, but "
                    f"{sections[number].dtype.name} has {size}"
                )
            shapes[number] = (size,)
        if missing == "skip":
            sections.append(SectionSpec(PRESENT, PRESENCE, False))
            shapes.append((len(leaves),))
        return cls(
            reduction_type, sparse_mean, chunk, missing, structure, tuple(leaves), tuple(sections), tuple(shapes)
        )

    @classmethod
    def parse(cls, text: str, **options: Any) -> TreeSpec:
        """Returns the specification that ``schema["tree"]`` describes.

        Args:
            text: that text.
            options: what ``of`` takes besides the leaves.

        Raises:
            ValueError: redisacc did not write this text.
        """
        structure, texts = parse_structure(text)
        spec = cls.of(structure, [_parse_leaf(leaf) for leaf in texts], **options)
        if spec.schema["tree"] != text:
            raise ValueError("the leaves of a tree are not as redisacc writes them")
        return spec

    @property
    def kind(self) -> Literal["tree"]:
        """Always "tree"."""
        return "tree"

    @cached_property
    def sections(self) -> tuple[SectionSpec, ...]:
        """The sections of every gradient, in order."""
        return self.packed

    @cached_property
    def schema(self) -> dict[str, str]:
        """The fields of the record that describe it, as text."""
        return {
            "kind": "tree",
            "dtype": ",".join(dict.fromkeys(leaf.dtype.name for leaf in self.leaves)),
            "shape": f"{len(self.leaves)} {'leaf' if len(self.leaves) == 1 else 'leaves'}",
            "reduction_type": self.reduction_type,
            "sparse_mean": self.sparse_mean,
            "missing": self.missing,
            "tree": self.structure.text([leaf.text for leaf in self.leaves]),
        }

    @property
    def tree(self) -> Any:
        """The tree with ``(dtype, shape)`` or ``Sparse(dtype, shape)`` as its leaves, from which it can be made."""
        return self.structure.build(
            [
                Sparse(leaf.dtype.name, leaf.shape) if leaf.is_sparse else (leaf.dtype.name, leaf.shape)
                for leaf in self.leaves
            ]
        )

    def section_shapes(self, round_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the sections, which are the same in every round."""
        del round_shape
        return self.shapes

    @property
    def fixed_shapes(self) -> tuple[tuple[int, ...], ...] | None:
        """The shapes of the sections, if no leaf is sparse."""
        return None if any(section.is_sparse for section in self.sections) else self.shapes

    def name_of(self, section: int, element: int) -> str:
        """Returns the path of the leaf that an element of a gradient belongs to, as a part of a sentence."""
        return f"grad at {shown(self._leaf_of(section, element).path)}"

    def path_of(self, section: int, element: int) -> str:
        """Returns the path of the leaf that an element of a gradient belongs to."""
        return self._leaf_of(section, element).path

    def extent_of(self, section: int, element: int) -> tuple[int, tuple[int, ...]]:
        """Returns where the dense leaf begins that an element of a gradient belongs to, and its shape."""
        leaf = self._leaf_of(section, element)
        return leaf.start, tuple(dim or 0 for dim in leaf.shape)

    def _leaf_of(self, section: int, element: int) -> Leaf:
        leaves = [leaf for leaf in self.leaves if leaf.section == section]
        # A sparse section is one leaf, and the leaves of a dense one are in the order in which they begin. A leaf
        # without elements begins where the next one does.
        return leaves[0] if leaves[0].is_sparse else [leaf for leaf in leaves if leaf.start <= element][-1]

    def result(self, round_sum: RoundSum, divisor: float) -> Any:
        """Returns the tree of reduced leaves: arrays that share memory, and ``IndexedSlices`` for sparse leaves.

        A leaf that every gradient lacks is None if ``missing`` is "skip", and otherwise holds zeros or no rows.

        Raises:
            CorruptDataError: an index is out of bounds, or more gradients held it, or a leaf, than there are.
        """
        present = self._present(round_sum, divisor) if self.missing == "skip" else None
        reduced: dict[int, Any] = {}
        results = []
        for number, leaf in enumerate(self.leaves):
            # Counts remain integers, like the divisor.
            holders = divisor if present is None else type(divisor)(present[number])
            if leaf.is_sparse:
                section = round_sum.sections[leaf.section]
                assert not isinstance(section, DenseSum)
                indices, values = section.result(self.reduction_type, holders, self.sparse_mean)
                value: Any = sparse_result(indices, values, self.packed[leaf.section].bound)
            else:
                if leaf.section not in reduced:
                    divisors = divisor if present is None else self._divisors(leaf.section, present)
                    reduced[leaf.section] = _dense(round_sum, leaf.section).result(self.reduction_type, divisors)
                value = reduced[leaf.section][leaf.start : leaf.start + leaf.size].reshape(leaf.shape)
            results.append(value if holders else None)
        return self.structure.build(results)

    def _present(self, round_sum: RoundSum, divisor: float) -> Array:
        """Returns for each leaf how many gradients have it, or the sum of their weights.

        Raises:
            CorruptDataError: that is not between 0 and the number of gradients.
        """
        present = _dense(round_sum, len(self.packed) - 1).sum().values
        # NaN is in no range.
        right = (present >= 0) & ~is_above(present, divisor)
        if isinstance(divisor, int):
            right &= present == np.trunc(present)
        (wrong,) = (~right).nonzero()
        if len(wrong):
            path, number = self.leaves[wrong[0]].path, present[wrong[0]]
            raise CorruptDataError(
                f"{round_sum.where}: {number:g} gradients are counted for the leaf {shown(path)} of a round of "
                f"{divisor:g}"
            )
        return present

    def _divisors(self, section: int, present: Array) -> Array:
        """Returns for each element of a dense section what ``_present`` says of its leaf, and 1 if none had it."""
        divisors = np.ones(self.shapes[section], np.float64)
        for number, leaf in enumerate(self.leaves):
            if leaf.section == section:
                divisors[leaf.start : leaf.start + leaf.size] = present[number] or 1
        return divisors


def _dense(round_sum: RoundSum, section: int) -> DenseSum:
    found = round_sum.sections[section]
    assert isinstance(found, DenseSum)
    return found


def _parse_leaf(text: str) -> _Described:
    match = _LEAF.fullmatch(text) if len(text) <= 2000 else None
    if match is None or match[2] not in TABLE:
        raise ValueError(f"{shown(text)} is not the description of a leaf")
    try:
        dims = [int(dim) for dim in match[3][1:-1].split(",") if dim]
        return _checked(match[1] is not None, match[2], dims, "a leaf")
    except InvalidArgumentError as error:
        raise ValueError(str(error)) from None


def described_by(tree: object) -> tuple[Structure, list[_Described]]:
    """Returns the structure and the leaves that a user's specification describes.

    Args:
        tree: a tree with ``(dtype, shape)`` or ``Sparse(dtype, shape)`` as its leaves.

    Raises:
        InvalidArgumentError: it is not such a tree.
    """
    structure, leaves = flatten(tree, "spec", is_leaf=_is_leaf)
    return structure, [_described(leaf, path) for path, leaf in zip(structure.paths, leaves, strict=True)]


def _is_leaf(node: object) -> bool:
    # A pair that begins with a tree is a tuple of two trees.
    return isinstance(node, tuple) and len(node) == 2 and _is_dtype(node[0]) and not _is_dtype(node[1])


def _is_dtype(value: object) -> bool:
    return isinstance(value, (str, np.dtype, type)) or hasattr(value, "as_numpy_dtype")


def _described(leaf: object, path: str) -> _Described:
    what = f"the leaf {shown(path)} of spec"
    if isinstance(leaf, Sparse):
        return _checked(True, leaf.dtype, leaf.shape, what)
    if isinstance(leaf, tuple) and len(leaf) == 2:
        return _checked(False, *leaf, what)
    raise InvalidArgumentError(f"{what} must be (dtype, shape) or redisacc.Sparse(dtype, shape), not {shown(leaf)}")


def _checked(is_sparse: bool, dtype: object, given: object, what: str) -> _Described:
    try:
        element = find_dtype(dtype)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{what}: {error}") from None
    shape: Shape = validation.shape(given, f"the shape of {what}")
    if is_sparse and not shape:
        raise InvalidArgumentError(f"the shape of {what} must have at least one dimension, not be {shape_text(shape)}")
    if shape is None or None in shape[is_sparse:]:
        known = "but for dimension 0 " if is_sparse else ""
        raise InvalidArgumentError(f"the shape of {what} must be known {known}in a tree, not {shape_text(shape)}")
    try:
        # numpy knows best how many dimensions an array can have, and how large they can be together.
        np.empty((0, *[dim or 0 for dim in shape[1:]]), np.complex128)
    except ValueError:
        raise InvalidArgumentError(
            f"the shape of {what} must be one that an array can have, not {shown(shape)}"
        ) from None
    return is_sparse, element, shape


def described_like(tree: object, sparse: Collection[str]) -> tuple[Structure, list[_Described]]:
    """Returns the structure and the leaves of a tree of arrays.

    Args:
        tree: a tree of arrays, such as the weights of a model. A leaf in a sparse form is a sparse leaf.
        sparse: the paths of further leaves that are sparse.

    Raises:
        InvalidArgumentError: it is not such a tree, or has no such path.
    """
    sparse_paths = _paths(sparse)
    structure, leaves = flatten(tree, "tree", is_leaf=foreign.is_rows)
    unknown = next((path for path in sparse_paths if path not in structure.numbers), None)
    if unknown is not None:
        raise InvalidArgumentError(
            f"sparse names {shown(unknown)}, which is not the path of a leaf. The paths are {shown(structure.paths)}"
        )
    described = []
    for path, leaf in zip(structure.paths, leaves, strict=True):
        what = f"the leaf {shown(path)} of tree"
        rows = foreign.rows_of(leaf, what)
        if rows is not None:
            if rows.dense_shape is None:
                raise InvalidArgumentError(f"{what} must have a dense_shape, the shape of the whole array")
            whole = validation.array(rows.dense_shape, f"the dense_shape of {what}")
            described.append(_checked(True, validation.array(rows.values, what).dtype, whole.tolist(), what))
        else:
            given = validation.array(leaf, what)
            described.append(_checked(path in sparse_paths, given.dtype, given.shape, what))
    return structure, described


def _paths(given: object) -> dict[str, None]:
    """Returns the paths in a collection, in its order."""
    paths = None
    if isinstance(given, Collection) and not isinstance(given, str):
        # Somebody else's collection may raise anything, and an array of rank 0 looks like one.
        with contextlib.suppress(Exception):
            paths = list(given)
    if paths is None or not all(isinstance(path, str) for path in paths):
        raise InvalidArgumentError(f"sparse must be a collection of paths, not {shown(given)}")
    return dict.fromkeys(paths)
