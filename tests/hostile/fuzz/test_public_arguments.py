"""Every public argument: any value gives InvalidArgumentError or a result, and a refused one changes nothing."""

import contextlib

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest

import redisacc

pytestmark = [pytest.mark.forges, pytest.mark.servers("valkey")]


class Hostile:
    """Refuses to be anything."""

    def _refuse(self, *args, **options):
        raise RuntimeError("no")

    __int__ = __index__ = __float__ = __len__ = __iter__ = __array__ = __bool__ = __eq__ = __str__ = __repr__ = _refuse
    __hash__ = object.__hash__


DTYPES = st.one_of(
    hnp.scalar_dtypes(),
    hnp.datetime64_dtypes(),
    hnp.byte_string_dtypes(),
    hnp.unicode_string_dtypes(),
    st.just(np.dtype(object)),
    hnp.nested_dtypes(max_itemsize=64),
)
ARRAYS = DTYPES.flatmap(
    lambda dtype: st.one_of(
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4).map(lambda shape: np.zeros(shape, dtype)),
        hnp.array_shapes(min_dims=0, max_dims=2, max_side=3).map(lambda shape: np.ones((*shape, 2), dtype)[..., ::2]),
    )
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=6),
    st.binary(max_size=6),
    st.sampled_from(
        [2**63 - 1, 2**63, -(2**63) - 1, 10**400, "w", "x" * 600, "{", "\x00", "\ud800", "MEAN", "SUM", "float32"]
    ),
    st.builds(Hostile),
    st.builds(object),
    st.just(Hostile),
    st.just(np.float32),
)
VALUES = st.one_of(
    SCALARS,
    ARRAYS,
    st.recursive(
        SCALARS,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=2)),
        max_leaves=6,
    ),
)
TREE = {"d": ("float32", (2,)), "l": [redisacc.Sparse("float32", (9, 2)), None]}


@pytest.fixture
def handles(open_dense, open_sparse, open_tree):
    return open_dense("float32", [2], "d"), open_sparse("float32", [9, 2], "s"), open_tree(TREE, "t")


def refused_or_done(call):
    """Lets only our own error through; returns True if the value was refused."""
    try:
        call()
    except redisacc.InvalidArgumentError as error:
        str(error)
        repr(error)
        return True
    except (
        redisacc.TakeTimeoutError,
        redisacc.NotReplicatedError,
        redisacc.AccumulatorFullError,
    ):
        return False
    return False


def test_methods(search, handles):
    dense, sparse, tree = handles
    # A refused call never touches a round.
    calls = {
        "dense": dense.apply_grad,
        "dense step": lambda a, b: dense.apply_grad([1, 2], a),
        "dense name": lambda a, b: dense.apply_grad([1, 2], 0, a),
        "sparse": sparse.apply_grad,
        "sparse rows": lambda a, b: sparse.apply_grad([1], a),
        "sparse indices": lambda a, b: sparse.apply_grad(a, [[1, 2]]),
        "sparse shape": lambda a, b: sparse.apply_grad([1], [[1, 2]], a),
        "slices": lambda a, b: sparse.apply_indexed_slices_grad(a),
        "slices of": lambda a, b: sparse.apply_indexed_slices_grad(redisacc.IndexedSlices(a, b)),
        "tree": lambda a, b: tree.apply_grad(a),
        "leaves": lambda a, b: tree.apply_grad({"d": a, "l": [b, None]}),
        "rows": lambda a, b: tree.apply_grad({"d": None, "l": [(a, b), None]}),
        "slices of a leaf": lambda a, b: tree.apply_grad({"d": [1, 2], "l": [redisacc.IndexedSlices(a, b), None]}),
        "nodes": lambda a, b: tree.apply_grad({"d": [1, 2], "l": a}),
        "take": lambda a, b: dense.take_grad(a, timeout=0),
        "timeout": lambda a, b: dense.take_grad(10**9, timeout=a if not isinstance(a, (int, float, np.number)) else 0),
        "take name": lambda a, b: dense.take_grad(10**9, a, timeout=0),
        "recover": lambda a, b: contextlib.ExitStack().enter_context(dense.recover(a)),
        "step": lambda a, b: sparse.set_global_step(a),
        "set_quorum": lambda a, b: sparse.set_quorum(least=a, grace=b),
        "count": lambda a, b: dense.num_accumulated(a),
    }

    def one(which, a, b):
        before = [(acc.info().num_accumulated, acc.info().global_step) for acc in handles]
        if a is None and which in ("timeout", "recover"):
            return
        if refused_or_done(lambda: calls[which](a, b)):
            assert [(acc.info().num_accumulated, acc.info().global_step) for acc in handles] == before
        dense.set_global_step(-(2**63))
        sparse.set_global_step(-(2**63))

    search(one, st.sampled_from(sorted(calls)), VALUES, VALUES, examples=70)
