"""Trees: nested dicts, lists and tuples whose leaves are arrays, as in a model with many parameters.

A tree is taken apart into its structure and its leaves, in one order, and put together again. The structure is written
to Redis as JSON with one text for each leaf::

    {"embedding": "sparse float32 [20000,32]", "layers": [{"w": "float32 [128,128]", "b": "float32 [128]"}]}

A tuple is a list that begins with "tuple", which is the text of no leaf. None is a node without leaves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any, NoReturn

from redisacc._arrays.validation import Array, array
from redisacc._interrupts import interrupt_in
from redisacc._text import is_unicode, shown
from redisacc.errors import InvalidArgumentError

# Trees may have this many levels and leaves, and paths this many bytes: beyond that, something is wrong.
MAX_DEPTH = 64
MAX_LEAVES = 100_000
MAX_PATH_BYTES = 1024

# The longest text of a structure that is parsed, in bytes. A tree with 10,000 leaves needs about half a megabyte.
LONGEST_STRUCTURE = 32 * 2**20

# The path of the only leaf of a tree that is a leaf itself.
ROOT = "."

_TUPLE = "tuple"

# Control characters and line separators, which names must not have either (validation.text).
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")

# A node: a dict, list or tuple of nodes, None, or the number of a leaf.
_Node = Any


@dataclass(frozen=True)
class Structure:
    """How a tree is put together, without its leaves.

    Attributes:
        node: the tree, with the number of each leaf in its place.
        paths: the path of each leaf, such as "layers/0/w": the keys on the way to it.
        form: the node as the program has given it: with the keys of dicts in its order, and named tuples of its
            classes. None means dicts are sorted by key, and all tuples plain, as other processes know it.
    """

    node: _Node
    paths: tuple[str, ...]
    form: _Node = field(default=None, compare=False)

    def build(self, leaves: Sequence[Any]) -> Any:
        """Returns the tree with these leaves, in its form."""
        return _build(self.node if self.form is None else self.form, leaves)

    def formed(self, tree: Any) -> Any:
        """Returns a tree in the form of this structure if it has this structure, and else as it is."""
        other, leaves = flatten(tree, "the tree")
        return self.build(leaves) if other == self else tree

    def leaves_of(self, tree: object, what: str) -> list[Any]:
        """Returns the leaves of a tree of this structure. Whatever is in the place of a leaf is that leaf.

        Args:
            tree: the tree.
            what: its name in errors.

        Raises:
            InvalidArgumentError: it has another structure. The message names the first path that is missing or surplus.
        """
        leaves: list[Any] = []
        _collect(self.node, tree, (), leaves, what)
        return leaves

    def text(self, leaf_texts: Sequence[str]) -> str:
        """Returns the structure as JSON, with a text for each leaf. No text may be "tuple"."""
        return json.dumps(_written(self.node, leaf_texts), ensure_ascii=False, separators=(",", ":"))

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Path of a leaf → its number."""
        return {path: number for number, path in enumerate(self.paths)}


def flatten(tree: object, what: str, *, is_leaf: Callable[[object], bool] | None = None) -> tuple[Structure, list[Any]]:
    """Takes a tree apart.

    Args:
        tree: nested dicts, lists and tuples. Everything else is a leaf, apart from None, which is a node without
            leaves. Keys are texts without control characters.
        what: its name in errors.
        is_leaf: recognizes further leaves, such as pairs of a dtype and a shape.

    Returns:
        The structure and the leaves, in one order: the keys of a dict are sorted.

    Raises:
        InvalidArgumentError: the tree has no leaf, too many leaves or levels, contains itself, or has a key that is not
            a text; or two of its leaves have the same path.
    """
    paths: dict[str, int] = {}
    leaves: list[Any] = []
    parents: set[int] = set()

    def visit(node: object, keys: tuple[str, ...]) -> _Node:
        if node is None:
            return None
        branches = _branches(node, is_leaf, what, keys)
        if branches is None:
            path = "/".join(keys) or ROOT
            if path in paths:
                raise InvalidArgumentError(
                    f"{what} has two leaves with the path {shown(path)}: a key that contains a slash, or is a number, "
                    "reads like the way to the other leaf. Rename it"
                )
            if len(path.encode()) > MAX_PATH_BYTES:
                raise InvalidArgumentError(f"{what} has a path of more than {MAX_PATH_BYTES} bytes: {shown(path)}")
            if len(leaves) == MAX_LEAVES:
                raise InvalidArgumentError(f"{what} has more than {MAX_LEAVES} leaves")
            paths[path] = len(leaves)
            leaves.append(node)
            return paths[path]
        if id(node) in parents:
            raise InvalidArgumentError(f"{what} contains itself at {shown('/'.join(keys) or ROOT)}")
        if len(keys) == MAX_DEPTH:
            raise InvalidArgumentError(f"{what} has more than {MAX_DEPTH} levels at {shown('/'.join(keys))}")
        parents.add(id(node))
        is_dict = isinstance(node, Mapping)
        # Sorted, so that processes which built their dicts in different orders agree on the structure.
        ordered = sorted(branches, key=itemgetter(0)) if is_dict else branches
        inner = {key: visit(child, (*keys, key)) for key, child in ordered}
        parents.discard(id(node))
        if is_dict:
            return {key: inner[key] for key, _ in branches}
        return _tuple_like(node, inner.values()) if isinstance(node, tuple) else list(inner.values())

    form = visit(tree, ())
    if not leaves:
        raise InvalidArgumentError(f"{what} must have at least one leaf, but {shown(tree)} has none")
    return Structure(_plain(form), tuple(paths), form), leaves


def parse_structure(text: str) -> tuple[Structure, list[str]]:
    """Returns a structure from ``Structure.text``, and the texts of its leaves.

    Raises:
        ValueError: redisacc did not write this text.
    """
    if len(text) > LONGEST_STRUCTURE:
        raise ValueError(f"the structure of a tree has {len(text)} characters")
    try:
        structure, leaf_texts = flatten(_read(json.loads(text), 0), "the structure")
    except RecursionError:
        raise ValueError("the structure of a tree is too deep") from None
    except InvalidArgumentError as error:
        raise ValueError(str(error)) from None
    if not all(isinstance(leaf, str) for leaf in leaf_texts) or structure.text(leaf_texts) != text:
        raise ValueError("the structure of a tree is not as redisacc writes it")
    return structure, leaf_texts


def difference(first: tuple[Structure, list[str]], second: tuple[Structure, list[str]]) -> tuple[str, str, str] | None:
    """Returns the first place in which two trees differ, given their structures and the texts of their leaves.

    Returns:
        The path, and what each tree has there: the text of a leaf, "a dict", "a list", "a tuple", "None" or "nothing".
    """
    ours, theirs = (dict(_nodes(structure.node, texts, ())) for structure, texts in (first, second))
    for path in ours | theirs:
        one, other = ours.get(path, "nothing"), theirs.get(path, "nothing")
        if one != other:
            return path, one, other
    return None


def _nodes(node: _Node, texts: Sequence[str], keys: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yields the path of each node of a tree, and what it is."""
    is_leaf = isinstance(node, int)
    yield "/".join(keys) or ROOT, texts[node] if is_leaf else "None" if node is None else f"a {type(node).__name__}"
    # A place in a list or tuple is a key, too.
    children = node.items() if isinstance(node, dict) else enumerate(() if is_leaf or node is None else node)
    for key, child in children:
        yield from _nodes(child, texts, (*keys, str(key)))


def _branches(
    node: object, is_leaf: Callable[[object], bool] | None, what: str, keys: tuple[str, ...]
) -> list[tuple[str, Any]] | None:
    """Returns the keys and children of a node, or None for a leaf. A place in a list or tuple is a key, too."""
    if is_leaf is not None and is_leaf(node):
        return None
    if not isinstance(node, (Mapping, list, tuple)):
        return None
    path = keys
    try:
        if not isinstance(node, Mapping):
            return [(str(place), child) for place, child in enumerate(node)]
        found = []
        for key in node:
            path = (*keys, _checked_key(key, what, keys))
            found.append((path[-1], node[key]))
            path = keys
    except Exception as error:  # noqa: BLE001 - raised again
        _raise_unreadable(node, path, what, error)
    return found


def _raise_unreadable(node: object, keys: tuple[str, ...], what: str, error: Exception) -> NoReturn:
    """Raises the error for a caller's node that raised while it was read, as an .npz file does after it was closed.

    Our own errors, interrupts and a lack of memory are raised as they are.
    """
    if isinstance(error, (InvalidArgumentError, MemoryError)) or interrupt_in(error) is not None:
        raise error
    where = f"{what} at {shown('/'.join(keys))}" if keys else what
    raise InvalidArgumentError(
        f"{where} cannot be read: {shown(type(node).__name__)} raised {type(error).__name__}: {shown(str(error))}"
    ) from error


def _checked_key(key: object, what: str, parents: tuple[str, ...]) -> str:
    if isinstance(key, str) and key and is_unicode(key) and not _CONTROL.search(key):
        return key
    where = f" under {shown('/'.join(parents))}" if parents else ""
    raise InvalidArgumentError(
        f"the keys of {what}{where} must be texts without control characters, and not empty, unlike {shown(key)}"
    )


def _build(node: _Node, leaves: Sequence[Any]) -> Any:
    if isinstance(node, int):
        return leaves[node]
    if isinstance(node, dict):
        # Most children are leaves, for which a call would cost more than all else here.
        return {key: leaves[child] if type(child) is int else _build(child, leaves) for key, child in node.items()}
    if isinstance(node, list):
        return [_build(child, leaves) for child in node]
    return None if node is None else _tuple_like(node, [_build(child, leaves) for child in node])


def _tuple_like(node: Any, children: Iterable[Any]) -> Any:
    """Returns a tuple of the class of another one, if that is a named tuple; else a plain one."""
    return type(node)._make(children) if hasattr(type(node), "_make") else tuple(children)


def _plain(form: _Node) -> _Node:
    """Returns a node with sorted dicts and plain tuples."""
    if isinstance(form, dict):
        return {key: _plain(form[key]) for key in sorted(form)}
    if isinstance(form, (list, tuple)):
        return (list if isinstance(form, list) else tuple)(map(_plain, form))
    return form


def _collect(node: _Node, tree: object, keys: tuple[str, ...], leaves: list[Any], what: str) -> None:
    """Appends the leaves of a tree in the order of its structure."""
    if isinstance(node, int):
        leaves.append(tree)
    elif node is None:
        if tree is not None:
            raise _unlike(what, keys, "None", tree)
    else:
        for key, child, found in _pairs(node, tree, keys, what):
            if isinstance(child, int):
                leaves.append(found)
            else:
                _collect(child, found, (*keys, str(key)), leaves, what)


def _pairs(node: _Node, tree: Any, keys: tuple[str, ...], what: str) -> list[tuple[str | int, _Node, Any]]:
    """Returns each key of a node, the child there, and what the tree has there."""
    expected = dict if isinstance(node, dict) else type(node)
    if not isinstance(tree, Mapping if expected is dict else expected):
        raise _unlike(what, keys, f"a {expected.__name__}", tree)
    found: list[tuple[str | int, _Node, Any]] = []
    path = keys
    try:
        there: Any = tree if expected is dict else range(len(tree))
        wanted: Any = node if expected is dict else range(len(node))
        if len(tree) != len(node) or not all(map(wanted.__contains__, there)):
            for key in wanted:
                if key not in there:
                    raise InvalidArgumentError(f"{what} lacks {shown('/'.join((*keys, str(key))))}")
            surplus = next(key for key in there if key not in wanted)
            # A key that is not text may refuse to become text.
            name = surplus if isinstance(surplus, str) else shown(surplus)
            raise InvalidArgumentError(f"{what} has {shown('/'.join((*keys, name)))}, which is surplus")
        for key in wanted:
            path = (*keys, str(key))
            found.append((key, node[key], tree[key]))
            path = keys
    except Exception as error:  # noqa: BLE001 - raised again
        _raise_unreadable(tree, path, what, error)
    return found


def _unlike(what: str, keys: tuple[str, ...], wanted: str, found: object) -> InvalidArgumentError:
    path = "/".join(keys)
    where = f"{what} at {shown(path)}" if path else what
    return InvalidArgumentError(f"{where} must be {wanted}, not {shown(found)}")


def _written(node: _Node, leaf_texts: Sequence[str]) -> Any:
    """Returns what JSON writes for a node."""
    if isinstance(node, int):
        return leaf_texts[node]
    if isinstance(node, dict):
        return {key: _written(child, leaf_texts) for key, child in node.items()}
    if node is None:
        return None
    inner = [_written(child, leaf_texts) for child in node]
    return inner if isinstance(node, list) else [_TUPLE, *inner]


def _read(written: Any, depth: int) -> Any:
    """Returns the tree that JSON wrote, with the texts as its leaves."""
    if depth > MAX_DEPTH:
        raise ValueError("the structure of a tree is too deep")
    if isinstance(written, dict):
        return {key: _read(child, depth + 1) for key, child in written.items()}
    if isinstance(written, list):
        if written[:1] == [_TUPLE]:
            return tuple([_read(child, depth + 1) for child in written[1:]])
        return [_read(child, depth + 1) for child in written]
    return written


# Trees whose leaves are numpy arrays, made from trees of anything that numpy can read.


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
