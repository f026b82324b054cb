"""The accumulator of a tree before it reaches a server: its leaves and sections, and how a gradient is packed."""

import re

import numpy as np
import pytest

from redisacc import IndexedSlices, Sparse
from redisacc._arrays.gradient import Gradient, Section
from redisacc._arrays.leaf_values import tree_gradient
from redisacc._arrays.spec import AccumulatorSpec, described_by, described_like
from redisacc.errors import CorruptDataError, InvalidArgumentError


def spec_of(tree, **options):
    return AccumulatorSpec.of_tree(*described_by(tree), **{"reduction_type": "SUM", **options})


MIXED = {
    "a": ("float32", (2,)),
    "b": [("int64", ()), Sparse("float32", (9, 2))],
    "c": (("float32", (2, 2)), Sparse("float16", (None,)), ("float64", (0, 3))),
}


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


SHAPE_OF_A = "the shape of the leaf 'a' of spec must"
TOO_LARGE = "'a' of spec must be one that an array can have"
NO_DTYPE = "the leaf 'a' of spec: dtype must be one of"
SPECS = [
    (np.zeros(2), "the leaf 'a' of spec must be (dtype, shape) or redisacc.Sparse(dtype, shape)"),
    ("float32", "the leaf 'a' of spec must be (dtype, shape)"),
    *((leaf, "the leaf 'a/0' of spec must be (dtype, shape)") for leaf in (["float32", ()], ("float32", (), 1))),
    *((leaf, NO_DTYPE) for leaf in (("float31", ()), (object, ()), Sparse("text", (9,)))),
    (("float32", None), f"{SHAPE_OF_A} be known in a tree, not unknown"),
    (("float32", (2, None)), "must be known in a tree, not [2,-1]"),
    (("float32", (-2,)), "dimension 0 of the shape of the leaf 'a' of spec must be in [-1"),
    (("float32", 3), f"{SHAPE_OF_A} be None or a sequence"),
    (("float32", (2**40, 2**40)), f"{SHAPE_OF_A} have at most"),
    (("float64", (2**61,)), f"float64 has {2**61}"),
    *((Sparse("int8", shape), TOO_LARGE) for shape in ((1, 2**30, 2**30), [1] * 100)),
    (("int8", [1] * 100), TOO_LARGE),
    *((Sparse("float32", shape), f"{SHAPE_OF_A} have at least one dim") for shape in ((), None)),
    (Sparse("float32", (9, None)), "must be known but for dimension 0 in a tree, not [9,-1]"),
]


def test_what_is_no_specification():
    together = f"dense leaves of a dtype must have at most {2**59 - 1} elements together, but float32 has {2**59}"
    for tree, message in (
        *(({"a": leaf}, message) for leaf, message in SPECS),
        ({"a": ("float32", (2**58,)), "b": [("float32", (2**58,))]}, together),
        # The first of two.
        ({"b": ("x", ()), "a": {"z": ("y", ())}}, "the leaf 'a/z' of spec: dtype must be one of"),
        ({}, "spec must have at least one leaf"),
    ):
        with pytest.raises(InvalidArgumentError, match=re.escape(message)):
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


def test_unlike():
    dense, no_collection = {"a": np.zeros(2)}, "sparse must be a collection of paths, not"
    of_shape = "of the leaf 'a' of tree must"
    for tree, sparse, message in (
        (dense, ["b"], "sparse names 'b', which is not the path of a leaf. The paths are ('a',)"),
        ({"a": {"b": np.zeros(2)}}, ["a"], "sparse names 'a', which is not the path of a leaf"),
        *((dense, sparse, f"{no_collection} {sparse!r}") for sparse in ("a", [1], None, 5)),
        (dense, iter(["a"]), f"{no_collection} <list_iterator"),
        (dense, np.array("a"), f"{no_collection} array"),
        ({"a": np.zeros(())}, ["a"], f"the shape {of_shape} have at least one dimension"),
        ({"a": IndexedSlices([1.0], [0])}, [], "the leaf 'a' of tree must have a dense_shape"),
        ({"a": IndexedSlices([1.0], [0], 5)}, [], f"the shape {of_shape} be None or a sequence"),
        *(
            ({"a": IndexedSlices([1.0], [0], [size])}, [], f"dimension 0 of the shape {of_shape} be an int")
            for size in (2.5, "x")
        ),
        ({"a": "text"}, [], "the leaf 'a' of tree: dtype must be one of"),
        ({"a": object()}, [], "the leaf 'a' of tree must be an array of numbers"),
        ({"a": np.ma.masked_array([1], [1])}, [], "the leaf 'a' of tree must not be a masked array"),
        ({"a": None}, [], "tree must have at least one leaf"),
    ):
        with pytest.raises(InvalidArgumentError, match=re.escape(message)):
            described_like(tree, sparse)


def packed(spec, tree):
    return tree_gradient(spec, tree, "grad").sections


def test_a_packed_gradient_is_a_copy_of_dense_leaves():
    spec = spec_of([("float32", (2,))])
    given = np.ones(2, np.float32)
    (section,) = packed(spec, [given])
    given[:] = 7
    assert section.values.tolist() == [1, 1]


ONE = {"a": {"d": ("float32", (2,)), "s": Sparse("float32", (9, 2))}, "b": (("int32", ()),)}
D, S, B = [1, 2], ([1], [[1, 2]]), (3,)
# In place of the dense leaf, what the error says of it.
NO_DENSE = [
    (np.zeros(2, complex), "must be float32 or a dtype that casts to it"),
    *((np.zeros(shape), "must have the declared shape [2], not [") for shape in ((3,), (1, 2))),
    ("ab", "must have the declared shape [2], not []"),
    ([[1], [2, 3]], "must be an array"),
    *((value, "must be an array of numbers") for value in ([None, 1], {"x": 1})),
    (np.ma.masked_array([1, 2], [0, 1]), "must not be a masked array"),
    (IndexedSlices([1.0], [1]), "must be a dense array, because"),
]
# And in place of the rows.
NO_ROWS = [
    *((value, "must be IndexedSlices, a sparse array, or") for value in (np.zeros((9, 2)), [[1], [[1, 2]]], ([1],))),
    (([9], [[1, 2]]), "must be below 9"),
    (([-1], [[1, 2]]), "must not be negative"),
    (([1.0], [[1, 2]]), "must be integers"),
    (([1, 2], [[1, 2]]), "must have one row for each"),
    (([1], [[1, 2, 3]]), "must fit the declared shape [9,2], unlike rows of shape [3]"),
    *((([1], values), "must fit the declared shape") for values in ([[[1], [2]]], [[[1, 1], [2, 2]]])),
    (([1], [[1j, 2]]), "must be float32"),
    *(((*S, whole), "must agree with the declared") for whole in ([8, 2], [9])),
    ((*S, "92"), "must be None or an integer vector"),
]


def test_what_is_no_gradient():
    spec = spec_of(ONE)
    assert len(packed(spec, {"a": {"d": D, "s": S}, "b": B})) == 3
    for d, s, b, message in (
        *((value, S, B, f"grad at 'a/d' {message}") for value, message in NO_DENSE),
        *((D, value, B, f"grad at 'a/s' {message}") for value, message in NO_ROWS),
        (D, S, (2**31,), "grad at 'b/0' must be in [-2147483648, 2147483647] for int32"),
        (D, S, ([3],), "grad at 'b/0' must have the declared shape [], not [1]"),
        # The first of two.
        ([1], S, (None, None), "grad has 'b/1', which is surplus"),
        ([1], 7, B, "grad at 'a/d' must have the declared shape"),
    ):
        with pytest.raises(InvalidArgumentError, match=re.escape(message)):
            packed(spec, {"a": {"d": d, "s": s}, "b": b})


def test_a_forged_count_of_the_gradients_that_have_a_leaf():
    spec = spec_of([("float32", (1,))], missing="skip", reduction_type="MEAN")
    for present in (-1, 3, -(2**31), 2**31 - 1):
        round_sum = spec.empty_sum((), where="redisacc:{w}:sums")
        round_sum.add(Gradient((Section(np.ones(1, np.float32)), Section(np.array([present], np.int64))), 2))
        with pytest.raises(CorruptDataError, match=r"redisacc:\{w\}:sums: .* gradients are counted for the leaf '0'"):
            spec.result(round_sum, 2)


def test_a_leaf_in_fewer_gradients_than_one_of_its_rows():
    spec = spec_of([Sparse("float32", (9,))], missing="skip", reduction_type="MEAN")
    round_sum = spec.empty_sum((), where="w")
    rows = Section(np.ones(1, np.float32), np.array([3]), np.array([2], np.uint64))
    round_sum.add(Gradient((rows, Section(np.array([1], np.int64))), 2))
    with pytest.raises(CorruptDataError, match="an index occurs in 2 gradients"):
        spec.result(round_sum, 2)


LEAVES = [
    *("float32", "float32[2]", "float32 [2] ", "float32 2", "float31 [2]", "Sparse float32 [9]", "tuple", ""),
    *("sparse [2]", "sparse float32 []", "sparse float32 [9,-1]", "float32 [-1]", "float32 [-2]", "float32 [02]"),
    *("float32 [2,]", "float32 [,2]", "float32 [-]", "float32 [1-2]", "float32 [9223372036854775808]"),
    *("float32 [4611686018427387904,4]", "float64 [2305843009213693952]"),
    # In two leaves.
    "float32 [4611686018427387903]",
    *(f"{kind} [" + "1," * 99 + "1]" for kind in ("float32", "sparse float32")),
    *("float32 [" + "1," * 300 + "1]", "float32 [" + "1" * 5000 + "]"),
]


def test_the_text_of_a_leaf_that_redisacc_did_not_write():
    def parse(leaf):
        return AccumulatorSpec.parse(f'["{leaf}","{leaf}"]', reduction_type="SUM").schema["tree"]

    assert parse("float32 [2]") == '["float32 [2]","float32 [2]"]'
    for text in LEAVES:
        with pytest.raises(ValueError, match=r".") as failure:
            pytest.fail(f"it was read: {parse(text)}")
        assert len(str(failure.value)) < 500
