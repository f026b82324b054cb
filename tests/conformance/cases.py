"""The cases that both TensorFlow and redisacc run.

A case is a plain dictionary (see tensorflow_driver for its form) with an "id" and a "row", the row of the
semantics page (docs/reference/semantics.md) that it belongs to. Random cases are in sequences.

Rows about processes that are killed have no case here: the process tests cover them, against redisacc only.
"""

import math

import numpy as np
from arraycode import encode, storage_dtype

STEP_MAX = 2**63 - 1
STEP_MIN = -(2**63)

# Every type that TensorFlow's documentation of the operation lists.
FLOATS = ("float32", "float64", "half", "bfloat16", "complex64", "complex128")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
QUANTIZED = ("qint8", "quint8", "qint16", "quint16", "qint32")
LISTED_TYPES = FLOATS + INTEGERS + QUANTIZED


# --- a small language for operations --------------------------------------------------------------


def arr(value, dtype="float32"):
    """A coded array of one of TensorFlow's types."""
    coded = encode(np.array(value).astype(storage_dtype(dtype)))
    coded["dtype"] = {"half": "float16"}.get(dtype, dtype)
    return coded


def dense(shape=None, dtype="float32", reduction="MEAN", **more):
    return {"kind": "dense", "dtype": dtype, "shape": shape, "reduction": reduction, **more}


def sparse(shape=None, dtype="float32", reduction="MEAN", **more):
    return {"kind": "sparse", "dtype": dtype, "shape": shape, "reduction": reduction, **more}


def push(grad, step=0, *, dtype="float32", **more):
    """apply to a dense accumulator; `grad` in Python's terms or coded."""
    coded = grad if isinstance(grad, dict) else arr(grad, dtype)
    return {"op": "apply", "grad": coded, "step": step, **more}


def rows(indices, values, step=0, *, grad_shape=None, dtype="float32", **more):
    """apply to a sparse accumulator; `grad_shape` None is unknown."""
    return {
        "op": "apply",
        "indices": indices if isinstance(indices, dict) else arr(indices, "int64"),
        "values": values if isinstance(values, dict) else arr(values, dtype),
        "grad_shape": grad_shape if grad_shape is None or isinstance(grad_shape, dict) else arr(grad_shape, "int64"),
        "step": step,
        **more,
    }


def take(num_required=1, **more):
    return {"op": "take", "num_required": num_required, **more}


def set_step(step, **more):
    return {"op": "set_global_step", "step": step, **more}


def start(taker, num_required, timeout=None, **more):
    return {"op": "start_take", "taker": taker, "num_required": num_required, "timeout": timeout, **more}


def wait(taker):
    return {"op": "wait", "taker": taker}


def still(taker):
    return {"op": "still_waiting", "taker": taker}


COUNT = {"op": "num_accumulated"}
REOPEN = {"op": "reopen"}

# One gradient of each kind, for cases that aren't about gradients: `one(kind, 3.0, step)`.


def one(kind, value, step=0, **more):
    if kind == "dense":
        return push([value, 2 * value], step, **more)
    return rows([1, 4], [[value, 1], [2 * value, -1]], step, **more)


def wrong(kind, step=0):
    """A gradient that doesn't fit those of `one` in the same round."""
    return push([1, 2, 3], step) if kind == "dense" else rows([1, 4], [[1], [2]], step)


def handle(kind, **spec):
    return dense(**spec) if kind == "dense" else sparse(**spec)


class Cases:
    """The list that the functions below add to."""

    def __init__(self):
        self.all = []
        self.row = ""

    def add(self, case_id, handles, ops, **more):
        handles = handles if isinstance(handles, list) else [handles]
        # Plain copies: operations are shared between cases here.
        ops = [dict(op) for op in ops]
        self.all.append({"id": case_id, "row": self.row, "handles": handles, "ops": ops, **more})

    def both(self, case_id, ops, **spec):
        for kind in ("dense", "sparse"):
            self.add(f"{case_id}-{kind}", handle(kind, **spec), ops(kind))


# --- the rows of the semantics page ---------------------------------------------------------------


def types(c):
    c.row = "Types: dtypes"
    for name in LISTED_TYPES:
        signed = not name.startswith(("u", "qu"))
        a, b = ([5, -7, 3], [2, -2, -8]) if signed else ([5, 200, 3], [2, 55, 8])
        c.add(f"type-dense-{name}", dense(dtype=name), [push(a, dtype=name), push(b, dtype=name), take(2)])
        c.add(
            f"type-dense-sum-{name}",
            dense(dtype=name, reduction="SUM"),
            [push(a, dtype=name), push(b, dtype=name), take(2)],
        )
        c.add(
            f"type-sparse-{name}",
            sparse(dtype=name),
            [rows([0, 2, 5], a, dtype=name), rows([2, 5, 9], b, dtype=name), take(2)],
        )
    for name in ("complex64", "complex128"):
        c.add(
            f"type-imaginary-{name}",
            dense(dtype=name),
            [push([1 + 2j, -3j], dtype=name), push([2 - 5j, 1], dtype=name), take(2)],
        )
    # Anything else isn't in the list.
    for name in ("bool", "string"):
        c.add(f"type-unlisted-{name}", dense(dtype=name), [COUNT])
        c.add(f"type-unlisted-sparse-{name}", sparse(dtype=name), [COUNT])

    c.row = "Types: reduction_type"
    for kind in ("dense", "sparse"):
        for label, reduction in (
            ("mean", "MEAN"),
            ("sum", "SUM"),
            ("none", None),
            ("lower", "mean"),
            ("title", "Sum"),
            ("empty", ""),
            ("other", "MAX"),
            ("number", 1),
        ):
            c.add(
                f"reduction-{label}-{kind}",
                handle(kind, reduction=reduction),
                [one(kind, 3), one(kind, 5), take(2)],
            )
    for kind in ("dense", "sparse"):
        spec = handle(kind)
        del spec["reduction"]
        c.add(f"reduction-default-{kind}", spec, [one(kind, 3), one(kind, 5), take(2)])

    c.row = "Types: what MEAN divides by"
    for reduction in ("MEAN", "SUM"):
        label = reduction.lower()
        c.add(f"divide-dense-{label}", dense(reduction=reduction), [push([v, 1]) for v in (1, 4, 6)] + [take(3)])
        c.add(
            f"divide-sparse-{label}",
            sparse(reduction=reduction),
            [rows([0, 1], [1, 2]), rows([1, 3], [4, 6]), rows([1], [6]), take(3)],
        )
        c.add(
            f"divide-sparse-rows-{label}",
            sparse([10, 3], reduction=reduction),
            [
                rows([0, 5, 9], [[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
                rows([1, 5], [[10, 20, 30], [40, 50, 60]]),
                rows([5, 9], [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]),
                rows([2, 3, 4, 5], np.arange(12).reshape(4, 3)),
                take(4),
            ],
        )


def arithmetic(c):
    c.row = "Types: sequential add, one true division"
    for dtype in ("float32", "float64"):
        big = 1e8 if dtype == "float32" else 1e17
        for reduction in ("MEAN", "SUM"):
            label = f"{dtype}-{reduction.lower()}"
            orders = [(1, big, -big), (big, 1, -big), (big, -big, 1), (0.1, 0.2, 0.3), (0.3, 0.2, 0.1)]
            ops = []
            for step, order in enumerate(orders):
                ops += [push([v, -v], step, dtype=dtype) for v in order] + [take(3)]
            c.add(f"order-dense-{label}", dense(dtype=dtype, reduction=reduction), ops)
            ops = []
            for step, order in enumerate(orders):
                ops += [rows([7], [[v, 3 * v]], step, dtype=dtype) for v in order] + [take(3)]
            c.add(f"order-sparse-{label}", sparse(dtype=dtype, reduction=reduction), ops)
        # Every divisor up to 24, for values that none of them divides exactly.
        ops = []
        for step, n in enumerate(range(1, 25)):
            ops += [push([1 / 3 + k, math.pi * 10 ** (k % 5), -math.e], step, dtype=dtype) for k in range(n)]
            ops.append(take(n))
        c.add(f"divisors-{dtype}", dense([3], dtype=dtype), ops)
        ops = []
        for step, n in enumerate(range(1, 13)):
            ops += [rows(range(k % 3, 4), [[1 / 3 + k]] * (4 - k % 3), step, dtype=dtype) for k in range(n)]
            ops.append(take(n))
        c.add(f"divisors-sparse-{dtype}", sparse([None, 1], dtype=dtype), ops)

    # Sizes around those at which an implementation may cut a gradient into pieces.
    for size in (127, 128, 129, 255, 256, 257, 512, 1000):
        values = [np.sin(np.arange(size) * (k + 1.0)) * 10.0 ** (np.arange(size) % 7 - 3) for k in range(3)]
        c.add(f"size-dense-{size}", dense(), [push(v) for v in values] + [take(3)])
    matrix = [np.cos(np.arange(40 * 16) * (k + 1.0)).reshape(40, 16) for k in range(2)]
    c.add(
        "size-sparse-40x16",
        sparse([1000, 16]),
        [rows(np.arange(40) * 3, matrix[0]), rows(np.arange(40) * 2, matrix[1]), take(2)],
    )
    c.add("size-dense-matrix", dense([40, 16]), [push(matrix[0]), push(matrix[1]), take(2)])

    c.row = "Types: float16"
    half = [2048, 1, 1, 1, 1]
    for reduction in ("MEAN", "SUM"):
        label = reduction.lower()
        ops = [push([v], dtype="half") for v in half] + [take(5)]
        c.add(f"half-dense-{label}", dense(dtype="half", reduction=reduction), ops)
        ops = [rows([3], [v], dtype="half") for v in half] + [take(5)]
        c.add(f"half-sparse-{label}", sparse(dtype="half", reduction=reduction), ops)
    c.add("half-exact", dense(dtype="half"), [push(v, dtype="half") for v in (1.5, 2.25, 3)] + [take(3)])
    c.add("half-overflow", dense(dtype="half"), [push(65504, dtype="half"), push(65504, dtype="half"), take(2)])
    c.add(
        "half-overflow-sum",
        dense(dtype="half", reduction="SUM"),
        [push(65504, dtype="half"), push(65504, dtype="half"), take(2)],
    )
    c.add(
        "half-special",
        dense(dtype="half"),
        [
            push([np.nan, np.inf, np.inf, -0.0], dtype="half"),
            push([1, 1, -np.inf, -0.0], dtype="half"),
            take(2),
        ],
    )

    c.row = "Types: subnormals"
    for dtype, tiny in (("float32", 1e-40), ("float64", 1e-310)):
        c.add(f"subnormal-{dtype}", dense(dtype=dtype), [push([tiny, 1], dtype=dtype)] * 2 + [take(2)])
        c.add(f"subnormal-sparse-{dtype}", sparse(dtype=dtype), [rows([0], [tiny], dtype=dtype)] * 2 + [take(2)])
    c.add("subnormal-quotient", dense(), [push(2e-38), push(1.2e-38), push(-2e-38), take(3)])

    c.row = "Types: NaN, infinities, negative zero"
    nan, inf = np.nan, np.inf
    pairs = [
        (nan, 1),
        (1, nan),
        (inf, 1),
        (inf, inf),
        (inf, -inf),
        (-inf, 2),
        (-0.0, -0.0),
        (-0.0, 0),
        (0, -0.0),
    ]
    pairs += [(1, -1), (-1, 1), (nan, nan), (nan, -inf)]
    for dtype in ("float32", "float64"):
        most = float(np.finfo(dtype).max)
        for reduction in ("MEAN", "SUM"):
            two = [[p[k] for p in [*pairs, (most, most), (most, -most), (-most, -most)]] for k in range(2)]
            label = f"{dtype}-{reduction.lower()}"
            ops = [push(two[0], dtype=dtype), push(two[1], dtype=dtype), take(2)]
            ops += [push([-0.0, nan, inf, -inf, most], 1, dtype=dtype), take(1)]
            c.add(f"special-dense-{label}", dense(dtype=dtype, reduction=reduction), ops)
            every = range(len(two[0]))
            ops = [rows(every, two[0], dtype=dtype), rows(every, two[1], dtype=dtype), take(2)]
            ops += [rows([5, 6], [[-0.0, nan], [inf, most]], 1, dtype=dtype), take(1)]
            c.add(f"special-sparse-{label}", sparse(dtype=dtype, reduction=reduction), ops)


def steps(c):
    c.row = "Steps: what is accepted"
    far = (STEP_MIN, -(2**53) - 1, -1, 0, 1, 2, 2**53 + 1, STEP_MAX)
    c.both("step-first", lambda k: [one(k, i + 1, s) for i, s in enumerate(far)] + [take(5)])
    c.both(
        "step-after-take",
        lambda k: [one(k, 1), take(1)] + [one(k, i, s) for i, s in enumerate(far)] + [take(4)],
    )
    c.both(
        "step-counts-takes",
        lambda k: [
            op for n in range(4) for op in (one(k, n, n - 1), one(k, 10 + n, n), one(k, 30 + n, n + 7), take(1))
        ],
    )

    c.row = "Steps: set_global_step"
    c.both("set-higher", lambda k: [set_step(10), one(k, 1, 9), one(k, 2, 10), one(k, 3, 11), take(2)])
    c.both("set-lower", lambda k: [set_step(10), set_step(4), one(k, 1, 3), one(k, 2, 4), take(1), one(k, 3, 4)])
    c.both("set-same", lambda k: [set_step(0), one(k, 1), set_step(0), take(1), set_step(1), one(k, 1, 0)])
    c.both(
        "set-negative",
        lambda k: [set_step(-5), one(k, 1, -6), one(k, 2, -5), take(1), one(k, 3, -5), one(k, 4, -4)],
    )
    c.both("set-lowest", lambda k: [set_step(STEP_MIN), one(k, 1, STEP_MIN), take(1), one(k, 1, STEP_MIN), COUNT])
    c.both("set-highest", lambda k: [set_step(STEP_MAX), one(k, 1, STEP_MAX - 1), one(k, 1, STEP_MAX), COUNT])
    # Neighbors that are the same number as a double.
    for label, step in (
        ("2e53", 2**53 + 1),
        ("2e62", 2**62 + 1),
        ("minus-2e53", -(2**53) - 1),
        ("minus-2e62", -(2**62) - 1),
    ):
        c.both(
            f"set-beyond-{label}",
            lambda k, s=step: [
                set_step(s),
                one(k, 1, s - 1),
                one(k, 2, s),
                one(k, 3, s + 1),
                take(2),
                one(k, 4, s),
                one(k, 5, s + 1),
                set_step(s - 1),
                one(k, 6, s - 2),
                one(k, 7, s - 1),
                take(2),
            ],
        )
    c.row = "Steps: setting the step keeps what is accumulated"
    c.both(
        "set-keeps",
        lambda k: [
            one(k, 1),
            one(k, 2),
            set_step(7),
            COUNT,
            one(k, 5, 6),
            one(k, 6, 7),
            take(3),
            one(k, 1, 7),
        ],
    )
    c.row = "Steps: a refused or timed-out take changes nothing"
    c.both("take-refused", lambda k: [one(k, 1), take(0), take(-3), one(k, 2, 0), take(2), one(k, 3, 0)])
    c.both(
        "take-timed-out",
        lambda k: [one(k, 1), take(3), one(k, 2, 0), take(2), one(k, 3, 0), take(1), one(k, 4, 1)],
    )
    c.row = "Steps: at 2^63-1"
    c.both(
        "wrap",
        lambda k: [
            set_step(STEP_MAX),
            one(k, 1, STEP_MAX),
            take(1),
            COUNT,
            set_step(5),
            take(1),
            one(k, 2, 5),
            one(k, 3, 6),
        ],
    )
    c.row = "Steps: what is a step"
    c.both("step-float", lambda k: [one(k, 1, 1.9), take(1), one(k, 2, 0.9), one(k, 3, 1.2), COUNT])
    c.both("step-float-set", lambda k: [set_step(2.7), one(k, 1, 1), one(k, 2, 2), COUNT])
    c.both(
        "step-scalar-array",
        lambda k: [set_step(arr(3, "int64")), one(k, 1, arr(2, "int32")), one(k, 2, arr(3, "int16"))],
    )
    c.both("step-vector1-set", lambda k: [set_step(arr([3], "int64")), one(k, 1, 0), COUNT])
    c.both("step-vector2-set", lambda k: [one(k, 1), set_step(arr([3, 4], "int64"))])
    c.both(
        "step-vector1-apply",
        lambda k: [set_step(5), one(k, 1, arr([3], "int64")), one(k, 2, arr([5], "int64")), COUNT],
    )
    c.both("step-vector2-apply", lambda k: [one(k, 1), one(k, 1, arr([3, 4], "int64"))])
    no_steps = {
        "text": "1",
        "none": None,
        "list1": [1],
        "list2": [1, 2],
        "above": 2**63,
        "below": STEP_MIN - 1,
    }
    for label, step in no_steps.items():
        for kind in ("dense", "sparse"):
            then = [one(kind, 2, 0), COUNT]
            c.add(f"step-{label}-{kind}", handle(kind), [one(kind, 1, step, static=True), *then])
            c.add(f"step-{label}-set-{kind}", handle(kind), [set_step(step, static=True), *then])


def takes(c):
    c.row = "Takes: num_required < 1"
    c.both(
        "take-none",
        lambda k: [take(0), take(-1), take(-(2**31)), one(k, 1), one(k, 2), take(0), take(-1), take(2)],
    )
    c.row = "Takes: when a take returns"
    c.both("take-blocks", lambda k: [take(1), one(k, 1), take(2), one(k, 2), take(2)])
    c.both("take-all", lambda k: [one(k, n) for n in range(5)] + [take(2), COUNT])
    c.both("take-exactly", lambda k: [one(k, n) for n in range(3)] + [take(3), COUNT])
    c.both("take-many", lambda k: [one(k, 1), take(2**31 - 1), COUNT, take(1)])
    c.row = "Takes: first come, first served"
    c.both(
        "fifo-head-blocks",
        lambda k: [
            start("A", 3),
            start("B", 1),
            one(k, 1),
            one(k, 2),
            still("A"),
            still("B"),
            one(k, 3),
            wait("A"),
            still("B"),
            one(k, 4, 0),
            still("B"),
            one(k, 5, 1),
            wait("B"),
            COUNT,
        ],
    )
    c.both(
        "fifo-order",
        lambda k: [
            start("A", 1),
            start("B", 1),
            start("C", 2),
            one(k, 1),
            wait("A"),
            one(k, 2, 1),
            wait("B"),
            one(k, 3, 2),
            still("C"),
            one(k, 4, 2),
            wait("C"),
            COUNT,
        ],
    )
    c.both(
        "fifo-head-blocks-what-is-there",
        lambda k: [
            one(k, 1),
            start("A", 2),
            start("B", 1),
            still("B"),
            one(k, 2),
            wait("A"),
            one(k, 3, 1),
            wait("B"),
        ],
    )
    c.row = "Takes: a cancelled head lets the next one through"
    c.both(
        "fifo-cancelled-head",
        lambda k: [
            one(k, 1),
            start("A", 5, 1.0),
            start("B", 1),
            still("B"),
            wait("A"),
            wait("B"),
            one(k, 2, 0),
            COUNT,
        ],
    )
    c.both(
        "fifo-cancelled-middle",
        lambda k: [
            start("A", 2),
            start("B", 9, 0.8),
            start("C", 1),
            wait("B"),
            one(k, 1),
            one(k, 2),
            wait("A"),
            one(k, 3, 1),
            wait("C"),
        ],
    )
    c.row = "Takes: a refused take does not touch the queue"
    c.both("fifo-refused", lambda k: [start("A", 2), take(0), one(k, 1), take(-1), one(k, 2), wait("A"), COUNT])
    c.row = "Takes: a second take with nothing new blocks"
    c.both("take-twice", lambda k: [one(k, 1), take(1), take(1), one(k, 2, 1), take(1), take(1)])
    c.row = "Takes: what num_required may be"
    for label, value in (
        ("float", 2.0),
        ("float-half", 1.5),
        ("text", "3"),
        ("none", None),
        ("true", True),
        ("list1", [1]),
        ("list2", [1, 2]),
    ):
        c.both(f"num-required-{label}", lambda k, v=value: [one(k, 1), one(k, 2), take(v), take(2)])
    for label, value in (("vector1", [1]), ("vector2", [1, 2]), ("vector0", [])):
        c.both(f"num-required-{label}", lambda k, v=value: [one(k, 1), take(arr(v, "int32"))])
    c.both("num-required-scalar-array", lambda k: [one(k, 1), take(arr(1, "int32"))])


def sparse_rules(c):
    c.row = "Sparse: order and repetition"
    for reduction in ("MEAN", "SUM"):
        label = reduction.lower()
        c.add(f"unsorted-alone-{label}", sparse(reduction=reduction), [rows([3, 1], [1, 2]), take(1)])
        c.add(
            f"unsorted-merge-{label}",
            sparse(reduction=reduction),
            [rows([3, 1], [1, 2]), rows([1, 3], [10, 20]), take(2)],
        )
        c.add(
            f"unsorted-second-{label}",
            sparse(reduction=reduction),
            [rows([1, 3], [1, 2]), rows([3, 1], [10, 20]), take(2)],
        )
        c.add(
            f"repeated-alone-{label}",
            sparse(reduction=reduction),
            [rows([1, 1, 4], [[1, 2], [3, 4], [5, 6]]), take(1)],
        )
        c.add(
            f"repeated-merge-{label}",
            sparse(reduction=reduction),
            [rows([1, 4], [8, 9]), rows([1, 1, 4], [1, 3, 5]), take(2)],
        )
    for reduction in ("MEAN", "SUM"):
        merges = []
        lists = [
            [0, 2, 4],
            [1, 3, 5],
            [0, 1, 2, 3, 4, 5],
            [2],
            [2, 9],
            [9],
            [0, 9, 10],
            [0, 2, 4],
        ]
        for n, indices in enumerate(lists):
            merges.append(rows(indices, [[n + i / 7, -i] for i in indices]))
        c.add(f"merge-{reduction.lower()}", sparse(reduction=reduction), [*merges, take(len(lists))])

    c.row = "Sparse: negative indices"
    c.add("negative-alone", sparse(), [rows([-1], [5]), take(1)])
    c.add("negative-mixed", sparse(), [rows([-5, 2], [[1], [2]]), COUNT])
    c.add("negative-declared", sparse([4, 1]), [rows([-1, 2], [[1], [2]]), COUNT])
    c.add("negative-lowest", sparse(), [rows([STEP_MIN], [1]), COUNT])

    c.row = "Sparse: indices beyond declared dim 0"
    c.add(
        "beyond-declared",
        sparse([4, 2]),
        [rows([3], [[1, 2]]), rows([4], [[1, 2]]), rows([0, 99], [[1, 2], [3, 4]]), COUNT, take(1)],
    )
    c.add("beyond-declared-rank1", sparse([4]), [rows([3], [1]), rows([4], [1]), take(1)])
    c.add(
        "beyond-declared-empty-round",
        sparse([4, 2]),
        [rows([4], [[1, 2]]), rows([2, 4], [[1, 2], [3, 4]]), COUNT, take(1)],
    )
    c.add(
        "beyond-unknown",
        sparse([None, 2]),
        [rows([2**40], [[1, 2]]), rows([7, STEP_MAX], [[1, 2], [3, 4]]), take(2)],
    )
    c.add("beyond-undeclared", sparse(), [rows([STEP_MAX], [1]), rows([2**53, 2**53 + 1], [1, 2]), take(2)])
    c.add("beyond-zero-rows", sparse([0, 2]), [rows([0], [[1, 2]]), rows([], np.zeros((0, 2))), take(1)])

    c.row = "Sparse: gradients without rows"
    none = np.zeros((0, 2))
    c.add("empty-alone", sparse(), [rows([], none), COUNT, take(1)])
    c.add("empty-only", sparse([9, 2]), [rows([], none), rows([], none), rows([], none), take(3)])
    c.add(
        "empty-dilutes-nothing",
        sparse(),
        [rows([1], [[3, 4]]), rows([], none), rows([1], [[5, 7]]), rows([], none), take(4)],
    )
    c.add("empty-first", sparse(), [rows([], none), rows([1], [[3, 4]]), take(2)])
    c.add(
        "empty-binds",
        sparse(),
        [rows([], none), rows([1], [[3, 4, 5]]), rows([2], [3]), COUNT, rows([1], [[3, 4]]), take(2)],
    )
    c.add(
        "empty-bound",
        sparse(),
        [rows([1], [[3, 4]]), rows([], np.zeros((0, 3))), rows([], []), COUNT, take(1)],
    )
    c.add("empty-scalars", sparse(), [rows([], []), rows([5], [2]), rows([5], [[2]]), take(2)])
    c.add("empty-declared", sparse([4, 3]), [rows([], none), rows([], np.zeros((0, 3))), take(1)])
    c.add(
        "empty-sum",
        sparse(reduction="SUM"),
        [rows([], none), rows([1], [[3, 4]]), rows([1], [[3, 4]]), take(3)],
    )

    c.row = "Sparse: rank and width of values"
    c.add("values-scalars", sparse(), [rows([0, 8], [1, 2]), rows([8], [5]), take(2)])
    cube = np.arange(24).reshape(2, 3, 4)
    c.add("values-rank3", sparse(), [rows([0, 8], cube), rows([8, 9], cube / 7), take(2)])
    c.add("values-rank3-declared", sparse([10, 3, 4]), [rows([0, 8], cube), rows([8, 9], cube / 7), take(2)])
    c.add("values-rank4", sparse(), [rows([3], np.arange(16).reshape(1, 2, 2, 4)), take(1)])
    c.add("values-width0", sparse(), [rows([0, 8], np.zeros((2, 0))), rows([8], np.zeros((1, 0))), take(2)])
    c.add("values-width0-declared", sparse([None, 0]), [rows([0, 8], np.zeros((2, 0))), take(1)])
    c.add(
        "values-width0-inner",
        sparse(),
        [rows([0, 8], np.zeros((2, 3, 0))), rows([8], np.zeros((1, 3, 0))), take(2)],
    )
    c.add(
        "values-width0-differ",
        sparse(),
        [rows([0], np.zeros((1, 0))), rows([0], [[1]]), rows([0], np.zeros((1, 0, 2))), take(1)],
    )
    c.add("values-above-declared", sparse([None, 3]), [rows([0, 8], cube), take(1)])
    c.add(
        "values-above-declared-rank1",
        sparse([10]),
        [rows([0, 8], [[1, 2], [3, 4]]), rows([8], [[1, 2]]), take(2)],
    )
    c.add("values-above-declared-scalar", sparse([]), [rows([0, 8], [[1, 2], [3, 4]]), take(1)])

    c.row = "Sparse: the shape that a take returns"
    for label, shape in (
        ("none", None),
        ("full", [9, 2]),
        ("rows", [None, 2]),
        ("width", [9, None]),
        ("unknown", [None, None]),
    ):
        ops = [rows([1, 8], [[1, 2], [3, 4]]), take(1)]
        ops += [rows([1], [[1, 2]], 1, grad_shape=[9, 2]), take(1)]
        ops += [rows([], none, 2), take(1)]
        c.add(f"returned-shape-{label}", sparse(shape), ops)
    c.add("returned-shape-grad-shape", sparse(), [rows([1], [[1, 2]], grad_shape=[50, 2]), take(1)])
    c.add(
        "returned-shape-grad-shape-rows",
        sparse([None, 2]),
        [rows([1], [[1, 2]], grad_shape=[50, 2]), take(1)],
    )
    c.add("returned-shape-rank1", sparse([9]), [rows([1], [1]), take(1)])

    c.row = "Sparse: grad_shape"
    good = ([1, 3], [[1, 2], [3, 4]])
    shapes = [
        ("none", None),
        ("scalar", []),
        ("rank1", [None]),
        ("rank1-full", [4]),
        ("full", [4, 2]),
        ("rows", [None, 2]),
        ("width", [4, None]),
        ("unknown", [None, None]),
        ("rank3", [4, 2, 3]),
    ]
    given = [
        ("empty", []),
        ("1", [4]),
        ("match", [4, 2]),
        ("rows-differ", [5, 2]),
        ("width-differs", [4, 3]),
        ("minus-rows", [-1, 2]),
        ("minus-width", [4, -1]),
        ("tail", [4, 2, 9]),
        ("long-tail", [4, 2, 3, 7]),
        ("small", [2, 2]),
        ("huge", [2**40, 2]),
        ("zero", [0, 0]),
    ]
    for shape_label, shape in shapes:
        values = good[1]
        if shape_label == "rank3":
            values = np.arange(12).reshape(2, 2, 3)
        if shape_label in ("rank1", "rank1-full"):
            values = [5, 6]
        # Every form in a case of its own round: what is accepted shows in the count.
        ops = [rows(good[0], values)] + [rows(good[0], values, grad_shape=g) for _, g in given]
        c.add(f"grad-shape-{shape_label}", sparse(shape), [*ops, take(1)])
        # ... and in a round that is empty.
        ops = [op for _, g in given for op in (rows(good[0], values, STEP_MAX, grad_shape=g), COUNT)]
        c.add(f"grad-shape-first-{shape_label}", sparse(shape), [*ops, take(1)])
    c.add("grad-shape-not-vector", sparse(), [rows([1], [1], grad_shape=arr(4, "int64")), COUNT])
    c.add("grad-shape-matrix", sparse(), [rows([1], [1], grad_shape=arr([[4]], "int64")), COUNT])
    c.add(
        "grad-shape-matrix-declared",
        sparse([4, 2]),
        [rows([1], [[1, 2]], grad_shape=arr([[4, 2]], "int64")), COUNT],
    )
    c.add(
        "grad-shape-raw",
        sparse([4, 2]),
        [rows(*good, grad_shape=[4, 2]), rows(*good, grad_shape=[4]), rows(*good), take(2)],
        api="raw",
    )

    c.row = "Sparse: shapes that do not fit"
    c.add("indices-scalar", sparse(), [rows(3, [1]), COUNT])
    c.add("indices-matrix", sparse(), [rows([[1], [3]], [1, 2]), COUNT])
    c.add("indices-scalar-declared", sparse([4]), [rows(3, [1]), COUNT])
    c.add("values-rank0", sparse(), [rows([3], 1.0), rows([], 1.0), COUNT])
    c.add("lengths-differ", sparse(), [rows([1, 3], [1]), rows([1], [1, 2]), rows([1, 3, 5], [[1], [2]]), COUNT])
    c.add("lengths-differ-empty", sparse(), [rows([], [1]), rows([1], []), rows([1], np.zeros((0, 3))), COUNT])
    c.add(
        "lengths-differ-declared",
        sparse([9, 2]),
        [rows([1, 3], [[1, 2]]), rows([1], [[1, 2], [3, 4]]), COUNT],
    )
    c.add(
        "lengths-differ-later",
        sparse(),
        [rows([1], [1]), rows([1, 3], [1]), rows([1], [1, 2]), COUNT, take(1)],
    )
    c.add(
        "values-below-declared",
        sparse([9, 2]),
        [rows([1, 3], [1, 2]), rows([1], [[1, 2]]), rows([1, 3], [1, 2]), COUNT, take(1)],
    )
    c.add(
        "values-below-unknown",
        sparse([None, None, 3]),
        [rows([1, 3], [[1, 2], [3, 4]]), rows([1], [4]), COUNT],
    )
    c.add(
        "row-differs-from-declared",
        sparse([9, 2]),
        [
            rows([1], [[1, 2, 3]]),
            rows([1], [[1]]),
            COUNT,
            rows([1], [[1, 2]]),
            rows([1], [[1, 2, 3]]),
            take(1),
        ],
    )
    c.add(
        "row-differs-from-declared-inner",
        sparse([None, 3, 4]),
        [rows([1], np.zeros((1, 3, 5))), rows([1], np.zeros((1, 4, 4))), COUNT],
    )
    c.add(
        "row-differs-from-round",
        sparse(),
        [rows([1], [[1, 2]]), rows([1], [[1, 2, 3]]), rows([1], [1]), rows([1], [[[1, 2]]]), COUNT, take(1)],
    )
    c.add(
        "row-differs-from-round-partial",
        sparse([9, None]),
        [rows([1], [[1, 2]]), rows([1], [[1, 2, 3]]), COUNT, take(1)],
    )
    c.add(
        "row-same-size-other-rank",
        sparse(),
        [rows([1], [[[1, 2], [3, 4]]]), rows([1], [[1, 2, 3, 4]]), COUNT, take(1)],
    )
    c.row = "Sparse: another row shape after a take"
    c.add(
        "row-shape-next-round",
        sparse(),
        [rows([1], [[1, 2]]), take(1), rows([1], [[1, 2, 3]], 1), take(1), rows([2], [7], 2), take(1)],
    )
    c.add(
        "row-shape-next-round-partial",
        sparse([9, None]),
        [rows([1], [[1, 2]]), take(1), rows([1], [[1, 2, 3]], 1), rows([1], [4], 1), take(1)],
    )
    c.add(
        "row-shape-next-round-declared",
        sparse([9, 2]),
        [rows([1], [[1, 2]]), take(1), rows([1], [[1, 2, 3]], 1), COUNT],
    )

    c.row = "Sparse: values of another dtype"
    c.add("values-float64", sparse(), [rows([1], arr([[1, 2]], "float64")), take(1)])
    c.add("values-float64-narrowing", sparse(), [rows([1], arr([1 / 3], "float64")), take(1)])
    c.add(
        "values-float32-into-float64",
        sparse(dtype="float64"),
        [rows([1], arr([[1.5, 2]], "float32")), take(1)],
    )
    c.add("values-int32", sparse(), [rows([1], arr([[1, 2]], "int32")), take(1)])
    c.add("values-complex", sparse(), [rows([1], arr([[1, 2]], "complex64")), COUNT])
    c.row = "Sparse: float indices"
    c.add("indices-float", sparse(), [rows(arr([1.7, 3.2], "float64"), [1, 2]), take(1)])
    c.add("indices-float-whole", sparse(), [rows(arr([1, 3], "float32"), [1, 2]), take(1)])
    for dtype in ("int8", "uint8", "int16", "int32", "uint16", "uint32"):
        c.add(f"indices-{dtype}", sparse(), [rows(arr([1, 3], dtype), [1, 2]), take(1)])
    c.row = "Sparse: shape=()"
    c.add("scalar-shape", sparse([]), [rows([0, 5], [1, 2]), rows([5, 2**40], [4, 6]), take(2)])
    c.add(
        "scalar-shape-grad-shape",
        sparse([]),
        [
            rows([0], [1], grad_shape=[]),
            rows([0], [1], grad_shape=[7]),
            rows([0], [1], grad_shape=[0]),
            COUNT,
        ],
    )


def dense_rules(c):
    c.row = "Dense: the shape of the round, then the declared one"
    c.add(
        "dense-no-broadcast",
        dense(),
        [push([1, 2]), push([1]), push(3.0), push([[1, 2]]), push([[1], [2]]), COUNT, take(1)],
    )
    c.add("dense-no-broadcast-scalar", dense(), [push(1.0), push([1]), push([[1]]), COUNT, take(1)])
    for label, shape in (("full", [2]), ("unknown", [None])):
        c.add(
            f"dense-declared-{label}",
            dense(shape),
            [
                push([1, 2, 3]),
                push(1.0),
                push([[1, 2]]),
                COUNT,
                push([1, 2]),
                push([1, 2, 3]),
                push([4, 9]),
                take(2),
            ]
            if label == "full"
            else [push(1.0), push([[1, 2]]), COUNT, push([1, 2]), push([1, 2, 3]), COUNT, take(1)],
        )
    partial = [
        push([[1, 2, 3]]),
        push([1, 2]),
        push([[1, 2], [3, 4], [5, 6]]),
        push([[1, 2]]),
        push([[1, 2, 3]] * 3),
        COUNT,
        take(1),
    ]
    c.add("dense-declared-partial", dense([None, 2]), [*partial, push([[1, 2]], 1), take(1)])
    c.add("dense-declared-scalar", dense([]), [push([1]), push(1.0), push([1, 2]), push(4.0), take(2)])
    c.add("dense-declared-zero", dense([0]), [push([1]), push([]), push(np.zeros((0, 2))), push([]), take(2)])
    c.add(
        "dense-declared-rank3",
        dense([2, None, 2]),
        [
            push(np.ones((2, 3, 3))),
            push(np.arange(12).reshape(2, 3, 2)),
            push(np.arange(8).reshape(2, 2, 2)),
            push(np.arange(12).reshape(2, 3, 2) / 7),
            take(2),
        ],
    )
    c.add(
        "dense-static-mismatch",
        dense([2]),
        [push([1, 2, 3], static=True), COUNT, push([1, 2], static=True), take(1)],
    )
    c.row = "Dense: scalars and zero-size"
    c.add("dense-scalar", dense(), [push(1.5), push(2.75), COUNT, take(2)])
    c.add(
        "dense-zero-size",
        dense(),
        [
            push([]),
            push([]),
            COUNT,
            take(2),
            push(np.zeros((2, 0)), 1),
            push(np.zeros((0, 2)), 1),
            push(np.zeros((2, 0)), 1),
            COUNT,
            take(2),
        ],
    )
    c.add(
        "dense-rank5",
        dense(),
        [push(np.arange(32).reshape((2,) * 5)), push(np.arange(32).reshape((2,) * 5) / 3), take(2)],
    )
    c.row = "Dense: declared None"
    c.add(
        "dense-first-fixes",
        dense(),
        [
            push([1, 2]),
            push([1, 2, 3]),
            take(1),
            push([1, 2, 3], 1),
            push([1, 2], 1),
            push([[1, 2, 3]], 1),
            take(1),
            push(1.0, 2),
            take(1),
        ],
    )
    c.row = "Dense: dtype of a gradient"
    for label, coded in (
        ("float64", arr([1 / 3, 2], "float64")),
        ("int64", arr([1, 2], "int64")),
        ("uint8", arr([1, 2], "uint8")),
        ("half", arr([1, 2], "half")),
        ("bool", arr([True, False], "bool")),
        ("complex", arr([1, 2], "complex64")),
    ):
        c.add(f"dense-from-{label}", dense(), [push(coded, static=True), take(1)])
    c.add(
        "dense-from-list",
        dense(),
        [
            {"op": "apply", "grad": [1, 2.5], "step": 0},
            {"op": "apply", "grad": 3, "step": 0, "static": True},
            {"op": "apply", "grad": "text", "step": 0},
            {"op": "apply", "grad": None, "step": 0},
            take(1),
        ],
    )


def stale(c):
    c.row = "Stale: not validated"
    ahead = set_step(3)
    c.add(
        "stale-dense-round-shape",
        dense(),
        [ahead, push([1, 2], 3), push([1, 2, 3], 2), push([[1]], 0), COUNT, take(1)],
    )
    c.add("stale-dense-declared", dense([2]), [ahead, push([1, 2, 3], 2), COUNT])
    c.add("stale-dense-declared-rank", dense([None, 2]), [ahead, push([1, 2], 2), COUNT])
    c.add(
        "stale-sparse-round-shape",
        sparse(),
        [ahead, rows([1], [[1, 2]], 3), rows([1], [[1, 2, 3]], 2), rows([1], [1], 2), COUNT, take(1)],
    )
    c.add("stale-sparse-lengths", sparse(), [ahead, rows([1, 2], [1], 2), COUNT])
    c.add("stale-sparse-index", sparse([4, 2]), [ahead, rows([4], [[1, 2]], 2), COUNT])
    c.add("stale-sparse-negative", sparse([4, 2]), [ahead, rows([-1], [[1, 2]], 2), COUNT])
    c.add("stale-sparse-row", sparse([4, 2]), [ahead, rows([1], [[1, 2, 3]], 2), COUNT])
    c.add("stale-sparse-rank", sparse([4, 2]), [ahead, rows([1], [1], 2), COUNT])
    c.add("stale-sparse-indices-rank", sparse(), [ahead, rows([[1]], [1], 2), COUNT])
    c.add("stale-sparse-values-rank", sparse(), [ahead, rows([1], 1.0, 2), COUNT])
    c.add("stale-sparse-grad-shape", sparse([4, 2]), [ahead, rows([1], [[1, 2]], 2, grad_shape=[5, 2]), COUNT])
    c.add(
        "stale-sparse-valid",
        sparse([4, 2]),
        [ahead, rows([3, 1], [[1, 2], [3, 4]], 2), rows([1], [[1, 2]], 3), take(1)],
    )
    c.row = "Stale: a refused or stale gradient wakes nobody"
    c.both(
        "wakes-nobody",
        lambda k: [
            set_step(2),
            one(k, 1, 2),
            start("A", 2),
            one(k, 5, 1),
            still("A"),
            wrong(k, 2),
            still("A"),
            set_step(1),
            still("A"),
            one(k, 7, 1),
            wait("A"),
            COUNT,
        ],
    )
    c.both(
        "refused-changes-nothing",
        lambda k: [one(k, 1), wrong(k), one(k, 2), wrong(k), COUNT, take(2), wrong(k, 1), take(1)],
    )


def shared(c):
    def on(op, number):
        return {**op, "handle": number}

    c.row = "shared_name: one state for all handles"
    for kind in ("dense", "sparse"):
        two = [handle(kind, shared_name="gradients"), handle(kind, shared_name="gradients")]
        c.add(
            f"shared-{kind}",
            two,
            [
                one(kind, 1),
                on(one(kind, 2), 1),
                on(COUNT, 1),
                on(take(2), 1),
                on(one(kind, 3, 1), 1),
                one(kind, 4, 0),
                take(1),
            ],
        )
        c.add(
            f"shared-taker-{kind}",
            two,
            [
                start("A", 2),
                on(start("B", 1), 1),
                on(one(kind, 1), 1),
                one(kind, 2),
                wait("A"),
                one(kind, 5, 1),
                wait("B"),
            ],
        )
        names = [handle(kind, shared_name="one"), handle(kind, shared_name="two")]
        c.add(
            f"shared-two-names-{kind}",
            names,
            [one(kind, 1), on(COUNT, 1), on(one(kind, 2), 1), take(1), on(take(1), 1)],
        )
        c.add(
            f"shared-survives-{kind}",
            handle(kind, shared_name=f"survivor-{kind}"),
            [
                one(kind, 1),
                take(1),
                one(kind, 3, 2),
                REOPEN,
                COUNT,
                one(kind, 4, 0),
                one(kind, 5, 1),
                take(2),
            ],
            server=True,
        )
    c.row = "shared_name: None or empty is private"
    for kind in ("dense", "sparse"):
        for label, name in (("none", None), ("empty", "")):
            spec = handle(kind, shared_name=name)
            c.add(
                f"private-{label}-{kind}",
                [spec, dict(spec)],
                [one(kind, 1), on(COUNT, 1), on(one(kind, 2), 1), take(1), on(take(1), 1)],
            )
    c.row = "shared_name: which names"
    for label, name in (
        ("underscore", "_gradients"),
        ("space", "a b"),
        ("unicode", "градиент/∇"),
        ("braces", "a{b}"),
        ("control", "a\nb"),
        ("512", "n" * 512),
        ("513", "n" * 513),
    ):
        c.add(f"name-{label}", dense(shared_name=name), [push([1, 2]), take(1)])
    c.row = "shared_name: another type under one name"
    for label, first, second, op in (
        ("reduction", dense(), dense(reduction="SUM"), push([2, 4])),
        ("shape", dense([2]), dense([3]), push([1, 2, 3])),
        ("shape-known", dense(), dense([3]), push([1, 2, 3])),
        ("dtype-apply", dense(), dense(dtype="float64"), push([1, 2], dtype="float64")),
        ("kind-apply", dense(), sparse(), rows([1], [1])),
        ("sparse-shape", sparse([4, 2]), sparse([4, 3]), rows([1], [[1, 2, 3]])),
        ("sparse-dtype-apply", sparse(), sparse(dtype="float64"), rows([1], [1], dtype="float64")),
    ):
        two = [{**first, "shared_name": "mixed"}, {**second, "shared_name": "mixed"}]
        c.add(f"other-{label}", two, [one(first["kind"], 2), on(op, 1), on(take(1), 1)])
    mixed = [dense(shared_name="mixed"), dense(dtype="float64", shared_name="mixed")]
    c.add("other-dtype-take", mixed, [one("dense", 2), on(take(1), 1)])
    mixed = [sparse(shared_name="mixed"), dense(shared_name="mixed")]
    c.add("other-kind-take", mixed, [one("sparse", 2), on(take(1), 1)])


def raw(c):
    c.row = "raw operations"
    c.add(
        "raw-dense",
        dense([2], shared_name="raw"),
        [push([1, 2]), push([4, 4]), COUNT, set_step(0), take(2), push([1, 1]), COUNT, take(0)],
        api="raw",
    )
    c.add(
        "raw-sparse",
        sparse([None, 2], shared_name="raw"),
        [
            rows([1], [[1, 2]], grad_shape=[7, 2]),
            rows([0, 1], [[4, 4], [5, 5]]),
            COUNT,
            take(2),
            rows([1], [[1, 2]]),
            COUNT,
        ],
        api="raw",
    )
    c.add("raw-sum", sparse(reduction="SUM"), [rows([1], [3]), rows([1], [4]), take(1)], api="raw")


def named_cases():
    """Returns all cases of the semantics page."""
    c = Cases()
    for part in (types, arithmetic, steps, takes, sparse_rules, dense_rules, stale, shared, raw):
        part(c)
    return c.all
