"""Trees whose leaves are numpy arrays, made from trees of anything that numpy can read."""

from __future__ import annotations

from typing import Any

from redisacc._arrays.tree.structure import Structure, flatten
from redisacc._arrays.validation import Array, array
from redisacc._text import shown


def flatten_arrays(tree: object, what: str) -> tuple[Structure, list[Array]]:
    """Takes a tree apart, and converts its leaves. Arrays in host memory are not copied.

    Args:
        tree: as for ``flatten``; its leaves may be arrays of other libraries, or numbers.
        what: its name in errors.

    Raises:
        InvalidArgumentError: it is no such tree. The message names the leaf.
    """
    structure, values = flatten(tree, what)
    return structure, [
        array(value, f"{what} at {shown(path)}") for path, value in zip(structure.paths, values, strict=True)
    ]


def as_arrays(tree: object, what: str) -> Any:
    """Returns a tree with numpy arrays as leaves, or None for None. Takes and raises what ``flatten_arrays`` does."""
    if tree is None:
        return None
    structure, arrays = flatten_arrays(tree, what)
    return structure.build(arrays)
