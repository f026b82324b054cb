"""Strategies for foreign bytes and values under our keys: made up, or our own with something changed."""

import json

import hypothesis.strategies as st
import msgpack

from support import planting

NUMBERS = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([2**31, 2**53 - 1, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1, 10**15, 10**30]),
    st.integers(),
)
NUMBER_TEXTS = st.one_of(
    NUMBERS.map(lambda number: b"%d" % number),
    st.sampled_from(
        [b"", b"-0", b"+1", b"007", b"1e3", b"1.5", b"nan", b" 1", b"1 ", b"0x1", "٣".encode(), b"9" * 5000]
    ),
)
WORDS = st.sampled_from(
    [b"granted", b"acknowledged", b"applied", b"stale", b"set", b"lowered", b"inexact", b"shape_mismatch", b"waiting",
     b"opened", b"deleting", b"missing", b"replaced", b"corrupt", b"lost", b"remains", b"full", b"would_accept",
      b"total",
     b"unknown", b"[2]", b"[-1]", b"[99999999999999]", b"[[2]]", b"[2.0]", b"[true]", b"float32", b"MEAN", b"dense"]
)  # fmt: skip
PLANTED = st.sampled_from(list(planting.TEXTS.values()))
TEXTS = st.one_of(
    NUMBER_TEXTS,
    WORDS,
    PLANTED,
    st.binary(max_size=40),
    st.lists(st.one_of(NUMBER_TEXTS, WORDS, PLANTED), max_size=8).map(b" ".join),
)

PLAIN = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        NUMBERS.filter(lambda n: -(2**63) <= n < 2**64),
        st.floats(),
        st.text(max_size=8),
        st.binary(max_size=8),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)
SIZES = st.one_of(PLAIN, st.lists(NUMBERS.filter(lambda n: -(2**63) <= n < 2**64), max_size=4))


# The sections of a gradient of {"d": ("float32", (2,)), "s": Sparse("float32", (5, 2))} whose leaves are counted.
TREE_SECTIONS = [["float32", [2]], ["float32", [1, 2]], ["int32", [2]]]


@st.composite
def headers(draw):
    """Entries of the buffered hash, nearly right or entirely wrong."""
    dtypes = st.sampled_from(["float32", "float32", "float64", "int64", "int8", "bfloat16", "O", "V8", "", None, [1]])
    section = st.tuples(dtypes, st.one_of(st.sampled_from([[2], [3, 2]]), SIZES)).map(list)
    header = {
        "version": draw(st.sampled_from([2, 2, 2, 2, 0, 1, "2", None, True])),
        "sections": draw(
            st.one_of(
                st.lists(section, min_size=1, max_size=1),
                st.just(TREE_SECTIONS),
                st.tuples(*[st.one_of(st.just(right), section) for right in TREE_SECTIONS]).map(list),
                st.lists(section, max_size=3),
                PLAIN,
            )
        ),
        "gradients": draw(st.one_of(st.just(1), PLAIN)),
        "parts": draw(st.one_of(st.sampled_from([[], [8], [4, 4], [48], [24, 24], [32, 16], [16, 16], [32]]), SIZES)),
    }
    for field in draw(st.lists(st.sampled_from(sorted(header)), max_size=2)):
        header.pop(field, None)
    packed = msgpack.packb(header if draw(st.integers(0, 9)) else draw(PLAIN))
    return mutated(draw, draw(st.one_of(st.just(b"0"), NUMBER_TEXTS)) + b" " + packed)


# Structures of trees as the record holds them, nearly right or entirely wrong.
LEAF_TEXTS = st.one_of(
    st.sampled_from(["float32 [2]", "sparse float32 [9,2]", "sparse int64 [-1]", "int8 []", "float16 [0]", "tuple"]),
    st.builds("{} [{}]".format, st.sampled_from(["float32", "sparse float32", "O", ""]), NUMBER_TEXTS.map(repr)),
    st.lists(NUMBERS, max_size=4).map(lambda dims: f"float32 [{','.join(map(str, dims))}]"),
    st.text(max_size=8),
)
TREE_NODES = st.recursive(
    st.one_of(LEAF_TEXTS, LEAF_TEXTS, st.none(), NUMBERS, st.booleans(), st.floats()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(lambda nodes: ["tuple", *nodes]),
        st.dictionaries(
            st.one_of(st.sampled_from(["a", "b", "0", "a/b", "\x1b", "\ud800"]), st.text(max_size=4)), inner
        ),
    ),
    max_leaves=12,
)


@st.composite
def structures(draw):
    """Values of the field ``tree`` of a record."""
    node = draw(TREE_NODES)
    separators = (",", ":") if draw(st.integers(0, 4)) else (", ", ": ")
    text = json.dumps(node, separators=separators, ensure_ascii=bool(draw(st.booleans())), sort_keys=True)
    return mutated(draw, text.encode(errors="surrogatepass"))


def mutated(draw, data):
    """The data, mostly unchanged; sometimes with bytes changed, cut off, inserted or doubled."""
    how = draw(st.sampled_from(["as it is", "as it is", "changed", "cut", "longer", "doubled", "flipped"]))
    at = draw(st.integers(0, max(len(data) - 1, 0)))
    if how == "changed":
        return data[:at] + draw(st.binary(max_size=6)) + data[at + draw(st.integers(0, 6)) :]
    if how == "cut":
        return data[:at]
    if how == "longer":
        return data + draw(st.binary(min_size=1, max_size=9))
    if how == "doubled":
        return data + data
    if how == "flipped" and data:
        return data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
    return data


# Possible replies of a server, as redis-py returns them.
REPLIES = st.recursive(
    st.one_of(st.none(), st.integers(), TEXTS, st.booleans(), st.floats()),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=12,
)
