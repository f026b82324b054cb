"""What options and arguments may be: each error names one and says what it must be, and nothing changes.

tests/hostile/ gives values of all kinds to each of them; what is here are the messages, and options that only go
together.
"""

import functools
import math

import numpy as np
import pytest
from support.servers import contents

import redisacc
from redisacc import Mean, Staleness

pytestmark = pytest.mark.servers("fakeredis", "valkey")

ENCODING = "encoding must be one of float32, bfloat16, int8, or None, not"
PARTITIONS = r"partitions must be an integer from 1 to 1000, \"auto\""
# Options of a dense accumulator of float32, and the error.
OPTIONS = [
    ({"mean": Mean(rows="index")}, r"mean\.rows must be None, not 'index': only a sparse accumulator and"),
    ({"mean": Mean(missing="skip")}, r"mean\.missing must be None, not 'skip': only a tree has leaves"),
    ({"worker": "{"}, "worker must have no braces"),
    *(({"min_replicas": value}, "min_replicas must be") for value in (-1, 1001, None, True)),
    *(({"finite": value}, "finite must be True or False") for value in (None, 1, "yes")),
    *(({"once_per_worker": value}, "once_per_worker must be True or False") for value in (1, "yes", np.array([True]))),
    ({"create": False}, "create=False requires a shared_name"),
    ({"shared_name": "x", "create": 0}, "create must be True or False, not 0"),
    *(({"order": value}, "order must be 'arrival' or 'worker'") for value in ("", "Worker", 1, b"worker")),
    ({"order": "worker", "once_per_worker": False}, "order='worker' cannot go together with once_per_worker"),
    *(({"staleness": value}, "staleness must be") for value in (-1, 1001, 1.0, math.nan, "1", True, [1])),
    *(
        ({"staleness": Staleness(1, value)}, r"staleness\.weight must be")
        for value in ("linear", 0.5, b"constant", [1, 1])
    ),
    ({"staleness": Staleness(0, "inverse_sqrt")}, r"needs a staleness\.most"),
    *(({"mean": Mean(by=value)}, r"mean\.by must be 'weights' or 'count', not") for value in ("number", True)),
    *(({"encoding": value}, ENCODING) for value in ("float16", "", 16)),
    *(({"partitions": value}, PARTITIONS) for value in (0, -1, 1001, True, 1.5, "many", "3", b"auto", [3])),
]


def test_options_of_an_accumulator(open_dense, client):
    for options, message in OPTIONS:
        with pytest.raises(redisacc.InvalidArgumentError, match=message):
            open_dense("float32", [1], **options)
    assert contents(client) == {}


def test_options_of_other_kinds(open_sparse, open_tree, open_parameters, client):
    rows = functools.partial(open_sparse, "float32", [9])
    tree = functools.partial(open_tree, {"a": ("float64", (2,)), "b": ("int64", ())})
    for opens, given, message in (
        (rows, {"mean": Mean(rows="rows")}, r"mean\.rows must be 'index' or 'round', not 'rows'"),
        (tree, {"mean": Mean(missing=0)}, r"mean\.missing must be 'zero' or 'skip', not 0"),
        (tree, {"encoding": "int8"}, "only float32 is encoded, .* are float64, int64"),
        (open_parameters, {"encoding": "int8"}, "encoding of parameters must be one of float32, bfloat16, or None"),
        (open_parameters, {"partitions": 0}, PARTITIONS),
    ):
        with pytest.raises(redisacc.InvalidArgumentError, match=message):
            opens(**given)
    assert contents(client) == {}


# Arguments of a take of two, and the error.
TAKES = [
    ({"most": 3}, "needs a grace"),
    ({"most": 1, "grace": 1}, r"most must be in \[2, "),
    ({"most": 2**63, "grace": 1}, "most must be in"),
    *(({"most": value, "grace": 1}, "most must be an integer") for value in (2.0, True)),
    *(
        ({"grace": value}, r"grace must be a number of seconds in \[0, 604800\]")
        for value in (-1, -1e-300, math.nan, math.inf, 604801, 10**400, "1", True, [1], 1j)
    ),
]
QUORUMS = {
    "least": (0, -1, 1.5, "1", True, 10**15),
    "most": (0, 1.5, "1", 10**15),
    "grace": (-1, math.nan, 604801, 10**400, "1", True),
}
NO_WEIGHTS = [
    *(0, -1.0, math.nan, math.inf, 1j),
    # A subnormal number, and those below and beyond the numbers of float32, and of floats.
    *(5e-324, 1e-39, 1e39, 10**400),
    *("1", b"1", True, [1.0], np.array([1.0]), np.array(True), object()),
]


def test_arguments_of_calls(open_dense, open_sparse, open_tree, client):
    dense, sparse = open_dense("float32", [1], "d"), open_sparse("float32", [3], "s")
    tree = open_tree({"w": ("float32", ())}, "t")
    before = contents(client)

    def refused(message, call, *args, **options):
        with pytest.raises(redisacc.InvalidArgumentError, match=message):
            call(*args, **options)

    for options, message in TAKES:
        for take in (
            dense.take_grad,
            sparse.take_indexed_slices_grad,
            lambda *args, **given: tree.take(*args, **given).__enter__(),
        ):
            refused(message, take, 2, timeout=0, **options)
    for name, values in QUORUMS.items():
        for value in values:
            refused(f"{name} must be", dense.set_quorum, **{"least": 1, name: value})
    for value in NO_WEIGHTS:
        refused("weight must be a number in", dense.apply_grad, [1.0], weight=value)
        refused(
            "weight must be a number in",
            sparse.apply_indexed_slices_grad,
            redisacc.IndexedSlices([1.0], [1]),
            weight=value,
        )
        refused("weight must be a number in", tree.apply_grad, {"w": 1.0}, weight=value)
        refused("weight must be a number in", dense.as_encoded, [1.0], weight=value)
        refused("min_weight must be a number in", dense.take_grad, 1, min_weight=value)
    for step, timeout in (("1", None), (1.5, None), (None, None), (True, None), (1, -1)):
        refused("must be", dense.wait_for_step, step, timeout=timeout)
    assert contents(client) == before
