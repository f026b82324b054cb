"""Trees: taken apart and put together, written as text and read again, and what is not a tree."""

import collections
import collections.abc
import json
import types

import numpy as np
import pytest
from support.rows import every_row

from redisacc._arrays import trees
from redisacc._arrays.trees import MAX_DEPTH, MAX_LEAVES, MAX_PATH_BYTES, flatten, parse_structure
from redisacc.errors import InvalidArgumentError

Pair = collections.namedtuple("Pair", "first second")

# A tree, its paths, the same tree as it is built again, and the text of its structure with "x" for each leaf.
TREES = {
    "leaf": (7, ["."], 7, '"x"'),
    "dict": ({"b": 1, "a": 2}, ["a", "b"], {"a": 2, "b": 1}, '{"a":"x","b":"x"}'),
    "list": ([1, 2], ["0", "1"], [1, 2], '["x","x"]'),
    "tuple": ((1, 2), ["0", "1"], (1, 2), '["tuple","x","x"]'),
    "a tuple of one": ((1,), ["0"], (1,), '["tuple","x"]'),
    "named tuple": (Pair(1, 2), ["0", "1"], (1, 2), '["tuple","x","x"]'),
    "ordered": (collections.OrderedDict([("z", 1), ("a", 2)]), ["a", "z"], {"a": 2, "z": 1}, '{"a":"x","z":"x"}'),
    "mapping": (types.MappingProxyType({"a": 1}), ["a"], {"a": 1}, '{"a":"x"}'),
    "default": (collections.defaultdict(int, {"a": 1}), ["a"], {"a": 1}, '{"a":"x"}'),
    "nested": (
        {"m": [(1, {"k": 2}), 3], "a": {"b": {"c": 4}}},
        ["a/b/c", "m/0/0", "m/0/1/k", "m/1"],
        {"a": {"b": {"c": 4}}, "m": [(1, {"k": 2}), 3]},
        '{"a":{"b":{"c":"x"}},"m":[["tuple","x",{"k":"x"}],"x"]}',
    ),
    "none": ({"a": None, "b": [None, 1]}, ["b/1"], {"a": None, "b": [None, 1]}, '{"a":null,"b":[null,"x"]}'),
    "empty nodes": ([{}, [], (), 1], ["3"], [{}, [], (), 1], '[{},[],["tuple"],"x"]'),
    "more than ten": ([*range(12)], [str(k) for k in range(12)], [*range(12)], json.dumps(["x"] * 12).replace(" ", "")),
    "unusual keys": (
        {"a/b": 1, "tuple": 2, "🙂": 3, "null": 4, "a b:c{}": 5},
        ["a b:c{}", "a/b", "null", "tuple", "🙂"],
        {"a b:c{}": 5, "a/b": 1, "null": 4, "tuple": 2, "🙂": 3},
        '{"a b:c{}":"x","a/b":"x","null":"x","tuple":"x","🙂":"x"}',
    ),
}


def test_a_tree_is_taken_apart_and_put_together():
    for case, (tree, paths, built, text) in TREES.items():
        structure, leaves = flatten(tree, "tree")
        assert list(structure.paths) == paths, case
        assert structure.numbers == {path: number for number, path in enumerate(paths)}, case
        assert structure.leaves_of(tree, "tree") == leaves, case
        again = structure.build(leaves)
        assert again == built, case
        form = dict(tree) if isinstance(tree, collections.abc.Mapping) else tree
        assert repr(again) == repr(form), f"{case}: the types and the order of keys, too"
        assert structure.text(["x"] * len(leaves)) == text, case
        parsed, texts = parse_structure(text)
        assert (parsed.paths, texts) == (structure.paths, ["x"] * len(leaves)), case
        assert repr(parsed.build(leaves)) == repr(built), case


def nested(depth, leaf=1):
    """A tree with that many levels of lists above its leaf."""
    for _ in range(depth):
        leaf = [leaf]
    return leaf


def cyclic(*, key):
    tree = {"a": {}}
    tree["a"][key] = tree
    return tree


def cyclic_list():
    tree = [1]
    tree.append({"b": tree})
    return tree


RENAME = "a key that contains a slash, or is a number, reads like the way to the other leaf. Rename it"
OF_KEYS = "the keys of tree must be texts without control characters, and not empty"
NO_KEYS = (0, b"a", "", "a\x00b", "\x1b[31m", "\x7f", "\x9b31m", "a\u2028b", "\ud800")
REFUSED = [
    ({}, "tree must have at least one leaf, but {} has none"),
    ({"a": None, "b": [(), None]}, "tree must have at least one leaf"),
    (None, "tree must have at least one leaf, but None has none"),
    (cyclic(key="b"), "tree contains itself at 'a/b'"),
    (cyclic_list(), "tree contains itself at '1/b'"),
    *((nested(depth), f"tree has more than {MAX_DEPTH} levels at '0/0/") for depth in (MAX_DEPTH + 1, 10_000)),
    *(({key: 1}, f"{OF_KEYS}, unlike") for key in NO_KEYS),
    ({"a": 1, 2: 3}, f"{OF_KEYS}, unlike 2"),
    ({"a": {"b": [{3: 1}]}}, "the keys of tree under 'a/b/0' must be texts"),
    ({"a/b": 1, "a": {"b": 2}}, "tree has two leaves with the path 'a/b': " + RENAME),
    ({"a/0": 1, "a": [2]}, "tree has two leaves with the path 'a/0'"),
    ({"a" * 1000: {"b" * 25: 1}}, f"tree has a path of more than {MAX_PATH_BYTES} bytes: 'aaa"),
    ({"🙂" * 257: 1}, f"tree has a path of more than {MAX_PATH_BYTES} bytes"),
    ([0] * 41, "tree has more than 40 leaves"),
]


def test_what_is_not_a_tree(monkeypatch):
    monkeypatch.setattr(trees, "MAX_LEAVES", 40)
    for tree, message in REFUSED:
        with pytest.raises(InvalidArgumentError, match=message) as failure:
            flatten(tree, "tree")
        assert len(str(failure.value)) < 500
        assert str(failure.value).isprintable()


def test_the_limits_are_allowed():
    assert len(flatten(nested(MAX_DEPTH), "tree")[0].paths[0]) == 2 * MAX_DEPTH - 1
    assert len(flatten([0] * MAX_LEAVES, "tree")[1]) == MAX_LEAVES
    assert flatten({"a" * (MAX_PATH_BYTES - 2): [0]}, "tree")[0].paths[0].endswith("a/0")
    text = flatten(nested(MAX_DEPTH), "tree")[0].text(["x"])
    assert parse_structure(text)[0].paths == flatten(nested(MAX_DEPTH), "tree")[0].paths


class Unprintable:
    def __str__(self):
        raise RuntimeError("no")

    __repr__ = __str__


# What a tree of the structure {"a": [leaf, (leaf, leaf)], "b": {"c": leaf, "d": None}} must not look like.
RIGHT = {"a": [1, (2, 3)], "b": {"c": 4, "d": None}}
OTHERS = [
    ({"a": RIGHT["a"]}, "grad lacks 'b'"),
    ({"a": [1, (2, 3)], "b": {"d": None}}, "grad lacks 'b/c'"),
    ({"a": [1, (2, 3)], "b": {"c": 4}}, "grad lacks 'b/d'"),
    *(({**RIGHT, "z": value}, "grad has 'z', which is surplus") for value in (1, None)),
    ({**RIGHT, 7: 1}, "grad has '7', which is surplus"),
    ({**RIGHT, Unprintable(): 1}, "grad has '<Unprintable .*>', which is surplus"),
    ({"a": RIGHT["a"], "B": RIGHT["b"]}, "grad lacks 'b'"),
    ({"a": [1], "b": RIGHT["b"]}, "grad lacks 'a/1'"),
    ({"a": [1, (2, 3), 4], "b": RIGHT["b"]}, "grad has 'a/2', which is surplus"),
    # The first of several.
    ({"a": [1, (2,)], "b": {}}, "grad lacks 'a/1/1'"),
    ([1, 2], r"grad must be a dict, not \[1, 2\]"),
    (np.zeros(3), r"grad must be a dict, not array"),
    (None, "grad must be a dict, not None"),
    ({"a": (1, (2, 3)), "b": RIGHT["b"]}, "grad at 'a' must be a list, not"),
    ({"a": [1, [2, 3]], "b": RIGHT["b"]}, r"grad at 'a/1' must be a tuple, not \[2, 3\]"),
    ({"a": np.zeros((2, 2)), "b": RIGHT["b"]}, "grad at 'a' must be a list, not array"),
    ({"a": RIGHT["a"], "b": 7}, "grad at 'b' must be a dict, not 7"),
    ({"a": RIGHT["a"], "b": {"c": 4, "d": 0}}, "grad at 'b/d' must be None, not 0"),
    ({"a": Unprintable(), "b": {}}, "grad at 'a' must be a list, not <Unprintable"),
]


def test_another_structure():
    structure, leaves = flatten(RIGHT, "spec")
    assert structure.leaves_of(RIGHT, "grad") == leaves == [1, 2, 3, 4]
    for tree, message in OTHERS:
        with pytest.raises(InvalidArgumentError, match=message):
            structure.leaves_of(tree, "grad")


def test_leaves_may_be_anything_and_dicts_in_any_order():
    structure, _ = flatten(RIGHT, "spec")
    tree = types.MappingProxyType({"b": collections.OrderedDict(d=None, c=None), "a": [{"x": 1}, Pair([1], (2,))]})
    assert structure.leaves_of(tree, "grad") == [{"x": 1}, [1], (2,), None]


def test_a_tree_that_is_a_leaf():
    structure, _ = flatten(1, "spec")
    for leaf in (None, {}, [1], nested(10_000)):
        assert structure.leaves_of(leaf, "grad")[0] is leaf


# Texts that redisacc does not write.
FOREIGN = [
    *("", "{", "\x00\xff", "[" * 10_000, "[" * 10_000 + '"x"' + "]" * 10_000, '{"a":' * 10_000 + '"x"' + "}" * 10_000),
    "[" * (MAX_DEPTH + 1) + '"x"' + "]" * (MAX_DEPTH + 1),
    *("{}", "null", "[1]", "[" + "1" * 10_000 + "]", '{"a":1.5}', "[NaN]", "[true]"),
    *('{"a": "x"}', '{"b":"x","a":"x"}', '{"a":"x","a":"x"}', '{"\\u0061":"x"}', '{"\\ud800":"x"}', '["\\ud800"]'),
    *('{"\\u0000":"x"}', '{"":"x"}', '{"a":{"b":"x"},"a/b":"x"}', '"x""x"', '"x"\n', '{"' + "k" * 2000 + '":"x"}'),
    "[" + '"x",' * 40 + '"x"]',
]


def test_a_structure_that_redisacc_did_not_write(monkeypatch):
    monkeypatch.setattr(trees, "MAX_LEAVES", 40)
    for text in FOREIGN:
        with pytest.raises(ValueError, match=r".") as failure:
            pytest.fail(f"{text[:50]!r} was read as {parse_structure(text)}")
        assert not isinstance(failure.value, UnicodeError), text[:50]
        assert len(str(failure.value)) < 500


def test_a_structure_that_is_too_long(monkeypatch):
    text = '{"' + "a" * 100 + '":"x"}'
    monkeypatch.setattr(trees, "LONGEST_STRUCTURE", len(text))
    assert parse_structure(text)[1] == ["x"]
    monkeypatch.setattr(trees, "LONGEST_STRUCTURE", len(text) - 1)
    with pytest.raises(ValueError, match=f"has {len(text)} characters"):
        parse_structure(text)


def parsed(tree):
    structure, leaves = flatten(tree, "tree")
    return structure, [str(leaf) for leaf in leaves]


@every_row(
    "first, second, expected",
    [
        ({"a": "x"}, {"a": "y"}, ("a", "x", "y")),
        ("x", ["x"], (".", "x", "a list")),
        (["x"], ("x",), (".", "a list", "a tuple")),
        ({"a": {"b": "x"}, "c": "y"}, {"c": "z", "a": {"b": "w"}}, ("a/b", "x", "w")),
        (["x"] * 12, ["x"] * 2 + ["y"] * 10, ("2", "x", "y")),
        (["x"] * 3, ["x"] * 2, ("2", "x", "nothing")),
        (["x"], ["x", None], ("1", "nothing", "None")),
        ({"a": ["x", None, ("y",)]}, {"a": ["x", None, ("y",)]}, None),
    ],
)
def test_the_first_difference(first, second, expected):
    assert trees.difference(parsed(first), parsed(second)) == expected
