"""The scripts of lua/inspect and trees: they print what peek() returns for a leaf."""

from __future__ import annotations

import ml_dtypes
import msgpack
import numpy as np
import pytest
from redis.exceptions import ResponseError
from support.selection import thorough
from test_inspect_scripts import index_of, numbers, run, same

import redisacc
from redisacc._format import buffered as buffered_format

pytestmark = pytest.mark.servers("valkey", "redis7", "redis62")

SPEC = {
    'a"b\\': ("float32", (3, 2)),
    "big": ("float32", (700,)),
    "embed": redisacc.Sparse("float32", (100, 2, 3)),
    "half": redisacc.Sparse("bfloat16", (None,)),
    "layers": ({"n": ("int16", (3,)), "w": ("complex64", (2,))}, None, [("int16", ()), {}, ("float32", (0, 5))]),
    "ü": ("uint8", (1, 5)),
}
DENSE = ['a"b\\', "big", "layers/0/n", "layers/0/w", "layers/2/0", "ü"]
SPARSE = ["embed", "half"]

# How gradients come to be stored: the in_place_limit of each handle, up to how many bytes a buffered one is inline, and
# whether the buffer has so little room that it must be compacted.
STORED = {
    "in place": ([10**9], 2**16, False),
    "inline": ([0], 2**16, False),
    "parts": ([0], 0, False),
    "compacted": ([0], 2**16, True),
    "compacted parts": ([0], 0, True),
    "mixed": ([10**9, 0, 0, 0], 3500, True),
}


def random_tree(rng, lacks=()):
    def rows(size, *row):
        indices = np.sort(rng.choice(16, rng.integers(0, size), replace=False))
        return indices, rng.normal(size=(len(indices), *row)).astype(np.float32 if row else ml_dtypes.bfloat16)

    tree = {
        'a"b\\': rng.normal(size=(3, 2)).astype(np.float32),
        "big": rng.normal(size=700).astype(np.float32),
        "embed": rows(9, 2, 3),
        "half": rows(9),
        "layers": (
            {"n": rng.integers(-99, 99, 3, np.int16), "w": rng.normal(size=2).astype(np.complex64)},
            None,
            [rng.integers(-99, 99, (), np.int16), {}, np.zeros((0, 5), np.float32)],
        ),
        "ü": rng.integers(0, 9, (1, 5), np.uint8),
    }
    for path in lacks:
        if path.startswith("layers/0/"):
            tree["layers"][0][path[-1]] = None
        else:
            tree[path] = None
    return tree


def leaf_of(tree, path):
    for key in path.split("/"):
        tree = tree[int(key) if key.isdigit() else key]
    return tree


@pytest.mark.servers("valkey")
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("missing", ["zero", "skip"])
@pytest.mark.parametrize("sparse_mean", ["round", "index"])
@pytest.mark.parametrize("reduction", thorough(["MEAN", "SUM"], usual=["MEAN"]))
def test_a_leaf_equals_peek(client, open_tree, monkeypatch, stored, missing, sparse_mean, reduction):
    limits, inline, compacted = STORED[stored]
    monkeypatch.setattr(buffered_format, "INLINE_BYTES", inline)
    options = {"missing": missing, "sparse_mean": sparse_mean, "reduction_type": reduction}
    options["buffer_limit"] = 9000 if compacted else 2**30
    accs = [open_tree(SPEC, "model", in_place_limit=limit, **options) for limit in limits]
    rng = np.random.default_rng([*stored.encode()])
    lacking = [(), ("embed", "big"), ("layers/0/n",), (), ("half", "ü")]
    for number in range(20):
        accs[number % len(accs)].apply_grad(random_tree(rng, lacking[number % len(lacking)]))
    acc = accs[0]
    headers = [msgpack.unpackb(entry.partition(b" ")[2]) for entry in client.hvals(f"{acc.accumulator_ref}:buffered")]
    assert any(header["gradients"] > 1 for header in headers) == compacted
    look = acc.peek().gradient
    have = {path: 20 - 4 * sum(path in lacks for lacks in lacking) for path in (*DENSE, *SPARSE)}
    field = reduction.lower()
    for path in DENSE:
        said = index_of(client, acc, path, "", 1000)
        expected = leaf_of(look, path)
        assert said["count"] == str(have[path] if missing == "skip" else 20)
        assert said.get("present") == (str(have[path]) if missing == "skip" else None)
        assert same(numbers(said[field], expected.dtype.name), expected.reshape(-1)), (path, said, expected)
    assert index_of(client, acc, "layers/2/2")["elements"] == "0 of 0"
    some = index_of(client, acc, "big", "300", 1)
    assert same(numbers(some[field], "float32"), look["big"][300:301])
    for path in SPARSE:
        held = leaf_of(look, path)
        assert len(held.indices) > 5
        for index in range(17):
            said = index_of(client, acc, path, index)
            if index not in held.indices:
                assert said["count"] == "0"
                continue
            expected = held.values[np.searchsorted(held.indices, index)]
            assert same(numbers(said[field], expected.dtype.name), expected.reshape(-1)), (path, index, said, expected)
    acc.delete()


@pytest.mark.every_server
def test_a_leaf_that_no_gradient_has(client, open_tree):
    acc = open_tree({"a": ("float32", (2,)), "s": redisacc.Sparse("float32", (9,))}, "w", missing="skip")
    acc.apply_grad({"a": None, "s": None})
    acc.apply_grad({"a": None, "s": ([3], [1.0])})
    said = index_of(client, acc, "a")
    assert (said["present"], said["count"], "sum" in said) == ("0", "0", False)
    said = index_of(client, acc, "s", 3)
    assert (said["present"], said["count"], said["mean"]) == ("1", "1", "1")
    acc.delete()


def test_an_empty_round(client, open_tree):
    acc = open_tree(SPEC, "w")
    assert index_of(client, acc, "embed", 3) == {
        "accumulator": f"{acc.accumulator_ref} tree float32,bfloat16,int16,complex64,uint8",
        "leaf": "embed sparse float32 [100,2,3]",
        "index": "3", "step": "0", "gradients": "0", "count": "0",
    }  # fmt: skip
    acc.delete()


def test_a_tree_that_is_a_leaf(client, open_tree):
    acc = open_tree(("float32", (2,)), "w")
    acc.apply_grad([1, 2])
    assert index_of(client, acc, ".")["sum"] == "1 2"
    assert "  .: float32 [2]" in run(client, "summary", acc.accumulator_ref)
    acc.delete()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), 'no leaf with the path ""; there are a"b\\\\, big, embed, half, layers/0/n and 4 more'),
        (("layers/0",), 'no leaf with the path "layers/0"; below it are layers/0/n, layers/0/w$'),
        (("\x1b\u202eevil",), 'no leaf with the path "[?]{2}evil"; there are'),
        (("embed",), "a sparse leaf needs an index"),
        (("embed", "x"), "whole numbers"),
        (("embed", "1", "0"), "1 to 1000"),
        (("embed", "1,2"), "coordinate 2 is outside a dimension of size 2"),
        (("big", "700"), "coordinate 700 is outside a dimension of size 700"),
        (("layers/2/0", "0"), "got 1 coordinates for 0 dimensions"),
    ],
)
def test_wrong_arguments_are_said(client, open_tree, args, message):
    acc = open_tree(SPEC, "w")
    acc.apply_grad(random_tree(np.random.default_rng(1)))
    with pytest.raises(ResponseError, match=message):
        index_of(client, acc, *args)
    acc.delete()


def test_the_work_is_bounded(client, open_tree):
    acc = open_tree({f"s{n:03}": redisacc.Sparse("float32", (9,)) for n in range(100)}, "w", in_place_limit=0)
    tree = {f"s{n:03}": ([1], [1.0]) for n in range(100)}
    for _ in range(26):
        acc.apply_grad(tree)
    assert index_of(client, acc, "s099", 1)["count"] == "26"
    acc.apply_grad(tree)
    with pytest.raises(ResponseError, match="27 gradients are buffered, and this script searches at most 26"):
        index_of(client, acc, "s099", 1)
    acc.delete()
    acc = open_tree({f"a/long/path/to/a/leaf/{n}": ("float32", ()) for n in range(1000)}, "w")
    with pytest.raises(ResponseError, match="has 40891 bytes, and this script reads at most 32768"):
        index_of(client, acc, "a/long/path/to/a/leaf/7")
    lines = run(client, "summary", acc.accumulator_ref)
    assert "leaves: 1000" in lines
    assert "  and 990 more" in lines
    assert len([line for line in lines if "a/long/path" in line]) == 10
    acc.delete()
    acc = open_tree({f"a/long/path/to/a/leaf/{n}": ("float32", ()) for n in range(5000)}, "w")
    lines = run(client, "summary", acc.accumulator_ref)
    assert lines[lines.index("leaves: 5000") + 1] == "  and 5000 more"
    acc.delete()


@pytest.mark.every_server
def test_the_summary(client, open_tree):
    acc = open_tree(SPEC, "w", worker="ann", missing="skip", sparse_mean="index")
    acc.apply_grad(random_tree(np.random.default_rng(1)))
    lines = run(client, "summary", acc.accumulator_ref)
    assert lines[0] == (
        "redisacc:{w}: tree float32,bfloat16,int16,complex64,uint8 9 leaves MEAN by the gradients that have the leaf, "
        "of a row by those that held its index"
    )
    assert lines[1] == "step 0, 1 gradients in this round"
    start = lines.index("leaves: 9")
    assert lines[start + 1 : start + 10] == [
        '  a"b\\: float32 [3,2]',
        "  big: float32 [700]",
        "  embed: sparse float32 [100,2,3]",
        "  half: sparse bfloat16 [-1]",
        "  layers/0/n: int16 [3]",
        "  layers/0/w: complex64 [2]",
        "  layers/2/0: int16 []",
        "  layers/2/2: float32 [0,5]",
        "  ü: uint8 [1,5]",
    ]
    acc.delete()


def test_evil_paths_are_printable(client, open_tree):
    evil = "a\u202ebc\u2066d\u200fe"
    acc = open_tree({evil: ("float32", ())}, "w")
    acc.apply_grad({evil: 1})
    assert "  a?bc?d?e: float32 []" in run(client, "summary", acc.accumulator_ref)
    assert index_of(client, acc, evil)["leaf"] == "a?bc?d?e float32 []"
    with pytest.raises(ResponseError, match=r"there are a\?bc\?d\?e"):
        index_of(client, acc, "b")
    acc.delete()


def test_recoveries_are_listed(client, open_tree):
    acc = open_tree({"a": ("float32", ())}, "w", worker="chief")
    assert "recovered rounds: 0" in run(client, "summary", acc.accumulator_ref)
    acc.apply_grad({"a": 1})
    acc.take(1).__enter__()
    with acc.recover():
        pass
    client.rpush("redisacc:{w}:recovered", *["garbage"] * 30)
    lines = run(client, "summary", acc.accumulator_ref)
    start = lines.index("recovered rounds: 31")
    assert " ago by chief, token " in lines[start + 1]
    assert lines[start + 2] == "  and 21 more"
    acc.delete()


FOREIGN = [
    "",
    "{",
    "[",
    "x",
    "nul",
    '"float32 []',
    '"float32 []\\',
    '{"a":"text"}',
    '{"a":7}',
    '{"a" "float32 []"}',
    "{7:1}",
    '{"a":"float32 []"',
    "[" * 100,
    "[[" * 10_000,
    '{"' + "a" * 30_000,
    '{"a":' * 5000,
]


@pytest.mark.forges
@pytest.mark.parametrize("tree", FOREIGN, ids=range(len(FOREIGN)))
def test_foreign_structures_are_an_error(client, open_tree, tree):
    acc = open_tree({"a": ("float32", ())}, "w")
    acc.apply_grad({"a": 1})
    client.hset("redisacc:{w}", "tree", tree)
    with pytest.raises(ResponseError, match="tree holds what redisacc did not write"):
        index_of(client, acc, "a")
    # It shows the leaves that it can read.
    assert len(run(client, "summary", acc.accumulator_ref)) < 40


@pytest.mark.forges
@pytest.mark.parametrize("text", ["text32 []", "float32 [9]", "sparse float32 [9]", "float32 [99999999999999]"])
def test_leaves_that_do_not_fit_the_data_are_an_error(client, open_tree, text):
    acc = open_tree({"a": ("float32", (2,))}, "w", in_place_limit=0)
    acc.apply_grad({"a": [1, 2]})
    client.hset("redisacc:{w}", "tree", f'{{"a":"{text}"}}')
    with pytest.raises(ResponseError, match=r"did not write|cannot read elements|has another length"):
        index_of(client, acc, "a", 1)
