"""The deliberate departures of redisacc from TensorFlow, case by case, with their reasons.

The replay holds us to every entry: at the operations that it names we must do what it says, and TensorFlow
must have done something else; at all others we must agree with TensorFlow.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from arraycode import encode
from cases import FLOATS, INTEGERS, QUANTIZED, arr

Outcome = dict[str, Any]


@dataclass(frozen=True)
class Departure:
    """The outcome of redisacc instead, in one case."""

    row: str  # the row of the semantics page that says so
    why: str
    ours: dict[int, Outcome]  # number of the operation -> our outcome
    construction: Outcome | None = None  # where we refuse to open what TensorFlow opens


def ok(count=None):
    return _counted({"ok": None}, count)


def value(array, dtype="float32", *, count=0):
    return _counted({"ok": arr(array, dtype)}, count)


def slices(indices, values, shape=(-1,), dtype="float32", *, count=0):
    return _counted({"ok": [arr(indices, "int64"), arr(values, dtype), arr(shape, "int64")]}, count)


def refused(count=None, error="InvalidArgumentError"):
    return _counted({"error": error}, count)


def blocked(count=0):
    return {"blocked": True, "count": count}


def counted(count):
    return {"ok": count, "count": count}


def _counted(outcome, count):
    return outcome if count is None else {**outcome, "count": count}


DEPARTURES = {}


def _add(case, row, why, ours, *, construction=None):
    assert case not in DEPARTURES, case
    DEPARTURES[case] = Departure(row, why, ours, construction)


def _both(case, row, why, dense, sparse=None):
    _add(f"{case}-dense", row, why, dense)
    _add(f"{case}-sparse", row, why, dense if sparse is None else sparse)


def _types():
    row = "only float16, float32, float64 work"
    why = "every type that TensorFlow's documentation lists works; an integer MEAN truncates toward zero"
    for name in (*FLOATS, *INTEGERS, *QUANTIZED):
        if name in ("float32", "float64", "half"):
            continue
        whole = name not in FLOATS
        if name.startswith(("u", "qu")):
            mean = [3, 127, 5]
            total = [7, 255, 11]
            held = [5, 101, 29, 8]
        else:
            mean = [3, -4, -2] if whole else [3.5, -4.5, -2.5]
            total = [7, -9, -5]
            held = [5, -2, 0, -8] if whole else [5, -2.5, 0.5, -8]
        first = {0: ok(1), 1: ok(2)}
        _add(f"type-dense-{name}", row, why, {**first, 2: value(mean, name)})
        _add(f"type-dense-sum-{name}", row, why, {**first, 2: value(total, name)})
        _add(f"type-sparse-{name}", row, why, {**first, 2: slices([0, 2, 5, 9], held, [-1], name)})
    for name in ("complex64", "complex128"):
        middle = value([1.5 - 1.5j, 0.5 - 1.5j], name)
        _add(f"type-imaginary-{name}", row, why, {0: ok(1), 1: ok(2), 2: middle})


def _arithmetic():
    row = "float16 adds in half"
    why = "we add in float32 and round once"
    _add("half-dense-mean", row, why, {5: value([2052 / 5], "half")})
    _add("half-dense-sum", row, why, {5: value([2052], "half")})
    _add("half-sparse-mean", row, why, {5: slices([3], [2052 / 5], [-1], "half")})
    _add("half-sparse-sum", row, why, {5: slices([3], [2052], [-1], "half")})
    _add("half-overflow", row, why, {2: value(65504, "half")})
    row = "float32/float64 subnormals are flushed to zero on its threads"
    why = "IEEE, as numpy"
    for dtype, tiny in (("float32", 1e-40), ("float64", 1e-310)):
        _add(f"subnormal-{dtype}", row, why, {2: value([tiny, 1], dtype)})
        _add(f"subnormal-sparse-{dtype}", row, why, {2: slices([0], [tiny], [-1], dtype)})
    numbers = [np.float32(v) for v in (2e-38, 1.2e-38, -2e-38)]
    quotient = (numbers[0] + numbers[1] + numbers[2]) / np.float32(3)
    _add("subnormal-quotient", row, why, {3: {"ok": encode(quotient), "count": 0}})


def _steps():
    row = "at 2^63-1 the step wraps to -2^63"
    why = "an error before anything changes: the gradient is still there for the take at a lower step"
    overflow = {2: refused(1, "RedisAccError"), 3: counted(1), 4: {**ok(1), "warned": True}}
    # TensorFlow is at step 5 from here on, we take first what it took before.
    after = {6: ok(0), 7: ok(1)}
    _both(
        "wrap",
        row,
        why,
        {**overflow, 5: value([1, 2]), **after},
        {**overflow, 5: slices([1, 4], [[1, 1], [2, -1]], [-1, 2]), **after},
    )
    row = "float steps truncate; a step of shape [1] raises and takes effect; of shape [2] it aborts"
    why = "a step that isn't an integer scalar is refused and changes nothing"
    _both("step-float", row, why, {0: refused(0), 1: blocked(), 2: refused(0), 3: refused(0), 4: counted(0)})
    _both("step-float-set", row, why, {0: {**refused(0), "warned": False}, 1: ok(1), 2: ok(2), 3: counted(2)})
    _both("step-above", row, why + "; 2^63 becomes -2^63 in TensorFlow", {0: refused(0)})
    _both("step-above-set", row, why + "; 2^63 becomes -2^63 in TensorFlow", {0: refused(0)})
    _both("step-vector1-set", row, why, {1: ok(1), 2: counted(1)})
    _both("step-vector1-apply", row, why, {2: refused(0), 3: counted(0)})
    _both("step-vector2-set", row, why, {1: {**refused(1), "warned": False}})
    _both("step-vector2-apply", row, why, {1: refused(1)})


def _takes():
    row = "num_required as float, text, None: TypeError; of shape [1]: the process segfaults"
    why = "anything but an integer scalar is refused"
    _both("num-required-vector1", row, why, {1: refused(1)})
    for label in ("vector0", "vector2"):
        _add(f"num-required-{label}-sparse", row, why, {1: refused(1)})
    taken = slices([1, 4], [[1.5, 1], [3, -1]], [-1, 2])
    _both("num-required-true", row, why, {2: refused(2), 3: value([1.5, 3])}, {2: refused(2), 3: taken})


def _sparse():
    row = "assumes sorted unique indices without checking"
    why = "we sort, sum repeated rows of one gradient, and count an index once a gradient"
    for reduction, merged, second, repeated in (
        ("mean", [6, 10.5], [10.5, 6], [6, 7]),
        ("sum", [12, 21], [21, 12], [12, 14]),
    ):
        _add(f"unsorted-alone-{reduction}", row, why, {1: slices([1, 3], [2, 1])})
        _add(f"unsorted-merge-{reduction}", row, why, {2: slices([1, 3], merged)})
        _add(f"unsorted-second-{reduction}", row, why, {2: slices([1, 3], second)})
        _add(f"repeated-alone-{reduction}", row, why, {1: slices([1, 4], [[4, 6], [5, 6]], [-1, 2])})
        _add(f"repeated-merge-{reduction}", row, why, {2: slices([1, 4], repeated)})
    row = "negative indices accepted and returned"
    why = "refused"
    _add("negative-alone", row, why, {0: refused(0), 1: blocked()})
    for label in ("mixed", "declared", "lowest"):
        _add(f"negative-{label}", row, why, {0: refused(0), 1: counted(0)})
    row = "grad_shape"
    why = "a shape is a vector; TensorFlow takes a scalar or a matrix for one"
    for label in ("not-vector", "matrix", "matrix-declared"):
        _add(f"grad-shape-{label}", row, why, {0: refused(0), 1: counted(0)})
    row = "values of another dtype abort the process"
    why = "converted where numpy's same_kind cast allows, else refused"
    for label, taken in (
        ("float64", slices([1], [[1, 2]], [-1, 2])),
        ("float64-narrowing", slices([1], [1 / 3])),
        ("float32-into-float64", slices([1], [[1.5, 2]], [-1, 2], "float64")),
        ("int32", slices([1], [[1, 2]], [-1, 2])),
    ):
        _add(f"values-{label}", row, why, {0: ok(1), 1: taken})
    _add("values-complex", row, why, {0: refused(0), 1: counted(0)})
    row = "float indices are truncated"
    for label in ("float", "float-whole"):
        _add(f"indices-{label}", row, "refused", {0: refused(0), 1: blocked()})


def _dense():
    row = "values of another dtype"
    why = "TensorFlow drops the imaginary part without a word; numpy's same_kind cast doesn't allow it"
    _add("dense-from-complex", row, why, {0: refused(0), 1: blocked()})


def _stale():
    row = "a stale gradient isn't validated at all"
    why = "what the client can see is always checked"
    cases = (
        "dense-declared",
        "dense-declared-rank",
        "sparse-lengths",
        "sparse-index",
        "sparse-negative",
        "sparse-row",
        "sparse-rank",
        "sparse-indices-rank",
        "sparse-values-rank",
        "sparse-grad-shape",
    )
    for case in cases:
        _add(f"stale-{case}", row, why, {1: refused(0)})


def _shared():
    row = 'a leading "_" is refused'
    why = "a name is any non-empty text up to 512 bytes without braces or control characters"
    _add("name-underscore", row, why, {0: ok(1), 1: value([1, 2])})
    for label in ("braces", "control", "513"):
        _add(f"name-{label}", row, why, {}, construction=refused())
    row = "a different reduction, shape, dtype or kind under one name"
    why = "an error at opening that shows both sides"
    for label in (
        "reduction",
        "shape",
        "shape-known",
        "dtype-apply",
        "kind-apply",
        "sparse-shape",
        "sparse-dtype-apply",
        "dtype-take",
        "kind-take",
    ):
        _add(f"other-{label}", row, why, {}, construction=refused(error="InvalidArgumentError"))


for _part in (_types, _arithmetic, _steps, _takes, _sparse, _dense, _stale, _shared):
    _part()
