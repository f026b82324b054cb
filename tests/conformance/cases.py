"""The cases that both TensorFlow and redisacc run.

A case is a plain dictionary (see tensorflow_driver for its form) with an "id" and a "row", the row of the
semantics page (docs/reference/semantics.md) that it belongs to. Random cases are in sequences.

Rows about processes that are killed have no case here: the process tests cover them, against redisacc only.
"""

import math
import re

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


COUNT = {"op": "num_accumulated"}
# What literals in the tables may name.
NAMES = {
    **vars(np),
    "MIN": STEP_MIN,
    "MAX": STEP_MAX,
    "none": np.zeros((0, 2)),
    "cube": np.arange(24).reshape(2, 3, 4),
    "box": np.arange(12).reshape(2, 3, 2),
}


def one(kind, value, step=0, **more):
    """One gradient of each kind, for cases that aren't about gradients."""
    if kind == "dense":
        return push([value, 2 * value], step, **more)
    return rows([1, 4], [[value, 1], [2 * value, -1]], step, **more)


def handle(kind, **spec):
    return dense(**spec) if kind == "dense" else sparse(**spec)


# A row of a table is the id of a case, its handles, and its operations, as in: set | each | step7 1@6 2@7 take2
#
# | handle | what it is |
# | --- | --- |
# | dense, sparse | an accumulator; "each" stands for both, in a case for each |
# | dense[2]+=a | of this shape, with SUM, and this shared_name |
#
# | operation | what it is |
# | --- | --- |
# | 3@7 | `one` with the value 3 and the step 7; without @7, the step is 0 |
# | wrong@7 | a gradient that doesn't fit those of `one` in the same round |
# | [1,2]@7 | a dense gradient |
# | [1,4]:[[1,2],[3,4]]~[9,2]@7 | a sparse one: its indices, its values and, if it is known, its shape |
# | 1:1,2;4:3,4~[9,2]@7 | the same; in 1:1;4:3, rows are scalars |
# | take2, step7, count, reopen | take(2) and set_step(7); "take" is take(1) |
# | A=take2/0.8, A?, A | a taker A, which has a timeout of 0.8; it still waits; the outcome of its take |
# | 3#1 | of handle 1 instead of 0 |


def handle_of(word):
    kind, shape, plus, name = re.fullmatch(r"(dense|sparse)(\[.*])?(\+)?(?:=(.+))?", word).groups()
    spec = {"shape": shape and eval(shape), "reduction": "SUM" if plus else "MEAN"}
    return handle(kind, **spec, **({"shared_name": name} if name else {}))


def op_of(word, handles):
    word, _, number = word.partition("#")
    word, _, step = word.partition("@")
    kind, step = handles[int(number or 0)]["kind"], eval(step or "0", NAMES)
    if word in ("count", "reopen"):
        op = COUNT if word == "count" else {"op": word}
    elif "=take" in word:
        taker, needed, timeout = re.fullmatch(r"(.)=take(\d+)/?(.*)", word).groups()
        op = {"op": "start_take", "taker": taker, "num_required": int(needed), "timeout": float(timeout or 0) or None}
    elif word[0].isupper():
        op = {"op": "still_waiting" if word.endswith("?") else "wait", "taker": word[0]}
    elif word.startswith(("take", "step")):
        op = (take if word.startswith("take") else set_step)(eval(word[4:] or "1", NAMES))
    elif word == "wrong":
        op = push([1, 2, 3], step) if kind == "dense" else rows([1, 4], [[1], [2]], step)
    elif re.fullmatch(r"-?\d+", word):
        op = one(kind, int(word), step)
    else:
        word, _, shape = word.partition("~")
        indices, _, values = word.rpartition(":")
        if ":" in word and "[" not in word:
            pairs = [pair.split(":") for pair in word.split(";")]
            indices, values = (f"[{','.join(f'({part})' for part in parts)}]" for parts in zip(*pairs, strict=True))
        values, shape = eval(values, NAMES), eval(shape or "None")
        op = rows(eval(indices, NAMES), values, step, grad_shape=shape) if indices else push(values, step)
    return {**op, "handle": 1} if number else op


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

    def both(self, case_id, ops):
        for kind in ("dense", "sparse"):
            self.add(f"{case_id}-{kind}", handle(kind), ops(kind))

    def read(self, table, **more):
        """Adds the cases of a table; a line that begins with # is their row of the semantics page."""
        for line in table.strip().splitlines():
            if line.startswith("#"):
                self.row = line[2:]
                continue
            case_id, handles, ops = line.split(" | ")
            for kind in ("dense", "sparse") if "each" in handles else ("",):
                found = [handle_of(word) for word in handles.replace("each", kind).split()]
                of_kind = case_id + (kind and f"-{kind}")
                self.add(of_kind, found, [op_of(word, found) for word in ops.split()], **more)


# --- the rows of the semantics page ---------------------------------------------------------------

# What differs only in what it names is in the functions below.
TABLE = """
# Steps: set_global_step
set-higher | each | step10 1@9 2@10 3@11 take2
set-lower | each | step10 step4 1@3 2@4 take 3@4
set-same | each | step0 1 step0 take step1 1
set-negative | each | step-5 1@-6 2@-5 take 3@-5 4@-4
set-lowest | each | stepMIN 1@MIN take 1@MIN count
set-highest | each | stepMAX 1@MAX-1 1@MAX count
# Steps: setting the step keeps what is accumulated
set-keeps | each | 1 2 step7 count 5@6 6@7 take3 1@7
# Steps: a refused or timed-out take changes nothing
take-refused | each | 1 take0 take-3 2 take2 3
take-timed-out | each | 1 take3 2 take2 3 take 4@1
# Steps: at 2^63-1
wrap | each | stepMAX 1@MAX take count step5 take 2@5 3@6
# Takes: num_required < 1
take-none | each | take0 take-1 take-2**31 1 2 take0 take-1 take2
# Takes: when a take returns
take-blocks | each | take 1 take2 2 take2
take-all | each | 0 1 2 3 4 take2 count
take-exactly | each | 0 1 2 take3 count
take-many | each | 1 take2**31-1 count take
# Takes: first come, first served
fifo-head-blocks | each | A=take3 B=take1 1 2 A? B? 3 A B? 4 B? 5@1 B count
fifo-order | each | A=take1 B=take1 C=take2 1 A 2@1 B 3@2 C? 4@2 C count
fifo-head-blocks-what-is-there | each | 1 A=take2 B=take1 B? 2 A 3@1 B
# Takes: a cancelled head lets the next one through
fifo-cancelled-head | each | 1 A=take5/1 B=take1 B? A B 2 count
fifo-cancelled-middle | each | A=take2 B=take9/0.8 C=take1 B 1 2 A 3@1 C
# Takes: a refused take does not touch the queue
fifo-refused | each | A=take2 take0 1 take-1 2 A count
# Takes: a second take with nothing new blocks
take-twice | each | 1 take take 2@1 take take
# Sparse: negative indices
negative-alone | sparse | -1:5 take
negative-mixed | sparse | [-5,2]:[[1],[2]] count
negative-declared | sparse[4,1] | [-1,2]:[[1],[2]] count
negative-lowest | sparse | [MIN]:[1] count
# Sparse: indices beyond declared dim 0
beyond-declared | sparse[4,2] | 3:1,2 4:1,2 0:1,2;99:3,4 count take
beyond-declared-rank1 | sparse[4] | 3:1 4:1 take
beyond-declared-empty-round | sparse[4,2] | 4:1,2 2:1,2;4:3,4 count take
beyond-unknown | sparse[None,2] | [2**40]:[[1,2]] [7,MAX]:[[1,2],[3,4]] take2
beyond-undeclared | sparse | [MAX]:[1] [2**53,2**53+1]:[1,2] take2
beyond-zero-rows | sparse[0,2] | 0:1,2 []:none take
# Sparse: gradients without rows
empty-alone | sparse | []:none count take
empty-only | sparse[9,2] | []:none []:none []:none take3
empty-dilutes-nothing | sparse | 1:3,4 []:none 1:5,7 []:none take4
empty-first | sparse | []:none 1:3,4 take2
empty-binds | sparse | []:none 1:3,4,5 2:3 count 1:3,4 take2
empty-bound | sparse | 1:3,4 []:zeros((0,3)) []:[] count take
empty-scalars | sparse | []:[] 5:2 [5]:[[2]] take2
empty-declared | sparse[4,3] | []:none []:zeros((0,3)) take
empty-sum | sparse+ | []:none 1:3,4 1:3,4 take3
# Sparse: rank and width of values
values-scalars | sparse | 0:1;8:2 8:5 take2
values-rank3 | sparse | [0,8]:cube [8,9]:cube/7 take2
values-rank3-declared | sparse[10,3,4] | [0,8]:cube [8,9]:cube/7 take2
values-rank4 | sparse | [3]:arange(16).reshape(1,2,2,4) take
values-width0 | sparse | [0,8]:zeros((2,0)) [8]:zeros((1,0)) take2
values-width0-declared | sparse[None,0] | [0,8]:zeros((2,0)) take
values-width0-inner | sparse | [0,8]:zeros((2,3,0)) [8]:zeros((1,3,0)) take2
values-width0-differ | sparse | [0]:zeros((1,0)) [0]:[[1]] [0]:zeros((1,0,2)) take
values-above-declared | sparse[None,3] | [0,8]:cube take
values-above-declared-rank1 | sparse[10] | 0:1,2;8:3,4 8:1,2 take2
values-above-declared-scalar | sparse[] | 0:1,2;8:3,4 take
# Sparse: the shape that a take returns
returned-shape-grad-shape | sparse | 1:1,2~[50,2] take
returned-shape-grad-shape-rows | sparse[None,2] | 1:1,2~[50,2] take
returned-shape-rank1 | sparse[9] | 1:1 take
# Sparse: grad_shape
grad-shape-not-vector | sparse | 1:1~4 count
grad-shape-matrix | sparse | 1:1~[[4]] count
grad-shape-matrix-declared | sparse[4,2] | 1:1,2~[[4,2]] count
# Sparse: shapes that do not fit
indices-scalar | sparse | 3:[1] count
indices-matrix | sparse | [[1],[3]]:[1,2] count
indices-scalar-declared | sparse[4] | 3:[1] count
values-rank0 | sparse | [3]:1.0 []:1.0 count
lengths-differ | sparse | [1,3]:[1] [1]:[1,2] [1,3,5]:[[1],[2]] count
lengths-differ-empty | sparse | []:[1] [1]:[] [1]:zeros((0,3)) count
lengths-differ-declared | sparse[9,2] | [1,3]:[[1,2]] [1]:[[1,2],[3,4]] count
lengths-differ-later | sparse | 1:1 [1,3]:[1] [1]:[1,2] count take
values-below-declared | sparse[9,2] | 1:1;3:2 1:1,2 1:1;3:2 count take
values-below-unknown | sparse[None,None,3] | 1:1,2;3:3,4 1:4 count
row-differs-from-declared | sparse[9,2] | 1:1,2,3 [1]:[[1]] count 1:1,2 1:1,2,3 take
row-differs-from-declared-inner | sparse[None,3,4] | [1]:zeros((1,3,5)) [1]:zeros((1,4,4)) count
row-differs-from-round | sparse | 1:1,2 1:1,2,3 1:1 [1]:[[[1,2]]] count take
row-differs-from-round-partial | sparse[9,None] | 1:1,2 1:1,2,3 count take
row-same-size-other-rank | sparse | [1]:[[[1,2],[3,4]]] 1:1,2,3,4 count take
# Sparse: another row shape after a take
row-shape-next-round | sparse | 1:1,2 take 1:1,2,3@1 take 2:7@2 take
row-shape-next-round-partial | sparse[9,None] | 1:1,2 take 1:1,2,3@1 1:4@1 take
row-shape-next-round-declared | sparse[9,2] | 1:1,2 take 1:1,2,3@1 count
# Sparse: shape=()
scalar-shape | sparse[] | 0:1;5:2 [5,2**40]:[4,6] take2
scalar-shape-grad-shape | sparse[] | 0:1~[] 0:1~[7] 0:1~[0] count
# Dense: the shape of the round, then the declared one
dense-no-broadcast | dense | 1 [1] 3.0 [[1,2]] [[1],[2]] count take
dense-no-broadcast-scalar | dense | 1.0 [1] [[1]] count take
dense-declared-full | dense[2] | wrong 1.0 [[1,2]] count 1 wrong [4,9] take2
dense-declared-unknown | dense[None] | 1.0 [[1,2]] count 1 wrong count take
dense-declared-partial | dense[None,2] | [[1,2,3]] 1 [[1,2],[3,4],[5,6]] [[1,2]] [[1,2,3]]*3 count take [[1,2]]@1 take
dense-declared-scalar | dense[] | [1] 1.0 1 4.0 take2
dense-declared-zero | dense[0] | [1] [] none [] take2
dense-declared-rank3 | dense[2,None,2] | ones((2,3,3)) box arange(8).reshape(2,2,2) box/7 take2
# Dense: scalars and zero-size
dense-scalar | dense | 1.5 2.75 count take2
dense-zero-size | dense | [] [] count take2 zeros((2,0))@1 none@1 zeros((2,0))@1 count take2
dense-rank5 | dense | arange(32).reshape((2,)*5) arange(32).reshape((2,)*5)/3 take2
# Dense: declared None
dense-first-fixes | dense | 1 wrong take wrong@1 1@1 [[1,2,3]]@1 take 1.0@2 take
# Stale: not validated
stale-dense-round-shape | dense | step3 1@3 wrong@2 [[1]] count take
stale-dense-declared | dense[2] | step3 wrong@2 count
stale-dense-declared-rank | dense[None,2] | step3 1@2 count
stale-sparse-round-shape | sparse | step3 1:1,2@3 1:1,2,3@2 1:1@2 count take
stale-sparse-lengths | sparse | step3 [1,2]:[1]@2 count
stale-sparse-index | sparse[4,2] | step3 4:1,2@2 count
stale-sparse-negative | sparse[4,2] | step3 -1:1,2@2 count
stale-sparse-row | sparse[4,2] | step3 1:1,2,3@2 count
stale-sparse-rank | sparse[4,2] | step3 1:1@2 count
stale-sparse-indices-rank | sparse | step3 [[1]]:[1]@2 count
stale-sparse-values-rank | sparse | step3 [1]:1.0@2 count
stale-sparse-grad-shape | sparse[4,2] | step3 1:1,2~[5,2]@2 count
stale-sparse-valid | sparse[4,2] | step3 3:1,2;1:3,4@2 1:1,2@3 take
# Stale: a refused or stale gradient wakes nobody
wakes-nobody | each | step2 1@2 A=take2 5@1 A? wrong@2 A? step1 A? 7@1 A count
refused-changes-nothing | each | 1 wrong 2 wrong count take2 wrong@1 take
# shared_name: one state for all handles
shared | each=gradients each=gradients | 1 2#1 count#1 take2#1 3@1#1 4 take
shared-taker | each=gradients each=gradients | A=take2 B=take1#1 1#1 2 A 5@1 B
shared-two-names | each=one each=two | 1 count#1 2#1 take take#1
# shared_name: another type under one name
other-reduction | dense=mixed dense+=mixed | 2 2#1 take#1
other-shape | dense[2]=mixed dense[3]=mixed | 2 wrong#1 take#1
other-shape-known | dense=mixed dense[3]=mixed | 2 wrong#1 take#1
other-kind-apply | dense=mixed sparse=mixed | 2 1:1#1 take#1
other-sparse-shape | sparse[4,2]=mixed sparse[4,3]=mixed | 2 1:1,2,3#1 take#1
other-kind-take | sparse=mixed dense=mixed | 2 take#1
"""
# Through tf.raw_ops.
RAW = """
# Sparse: grad_shape
grad-shape-raw | sparse[4,2] | 1:1,2;3:3,4~[4,2] 1:1,2;3:3,4~[4] 1:1,2;3:3,4 take2
# raw operations
raw-dense | dense[2]=raw | 1 [4,4] count step0 take2 [1,1] count take0
raw-sparse | sparse[None,2]=raw | 1:1,2~[7,2] 0:4,4;1:5,5 count take2 1:1,2 count
raw-sum | sparse+ | 1:3 1:4 take
"""


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
    c.both("step-after-take", lambda k: [one(k, 1), take(1)] + [one(k, i, s) for i, s in enumerate(far)] + [take(4)])
    c.both(
        "step-counts-takes",
        lambda k: [
            op for n in range(4) for op in (one(k, n, n - 1), one(k, 10 + n, n), one(k, 30 + n, n + 7), take(1))
        ],
    )

    c.row = "Steps: set_global_step"
    # Neighbors that are the same number as a double.
    for label, s in (("2e53", 2**53), ("2e62", 2**62), ("minus-2e53", -(2**53) - 2), ("minus-2e62", -(2**62) - 2)):
        ops = f"step{s + 1} 1@{s} 2@{s + 1} 3@{s + 2} take2 4@{s + 1} 5@{s + 2} step{s} 6@{s - 1} 7@{s} take2"
        c.read(f"set-beyond-{label} | each | {ops}")
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
    no_steps = {"text": "1", "none": None, "list1": [1], "list2": [1, 2], "above": 2**63, "below": STEP_MIN - 1}
    for label, step in no_steps.items():
        c.both(f"step-{label}", lambda k, s=step: [one(k, 1, s, static=True), one(k, 2, 0), COUNT])
        c.both(f"step-{label}-set", lambda k, s=step: [set_step(s, static=True), one(k, 2, 0), COUNT])


def takes(c):
    c.row = "Takes: what num_required may be"
    values = {"float": 2.0, "float-half": 1.5, "text": "3", "none": None, "true": True, "list1": [1], "list2": [1, 2]}
    for label, value in values.items():
        c.both(f"num-required-{label}", lambda k, v=value: [one(k, 1), one(k, 2), take(v), take(2)])
    for label, value in (("vector1", [1]), ("vector2", [1, 2]), ("vector0", []), ("scalar-array", 1)):
        c.both(f"num-required-{label}", lambda k, v=value: [one(k, 1), take(arr(v, "int32"))])


def sparse_rules(c):
    c.row = "Sparse: order and repetition"
    for end, plus in (("mean", ""), ("sum", "+")):
        c.read(
            f"""
unsorted-alone-{end} | sparse{plus} | 3:1;1:2 take
unsorted-merge-{end} | sparse{plus} | 3:1;1:2 1:10;3:20 take2
unsorted-second-{end} | sparse{plus} | 1:1;3:2 3:10;1:20 take2
repeated-alone-{end} | sparse{plus} | 1:1,2;1:3,4;4:5,6 take
repeated-merge-{end} | sparse{plus} | 1:8;4:9 1:1;1:3;4:5 take2
"""
        )
        lists = [[0, 2, 4], [1, 3, 5], [*range(6)], [2], [2, 9], [9], [0, 9, 10], [0, 2, 4]]
        merges = [rows(indices, [[n + i / 7, -i] for i in indices]) for n, indices in enumerate(lists)]
        c.add(f"merge-{end}", sparse(reduction=end.upper()), [*merges, take(len(lists))])

    c.row = "Sparse: the shape that a take returns"
    declared = {"none": "", "full": "[9,2]", "rows": "[None,2]", "width": "[9,None]", "unknown": "[None,None]"}
    for label, shape in declared.items():
        ops = "[1,8]:[[1,2],[3,4]] take 1:1,2~[9,2]@1 take []:none@2 take"
        c.read(f"returned-shape-{label} | sparse{shape} | {ops}")

    c.row = "Sparse: grad_shape"
    declared |= {"full": "[4,2]", "width": "[4,None]", "scalar": "[]"}
    declared |= {"rank1": "[None]", "rank1-full": "[4]", "rank3": "[4,2,3]"}
    given = [[], [4], [4, 2], [5, 2], [4, 3], [-1, 2], [4, -1], [4, 2, 9], [4, 2, 3, 7], [2, 2], [2**40, 2], [0, 0]]
    given = [str(each).replace(" ", "") for each in given]
    for label, shape in declared.items():
        values = {"rank1": "[5,6]", "rank3": "arange(12).reshape(2,2,3)"}.get(label[:5], "[[1,2],[3,4]]")
        # Every form in a case of its own round: what is accepted shows in the count.
        every = " ".join(f"[1,3]:{values}~{each}" for each in given)
        c.read(f"grad-shape-{label} | sparse{shape} | [1,3]:{values} {every} take")
        # ... and in a round that is empty.
        every = " ".join(f"[1,3]:{values}~{each}@MAX count" for each in given)
        c.read(f"grad-shape-first-{label} | sparse{shape} | {every} take")

    c.row = "Sparse: values of another dtype"
    c.add("values-float64", sparse(), [rows([1], arr([[1, 2]], "float64")), take(1)])
    c.add("values-float64-narrowing", sparse(), [rows([1], arr([1 / 3], "float64")), take(1)])
    c.add("values-float32-into-float64", sparse(dtype="float64"), [rows([1], arr([[1.5, 2]])), take(1)])
    c.add("values-int32", sparse(), [rows([1], arr([[1, 2]], "int32")), take(1)])
    c.add("values-complex", sparse(), [rows([1], arr([[1, 2]], "complex64")), COUNT])
    c.row = "Sparse: float indices"
    c.add("indices-float", sparse(), [rows(arr([1.7, 3.2], "float64"), [1, 2]), take(1)])
    c.add("indices-float-whole", sparse(), [rows(arr([1, 3], "float32"), [1, 2]), take(1)])
    for dtype in ("int8", "uint8", "int16", "int32", "uint16", "uint32"):
        c.add(f"indices-{dtype}", sparse(), [rows(arr([1, 3], dtype), [1, 2]), take(1)])


def dense_rules(c):
    c.row = "Dense: the shape of the round, then the declared one"
    static = [push([1, 2, 3], static=True), COUNT, push([1, 2], static=True), take(1)]
    c.add("dense-static-mismatch", dense([2]), static)
    c.row = "Dense: dtype of a gradient"
    for label, coded in (
        ("float64", arr([1 / 3, 2], "float64")),
        *((label, arr([1, 2], label)) for label in ("int64", "uint8", "half")),
        ("bool", arr([True, False], "bool")),
        ("complex", arr([1, 2], "complex64")),
    ):
        c.add(f"dense-from-{label}", dense(), [push(coded, static=True), take(1)])
    given = ({"grad": [1, 2.5]}, {"grad": 3, "static": True}, {"grad": "text"}, {"grad": None})
    c.add("dense-from-list", dense(), [*({"op": "apply", "step": 0, **each} for each in given), take(1)])


def shared(c):
    c.row = "shared_name: one state for all handles"
    c.read("shared-survives | each=survivor-each | 1 take 3@2 reopen count 4 5@1 take2", server=True)
    c.row = "shared_name: None or empty is private"
    for kind in ("dense", "sparse"):
        for label, name in (("none", None), ("empty", "")):
            two = [handle(kind, shared_name=name) for _ in range(2)]
            ops = [op_of(word, two) for word in ("1", "count#1", "2#1", "take", "take#1")]
            c.add(f"private-{label}-{kind}", two, ops)
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
    for of, mine in ((dense, push([1, 2], dtype="float64")), (sparse, rows([1], [1], dtype="float64"))):
        two = [of(shared_name="mixed"), of(dtype="float64", shared_name="mixed")]
        end = "" if of is dense else "sparse-"
        kind = two[0]["kind"]
        c.add(f"other-{end}dtype-apply", two, [one(kind, 2), {**mine, "handle": 1}, {**take(1), "handle": 1}])
    c.add(
        "other-dtype-take",
        [dense(shared_name="mixed"), dense(dtype="float64", shared_name="mixed")],
        [one("dense", 2), {**take(1), "handle": 1}],
    )


def named_cases():
    """Returns all cases of the semantics page."""
    c = Cases()
    c.read(TABLE)
    c.read(RAW, api="raw")
    for part in (types, arithmetic, steps, takes, sparse_rules, dense_rules, shared):
        part(c)
    return c.all
