"""Gradients as callers give them: each leaf is checked and converted, and then packed into sections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from redisacc._arrays import foreign, validation
from redisacc._arrays.dtypes import DType
from redisacc._arrays.gradient import Gradient, Section
from redisacc._arrays.spec import AccumulatorSpec, Leaf
from redisacc._arrays.validation import Array, Shape, shape_text
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError

# Dense leaves of fewer bytes than this are put together before they are sent.
JOINED_BYTES = 16 * 1024

# What errors call the indices, the rows and the shape of a sparse gradient that is no tree.
ROWS_ARGUMENTS = ("grad_indices", "grad_values", "grad_shape")


def tree_gradient(spec: AccumulatorSpec, tree: object, what: str) -> Gradient:
    """Returns a tree of gradients in the form in which it is sent. Large dense leaves are not copied.

    Args:
        spec: what the accumulator was created as.
        tree: a tree of that structure, with None for each leaf that has no gradient.
        what: its name in errors.

    Raises:
        InvalidArgumentError: the structure, a dtype, a shape or an index is wrong. The message names the first path.
    """
    leaves = spec.structure.leaves_of(tree, what)
    found: list[list[Any]] = [[] for _ in spec.sections]
    for leaf, value in zip(spec.leaves, leaves, strict=True):
        found[leaf.section].append((leaf_rows if leaf.is_sparse else leaf_elements)(leaf, value, what))
    if spec.missing == "skip":
        found[-1].append(np.array([leaf is not None for leaf in leaves], np.int32))
    sections = []
    for section, values in zip(spec.sections, found, strict=True):
        sections.append(values[0] if section.is_sparse else Section(_joined(values)))
    return Gradient(tuple(sections))


def _joined(arrays: list[Array]) -> list[Array]:
    """Returns vectors, one after the other, with neighbors that are small put together.

    A large one is sent from the memory where it is. For a small one, the copy costs less than a place of its own would.
    """
    joined: list[Array] = []
    small: list[Array] = []
    for array in [*arrays, None]:
        if array is not None and array.nbytes < JOINED_BYTES:
            small.append(array)
            continue
        if small:
            joined.append(np.concatenate(small))
            small = []
        if array is not None:
            joined.append(array)
    return joined


def dense_array(leaf: Leaf, value: object, what: str) -> Array:
    """Returns a dense leaf as an array of its dtype and shape.

    Args:
        leaf: the leaf.
        value: anything that numpy can turn into an array.
        what: the name of the gradient in errors.

    Raises:
        InvalidArgumentError: a dtype or a shape is wrong. The message names the path.
    """
    given = value if type(value) is np.ndarray else validation.array(value, leaf.named(what))
    if given.shape != leaf.shape and not _agrees(given.shape, leaf.shape, may_have_more=False):
        raise InvalidArgumentError(
            f"{leaf.named(what)} must have the declared shape {shape_text(leaf.shape)}, not {shape_text(given.shape)}"
        )
    if given.dtype == leaf.dtype.storage:
        return given
    return validation.cast(given, leaf.dtype, leaf.named(what), value=value)


def leaf_elements(leaf: Leaf, value: object, what: str) -> Array:
    """Returns the elements of a dense leaf of a tree as a vector; zeros if there is no gradient.

    The arguments and the errors are those of ``dense_array``.
    """
    if type(value) is np.ndarray and value.dtype == leaf.dtype.storage and value.shape == leaf.shape:
        return value.ravel()
    if value is None:
        return np.zeros(leaf.size, leaf.dtype.storage)
    if foreign.is_rows(value):
        raise InvalidArgumentError(
            f"{leaf.named(what)} must be a dense array, because the leaf was not declared with Sparse(), not "
            f"{shown(value)}"
        )
    return dense_array(leaf, value, what).ravel()


def leaf_rows(leaf: Leaf, value: Any, what: str) -> Section:
    """Returns the rows of a sparse leaf of a tree; none if there is no gradient. Raises as ``dense_array``."""
    if value is None:
        return Section(np.empty((0, *leaf.known_shape), leaf.dtype.storage), np.empty(0, np.int64))
    name = leaf.named(what)
    if type(value) is tuple and len(value) in (2, 3):
        indices, values, whole = (*value, None)[:3]
    elif (rows := foreign.rows_of(value, name)) is not None:
        indices, values, whole = rows
    else:
        raise InvalidArgumentError(
            f"{name} must be IndexedSlices, a sparse array, or a tuple of indices and values, because the leaf was "
            f"declared with Sparse(), not {shown(value)}. IndexedSlices.from_dense() makes rows of a dense array"
        )
    names = f"the indices of {name}", f"the rows of {name}", f"the dense_shape of {name}"
    return sparse_section(leaf, indices, values, whole, names)


def sparse_section(leaf: Leaf, indices: object, values: object, whole: object, names: tuple[str, str, str]) -> Section:
    """Returns rows as a section with strictly increasing indices: sorted, and with the rows of each index added up.

    Args:
        leaf: the leaf. Unless it is one of a tree, rows may have more dimensions than it declares.
        indices: integer vector ``[n]``, in any order and with repetitions.
        values: array-like of shape ``[n, *row]``.
        whole: the shape of the whole array, which may have more dimensions than declared; -1 is not a wildcard. None:
            it is not checked.
        names: what errors call these three.

    Raises:
        InvalidArgumentError: the indices or the rows are invalid, or do not fit the declared shape.
    """
    if whole is not None:
        _check_whole(whole, leaf.shape, names[2])
    checked, last, are_ascending = validation.indices(indices, names[0])
    given = values if type(values) is np.ndarray else validation.array(values, names[1])
    _check_rows(leaf, len(checked), last, given, names)
    dtype = leaf.dtype
    rows = given if given.dtype == dtype.storage else validation.cast(given, dtype, names[1], value=values)
    return Section(rows, checked) if are_ascending else ascending(checked, rows, dtype)


def _check_rows(leaf: Leaf, number: int, last: int, values: Array, names: tuple[str, str, str]) -> None:
    """Checks that ``values`` has a row for each of ``number`` indices; the largest index is ``last``."""
    declared = leaf.shape or ()
    if values.ndim == 0:
        raise InvalidArgumentError(f"{names[1]} must have one row for each index, and a scalar has none")
    if len(values) != number:
        raise InvalidArgumentError(
            f"{names[1]} must have one row for each of the {number} {names[0]}, not {len(values)} rows"
        )
    row = values.shape[1:]
    if row != declared[1:] and not _agrees(row, declared[1:], may_have_more=not leaf.path):
        raise InvalidArgumentError(
            f"{names[1]} must fit the declared shape {shape_text(declared)}, unlike rows of shape {shape_text(row)}"
        )
    if declared and declared[0] is not None and last >= declared[0]:
        raise InvalidArgumentError(
            f"{names[0]} must be below {declared[0]}, dimension 0 of the declared shape, but {last} is not"
        )


def _check_whole(given: object, declared: Shape, what: str) -> None:
    """Checks the shape of the whole array that a caller gives against the declared one."""
    whole = validation.array(given, what)
    if whole.ndim != 1 or (whole.size and whole.dtype.kind not in "iu"):
        raise InvalidArgumentError(f"{what} must be None or an integer vector, not {shown(given)}")
    dims = whole.tolist()
    if not _agrees(dims, declared, may_have_more=True):
        raise InvalidArgumentError(
            f"{what} must agree with the declared shape {shape_text(declared)}, unlike {shown(dims)}"
        )


def _agrees(dims: Sequence[int], declared: Shape, *, may_have_more: bool) -> bool:
    """Returns whether dimensions are as declared."""
    if declared is None:
        return True
    has_rank = len(dims) >= len(declared) if may_have_more else len(dims) == len(declared)
    return has_rank and all(want in (None, have) for want, have in zip(declared, dims, strict=False))


def ascending(indices: Array, values: Array, dtype: DType) -> Section:
    """Returns the section with strictly increasing indices: sorted, and with the rows of each index added up."""
    order = np.argsort(indices, kind="stable")
    indices, values = indices[order], values[order]
    starts = np.flatnonzero(np.concatenate(([True], indices[1:] != indices[:-1])))
    if len(starts) == len(indices):
        return Section(values, indices)
    with np.errstate(over="ignore", invalid="ignore"):
        rows = np.add.reduceat(values.astype(dtype.sum, copy=False), starts, axis=0, dtype=dtype.sum)
    return Section(rows, indices[starts])
