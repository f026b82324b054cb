"""The accumulator of a tree before it reaches a server: its leaves and sections, and how a gradient is packed."""

from __future__ import annotations

import collections
import re

import ml_dtypes
import numpy as np
import pytest

from redisacc import IndexedSlices, Sparse
from redisacc._data.dtypes import TABLE
from redisacc._data.gradient import Gradient, Section
from redisacc._data.leaf_values import tree_gradient
from redisacc._data.spec import AccumulatorSpec, described_by, described_like
from redisacc._format import in_place
from redisacc.errors import CorruptDataError, InvalidArgumentError


def spec_of(tree, **options):
    return AccumulatorSpec.of_tree(*described_by(tree), **{"reduction_type": "SUM", **options})


MIXED = {
    "a": ("float32", (2,)),
    "b": [("int64", ()), Sparse("float32", (9, 2))],
    "c": (("float32", (2, 2)), Sparse("float16", (None,)), ("float64", (0, 3))),
}


def test_dense_leaves_of_a_dtype_share_a_section_and_sparse_ones_have_their_own():
    spec = spec_of(MIXED, missing="skip")
    assert [section.label for section in spec.sections] == [
        "dense:float32",
        "dense:int64",
        "sparse:b/1",
        "sparse:c/1",
        "dense:float64",
        "present",
    ]
    assert spec.section_shapes(()) == ((6,), (1,), (2,), (), (0,), (6,))
    assert [section.bound for section in spec.sections] == [None, None, 9, None, None, None]
    assert [(leaf.path, leaf.section, leaf.start) for leaf in spec.leaves] == [
        ("a", 0, 0),
        ("b/0", 1, 0),
        ("b/1", 2, 0),
        ("c/0", 0, 2),
        ("c/1", 3, 0),
        ("c/2", 4, 0),
    ]
    assert "present" not in [section.label for section in spec_of(MIXED).sections]


def test_the_schema_says_everything_and_is_read_again():
    spec = spec_of(MIXED, sparse_mean="index", missing="skip", reduction_type="MEAN")
    assert spec.schema == {
        "kind": "tree",
        "dtype": "float32,int64,float16,float64",
        "shape": "6 leaves",
        "reduction_type": "MEAN",
        "sparse_mean": "index",
        "missing": "skip",
        "tree": '{"a":"float32 [2]","b":["int64 []","sparse float32 [9,2]"],'
        '"c":["tuple","float32 [2,2]","sparse float16 [-1]","float64 [0,3]"]}',
    }
    assert spec.tree == MIXED
    parsed = AccumulatorSpec.parse(
        spec.schema["tree"], reduction_type="MEAN", sparse_mean="index", missing="skip", chunk=spec.chunk
    )
    assert (parsed.leaves, parsed.shapes) == (spec.leaves, spec.shapes)
    assert [vars(section) for section in parsed.sections] == [vars(section) for section in spec.sections]
    assert parsed.schema == spec.schema
    assert spec_of(("float32", ())).schema["shape"] == "1 leaf"


@pytest.mark.parametrize("dtype", TABLE)
def test_every_dtype_and_how_it_may_be_written(dtype):
    public = TABLE[dtype].public
    for given in (dtype, public, *([public.type] if dtype[0] != "q" else [])):
        spec = spec_of({"d": (given, [2]), "s": Sparse(given, [None, 2])})
        assert spec.schema["tree"] == f'{{"d":"{dtype} [2]","s":"sparse {dtype} [-1,2]"}}'


SPECS = {
    "array": ({"a": np.zeros(2)}, r"the leaf 'a' of spec must be \(dtype, shape\) or redisacc.Sparse\(dtype, shape\)"),
    "text": ({"a": "float32"}, "the leaf 'a' of spec must be (dtype, shape)"),
    "a list instead of a pair": ({"a": ["float32", ()]}, "the leaf 'a/0' of spec must be (dtype, shape)"),
    "three": ({"a": ("float32", (), 1)}, "the leaf 'a/0' of spec must be (dtype, shape)"),
    "no dtype": ({"a": ("float31", ())}, "the leaf 'a' of spec: dtype must be one of"),
    "object": ({"a": (object, ())}, "the leaf 'a' of spec: dtype must be one of"),
    "unknown rank": (
        {"a": ("float32", None)},
        "the shape of the leaf 'a' of spec must be known in a tree, not unknown",
    ),
    "unknown dimension": ({"a": ("float32", (2, None))}, "must be known in a tree, not [2,-1]"),
    "negative": ({"a": ("float32", (-2,))}, "dimension 0 of the shape of the leaf 'a' of spec must be in [-1"),
    "number": ({"a": ("float32", 3)}, "the shape of the leaf 'a' of spec must be None or a sequence"),
    "huge": ({"a": ("float32", (2**40, 2**40))}, "the shape of the leaf 'a' of spec must have at most"),
    "huge together": (
        {"a": ("float32", (2**58,)), "b": [("float32", (2**58,))]},
        f"dense leaves of a dtype must have at most {2**59 - 1} elements together, but float32 has {2**59}",
    ),
    "huge alone": ({"a": ("float64", (2**61,))}, f"float64 has {2**61}"),
    "huge rows": (
        {"a": Sparse("int8", (1, 2**30, 2**30))},
        "the shape of the leaf 'a' of spec must be one that an array can have",
    ),
    "more dimensions than numpy has": ({"a": ("int8", [1] * 100)}, "'a' of spec must be one that an array can have"),
    "sparse dimensions": ({"a": Sparse("int8", [1] * 100)}, "'a' of spec must be one that an array can have"),
    "sparse scalar": ({"a": Sparse("float32", ())}, "the shape of the leaf 'a' of spec must have at least one dim"),
    "sparse without rank": ({"a": Sparse("float32", None)}, "the shape of the leaf 'a' of spec must have at least one"),
    "sparse row": ({"a": Sparse("float32", (9, None))}, "must be known but for dimension 0 in a tree, not [9,-1]"),
    "sparse dtype": ({"a": Sparse("text", (9,))}, "the leaf 'a' of spec: dtype must be one of"),
    "the first": ({"b": ("x", ()), "a": {"z": ("y", ())}}, "the leaf 'a/z' of spec: dtype must be one of"),
    "empty": ({}, "spec must have at least one leaf"),
}


@pytest.mark.parametrize("case", SPECS)
def test_what_is_no_specification(case):
    tree, message = SPECS[case]
    with pytest.raises(InvalidArgumentError, match=message if "\\" in message else re.escape(message)):
        spec_of(tree)


def test_a_tuple_of_two_trees_is_no_pair():
    one, two = ("float32", (1,)), ("int64", (2,))
    for tree in (
        (one, two),
        (None, one),
        ((one, two), (two, one)),
        ({"a": one}, {"b": two}),
        (Sparse("float32", [3]), one),
    ):
        assert spec_of(tree).tree == described_like_spec(tree)


def described_like_spec(tree):
    """The specification with shapes as tuples, as it is handed out."""
    if isinstance(tree, Sparse):
        return Sparse(tree.dtype, tuple(tree.shape))
    return tree if not isinstance(tree, tuple) else tuple(map(described_like_spec, tree))


def test_like():
    rows = IndexedSlices(np.ones((1, 2), np.float16), [3], [9, 2])
    tree = {"a": np.zeros((2, 3)), "b": [1, rows, np.int64(3)], "c": np.zeros((4, 1), ml_dtypes.bfloat16)}
    structure, described = described_like(tree, {"c"})
    spec = AccumulatorSpec.of_tree(structure, described, reduction_type="MEAN")
    assert spec.tree == {
        "a": ("float64", (2, 3)),
        "b": [("int64", ()), Sparse("float16", (9, 2)), ("int64", ())],
        "c": Sparse("bfloat16", (4, 1)),
    }


@pytest.mark.parametrize(
    ("tree", "sparse", "message"),
    [
        ({"a": np.zeros(2)}, ["b"], "sparse names 'b', which is not the path of a leaf. The paths are ('a',)"),
        ({"a": {"b": np.zeros(2)}}, ["a"], "sparse names 'a', which is not the path of a leaf"),
        ({"a": np.zeros(2)}, "a", "sparse must be a collection of paths, not 'a'"),
        ({"a": np.zeros(2)}, [1], "sparse must be a collection of paths, not [1]"),
        ({"a": np.zeros(2)}, None, "sparse must be a collection of paths, not None"),
        ({"a": np.zeros(2)}, 5, "sparse must be a collection of paths, not 5"),
        ({"a": np.zeros(2)}, iter(["a"]), "sparse must be a collection of paths, not <list_iterator"),
        ({"a": np.zeros(2)}, np.array("a"), "sparse must be a collection of paths, not array"),
        ({"a": np.zeros(())}, ["a"], "the shape of the leaf 'a' of tree must have at least one dimension"),
        ({"a": IndexedSlices([1.0], [0])}, [], "the leaf 'a' of tree must have a dense_shape"),
        ({"a": IndexedSlices([1.0], [0], 5)}, [], "the shape of the leaf 'a' of tree must be None or a sequence"),
        (
            {"a": IndexedSlices([1.0], [0], [2.5])},
            [],
            "dimension 0 of the shape of the leaf 'a' of tree must be an int",
        ),
        (
            {"a": IndexedSlices([1.0], [0], ["x"])},
            [],
            "dimension 0 of the shape of the leaf 'a' of tree must be an int",
        ),
        ({"a": "text"}, [], "the leaf 'a' of tree: dtype must be one of"),
        ({"a": object()}, [], "the leaf 'a' of tree must be an array of numbers"),
        ({"a": np.ma.masked_array([1], [1])}, [], "the leaf 'a' of tree must not be a masked array"),
        ({"a": None}, [], "tree must have at least one leaf"),
    ],
)
def test_unlike(tree, sparse, message):
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        described_like(tree, sparse)


def packed(spec, tree):
    return tree_gradient(spec, tree, "grad").sections


def test_a_gradient_is_packed_in_the_order_of_the_leaves():
    spec = spec_of(MIXED, missing="skip")
    rows = IndexedSlices([[1, 2], [3, 4], [5, 6]], [7, 2, 7])
    tree = {"a": [1, 2], "b": [5, rows], "c": (np.arange(4).reshape(2, 2), ([4], [0.5]), np.zeros((0, 3)))}
    a, b, first, second, c, present = packed(spec, tree)
    assert (a.values.dtype, a.values.tolist()) == (np.float32, [1, 2, 0, 1, 2, 3])
    assert (b.values.dtype, b.values.tolist()) == (np.int64, [5])
    assert (first.indices.tolist(), first.values.tolist()) == ([2, 7], [[3, 4], [6, 8]])
    assert (second.indices.tolist(), second.values.tolist()) == ([4], [0.5])
    assert (c.values.dtype, c.values.shape) == (np.float64, (0,))
    assert (present.values.dtype, present.values.tolist()) == (np.int32, [1] * 6)


def test_missing_leaves_are_zeros_no_rows_and_not_present():
    spec = spec_of(MIXED, missing="skip")
    a, b, first, second, c, present = packed(spec, {"a": None, "b": [None, None], "c": (np.ones((2, 2)), None, None)})
    assert a.values.tolist() == [0, 0, 1, 1, 1, 1]
    assert b.values.tolist() == [0]
    assert (first.indices.shape, first.values.shape, second.values.shape) == ((0,), (0, 2), (0,))
    assert c.values.shape == (0,)
    assert present.values.tolist() == [0, 0, 0, 1, 0, 0]


def test_a_packed_gradient_is_a_copy_of_dense_leaves():
    spec = spec_of([("float32", (2,))])
    given = np.ones(2, np.float32)
    (section,) = packed(spec, [given])
    given[:] = 7
    assert section.values.tolist() == [1, 1]


def test_only_sections_with_rows_are_added_in_place_and_cost_anything():
    spec = spec_of([("float32", (300,)), *[Sparse("float32", (9, 2))] * 3, ("int32", (0,))])
    gradient = tree_gradient(spec, [None, None, ([1, 2], np.ones((2, 2))), ([], np.ones((0, 2))), None], "grad")
    # 300 elements in two rows, two rows of two elements, and a second section.
    cost = 300 + 2 * 24 + 2 * (2 + 24) + 72
    assert in_place.pack_rows(gradient, spec, cost - 1) is None
    dense, sparse = in_place.pack_rows(gradient, spec, cost)
    assert (dense.label, dense.indices, dense.row_bytes) == ("dense:float32", b"0, 1", str(4 * spec.chunk))
    assert (sparse.label, sparse.indices, sparse.row_bytes) == ("sparse:2", b"1, 2", "8")
    nothing = tree_gradient(spec_of([Sparse("float32", (9,))] * 50), [None] * 50, "grad")
    assert in_place.pack_rows(nothing, spec_of([Sparse("float32", (9,))] * 50), 1) == []


def test_every_order_of_memory():
    spec = spec_of({"a": ("float32", (3, 2)), "b": ("float32", (2,))})
    right = [0, 1, 2, 3, 4, 5, 8, 9]
    whole = np.arange(6, dtype=np.float32).reshape(3, 2)
    for a in (
        whole,
        np.asfortranarray(whole),
        whole.astype(">f4"),
        np.repeat(whole, 2, axis=1)[:, ::2],
        whole.tolist(),
    ):
        (section,) = packed(spec, {"a": a, "b": np.float32([9, 8])[::-1]})
        assert section.values.tolist() == right
        assert section.values.dtype == np.dtype("<f4")


Point = collections.namedtuple("Point", "x y")
ONE = {"a": {"d": ("float32", (2,)), "s": Sparse("float32", (9, 2))}, "b": (("int32", ()),)}
D, S, B = [1, 2], ([1], [[1, 2]]), (3,)
GRADIENTS = {
    "dtype": ({"d": np.zeros(2, complex), "s": S}, B, "grad at 'a/d' must be float32 or a dtype that casts to it"),
    "shape": ({"d": np.zeros(3), "s": S}, B, "grad at 'a/d' must have the declared shape [2], not [3]"),
    "rank": ({"d": np.zeros((1, 2)), "s": S}, B, "grad at 'a/d' must have the declared shape [2], not [1,2]"),
    "text": ({"d": "ab", "s": S}, B, "grad at 'a/d' must have the declared shape [2], not []"),
    "ragged": ({"d": [[1], [2, 3]], "s": S}, B, "grad at 'a/d' must be an array"),
    "deep": ({"d": [[[[[[1]]]]]], "s": S}, B, "grad at 'a/d' must have the declared shape"),
    "objects": ({"d": [None, 1], "s": S}, B, "grad at 'a/d' must be an array of numbers"),
    "masked": ({"d": np.ma.masked_array([1, 2], [0, 1]), "s": S}, B, "grad at 'a/d' must not be a masked array"),
    "dict": ({"d": {"x": 1}, "s": S}, B, "grad at 'a/d' must be an array of numbers"),
    "rows for dense": ({"d": IndexedSlices([1.0], [1]), "s": S}, B, "grad at 'a/d' must be a dense array, because"),
    "dense for rows": ({"d": D, "s": np.zeros((9, 2))}, B, "grad at 'a/s' must be IndexedSlices, a sparse array, or"),
    "a list for rows": ({"d": D, "s": [[1], [[1, 2]]]}, B, "grad at 'a/s' must be IndexedSlices, a sparse array, or"),
    "no rows": ({"d": D, "s": ([1],)}, B, "grad at 'a/s' must be IndexedSlices, a sparse array, or"),
    "index": ({"d": D, "s": ([9], [[1, 2]])}, B, "the indices of grad at 'a/s' must be below 9"),
    "negative index": ({"d": D, "s": ([-1], [[1, 2]])}, B, "the indices of grad at 'a/s' must not be negative"),
    "float index": ({"d": D, "s": ([1.0], [[1, 2]])}, B, "the indices of grad at 'a/s' must be integers"),
    "too few rows": ({"d": D, "s": ([1, 2], [[1, 2]])}, B, "the rows of grad at 'a/s' must have one row for each"),
    "row shape": ({"d": D, "s": ([1], [[1, 2, 3]])}, B, "grad at 'a/s'"),
    "row rank": ({"d": D, "s": ([1], [[[1], [2]]])}, B, "grad at 'a/s'"),
    "further dimensions": (
        {"d": D, "s": ([1], [[[1, 1], [2, 2]]])},
        B,
        "the rows of grad at 'a/s' must fit the declared shape [9,2]",
    ),
    "row dtype": ({"d": D, "s": ([1], [[1j, 2]])}, B, "the rows of grad at 'a/s' must be float32"),
    "whole shape": ({"d": D, "s": (*S, [8, 2])}, B, "the dense_shape of grad at 'a/s' must agree with the declared"),
    "whole rank": ({"d": D, "s": (*S, [9])}, B, "the dense_shape of grad at 'a/s' must agree with the declared"),
    "whole text": ({"d": D, "s": (*S, "92")}, B, "the dense_shape of grad at 'a/s' must be None or an integer vector"),
    "range": ({"d": D, "s": S}, (2**31,), "grad at 'b/0' must be in [-2147483648, 2147483647] for int32"),
    "the first of two": ({"d": [1], "s": S}, (None, None), "grad has 'b/1', which is surplus"),
    "the first of two leaves": ({"d": [1], "s": 7}, B, "grad at 'a/d' must have the declared shape"),
    "a scalar as a vector": ({"d": D, "s": S}, ([3],), "grad at 'b/0' must have the declared shape [], not [1]"),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_what_is_no_gradient(case):
    spec = spec_of(ONE)
    assert len(packed(spec, {"a": {"d": D, "s": S}, "b": B})) == 3
    a, b, message = GRADIENTS[case]
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        packed(spec, {"a": a, "b": b})


def test_rows_that_a_round_handed_out_may_be_applied_again():
    spec = spec_of([Sparse("float32", (None, 2))])
    (section,) = packed(spec, [IndexedSlices([[1, 2]], [2**62], [-1, 2])])
    assert section.indices.tolist() == [2**62]
    with pytest.raises(InvalidArgumentError, match="must agree"):
        packed(spec, [IndexedSlices([[1, 2]], [1], [-1, 3])])
    with pytest.raises(InvalidArgumentError, match="must agree"):
        packed(spec_of([Sparse("float32", (9, 2))]), [IndexedSlices([[1, 2]], [1], [-1, 2])])


def reduced(spec, *trees):
    round_sum = spec.empty_sum((), where="w")
    for tree in trees:
        round_sum.add(tree_gradient(spec, tree, "grad"))
    return spec.result(round_sum, len(trees))


def test_the_mean_of_leaves_that_some_gradients_lack():
    tree = {"d": ("float32", (1,)), "i": ("int32", ()), "s": Sparse("float32", (9, 1)), "n": ("float32", ())}
    some = {"d": [8.0], "i": 7, "s": ([3], [[6.0]]), "n": None}
    others = [{"d": None, "i": -2, "s": None, "n": None}, {"d": [1.0], "i": None, "s": ([3, 4], [[3], [2]]), "n": None}]
    zero = reduced(spec_of(tree, reduction_type="MEAN"), some, *others)
    assert (zero["d"].tolist(), int(zero["i"]), zero["s"].values.ravel().tolist()) == (
        [3.0],
        1,
        [3.0, np.float32(2 / 3)],
    )
    assert float(zero["n"]) == 0
    skip = reduced(spec_of(tree, reduction_type="MEAN", missing="skip"), some, *others)
    assert (skip["d"].tolist(), int(skip["i"]), skip["s"].values.ravel().tolist()) == ([4.5], 2, [4.5, 1.0])
    assert skip["n"] is None
    index = reduced(spec_of(tree, reduction_type="MEAN", missing="skip", sparse_mean="index"), some, *others)
    assert index["s"].values.ravel().tolist() == [4.5, 2.0]
    total = reduced(spec_of(tree, missing="skip"), some, *others)
    assert (total["d"].tolist(), int(total["i"]), total["s"].values.ravel().tolist()) == ([9.0], 5, [9.0, 2.0])


@pytest.mark.parametrize("present", [[-1], [3], [-(2**31)], [2**31 - 1]])
def test_a_forged_count_of_the_gradients_that_have_a_leaf(present):
    spec = spec_of([("float32", (1,))], missing="skip", reduction_type="MEAN")
    round_sum = spec.empty_sum((), where="redisacc:{w}:sums")
    values = Section(np.ones(1, np.float32)), Section(np.array(present, np.int64))
    round_sum.add(Gradient(values, 2))
    with pytest.raises(CorruptDataError, match=r"redisacc:\{w\}:sums: .* gradients are counted for the leaf '0'"):
        spec.result(round_sum, 2)


def test_a_leaf_in_fewer_gradients_than_one_of_its_rows():
    spec = spec_of([Sparse("float32", (9,))], missing="skip", reduction_type="MEAN")
    round_sum = spec.empty_sum((), where="w")
    rows = Section(np.ones(1, np.float32), np.array([3]), np.array([2], np.uint64))
    round_sum.add(Gradient((rows, Section(np.array([1], np.int64))), 2))
    with pytest.raises(CorruptDataError, match="an index occurs in 2 gradients"):
        spec.result(round_sum, 2)


LEAF_TEXTS = [
    "float32",
    "float32[2]",
    "float32 [2] ",
    "float32 2",
    "float31 [2]",
    "sparse [2]",
    "sparse float32 []",
    "sparse float32 [9,-1]",
    "Sparse float32 [9]",
    "float32 [-1]",
    "float32 [-2]",
    "float32 [02]",
    "float32 [2,]",
    "float32 [,2]",
    "float32 [-]",
    "float32 [1-2]",
    "float32 [9223372036854775808]",
    "float32 [4611686018427387904,4]",
    "float32 [" + "1," * 99 + "1]",
    "sparse float32 [" + "1," * 99 + "1]",
    "float32 [" + "1," * 300 + "1]",
    "float32 [" + "1" * 5000 + "]",
    "tuple",
    "",
]


@pytest.mark.parametrize("text", LEAF_TEXTS, ids=lambda text: text[:30])
def test_the_text_of_a_leaf_that_redisacc_did_not_write(text):
    assert AccumulatorSpec.parse('{"a":"float32 [2]"}', reduction_type="SUM").schema["tree"] == '{"a":"float32 [2]"}'
    with pytest.raises(ValueError, match=r".") as failure:
        AccumulatorSpec.parse(f'{{"a":"{text}"}}', reduction_type="SUM")
    assert len(str(failure.value)) < 500


def test_forged_shapes_that_no_gradient_can_have():
    with pytest.raises(ValueError, match="elements"):
        AccumulatorSpec.parse('["float64 [2305843009213693952]"]', reduction_type="SUM")
    with pytest.raises(ValueError, match="elements"):
        AccumulatorSpec.parse('["float32 [4611686018427387903]","float32 [4611686018427387903]"]', reduction_type="SUM")
