"""What an accumulator was created as, and how its rounds are reduced.

A gradient is a tree of leaves. That of a dense or a sparse accumulator is a tree of one leaf, the array itself.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from redisacc._arrays import foreign, validation
from redisacc._arrays.dtypes import PRESENCE, TABLE, DType, find_dtype
from redisacc._arrays.slices import IndexedSlices
from redisacc._arrays.sums import DenseSum, RoundSum, SparseSum, is_above
from redisacc._arrays.trees import Structure, flatten, parse_structure
from redisacc._arrays.validation import INT64_MAX, Array, Shape, shape_text
from redisacc._arrays.weights import is_nothing
from redisacc._text import shown
from redisacc.errors import CorruptDataError, InvalidArgumentError

# The largest number of elements of all dense leaves of a dtype. numpy counts bytes in an int64, and sums have up to 16
# of them for each element.
MAX_ELEMENTS = INT64_MAX // 16

_LEAF = re.compile(r"(sparse )?([a-z0-9]{1,16}) (\[[0-9,-]*\])")


Kind = Literal["dense", "sparse", "tree"]

# What the sum of a row is divided by for "MEAN": the number of gradients that held its index, or of all in the round.
SparseMean = Literal["index", "round"]

# What the mean of a leaf divides by if some gradients lack it: the number of all gradients, or of those that have it.
Missing = Literal["zero", "skip"]

# What a mean divides by: the sum of the weights of gradients, or their number.
Normalize = Literal["weights", "count"]

# The order in which the gradients of a round are added: that in which they arrive, or that of their workers' numbers.
Order = Literal["arrival", "worker"]

# The number of elements in a row of a dense section that is summed in place. A row costs Redis 2 to 3 microseconds, so
# it is long enough for the additions to outweigh that, and short enough to be read with HGET.
CHUNK = 256

# The number of dimensions that every version of numpy can count: 32 before version 2, and 64 since then.
LEAST_MOST_DIMENSIONS = 32

# The label of the section that says which leaves of a tree a gradient has: what the means of leaves are divided by.
PRESENT = "present"


# Compared by identity, because specifications are keys of caches on the way of every gradient.
@dataclass(frozen=True, eq=False)
class SectionSpec:
    """What a section of every gradient is.

    Attributes:
        label: begins the fields of the section in the ``sums`` hash; empty for the only section of an accumulator.
        dtype: the element type.
        is_sparse: whether the section consists of rows and their indices.
        bound: dimension 0 of the array whose rows a sparse section holds: all indices are below it. None if it is
            unknown.
    """

    label: str
    dtype: DType
    is_sparse: bool
    bound: int | None = None


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
    """A leaf of a gradient, and where its values are.

    Attributes:
        path: the keys on the way to it, such as "layers/0/w"; "" if the gradient is one array, and no tree.
        dtype: the element type.
        shape: its shape. In a tree, only dimension 0 of a sparse leaf can be None.
        is_sparse: whether gradients hold rows of it.
        section: the number of its section.
        start: the place of its first element in its section, if it is dense.
    """

    path: str
    dtype: DType
    shape: Shape
    is_sparse: bool
    section: int = 0
    start: int = 0

    @cached_property
    def known_shape(self) -> tuple[int, ...]:
        """The shape of a dense leaf, or of a row of a sparse one. For unknown dimensions, it has 0."""
        return tuple([dim or 0 for dim in (self.shape or ())[self.is_sparse :]])

    @cached_property
    def size(self) -> int:
        """The number of elements of a dense leaf."""
        return math.prod(self.known_shape)

    @property
    def text(self) -> str:
        """What the record says about it, such as "sparse float32 [20000,32]"."""
        return f"{'sparse ' if self.is_sparse else ''}{self.dtype.name} {shape_text(self.shape)}"

    def named(self, what: str) -> str:
        """Returns what errors call it, given the name of the argument that is, or holds, the gradient."""
        return f"{what} at {shown(self.path)}" if self.path else what


# The kind, dtype and shape of a leaf, before it has a place.
_Described = tuple[bool, DType, tuple[int | None, ...]]


@dataclass(frozen=True, eq=False, kw_only=True)
class AccumulatorSpec:
    """Everything about an accumulator that never changes.

    All dense leaves of a dtype are one section: their elements one after the other, in the order of the leaves. Each
    sparse leaf is a section of its own.

    Attributes:
        kind: which class of accumulator it is.
        structure: how its gradients are put together.
        leaves: their leaves.
        sections: the sections into which they are packed.
        shapes: the shape of each section, or of the rows of a sparse one; None if that is not the same in all rounds.
        reduction_type: "MEAN" or "SUM".
        sparse_mean: what the sum of a row is divided by: the number of gradients that held its "index", or of all
            gradients of the "round". Without meaning for a dense accumulator.
        missing: what the mean of a leaf divides by if some gradients lack it: "zero" for the number of all gradients,
            "skip" for the number of those that have it.
        normalize: what means are divided by: the sum of the "weights" of gradients, or their "count".
        order: the order in which the gradients of a round are added: of their "arrival", or of the numbers of their
            "worker".
        chunk: the number of elements of a dense section that one field of the ``sums`` hash holds.
    """

    kind: Kind
    structure: Structure
    leaves: tuple[Leaf, ...]
    sections: tuple[SectionSpec, ...]
    shapes: tuple[tuple[int, ...], ...] | None
    reduction_type: str
    sparse_mean: SparseMean = "index"
    missing: Missing = "zero"
    normalize: Normalize = "weights"
    order: Order = "arrival"
    chunk: int = CHUNK

    @classmethod
    def of_array(cls, kind: Literal["dense", "sparse"], dtype: DType, shape: Shape, **options: Any) -> AccumulatorSpec:
        """Returns the specification of an accumulator whose gradients are arrays.

        Args:
            kind: the class of the accumulator.
            dtype: the element type.
            shape: the declared shape of a dense gradient, or of the array whose rows a sparse gradient holds. None if
                the rank is unknown, with None for each unknown dimension.
            options: the attributes with the same names.
        """
        leaf = Leaf("", dtype, shape, kind == "sparse")
        section = SectionSpec("", dtype, leaf.is_sparse, shape[0] if leaf.is_sparse and shape else None)
        is_open = leaf.is_sparse or shape is None or None in shape
        return cls(
            kind=kind,
            structure=Structure(0, ("",)),
            leaves=(leaf,),
            sections=(section,),
            shapes=None if is_open else (leaf.known_shape,),
            **options,
        )

    @classmethod
    def of_tree(cls, structure: Structure, described: Sequence[_Described], **options: Any) -> AccumulatorSpec:
        """Returns the specification of an accumulator of trees.

        Args:
            structure: how a tree is put together.
            described: the kind, dtype and shape of each leaf.
            options: the attributes with the same names. A row is divided by the gradients of the "round" by default.

        Raises:
            InvalidArgumentError: the dense leaves of a dtype have too many elements together.
        """
        sections: list[SectionSpec] = []
        shapes: list[tuple[int, ...]] = []
        leaves: list[Leaf] = []
        dense: dict[DType, int] = {}
        for path, (is_sparse, dtype, shape) in zip(structure.paths, described, strict=True):
            number = len(sections) if is_sparse else dense.setdefault(dtype, len(sections))
            if number == len(sections):
                label = f"sparse:{path}" if is_sparse else f"dense:{dtype.name}"
                sections.append(SectionSpec(label, dtype, is_sparse, shape[0] if is_sparse else None))
                shapes.append((0,))
            leaf = Leaf(path, dtype, shape, is_sparse, number, 0 if is_sparse else shapes[number][0])
            shapes[number] = leaf.known_shape if is_sparse else (leaf.start + leaf.size,)
            leaves.append(leaf)
        for dtype, number in dense.items():
            if shapes[number][0] > MAX_ELEMENTS:
                raise InvalidArgumentError(
                    f"the dense leaves of a dtype must have at most {MAX_ELEMENTS} elements together, but "
                    f"{dtype.name} has {shapes[number][0]}"
                )
        if options.get("missing") == "skip":
            sections.append(SectionSpec(PRESENT, PRESENCE, False))
            shapes.append((len(leaves),))
        return cls(
            kind="tree",
            structure=structure,
            leaves=tuple(leaves),
            sections=tuple(sections),
            shapes=tuple(shapes),
            **{"sparse_mean": "round", **options},
        )

    @classmethod
    def parse(cls, text: str, **options: Any) -> AccumulatorSpec:
        """Returns the specification that ``schema["tree"]`` describes.

        Args:
            text: that text.
            options: as for ``of_tree``.

        Raises:
            ValueError: redisacc did not write this text.
        """
        structure, texts = parse_structure(text)
        spec = cls.of_tree(structure, [_parse_leaf(leaf) for leaf in texts], **options)
        if spec.schema["tree"] != text:
            raise ValueError("the leaves of a tree are not as redisacc writes them")
        return spec

    @cached_property
    def dtypes(self) -> tuple[DType, ...]:
        """The element type of each section."""
        return tuple([section.dtype for section in self.sections])

    @cached_property
    def schema(self) -> dict[str, str]:
        """The fields of the record that describe it, as text. Two handles agree if all fields are equal."""
        number = len(self.leaves)
        is_tree = self.kind == "tree"
        return {
            "kind": self.kind,
            "dtype": ",".join(dict.fromkeys(leaf.dtype.name for leaf in self.leaves)),
            "shape": f"{number} {'leaf' if number == 1 else 'leaves'}" if is_tree else shape_text(self.leaves[0].shape),
            "reduction_type": self.reduction_type,
            "sparse_mean": self.sparse_mean,
            "missing": self.missing,
            "tree": self.structure.text([leaf.text for leaf in self.leaves]) if is_tree else "",
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
        """Returns the shape of each section in a round, or of the rows of a sparse one.

        Args:
            round_shape: the shape that binds the round: of an array, or of the rows of one. That of a tree is ``()``.
        """
        return self.shapes or (round_shape,)

    @property
    def fixed_shapes(self) -> tuple[tuple[int, ...], ...] | None:
        """The shape of each section if all gradients have the same, and no rows; else None."""
        return None if any(section.is_sparse for section in self.sections) else self.shapes

    @property
    def gradient_bytes(self) -> int | None:
        """The bytes of a gradient; None if gradients differ in that."""
        if self.fixed_shapes is None:
            return None
        pairs = zip(self.dtypes, self.fixed_shapes, strict=True)
        return sum(math.prod(shape) * dtype.storage.itemsize for dtype, shape in pairs)

    def leaf_at(self, section: int, element: int) -> Leaf:
        """Returns the leaf that an element of a gradient belongs to.

        Args:
            section: the number of the section.
            element: its place in the section, in row-major order.
        """
        leaves = [leaf for leaf in self.leaves if leaf.section == section]
        # A sparse section is one leaf, and the leaves of a dense one are in the order in which they begin. A leaf
        # without elements begins where the next one does.
        return leaves[0] if leaves[0].is_sparse else [leaf for leaf in leaves if leaf.start <= element][-1]

    def name_of(self, section: int, element: int) -> str:
        """Returns what errors call the leaf that an element of a gradient belongs to. The arguments are the same."""
        return self.leaf_at(section, element).named("grad_values" if self.kind == "sparse" else "grad")

    def divisor(self, number: int, weight: float | None) -> float:
        """Returns what the mean of a round is divided by: the number of gradients (int), or their weights (float).

        Args:
            number: how many gradients the round holds.
            weight: the sum of their weights; None if all are 1.
        """
        return number if weight is None or self.normalize == "count" else weight

    def update_divisor(self, number: int, weight: float | None) -> float:
        """Returns what an optimizer divides the sum of a round by; 0 if every worker has skipped the step.

        The arguments are those of ``divisor``.
        """
        if is_nothing(number, weight):
            return 0
        return self.divisor(number, weight) if self.reduction_type == "MEAN" else 1

    def weight_of(self, round_sum: RoundSum, counted: float | None) -> float | None:
        """Returns the sum of the weights of a round, added in the order of its gradients; None if all are 1.

        Args:
            round_sum: the sum of the round.
            counted: the sum of the weights as the server has counted it, in the order of arrival.
        """
        return round_sum.weight if self.order == "worker" else counted

    @cached_property
    def can_weigh(self) -> bool:
        """Whether gradients may have other weights than 1: not if a result is an integer."""
        return not any(section.dtype.is_integer for section in self.sections)

    def empty_sum(self, round_shape: tuple[int, ...], *, where: str) -> RoundSum:
        """Returns an empty sum for the gradients of one round.

        Args:
            round_shape: as for ``section_shapes``.
            where: the source of the gradients, for errors.
        """
        sections: list[DenseSum | SparseSum] = []
        weighs = self.normalize == "weights"
        for of, shape in zip(self.sections, self.shapes or (round_shape,), strict=True):
            if not of.is_sparse:
                sections.append(DenseSum(of.dtype, shape, has_weights=weighs or of.label != PRESENT))
                continue
            if len(shape) >= LEAST_MOST_DIMENSIONS:
                _check_rows(shape, where)
            sections.append(SparseSum(of.dtype, shape, bound=of.bound, where=where, counts_weights=weighs))
        return RoundSum(sections, where)

    def result(self, round_sum: RoundSum, divisor: float) -> Any:
        """Returns the reduced gradient, in the form in which a take hands it out.

        That is an array, or ``IndexedSlices``; of a tree, a tree of both. Arrays of one tree share memory. A leaf that
        every gradient lacks is None if ``missing`` is "skip", and otherwise holds zeros or no rows.

        Args:
            round_sum: a sum from ``empty_sum()``. It cannot be used afterwards, because its memory may be reused.
            divisor: what ``divisor`` returns for the round.

        Raises:
            CorruptDataError: an index is out of bounds, or more gradients held it, or a leaf, than there are.
        """
        present = self.present(round_sum, divisor) if self.missing == "skip" else None
        reduced: dict[int, Array] = {}
        results = []
        for number, leaf in enumerate(self.leaves):
            # Counts remain integers, like the divisor.
            holders = divisor if present is None else type(divisor)(present[number])
            section = round_sum.sections[leaf.section]
            if isinstance(section, SparseSum):
                indices, values = section.result(self.reduction_type, holders, self.sparse_mean)
                bound = self.sections[leaf.section].bound
                whole = np.array([-1 if bound is None else bound, *values.shape[1:]], np.int64)
                value: Any = IndexedSlices(values, indices, whole)
            else:
                if leaf.section not in reduced:
                    divisors = divisor if present is None else self._divisors(leaf.section, present)
                    reduced[leaf.section] = section.result(self.reduction_type, divisors)
                value = reduced[leaf.section]
                if leaf.path:
                    value = value[leaf.start : leaf.start + leaf.size].reshape(leaf.known_shape)
            results.append(value if holders else None)
        return self.structure.build(results) if self.kind == "tree" else results[0]

    def present(self, round_sum: RoundSum, divisor: float) -> Array:
        """Returns for each leaf how many gradients have it, or the sum of their weights.

        Raises:
            CorruptDataError: that is not between 0 and the number of gradients.
        """
        present = round_sum.sections[-1].sum().values
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
        """Returns for each element of a dense section what ``present`` says of its leaf, and 1 if none had it."""
        leaves = [
            (leaf.size, present[number] or 1) for number, leaf in enumerate(self.leaves) if leaf.section == section
        ]
        sizes, numbers = zip(*leaves, strict=True)
        return np.repeat(np.array(numbers, np.float64), sizes)


def _check_rows(row_shape: tuple[int, ...], where: str) -> None:
    """Raises CorruptDataError if numpy cannot count the dimensions of rows of this shape, and one more."""
    try:
        np.empty((0, *row_shape))
    except ValueError:
        raise CorruptDataError(f"{where}: rows cannot have {len(row_shape)} dimensions") from None


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
