"""Random cases: sequences of operations on one accumulator.

Everything comes from `random.Random`, whose streams, unlike numpy's, are the same in every version, so that
the file of recorded outcomes can be made again and compared.
"""

import math
import random
from typing import ClassVar

import numpy as np
from cases import arr, named_cases, rows, set_step, take

# The recorded sequences: the numbers of small and of larger ones for each kind, dtype and reduction.
RECORDED = {"random": 40, "random-large": 3}
RECORDED_SEED = 1
LARGE = 6


class Numbers:
    """Random values whose sums and quotients are never subnormal: multiples of a power of two far above."""

    # float32: mantissas of 24 bits from 2^-40 on, so sums are multiples of 2^-63, divided by 2^5 at most.
    LOWEST: ClassVar = {"float32": -40, "float64": -300}
    HIGHEST: ClassVar = {"float32": 100, "float64": 900}
    MANTISSA: ClassVar = {"float32": 24, "float64": 53}

    def __init__(self, rng, dtype):
        self.rng = rng
        self.dtype = dtype
        # How far apart the magnitudes are decides which bits rounding drops, so sequences differ in it.
        self.spread = rng.choice((0, 2, 8, 24, 60, 130))
        span = self.HIGHEST[dtype] - self.LOWEST[dtype] - self.spread
        self.base = self.LOWEST[dtype] + int(rng.random() * max(span, 1))
        if rng.random() < 0.5:
            self.base = max(-12, self.LOWEST[dtype])
        self.special = 0.05 if rng.random() < 0.15 else 0.0

    def one(self):
        rng = self.rng
        if rng.random() < self.special:
            return rng.choice((0.0, -0.0, math.inf, -math.inf, math.nan))
        bits = self.MANTISSA[self.dtype]
        mantissa = rng.getrandbits(bits) | 1 << (bits - 1)
        exponent = self.base + (rng.getrandbits(20) % (self.spread + 1)) - bits + 1
        exponent = min(exponent, self.HIGHEST[self.dtype] - bits)
        return math.ldexp(mantissa if rng.random() < 0.5 else -mantissa, exponent)

    def array(self, shape):
        values = [self.one() for _ in range(math.prod(shape))]
        return arr(np.array(values, dtype=self.dtype).reshape(shape), self.dtype)


def random_sequence(
    rng,
    kind,
    dtype,
    reduction,
    *,
    rounds=3,
    scale=1,
    blocking=0.02,
):
    """A case of a few rounds: gradients up to date, future and stale, some that don't fit, takes, steps set.

    `scale` makes gradients larger, `blocking` is the share of rounds with a take that comes too early. The
    case holds nothing in which redisacc departs from TensorFlow on purpose.
    """
    numbers = Numbers(rng, dtype)
    ops = []
    step = 0
    width = [(), (1,), (3,), (2, 2), (0,), (5 * scale,)][rng.randrange(6)]
    pool = sorted({rng.randrange(12 * scale) if rng.random() < 0.9 else rng.getrandbits(50) for _ in range(10 * scale)})
    dense_shape = [(), (1,), (4,), (2, 3), (0,), (7 * scale,), (11 * scale, 1)][rng.randrange(7)]
    shape = dense_shape if kind == "dense" else (max(pool) + 1, *width)
    declared = rng.choice((None, "full", "partial"))
    if declared is not None:
        declared = [None if declared == "partial" and rng.random() < 0.5 else d for d in shape]

    def gradient(at, fits=True):
        if kind == "dense":
            return {"op": "apply", "grad": numbers.array(shape if fits else (*shape, 2)), "step": at}
        row = width if fits else (*width, 2)
        share = rng.choice((0.0, 0.2, 0.5, 0.5, 0.8, 1.0))
        indices = [i for i in pool if rng.random() < share]
        given = rng.random()
        grad_shape = list(shape) if given < 0.2 else [*shape, 3] if given < 0.25 else None
        return rows(indices, numbers.array((len(indices), *row)), at, grad_shape=grad_shape)

    for _ in range(rounds):
        wanted = rng.choice((1, 2, 3, 3, 4, 5, 7, 16 if scale == 1 else 6))
        accepted = 0
        while accepted < wanted:
            dice = rng.random()
            if dice < 0.1:
                ops.append(gradient(step - 1 - rng.randrange(3)))
                continue
            if dice < 0.14 and accepted:
                # (With nothing accumulated and no declared shape it would fit.)
                ops.append(gradient(step, fits=False))
                continue
            if dice < 0.17:
                step += rng.randrange(-3, 6)
                ops.append(set_step(step))
                continue
            if dice < 0.19:
                ops.append(take(-rng.randrange(3)))
                continue
            ops.append(gradient(step + (rng.randrange(5) if rng.random() < 0.2 else 0)))
            accepted += 1
        if rng.random() < blocking:
            ops.append(take(accepted + 1 + rng.randrange(3)))
        ops.append(take(1 + rng.randrange(accepted)))
        step += 1
    spec = {"kind": kind, "dtype": dtype, "shape": declared, "reduction": reduction}
    case = {"handles": [spec], "ops": ops}
    if rng.random() < 0.1:
        case["api"] = "raw"
    return case


def sequences(label, seed, each, **more):
    """`each` random sequences for every kind, dtype and reduction, with ids that begin with `label`."""
    for kind in ("dense", "sparse"):
        for dtype in ("float32", "float64"):
            for reduction in ("MEAN", "SUM"):
                rng = random.Random(f"{label}-{seed}-{kind}-{dtype}-{reduction}")
                for number in range(each):
                    case = random_sequence(rng, kind, dtype, reduction, **more)
                    case["id"] = f"{label}-{kind}-{dtype}-{reduction.lower()}-{number:03}"
                    case["row"] = "Types: sequential add, one true division"
                    yield case


def all_cases():
    """Returns the recorded cases: the named ones, then the random sequences."""
    found = named_cases()
    for label, each in RECORDED.items():
        found += sequences(label, RECORDED_SEED, each, scale=LARGE if label == "random-large" else 1)
    ids = [case["id"] for case in found]
    assert len(ids) == len(set(ids)), "two cases of one id"
    return found
