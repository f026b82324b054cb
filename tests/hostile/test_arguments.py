"""Every argument of every public function, wrong in every way: a typed error that names it, and nothing changes.

tests/hostile/fuzz/test_public_arguments.py tries values that nobody has thought of.
"""

import datetime
import fractions
import types

import numpy as np
import pytest
from support.servers import contents

import redisacc
from redisacc import raw_ops

pytestmark = pytest.mark.servers("fakeredis", "valkey")


class Broken:
    """An array, an index and a float that fails at being each of them."""

    def __array__(self, dtype=None, copy=None):
        raise ValueError("no array")

    def __index__(self):
        raise TypeError("no index")

    def __float__(self):
        raise TypeError("no float")

    def __repr__(self):
        raise RuntimeError("no repr")


class Column:
    """What a column of pandas, Arrow or Polars offers. numpy would convert its missing values to NaN."""

    def __init__(self, **offered):
        vars(self).update(offered)

    def __array__(self, *args, **options):
        return np.array([1.0, np.nan, 1.0], np.float32)


SURROGATE = "w\udce9"
ONES, ROW = np.ones(3, np.float32), [[1.0, 1.0]]
recursive = []
recursive.append(recursive)

NO_INTEGERS = [
    *(None, "1", b"1", 1.0, np.float64(1), [1], np.array([1]), True, np.bool_(True), fractions.Fraction(1), Broken()),
    *(datetime.timedelta(1), np.timedelta64(1, "s")),
    *(2**63, -(2**63) - 1, 10**400, np.uint64(2**64 - 1)),
]
NO_TIMES = [-1, -1e-9, float("nan"), "1", [1], np.array([1.0]), True, -(10**400)]
NO_TEXTS = [1, b"x", ["x"], object(), 1.5, True, Broken(), SURROGATE]
NO_NAMES = [*NO_TEXTS, "a\nb", "x" * 1000]
MISSING = [
    Column(dtype=types.SimpleNamespace(na_value=None), isna=lambda: [False, True, False]),
    Column(null_count=1),
    Column(null_count=lambda: 1),
]
NO_ARRAYS = [
    *(None, "abc", {"a": 1}, object(), Broken(), [[1], [2, 3]], recursive, Broken, [None] * 3, iter("abc")),
    *(np.array([1, 2, 3], object), np.zeros(3, "S1"), np.zeros(3, "datetime64[s]"), np.zeros(3, [("a", "f4")])),
    *([1j, 1j, 1j], np.zeros(3, np.complex64), [10**400, 1, 1], [fractions.Fraction(1, 3)] * 3, *MISSING),
]
# Eight petabytes, all one element: touching them would kill the process.
HUGE = np.broadcast_to(np.float64(1), (2**50,))
WRONG_SHAPES = [1.0, [], [1.0], [1.0] * 4, [[1.0] * 3], np.zeros((3, 1)), np.zeros((0, 3)), np.zeros((1,) * 30), HUGE]
WRONG_ROWS = [
    *(1.0, [1.0], [[1.0]], [[1.0] * 3], [[1.0] * 2] * 2, np.zeros((0, 2)), np.zeros((1, 2))[:, :1], [[]]),
    *(HUGE[:, None], HUGE[None]),
]
WRONG_INDICES = [
    *(-1, 1.0, [1.0], [float("nan")], [np.inf], [-1], [4], [2**63 - 1], [2**63], [2**64], [10**30], [-(2**63)]),
    *([[1]], 1, [1, 2], [], ["1"], "1", [None], None, {1: 2}, [True], [1j], Broken()),
    *(np.array([1], object), np.array([1], "datetime64[s]"), np.array([2**64 - 1], np.uint64), [[1], [2, 3]]),
    *(np.ma.masked_array([1], [True]), recursive, range(3), np.array([1], np.float16), np.array(["1"]), *MISSING),
]
WRONG_WHOLES = [
    *(4, "42", b"42", [4.0, 2.0], [float("nan"), 2], [[4, 2]], [4], [], [3, 2], [4, 3], [-1, 2], [4, -1], {}),
    *(["4", "2"], [4, None], [4, 2**64], Broken(), np.array([4, 2], object), [True, True]),
    *([4, 2, "x"], [4, 2, 0.5]),
]
NO_SLICES = [
    *(None, 1, "x", [1.0], object(), Broken(), types.SimpleNamespace()),
    types.SimpleNamespace(indices=[1], values=ROW),
]
NO_SHAPES = [
    *(5, "3", [1.5], [-2], [[1]], ["3"], [True], [None, "x"], {1: 2}, Broken(), np.array([[3]]), [2**63]),
    *([2**40, 2**40], iter([3]), True),
    [1] * 255,
]
NO_SHARED_NAMES = [
    *NO_TEXTS,
    "a{b",
    "a}b",
    "{}",
    "a\nb",
    "\x00",
    "a\x7f",
    "x" * 513,
    "é" * 257,
    0,
    "a\u2028b",
    "a\x85b",
]
NO_REDUCTIONS = [*NO_TEXTS, "mean", "sum", "MAX", "", " MEAN", ["MEAN"], 0]
NO_SERVERS = [
    *(0, True, b"redis://localhost", [], object(), Broken(), "http://x", "localhost", "redis://h:port", "redis://["),
    *("\x00", f"redis://{SURROGATE}", f"redis://:{SURROGATE}@127.0.0.1:1"),
]
NO_HANDLES = [
    *("", "d", "redisacc:d", "redisacc:{}", "redisacc:{d", "redisacc:{d}:sums", b"redisacc:{d}", None, 7, []),
    f"redisacc:{{{SURROGATE}}}",
]
NO_DTYPES = [None, "x", 7, SURROGATE, "", "object", "S4", bool, "datetime64[s]", [], "i8,i8"]
KINDS = (redisacc.ConditionalAccumulator, redisacc.SparseConditionalAccumulator)


def slices(indices):
    return types.SimpleNamespace(indices=indices, values=ROW, dense_shape=None)


def of_handles(d, s):
    """Yields arguments of methods: the name, or those of which the error has one; wrong values; and calls."""
    both = (d, s)
    yield "local_step", NO_INTEGERS, [
        lambda value: d.apply_grad(ONES, value),
        lambda value: s.apply_grad([1], ROW, local_step=value),
        lambda value: s.apply_indexed_slices_grad(redisacc.IndexedSlices(ROW, [1], None), value),
    ]  # fmt: skip
    yield "new_global_step", NO_INTEGERS, [acc.set_global_step for acc in both]
    yield "num_required", [*NO_INTEGERS[1:], 0, -1, np.int8(-1), -(2**63)], [
        *(take for acc in both for take in (acc.take_grad, lambda value, acc=acc: acc.take(value).__enter__())),
        s.take_indexed_slices_grad,
    ]  # fmt: skip
    yield "timeout", [*NO_TIMES, Broken(), object()], [
        *(lambda value, acc=acc: acc.take_grad(1, timeout=value) for acc in both),
        *(lambda value, acc=acc: acc.take(1, timeout=value).__enter__() for acc in both),
    ]  # fmt: skip
    yield "name", NO_TEXTS, [
        d.num_accumulated,
        lambda value: d.apply_grad(ONES, 2, value),
        lambda value: d.set_global_step(5, value),
        lambda value: s.apply_grad([1], ROW, local_step=2, name=value),
        *(lambda value, take=take: take(1, value) for take in (d.take_grad, s.take_grad, s.take_indexed_slices_grad)),
    ]  # fmt: skip
    # Also of a gradient that would be stale.
    yield "grad", [*NO_ARRAYS, *WRONG_SHAPES], [lambda value, step=step: d.apply_grad(value, step) for step in (2, 1)]
    yield "grad_values", NO_ARRAYS, [lambda value: s.apply_grad([0, 1, 2], value, local_step=2)]
    yield "grad_values grad_indices", WRONG_ROWS, [lambda value: s.apply_grad([1], value, local_step=2)]
    yield "indices grad_values", WRONG_INDICES, [
        lambda value: s.apply_grad(value, ROW, local_step=2),
        lambda value: s.apply_indexed_slices_grad(slices(value), 2),
    ]  # fmt: skip
    yield "grad_shape", WRONG_WHOLES, [
        lambda value, step=step: s.apply_grad([1], ROW, value, local_step=step) for step in (2, 1)
    ]  # fmt: skip
    yield "grad", NO_SLICES, [lambda value: s.apply_indexed_slices_grad(value, 2)]
    yield "token", [*NO_NAMES, "", "{"], [lambda value: d.recover(value).__enter__()]


def of_constructors(client):
    def created(name):
        return [lambda value, kind=kind: kind(**{"dtype": "float32", "redis": client, name: value}) for kind in KINDS]

    yield "dtype", NO_DTYPES, created("dtype")
    yield "shape", NO_SHAPES, created("shape")
    yield "shared_name", NO_SHARED_NAMES, created("shared_name")
    yield "reduction_type", NO_REDUCTIONS, created("reduction_type")
    yield "worker", [*NO_NAMES, ""], created("worker")
    yield "name", NO_NAMES, created("name")
    yield "limits.in_place", [-1, 1.0, "1", float("nan"), True, [1], np.array([1]), 2**70, object(), Broken()], [
        lambda value, kind=kind: kind("float32", limits=redisacc.Limits(in_place=value), redis=client)
        for kind in KINDS
    ]  # fmt: skip
    yield "redis URL", NO_SERVERS, created("redis")


def of_raw_operations(d, s, client):
    """Yields what only these functions have: they pass the rest on to handles."""

    def call(operation, handle, name, **more):
        return lambda value: getattr(raw_ops, operation)(**{"handle": handle, **more, name: value}, redis=client)

    rows = {"gradient_indices": [1], "gradient_values": ROW, "gradient_shape": [], "has_known_shape": False}
    sparse = {**rows, "local_step": 2}
    known = {**sparse, "has_known_shape": True}
    take = {"num_required": 1, "dtype": "float32"}
    of_rows = "SparseAccumulatorApplyGradient"
    takes = [("AccumulatorTakeGradient", d), ("SparseAccumulatorTakeGradient", s)]
    yield "dtype", ["float64", "nonsense", None, 7], [call(*of, "dtype", **take) for of in takes]
    yield "shape", [[5, 2], None, "x"], [call(of_rows, s, "gradient_shape", **known)]
    yield "shape", [None, "yes"], [call(of_rows, s, "has_known_shape", **sparse)]
    apply = {"local_step": 0, "gradient": ONES}
    given = {"AccumulatorNumAccumulated": {}, "AccumulatorSetGlobalStep": {"new_global_step": 1}}
    of_dense, of_sparse = {"AccumulatorApplyGradient": apply, takes[0][0]: take}, {of_rows: sparse, takes[1][0]: take}
    for handles, every in ((NO_HANDLES, {**given, **of_dense, takes[1][0]: take}), ([s], of_dense), ([d], of_sparse)):
        # Those of the other kind are named by it.
        yield "handle dense sparse", handles, [call(of, "", "handle", **more) for of, more in every.items()]
    good = {"dtype": "float32", "shape": [4], "shared_name": "new", "redis": client}
    wrong = {"dtype": ["x", None], "shape": [4, [-2]], "shared_name": [7, "{", SURROGATE], "name": [SURROGATE]}
    wrong |= {"reduction_type": ["mean"], "redis": [7], "container": [7, b"x", ["x"]]}
    for name, values in wrong.items():
        yield name, values, [
            lambda value, kind=kind, name=name: getattr(raw_ops, kind.__name__)(**{**good, name: value})
            for kind in KINDS
        ]  # fmt: skip


@pytest.fixture
def handles(open_dense, open_sparse):
    """A dense and a sparse accumulator at step 2, each with a gradient."""
    dense = open_dense("float32", [3], "dense")
    sparse = open_sparse("float32", [4, 2], "sparse", limits=redisacc.Limits(in_place=0))
    for acc, gradient in ((dense, [ONES]), (sparse, [[1], ROW])):
        acc.set_global_step(2)
        acc.apply_grad(*gradient, local_step=2)
    yield dense, sparse
    dense.delete()
    sparse.delete()


@pytest.mark.parametrize("of", [of_handles, of_constructors, of_raw_operations])
def test_a_wrong_argument_is_named_and_changes_nothing(handles, client, of):
    dense, sparse = handles
    refs = (dense.accumulator_ref, sparse.accumulator_ref)
    arguments = {of_handles: handles, of_constructors: (client,), of_raw_operations: (*refs, client)}[of]
    before = contents(client)
    for names, values, calls in of(*arguments):
        for number, value in enumerate(values):
            where = f"{names}: value {number}, of {type(value).__name__}"
            for call in calls:
                with pytest.raises(redisacc.InvalidArgumentError) as failure:
                    pytest.fail(f"{where}, was accepted: {call(value)}")
                message = str(failure.value)
                # Text that is no Unicode may be called that.
                assert any(name in message for name in (*names.split(), "Unicode")), f"{where}: {message}"
                # The message is readable, whatever the value.
                assert len(message) < 600, where
            assert contents(client) == before, where


def test_columns_say_what_to_do_about_missing_values(handles):
    with pytest.raises(redisacc.InvalidArgumentError, match=r"missing values .*: fill them first"):
        handles[0].apply_grad(MISSING[0], 2)
    assert handles[0].apply_grad(Column(null_count=0), 2)


def test_tokens_of_no_round(handles, client):
    before = contents(client)
    for token in ("nonsense", "*", " ", "a" * 200):
        with handles[0].recover(token) as taken:
            assert taken is None
    assert contents(client) == before


def test_positional_arguments_stand_where_tensorflow_has_them(client):
    acc = redisacc.ConditionalAccumulator("float32", [1], "w", "name", "SUM", redis=client)
    assert (acc.shape, acc.shared_name, acc.name, acc.reduction_type) == ((1,), "w", "name", "SUM")
    with pytest.raises(TypeError):
        redisacc.ConditionalAccumulator("float32", [1], "w", "name", "SUM", client)
    with pytest.raises(TypeError):
        acc.take_grad(1, "name", 5)


def test_as_many_dimensions_as_allowed(client):
    for kind in KINDS:
        acc = kind("float32", [None] * 254, "x", redis=client)
        assert acc.info().shape == (None,) * 254
        acc.delete()
        acc.close()
