"""Accumulators of trees in every command that shows, takes or applies gradients."""

import re

import ml_dtypes
import numpy as np
import pytest
from support.selection import thorough
from terminals import on_a_terminal

import redisacc
from redisacc.tools.cli.shared.output import json_value

pytestmark = pytest.mark.servers("valkey", "cluster")

SPEC = {
    "embed": redisacc.Sparse("float32", (100, 2)),
    "file": ("bfloat16", (2,)),
    "layers": [{"w": ("float32", (3, 2)), "n": ("int64", ())}, {"w": ("float32", (2,)), "n": ("int64", ())}],
    "open": redisacc.Sparse("float64", (None,)),
}
PATHS = ["embed", "file", "layers/0/n", "layers/0/w", "layers/1/n", "layers/1/w", "open"]


def gradient(number, *, lacks=()):
    rng = np.random.default_rng(number)
    indices = np.sort(rng.choice(20, 5, replace=False))
    tree = {
        "embed": (indices, rng.normal(size=(5, 2)).astype(np.float32)),
        "file": rng.integers(0, 50, 2).astype(ml_dtypes.bfloat16),
        "layers": [
            {"w": rng.normal(size=(3, 2)).astype(np.float32), "n": np.int64(number)},
            {"w": rng.normal(size=2).astype(np.float32), "n": np.int64(2**60 + number)},
        ],
        "open": (indices + 2**40, rng.normal(size=5)),
    }
    for path in lacks:
        *parents, last = [int(key) if key.isdigit() else key for key in path.split("/")]
        node = tree
        for key in parents:
            node = node[key]
        node[last] = None
    return tree


def leaf_of(tree, path):
    for key in path.split("/"):
        tree = tree[int(key) if key.isdigit() else key]
    return tree


def arrays_of(file):
    """Returns the arrays of an .npz."""
    # It is closed here, because a local variable of a test that runs commands lives until the garbage is collected: the
    # exit of a command is an exception in a cycle with its frames, and these refer to the frame of the test.
    with np.load(file) as saved:
        return dict(saved)


def test_ls_and_show(cli, cli_json, open_tree):
    acc = open_tree(SPEC, "model", worker="ann")
    acc.apply_grad(gradient(1))
    lines = [line.split() for line in cli("ls").stdout.splitlines()]
    assert lines[1][:7] == ["model", "tree", "float32", "+3", "7", "leaves", "0"]
    (found,) = cli_json("ls")
    assert (found["kind"], found["dtype"], found["shape"], found["num_leaves"]) == (
        "tree", "float32,bfloat16,int64,float64", None, 7,
    )  # fmt: skip
    said = cli("show", "model").stdout
    for pattern in (
        r"^model  tree float32,bfloat16,int64,float64 7 leaves MEAN$",
        r"^  this round +1 gradient$",
        r"^  mean +divides by the gradients of the round$",
        r"^  PATH +KIND +DTYPE +SHAPE$",
        r"^  embed +sparse +float32 +\[100,2\]$",
        r"^  layers/0/n +dense +int64 +\[\]$",
        r"^  open +sparse +float64 +\[None\]$",
    ):
        assert re.search(pattern, said, re.MULTILINE), (pattern, said)
    assert max(map(len, said.splitlines())) <= 80
    facts = cli_json("show", "model")
    assert [leaf["path"] for leaf in facts["leaves"]] == PATHS
    assert facts["leaves"][0] == {"path": "embed", "kind": "sparse", "dtype": "float32", "shape": [100, 2]}
    assert facts["missing"] == "zero"


def test_show_lists_some_of_many_leaves(cli, cli_json, open_tree):
    open_tree({f"w{n:03}": ("float32", (2,)) for n in range(500)}, "model")
    said = cli("show", "model").stdout
    assert said.count("dense") == 20
    assert "and 480 more, which --json lists" in said
    assert len(cli_json("show", "model")["leaves"]) == 500


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mean": redisacc.Mean(missing="skip")}, "divides by the gradients that have the leaf"),
        (
            {"mean": redisacc.Mean(rows="index")},
            "divides by the gradients of the round, and a row by those that held its index",
        ),
    ],
)
def test_show_says_what_a_mean_divides_by(cli, open_tree, options, text):
    open_tree(SPEC, "model", **options)
    assert f"mean         {text}\n" in cli("show", "model").stdout


FLOATS = {
    "bias": ("complex64", (4,)),
    "embed": redisacc.Sparse("float32", (100, 2)),
    "layers": [{"w": ("float32", (3, 2)), "n": ("int32", ())}],
    "open": redisacc.Sparse("float64", (None,)),
}


@pytest.mark.parametrize("missing", ["zero", "skip"])
@pytest.mark.parametrize("sparse_mean", ["round", "index"])
@pytest.mark.parametrize("reduction", thorough(["MEAN", "SUM"], usual=["MEAN"]))
def test_the_rows_of_a_leaf_equal_peek(cli_json, open_tree, missing, sparse_mean, reduction):
    options = {"mean": redisacc.Mean(missing=missing, rows=sparse_mean), "reduction_type": reduction}
    # Some are added in place, and the others are inline or in parts.
    limits = [redisacc.Limits(in_place=limit, inline=300) for limit in (10**9, 0)]
    accs = [open_tree(FLOATS, "model", limits=limit, **options) for limit in limits]
    lacking = [(), ("embed",), ("layers/0/w",), ("embed", "layers/0/n"), ("open",), ()]
    for number in range(18):
        lacks = lacking[number % len(lacking)]
        whole = gradient(number, lacks=lacks)
        tree = {"bias": [5 - 1j] * 4, "embed": whole["embed"], "layers": [whole["layers"][0]], "open": whole["open"]}
        accs[number % len(accs)].apply_grad(tree)
    look = accs[0].peek().gradient
    field = "sum" if reduction == "SUM" else "mean"
    of = {path: 18 - 3 * sum(path in lacks for lacks in lacking) for path in ("embed", "open")}
    for path, offset in (("embed", 0), ("open", 2**40)):
        expected = leaf_of(look, path)
        wanted = [3 + offset, 17 + offset, 77 + offset]
        some = cli_json("show", "model", "--leaf", path, *[word for index in wanted for word in ("--index", index)])
        assert [row["index"] for row in some["rows"]] == [n for n in wanted if n in expected.indices]
        assert some["rows"]
        assert some["num_present"] == (of[path] if missing == "skip" else 18)
        for row in some["rows"]:
            place = np.searchsorted(expected.indices, row["index"])
            assert row[field] == json_value(expected.values[place])
    dense = cli_json("show", "model", "--leaf", "layers/0/w", "--index", 0, "--index", 2)
    assert dense["leaf"] == "layers/0/w"
    assert [row[field] for row in dense["rows"]] == json_value(look["layers"][0]["w"][[0, 2]])
    assert cli_json("show", "model", "--leaf", "bias", "--index", 3)["rows"][0][field] == json_value(look["bias"][3])
    (scalar,) = cli_json("show", "model", "--leaf", "layers/0/n", "--index", 0)["rows"]
    assert scalar[field] == int(look["layers"][0]["n"])
    assert scalar["count"] == (15 if missing == "skip" else 18)


def test_a_leaf_that_no_gradient_has(cli, cli_json, open_tree):
    acc = open_tree(SPEC, "model", mean=redisacc.Mean(missing="skip"))
    acc.apply_grad(gradient(1, lacks=["embed", "layers/0/w"]))
    acc.apply_grad(gradient(2, lacks=["embed", "layers/0/w"]))
    assert acc.peek().gradient["layers"][0]["w"] is None
    assert cli_json("show", "model", "--leaf", "layers/0/w", "--index", 1)["rows"] == []
    said = cli("show", "model", "--leaf", "embed", "--index", 3).stdout
    assert said == "model, leaf embed: step 0, 2 gradients, 0 with this leaf\nrow 3  in no gradient of this round\n"


def test_an_empty_round(cli_json, open_tree):
    open_tree(SPEC, "model")
    assert cli_json("show", "model", "--leaf", "embed", "--index", 3)["rows"] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--index", "1", "--leaf", "\x1b[2J"),
            "there are 'embed', 'file', 'layers/0/n', 'layers/0/w', 'layers/1/n' and 2 more",
        ),
        (("--index", "1"), "choose a leaf by its path, such as 'embed'"),
        (("--leaf", "embed"), "--leaf needs --index"),
    ],
)
def test_a_leaf_that_is_not_there(cli, open_tree, words, message):
    acc = open_tree(SPEC, "model")
    acc.apply_grad(gradient(1))
    found = cli("show", "model", *words)
    assert found.exit_code == 2
    assert message in found.stderr
    assert "\x1b" not in found.stderr


@pytest.mark.usefixtures("accumulator")
def test_a_leaf_of_what_is_no_tree(cli):
    found = cli("show", "w", "--leaf", "embed", "--index", "1")
    assert (found.exit_code, "not trees" in found.stderr) == (2, True)


EVIL = "w\u202ex"


@pytest.mark.slow
def test_evil_paths_are_printable(cli, open_tree, real_server):
    acc = open_tree({EVIL: ("float32", (2,)), "a" * 900: ("float32", (2,))}, "model")
    acc.apply_grad({EVIL: [1, 2], "a" * 900: [1, 2]})
    for words in (
        ("show", "model"),
        ("show", "model", "--leaf", EVIL, "--index", "1"),
        ("show", "model", "--leaf", "nothing", "--index", "1"),
        ("show", "model", "--index", "1"),
        ("ls",),
    ):
        found = cli(*words)
        assert all(line.isprintable() for line in found.output.splitlines()), words
    lines = [line.rstrip() for line in on_a_terminal("show", "model", "--redis", real_server.url).splitlines()]
    assert max(map(len, lines)) <= 80


def test_take_and_apply(cli, cli_json, open_tree, tmp_path):
    acc = open_tree(SPEC, "model", worker="ann", mean=redisacc.Mean(missing="skip"))
    acc.apply_grad(gradient(1, lacks=["layers/1/w", "embed"]))
    acc.apply_grad(gradient(2, lacks=["layers/1/w", "embed"]))
    expected = acc.peek().gradient
    said = cli_json("take", "model", 2, "-o", tmp_path / "g.npz")
    assert said["num_accumulated"] == 2
    saved = arrays_of(tmp_path / "g.npz")
    assert sorted(saved) == ["file", "layers/0/n", "layers/0/w", "layers/1/n", "open/indices", "open/shape",
                             "open/values"]  # fmt: skip
    assert saved["layers/0/n"].shape == ()
    assert saved["file"].dtype == np.float32
    assert saved["open/shape"].tolist() == [-1]
    assert cli_json("apply", "model", tmp_path / "g.npz")["outcome"] == "applied"
    again = acc.peek().gradient
    for path in PATHS:
        one, other = leaf_of(expected, path), leaf_of(again, path)
        if one is None:
            assert other is None
        elif hasattr(one, "indices"):
            assert (other.indices.tolist(), other.values.tolist()) == (one.indices.tolist(), one.values.tolist())
        else:
            assert (other.dtype, other.tolist()) == (one.dtype, one.tolist())


def test_apply_refuses_other_arrays(cli, open_tree, tmp_path):
    acc = open_tree(SPEC, "model")

    def apply(**arrays):
        np.savez(tmp_path / "g.npz", **arrays)
        found = cli("apply", "model", tmp_path / "g.npz")
        assert found.exit_code == 2
        assert acc.num_accumulated() == 0
        return " ".join(found.stderr.split())

    w = np.ones((3, 2), np.float32)
    assert "it holds 'layers/2/w'" in apply(**{"layers/0/w": w, "layers/2/w": w})
    assert "both the indices and the values of the sparse leaf 'embed'" in apply(**{"embed/indices": [1]})
    assert "both the indices and the values of the sparse leaf 'embed'" in apply(**{"embed/values": w[:1]})
    assert "both the indices and the values of the sparse leaf 'embed'" in apply(**{"embed/shape": [100, 2]})
    assert "at 'embed'" in apply(**{"embed/indices": [1], "embed/values": w[:1], "embed/shape": [99, 2]})
    assert "at 'layers/0/w'" in apply(**{"layers/0/w": w[:1]})
    np.save(tmp_path / "g.npy", w)
    found = cli("apply", "model", tmp_path / "g.npy")
    assert (found.exit_code, "one array without a name" in found.stderr) == (2, True)


@pytest.mark.parametrize(
    "spec",
    [
        {"a": redisacc.Sparse("float32", (9, 2)), "a/indices": ("float32", ())},
        {"a/values": ("float32", ()), "a": redisacc.Sparse("float32", (9, 2))},
        {"a": ("float32", ()), "a.npy": ("float32", ())},
        {"a.npy.npy": ("float32", ()), "a.npy": ("float32", ())},
        {"a": redisacc.Sparse("float32", (9, 2)), "a/shape.npy": ("float32", ())},
        {"x": {"y.npy": ("float32", ())}, "x/y": ("float32", ())},
    ],
)
def test_trees_that_no_file_can_hold(cli, open_tree, spec, tmp_path):
    acc = open_tree(spec, "model")
    # Nobody has a gradient for any leaf.
    acc.apply_grad({key: dict.fromkeys(leaf) if isinstance(leaf, dict) else None for key, leaf in spec.items()})
    found = cli("take", "model", 1, "-o", tmp_path / "g.npz")
    assert found.exit_code == 2
    assert "would be confused; use Python instead" in found.stderr
    assert acc.num_accumulated() == 1


def test_names_that_savez_and_zip_treat_apart(cli, open_tree, tmp_path):
    spec = dict.fromkeys(("file", "../up", "/root", "ü\\", "a//b", "."), ("float32", (1,)))
    acc = open_tree(spec, "model")
    acc.apply_grad({key: [number] for number, key in enumerate(spec)})
    assert cli("take", "model", 1, "-o", tmp_path / "g.npz").exit_code == 0
    saved = arrays_of(tmp_path / "g.npz")
    assert {key: saved[key].tolist() for key in spec} == {key: [number] for number, key in enumerate(spec)}
    assert cli("apply", "model", tmp_path / "g.npz").exit_code == 0
    assert {key: array.tolist() for key, array in acc.peek().gradient.items()} == {
        key: [number] for number, key in enumerate(spec)
    }


def test_a_tree_that_is_a_leaf(cli, cli_json, open_tree, tmp_path):
    acc = open_tree(("float32", (2,)), "model")
    acc.apply_grad([1, 2])
    assert cli_json("show", "model", "--leaf", ".", "--index", 1)["rows"][0]["mean"] == 2
    assert cli("take", "model", 1, "-o", tmp_path / "g.npz").exit_code == 0
    assert arrays_of(tmp_path / "g.npz")["."].tolist() == [1, 2]
    assert cli("apply", "model", tmp_path / "g.npz").exit_code == 0
