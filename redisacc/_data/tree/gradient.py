"""Packs a tree of gradients into sections."""

from __future__ import annotations

from typing import Any

import numpy as np

from redisacc._data import foreign, validation
from redisacc._data.gradient import Gradient, Section
from redisacc._data.sparse_rows import check_whole, sparse_section
from redisacc._data.tree.spec import Leaf, TreeSpec
from redisacc._data.validation import Array, shape_text
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError

# Dense leaves of fewer bytes than this are put together before they are sent.
JOINED_BYTES = 16 * 1024


def tree_gradient(spec: TreeSpec, tree: object, what: str) -> Gradient:
    """Returns a tree of gradients in the form in which it is sent. Large dense leaves are not copied.

    Args:
        spec: what the accumulator was created as.
        tree: a tree of that structure, with None for each leaf that has no gradient.
        what: its name in errors.

    Raises:
        InvalidArgumentError: the structure, a dtype, a shape or an index is wrong. The message names the first path.
    """
    leaves = spec.structure.leaves_of(tree, what)
    dense: dict[int, list[Array]] = {}
    sections: list[Section | None] = [None] * len(spec.sections)
    for leaf, value in zip(spec.leaves, leaves, strict=True):
        if leaf.is_sparse:
            sections[leaf.section] = leaf_rows(leaf, value, what)
        else:
            dense.setdefault(leaf.section, []).append(leaf_elements(leaf, value, what))
    for number, arrays in dense.items():
        sections[number] = Section(_joined(arrays))
    if spec.missing == "skip":
        sections[-1] = Section(np.array([leaf is not None for leaf in leaves], np.int32))
    packed = tuple([section for section in sections if section is not None])
    assert len(packed) == len(sections)
    return Gradient(packed)


def _joined(arrays: list[Array]) -> list[Array]:
    """Returns vectors, one after the other, with neighbours that are small put together.

    A large one is sent from the memory where it is. For a small one, the copy costs less than a place of its own would.
    """
    joined: list[Array] = []
    small: list[Array] = []
    for array in arrays:
        if array.nbytes < JOINED_BYTES:
            small.append(array)
            continue
        if small:
            joined.append(np.concatenate(small))
            small = []
        joined.append(array)
    if small:
        joined.append(np.concatenate(small))
    return joined


def leaf_elements(leaf: Leaf, value: object, what: str) -> Array:
    """Returns the elements of a dense leaf as a vector; zeros if there is no gradient.

    Raises:
        InvalidArgumentError: a dtype or a shape is wrong. The message names the path.
    """
    storage = leaf.dtype.storage
    if type(value) is np.ndarray and value.dtype == storage and value.shape == leaf.shape:
        return value.ravel()
    if value is None:
        return np.zeros(leaf.size, storage)
    name = f"{what} at {shown(leaf.path)}"
    if foreign.is_rows(value):
        raise InvalidArgumentError(
            f"{name} must be a dense array, because the leaf was not declared with Sparse(), not {shown(value)}"
        )
    given = validation.array(value, name)
    if given.shape != leaf.shape:
        raise InvalidArgumentError(
            f"{name} must have the declared shape {shape_text(leaf.shape)}, not {shape_text(given.shape)}"
        )
    return validation.cast(given, leaf.dtype, name, value=value).ravel()


def leaf_rows(leaf: Leaf, value: Any, what: str) -> Section:
    """Returns the rows of a sparse leaf; none if there is no gradient. Raises as ``leaf_elements``."""
    if value is None:
        return Section(np.empty((0, *leaf.row_shape), leaf.dtype.storage), np.empty(0, np.int64))
    name = f"{what} at {shown(leaf.path)}"
    if type(value) is tuple and len(value) in (2, 3):
        indices, values, whole = (*value, None)[:3]
    elif (rows := foreign.rows_of(value, name)) is not None:
        indices, values, whole = rows
    else:
        raise InvalidArgumentError(
            f"{name} must be IndexedSlices, a sparse array, or a tuple of indices and values, because the leaf was "
            f"declared with Sparse(), not {shown(value)}. IndexedSlices.from_dense() makes rows of a dense array"
        )
    section = sparse_section(indices, values, leaf.dtype, leaf.shape, (f"the indices of {name}", f"the rows of {name}"))
    if section.values.shape[1:] != leaf.row_shape:
        raise InvalidArgumentError(
            f"the rows of {name} must have the shape {shape_text(leaf.row_shape)}, not "
            f"{shape_text(section.values.shape[1:])}"
        )
    if whole is not None:
        check_whole(whole, leaf.shape, f"the dense_shape of {name}")
    return section
