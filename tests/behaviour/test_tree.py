"""Accumulators of trees: every leaf is summed as if it had an accumulator of its own, and all are taken at once."""

import re

import numpy as np
import pytest
from support import model

import redisacc
from redisacc import IndexedSlices, Sparse


def assert_equal(tree, expected):
    """Every leaf is that of the model, bit for bit."""
    found = model.flat(tree)
    assert list(found) == list(expected)
    for path, leaf in found.items():
        wanted = expected[path]
        if wanted is None:
            assert leaf is None, path
        elif isinstance(wanted, tuple):
            assert isinstance(leaf, IndexedSlices)
            model.assert_same(leaf.indices, wanted[0])
            model.assert_same(leaf.values, wanted[1])
            assert leaf.dense_shape.tolist() == wanted[2].tolist()
        else:
            model.assert_same(leaf, wanted)


MIXED = {
    "emb": Sparse("float32", (9, 2)),
    "layers": [{"w": ("float32", (2, 2)), "b": ("float32", (2,))}, {"w": ("int32", ())}],
    "t": (("float64", (2,)), None, Sparse("int32", (None,))),
}


def mixed(value):
    return {
        "emb": IndexedSlices([[value, value]], [value]),
        "layers": [{"w": [[value, 0], [0, value]], "b": np.float32([value, 1])}, {"w": value}],
        "t": (np.float64([value, -value]), None, ([value], [value])),
    }


def test_what_the_handle_says(open_tree):
    acc = open_tree(MIXED, "model")
    assert acc.spec == MIXED
    assert repr(acc).startswith("TreeAccumulator(6 leaves, shared_name='model', reduction_type='MEAN', at ")
    with open_tree(acc.spec, "model", create=False) as again:
        assert again.info().incarnation == acc.info().incarnation


def test_like(client):
    weights = {"emb": np.zeros((9, 2), np.float32), "b": [np.ones(3), IndexedSlices([[1]], [0], [7, 1])]}
    with redisacc.TreeAccumulator.like(
        weights, sparse=["emb"], reduction_type="SUM", mean=redisacc.Mean(missing="skip", rows="index"), redis=client
    ) as acc:
        assert acc.spec == {"b": [("float64", (3,)), Sparse("int64", (7, 1))], "emb": Sparse("float32", (9, 2))}
        assert (acc.info().reduction_type, acc.info().sparse_mean) == ("SUM", "index")
        acc.apply_grad({"emb": None, "b": [[1, 2, 3], None]})
        total = acc.take_grad(1)
        assert (total["emb"], total["b"][0].tolist(), total["b"][1]) == (None, [1, 2, 3], None)


@pytest.mark.servers("valkey")
def test_a_sum_that_lua_cannot_hold_is_buffered_with_the_whole_tree(open_tree):
    acc = open_tree(
        {"a": ("int32", (2,)), "b": Sparse("uint32", (9,))},
        reduction_type="SUM",
        limits=redisacc.Limits(in_place=10**6),
    )
    # Rows of one gradient are added up beforehand, to more than a double holds exactly.
    many = 2**21 + 2
    acc.apply_grad({"a": [1, 2], "b": (np.full(many, 3), np.full(many, 2**32 - 1, np.uint32))})
    assert acc.info().buffered == 1
    acc.apply_grad({"a": [1, 2], "b": ([3], [7])})
    assert acc.info().buffered == 1
    total = acc.take_grad(2)
    assert total["a"].tolist() == [2, 4]
    assert total["b"].values.tolist() == [(many * (2**32 - 1) + 7) % 2**32]


@pytest.mark.slow(keep="mixed")
@pytest.mark.usual(client="asyncio")
@pytest.mark.servers("valkey")
@pytest.mark.parametrize("sections", ["dense", "mixed"])
def test_large_trees_in_many_parts(open_tree, background, until, sections):
    """Cuts fall into every section, also into the middle of an element of sixteen bytes."""
    spec = {
        "a": ("int8", (3,)),
        "b": ("complex128", (36_000,)),
        "c": ("float16", (200, 1001)),
        "d": ("float32", (280_001,)),
        "e": ("complex128", (7,)),
    }
    if sections == "mixed":
        spec |= {"f": Sparse("float32", (None, 85)), "g": Sparse("uint8", (5000,)), "h": Sparse("float64", (9, 2))}
    leaves = {p: ("sparse", s.dtype, s.shape) if isinstance(s, Sparse) else ("dense", *s) for p, s in spec.items()}
    rng = np.random.default_rng(5)
    acc = open_tree(spec, mean=redisacc.Mean(missing="skip"))
    oracle = model.Tree.of(leaves, "MEAN", "skip")
    waiting = background(acc.take_grad, 4, timeout=60)
    until(lambda: acc.info().waiting)
    for number in range(4):
        grad = {}
        for path, (kind, dtype, shape) in leaves.items():
            if kind == "dense":
                grad[path] = model.numbers(rng, dtype, shape)
            else:
                indices = np.sort(rng.permutation(4000 if path != "h" else 9)[: 4 if path == "h" else 1500])
                grad[path] = (indices, model.numbers(rng, dtype, (len(indices), *shape[1:])))
        if number == 2:
            grad |= {"c": None, "f": None} if sections == "mixed" else {"c": None}
        oracle.apply(grad, 0, "w")
        acc.apply_grad(grad)
    assert_equal(waiting.result(60), oracle.take(4).gradient)


# Opening

LIKE = {"a": {"w": ("float32", (2, 2)), "b": ("float32", (2,))}, "s": Sparse("float32", (9, 2)), "t": [("int32", ())]}
OTHER_TREES = [
    (
        {**LIKE, "a": {"w": ("float32", (2, 3)), "b": ("float32", (2,))}},
        "float32 [2,2] at 'a/w', not float32 [2,3]",
    ),
    ({**LIKE, "t": [("int64", ())]}, "int32 [] at 't/0', not int64 []"),
    ({"a": LIKE["a"], "t": LIKE["t"]}, "sparse float32 [9,2] at 's', not nothing"),
    ({**LIKE, "b": ("int8", ())}, "nothing at 'b', not int8 []"),
    ({**LIKE, "s": ("float32", (9, 2))}, "sparse float32 [9,2] at 's', not float32 [9,2]"),
    (
        {**LIKE, "s": Sparse("float32", (None, 2))},
        "sparse float32 [9,2] at 's', not sparse float32 [-1,2]",
    ),
    ({**LIKE, "t": (("int32", ()),)}, "a list at 't', not a tuple"),
    ({**LIKE, "t": {"0": ("int32", ())}}, "a list at 't', not a dict"),
    ({**LIKE, "n": None}, "nothing at 'n', not None"),
    ({**LIKE, "t": [("int32", ()), []]}, "nothing at 't/1', not a list"),
    # The first of several.
    ({**LIKE, "a": {"b": ("int8", ())}, "t": []}, "float32 [2] at 'a/b', not int8 []"),
]


@pytest.mark.servers("fakeredis", "valkey")
def test_opening_another_tree(open_tree):
    open_tree(LIKE, "model")
    for other, message in OTHER_TREES:
        expected = re.escape(f"its tree has {message}. Ask for the same, ")
        with pytest.raises(redisacc.InvalidArgumentError, match=expected):
            open_tree(other, "model")


@pytest.mark.servers("fakeredis", "valkey")
def test_opening_with_other_options_or_as_another_kind(open_tree, open_dense, open_sparse):
    open_tree(LIKE, "model")
    open_dense("float32", [2], "array")
    message = r"its mean\.missing is zero, not skip\. Ask for the same, choose another name, or delete"
    with pytest.raises(redisacc.InvalidArgumentError, match=message):
        open_tree(LIKE, "model", mean=redisacc.Mean(missing="skip"))
    for make in (open_dense, open_sparse):
        with pytest.raises(redisacc.InvalidArgumentError, match="its kind is tree, not "):
            make("float32", [2, 2], "model")
    with pytest.raises(redisacc.InvalidArgumentError, match="its kind is dense, not tree"):
        open_tree(("float32", [2]), "array")
