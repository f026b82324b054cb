"""Every argument of every public function, wrong in every way: a typed error that names it, and nothing changes."""

from __future__ import annotations

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


@pytest.fixture
def dense(open_dense):
    acc = open_dense("float32", [3], "dense")
    acc.set_global_step(2)
    acc.apply_grad(np.float32([1, 2, 3]), local_step=2)
    yield acc
    acc.delete()


@pytest.fixture
def sparse(open_sparse):
    acc = open_sparse("float32", [4, 2], "sparse", limits=redisacc.Limits(in_place=0))
    acc.set_global_step(2)
    acc.apply_grad([1], [[1.0, 2.0]], local_step=2)
    yield acc
    acc.delete()


def refused(call, client, names=(), **arguments):
    """The call must raise InvalidArgumentError, name one of its arguments, and leave everything as it was."""
    before = contents(client)
    with pytest.raises(redisacc.InvalidArgumentError) as failure:
        call(**arguments)
    message = str(failure.value)
    names = names or tuple(arguments)
    assert any(name in message for name in names), message
    # The message is readable, whatever the value.
    assert len(message) < 600, message
    assert contents(client) == before


NO_INTEGERS = [None, "1", b"1", 1.0, np.float64(1), float("nan"), 1j, [1], (1,), np.array([1]), np.array([1, 2]), {}]
NO_INTEGERS += [np.array(1.0), True, np.bool_(True), np.array(True), fractions.Fraction(1), Broken(), object(), ...]
NO_INTEGERS += [datetime.timedelta(1), np.timedelta64(1, "s"), np.array([], int), np.array([[1]])]
TOO_LARGE = [2**63, -(2**63) - 1, 10**400, np.uint64(2**64 - 1)]


class NamedValue:
    """pytest shows the class's repr for an id and some values have none."""


def ids(values):
    return [f"{number}-{type(value).__name__}" for number, value in enumerate(values)]


def each(values):
    return pytest.mark.parametrize("value", values, ids=ids(values))


@each([*NO_INTEGERS, *TOO_LARGE])
def test_steps(dense, sparse, client, value):
    refused(dense.apply_grad, client, ("local_step",), grad=np.ones(3, np.float32), local_step=value)
    refused(sparse.apply_grad, client, ("local_step",), grad_indices=[1], grad_values=[[1.0, 1.0]], local_step=value)
    slices = redisacc.IndexedSlices([[1.0, 1.0]], [1], None)
    refused(sparse.apply_indexed_slices_grad, client, ("local_step",), grad=slices, local_step=value)
    refused(dense.set_global_step, client, new_global_step=value)
    refused(sparse.set_global_step, client, new_global_step=value)


@each([*NO_INTEGERS, *TOO_LARGE, 0, -1, np.int8(-1), -(2**63)])
def test_numbers_required(dense, sparse, client, value):
    for acc in (dense, sparse):
        refused(acc.take_grad, client, num_required=value)
        refused(lambda num_required, acc=acc: acc.take(num_required).__enter__(), client, num_required=value)
    refused(sparse.take_indexed_slices_grad, client, num_required=value)


@each(
    [-1, -1e-9, float("nan"), float("-inf"), "1", b"1", [1], 1j, np.array([1.0]), True, Broken(), object(), -(10**400)]
)
def test_timeouts(dense, sparse, client, value):
    for acc in (dense, sparse):
        refused(acc.take_grad, client, ("timeout",), num_required=1, timeout=value)
        refused(lambda timeout, acc=acc: acc.take(1, timeout=timeout).__enter__(), client, timeout=value)


SURROGATE = "w\udce9"


@each([1, b"x", ["x"], object(), 1.5, True, Broken(), SURROGATE])
def test_names_of_operations(dense, sparse, client, value):
    refused(dense.num_accumulated, client, name=value)
    refused(dense.apply_grad, client, ("name",), grad=np.ones(3, np.float32), local_step=2, name=value)
    refused(dense.take_grad, client, ("name",), num_required=1, name=value)
    refused(dense.set_global_step, client, ("name",), new_global_step=5, name=value)
    refused(sparse.apply_grad, client, ("name",), grad_indices=[1], grad_values=[[1.0, 1.0]], local_step=2, name=value)
    refused(sparse.take_grad, client, ("name",), num_required=1, name=value)
    refused(sparse.take_indexed_slices_grad, client, ("name",), num_required=1, name=value)


recursive: list = []
recursive.append(recursive)

NO_ARRAYS = [None, "abc", b"abc", {}, {"a": 1}, set(), object(), Broken(), ..., [[1], [2, 3]], recursive, NamedValue]
NO_ARRAYS += [
    ["a", "b", "c"],
    [None] * 3,
    [object()] * 3,
    np.array([1, 2, 3], object),
    np.zeros(3, "S1"),
    (i for i in "abc"),
]
NO_ARRAYS += [
    np.zeros(3, "datetime64[s]"),
    np.zeros(3, "timedelta64[s]"),
    np.zeros(3, "V4"),
    np.zeros(3, [("a", "f4")]),
]
NO_ARRAYS += [[1j, 1j, 1j], np.zeros(3, np.complex64), [10**400, 1, 1], [fractions.Fraction(1, 3)] * 3]
WRONG_SHAPES = [1.0, [], [1.0], [1.0] * 4, [[1.0] * 3], np.zeros((3, 1)), np.zeros((0, 3)), np.zeros((1,) * 30)]


@each([*NO_ARRAYS, *WRONG_SHAPES])
def test_dense_gradients(dense, client, value):
    refused(dense.apply_grad, client, grad=value, local_step=2)
    refused(dense.apply_grad, client, grad=value, local_step=1)


@each(NO_ARRAYS)
def test_rows(sparse, client, value):
    refused(sparse.apply_grad, client, ("grad_values",), grad_indices=[0, 1, 2], grad_values=value, local_step=2)


class Column:
    """What a column of pandas, Arrow or Polars offers. numpy would convert its missing values to NaN."""

    def __init__(self, **offered):
        vars(self).update(offered)

    def __array__(self, *args, **options):
        return np.array([1.0, np.nan, 1.0], np.float32)


COLUMNS = {
    "pandas-like": Column(dtype=types.SimpleNamespace(na_value=None), isna=lambda: [False, True, False]),
    "arrow-like": Column(null_count=1),
    "polars-like": Column(null_count=lambda: 1),
}


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
def test_missing_values(dense, sparse, client, column):
    refused(dense.apply_grad, client, grad=column, local_step=2)
    refused(sparse.apply_grad, client, ("grad_indices",), grad_indices=column, grad_values=np.ones((3, 2)))
    with pytest.raises(redisacc.InvalidArgumentError, match=r"missing values .*: fill them first"):
        dense.apply_grad(column, 2)


def test_a_column_without_missing_values(dense):
    assert dense.apply_grad(Column(null_count=0), 2)


WRONG_ROWS = [1.0, [1.0], [[1.0]], [[1.0] * 3], [[1.0] * 2] * 2, np.zeros((0, 2)), np.zeros((1, 2))[:, :1], [[]]]


@each(WRONG_ROWS)
def test_rows_of_wrong_shapes(sparse, client, value):
    names = ("grad_values", "grad_indices")
    refused(sparse.apply_grad, client, names, grad_indices=[1], grad_values=value, local_step=2)


WRONG_INDICES = [
    -1,
    1.0,
    [1.0],
    [float("nan")],
    [np.inf],
    [-1],
    [4],
    [2**63 - 1],
    [2**63],
    [2**64],
    [10**30],
    [-(2**63)],
]
WRONG_INDICES += [
    [[1]],
    1,
    [1, 2],
    [],
    ["1"],
    "1",
    b"1",
    [b"1"],
    [None],
    None,
    {},
    {1: 2},
    [True],
    [1j],
    object(),
    Broken(),
]
WRONG_INDICES += [
    np.array([1], object),
    np.array([1], "datetime64[s]"),
    np.array([2**64 - 1], np.uint64),
    [[1], [2, 3]],
]
WRONG_INDICES += [np.ma.masked_array([1], [True]), recursive, range(3), np.array([1], np.float16), np.array(["1"])]


@each(WRONG_INDICES)
def test_indices(sparse, client, value):
    names = ("grad_indices", "grad_values")
    refused(sparse.apply_grad, client, names, grad_indices=value, grad_values=[[1.0, 1.0]], local_step=2)
    slices = types.SimpleNamespace(indices=value, values=[[1.0, 1.0]], dense_shape=None)
    refused(sparse.apply_indexed_slices_grad, client, (*names, "indices"), grad=slices, local_step=2)


WRONG_WHOLES = [4, "42", b"42", [4.0, 2.0], [float("nan"), 2], [[4, 2]], [4], [], [3, 2], [4, 3], [-1, 2], [4, -1], {}]
WRONG_WHOLES += [["4", "2"], [4, None], [4, 2**64], object(), Broken(), np.array([4, 2], object), [True, True], [None]]
WRONG_WHOLES += [[4, 2, "x"], [4, 2, 0.5]]


@each(WRONG_WHOLES)
def test_claimed_shapes(sparse, client, value):
    arguments = {"grad_indices": [1], "grad_values": [[1.0, 1.0]], "grad_shape": value, "local_step": 2}
    refused(sparse.apply_grad, client, ("grad_shape",), **arguments)
    refused(sparse.apply_grad, client, ("grad_shape",), **{**arguments, "local_step": 1})


@each(
    [
        None,
        1,
        "x",
        [1.0],
        object(),
        Broken(),
        types.SimpleNamespace(),
        types.SimpleNamespace(indices=[1], values=[[1.0, 1.0]]),
    ]
)
def test_slices(sparse, client, value):
    refused(sparse.apply_indexed_slices_grad, client, grad=value, local_step=2)


@each([1, b"x", ["x"], "", "x" * 1000, "a\nb", "{", object(), Broken()])
def test_tokens(dense, client, value):
    refused(lambda token: dense.recover(token).__enter__(), client, token=value)


@each(["nonsense", "*", " ", "a" * 200])
def test_tokens_of_no_round(dense, client, value):
    before = contents(client)
    with dense.recover(value) as taken:
        assert taken is None
    assert contents(client) == before


KINDS = [redisacc.ConditionalAccumulator, redisacc.SparseConditionalAccumulator]

SHAPES = [5, "3", b"3", 3.0, [1.5], [-2], [[1]], ["3"], [True], [None, "x"], {}, {1: 2}, {1}, object(), Broken(), ...]
SHAPES += [
    np.array(3),
    np.array([[3]]),
    np.array([3.0]),
    [2**63],
    [2**40, 2**40],
    [float("nan")],
    (i for i in [3]),
    -1,
    True,
]


@each(SHAPES)
def test_declared_shapes(client, value):
    for kind in KINDS:
        refused(kind, client, ("shape",), dtype="float32", shape=value, shared_name="new", redis=client)


SHARED_NAMES = [
    5,
    b"x",
    ["x"],
    "a{b",
    "a}b",
    "{}",
    "a\nb",
    "\x00",
    "a\x7f",
    "x" * 513,
    "é" * 257,
    "\ud800",
    True,
    object(),
]
SHARED_NAMES += [0, False, 1.5, Broken(), "a\u2028b", "a\x85b"]


@each(SHARED_NAMES)
def test_shared_names(client, value):
    for kind in KINDS:
        refused(kind, client, ("shared_name",), dtype="float32", shared_name=value, redis=client)


@each([5, b"MEAN", "mean", "sum", "MAX", "", " MEAN", True, ["MEAN"], object(), Broken(), 0])
def test_reductions(client, value):
    for kind in KINDS:
        refused(kind, client, ("reduction_type",), dtype="float32", reduction_type=value, redis=client)


@each(["", 5, b"w", "a\nb", "\x00", "x" * 201, "\udfff", True, ["w"], object(), Broken()])
def test_workers(client, value):
    for kind in KINDS:
        refused(kind, client, ("worker",), dtype="float32", worker=value, redis=client)


@each([5, b"w", "a\nb", "x" * 1000, "\udfff", True, ["w"], object(), Broken()])
def test_names(client, value):
    for kind in KINDS:
        refused(kind, client, ("name",), dtype="float32", name=value, redis=client)


@each([-1, 1.0, "1", float("nan"), True, [1], np.array([1]), 2**70, object(), Broken()])
def test_limits(client, value):
    for kind in KINDS:
        refused(
            kind, client, ("limits.in_place",), dtype="float32", limits=redisacc.Limits(in_place=value), redis=client
        )


@each(
    [
        0,
        True,
        b"redis://localhost",
        [],
        object(),
        Broken(),
        "http://x",
        "localhost",
        "redis://h:port",
        "redis://[",
        "\x00",
    ]
)
def test_servers(client, value):
    for kind in KINDS:
        refused(kind, client, ("redis", "URL"), dtype="float32", redis=value)


def test_a_gradient_of_another_shape_is_never_converted(dense, sparse, client):
    # Eight petabytes, all one element: touching them would kill the process.
    huge = np.broadcast_to(np.float64(1), (2**50,))
    refused(dense.apply_grad, client, grad=huge, local_step=2)
    refused(sparse.apply_grad, client, ("grad_values",), grad_indices=[1], grad_values=huge[:, None], local_step=2)
    refused(
        sparse.apply_grad,
        client,
        ("grad_values",),
        grad_indices=[1],
        grad_values=np.broadcast_to(np.float64(1), (1, 2**50)),
        local_step=2,
    )


def test_positional_arguments_stand_where_tensorflow_has_them(client):
    acc = redisacc.ConditionalAccumulator("float32", [1], "w", "name", "SUM", redis=client)
    assert (acc.shape, acc.shared_name, acc.name, acc.reduction_type) == ((1,), "w", "name", "SUM")
    with pytest.raises(TypeError):
        redisacc.ConditionalAccumulator("float32", [1], "w", "name", "SUM", client)
    with pytest.raises(TypeError):
        acc.take_grad(1, "name", 5)
    acc.delete()


def test_the_handles_of_raw_ops_check_everything_too(dense, sparse, client):
    d, s = dense.accumulator_ref, sparse.accumulator_ref
    rows = {"gradient_indices": [1], "gradient_values": [[1.0, 1.0]], "gradient_shape": [], "has_known_shape": False}
    for value in (1.5, "2", None, [2], 2**63):
        step = {"local_step": value, "redis": client}
        refused(raw_ops.AccumulatorApplyGradient, client, ("local_step",), handle=d, gradient=[1.0] * 3, **step)
        refused(raw_ops.SparseAccumulatorApplyGradient, client, ("local_step",), handle=s, **rows, **step)
        refused(
            raw_ops.AccumulatorSetGlobalStep,
            client,
            ("new_global_step",),
            handle=d,
            new_global_step=value,
            redis=client,
        )
    for value in (0, -1, 1.0, "1", None, [1]):
        required = {"num_required": value, "dtype": "float32", "redis": client}
        refused(raw_ops.AccumulatorTakeGradient, client, ("num_required",), handle=d, **required)
        refused(raw_ops.SparseAccumulatorTakeGradient, client, ("num_required",), handle=s, **required)
    for value in ("float64", "nonsense", None, 7):
        required = {"num_required": 1, "dtype": value, "redis": client}
        refused(raw_ops.AccumulatorTakeGradient, client, ("dtype",), handle=d, **required)
        refused(raw_ops.SparseAccumulatorTakeGradient, client, ("dtype",), handle=s, **required)
    for value in NO_ARRAYS[:8]:
        refused(
            raw_ops.AccumulatorApplyGradient, client, ("grad",), handle=d, local_step=2, gradient=value, redis=client
        )
    for wrong in (
        {"gradient_indices": [-1]},
        {"gradient_indices": [1.5]},
        {"gradient_values": [[1.0]]},
        {"gradient_values": "x"},
        {"gradient_shape": [5, 2], "has_known_shape": True},
        {"gradient_shape": None, "has_known_shape": True},
        {"gradient_shape": "x", "has_known_shape": True},
        {"has_known_shape": None},
        {"has_known_shape": "yes"},
    ):
        arguments = {**rows, **wrong, "handle": s, "local_step": 2, "redis": client}
        names = ("indices", "values", "shape")
        refused(raw_ops.SparseAccumulatorApplyGradient, client, names, **arguments)


@pytest.mark.parametrize("kind", ["ConditionalAccumulator", "SparseConditionalAccumulator"])
def test_what_raw_ops_create_is_checked_too(client, kind):
    good = {"dtype": "float32", "shape": [4], "shared_name": "new", "redis": client}
    wrong = [{"dtype": "x"}, {"dtype": None}, {"shape": 4}, {"shape": [-2]}, {"shared_name": 7}, {"shared_name": "{"}]
    wrong += [{"reduction_type": "mean"}, {"redis": 7}]
    for one in wrong:
        refused(getattr(raw_ops, kind), client, tuple(one), **{**good, **one})
    for container in (7, b"x", ["x"]):
        refused(getattr(raw_ops, kind), client, ("container",), **good, container=container)


def test_lone_surrogates(client, dense):
    raw = redisacc.raw_ops
    for call in (
        lambda: raw.AccumulatorNumAccumulated(handle=f"redisacc:{{{SURROGATE}}}", redis=client),
        lambda: raw.ConditionalAccumulator(dtype="float32", shape=[1], shared_name=SURROGATE, redis=client),
        lambda: raw.ConditionalAccumulator(dtype="float32", shape=[1], name=SURROGATE, redis=client),
        lambda: redisacc.ConditionalAccumulator("float32", [1], "x", worker=SURROGATE, redis=client),
        lambda: redisacc.ConditionalAccumulator("float32", [1], "x", reduction_type=SURROGATE, redis=client),
        lambda: redisacc.ConditionalAccumulator(SURROGATE, [1], "x", redis=client),
        lambda: redisacc.ConditionalAccumulator("float32", [1], "x", redis=f"redis://{SURROGATE}"),
        lambda: redisacc.ConditionalAccumulator("float32", [1], "x", redis=f"redis://:{SURROGATE}@127.0.0.1:1"),
        lambda: dense.recover(SURROGATE).__enter__(),
    ):
        refused(call, client, ("Unicode", "handle", "must be", "cannot be read"))


def test_too_many_dimensions(client):
    for kind in (redisacc.ConditionalAccumulator, redisacc.SparseConditionalAccumulator):
        refused(lambda shape, kind=kind: kind("float32", shape, "x", redis=client), client, shape=[1] * 255)
        acc = kind("float32", [None] * 254, "x", redis=client)
        assert acc.info().shape == (None,) * 254
        acc.delete()
        acc.close()
