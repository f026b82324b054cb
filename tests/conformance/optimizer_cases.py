"""Trainings that torch's optimizers and ours run step by step: options, weights and gradients.

All numbers are fractions of powers of two, so that every machine makes the same ones.
"""

import hashlib
import math

import numpy as np

STEPS = 1000
DTYPES = ("float32", "float64")
# More than the registers of any processor hold, and no multiple of them.
SHAPES = {"w": (61,), "bias": (6,)}
ROWS, WIDTH = 20, 3

# Name → the class, its options, and whether the learning rate follows ``rate``. The options are torch's as well, except
# those of OURS.
CASES = {
    "sgd": ("SGD", {"lr": 0.01}, False),
    "sgd-schedule": ("SGD", {"lr": 0.01, "weight_decay": 0.01}, True),
    "sgd-momentum": ("SGD", {"lr": 0.01, "momentum": 0.9}, False),
    "sgd-dampening": ("SGD", {"lr": 0.01, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02}, False),
    "sgd-nesterov": ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.02}, True),
    "sgd-maximize": ("SGD", {"lr": 0.01, "momentum": 0.5, "maximize": True, "weight_decay": 0.02}, False),
    "adam": ("Adam", {}, False),
    "adam-decay": ("Adam", {"lr": 0.01, "weight_decay": 0.1}, True),
    "adam-amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True}, False),
    "adam-maximize": ("Adam", {"lr": 0.01, "maximize": True, "weight_decay": 0.1}, False),
    "adam-betas": ("Adam", {"lr": 0.01, "betas": (0.3, 0.95), "eps": 1e-3}, False),
    "adamw": ("AdamW", {}, False),
    "adamw-all": ("AdamW", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True, "maximize": True}, True),
    "adamw-groups": (
        "AdamW",
        {"lr": 0.01, "weight_decay": 0.1, "no_decay": ["bias"], "lr_factor": {"b*": 0.3, "*": 0.7}, "ema": 0.99},
        True,
    ),
    "adamw-ema": ("AdamW", {"ema": 0.3}, False),
    "adagrad": ("Adagrad", {}, False),
    "adagrad-all": (
        "Adagrad",
        {"lr_decay": 0.01, "weight_decay": 0.02, "initial_accumulator_value": 0.1, "eps": 1e-6, "maximize": True},
        True,
    ),
    "rmsprop": ("RMSprop", {}, False),
    "rmsprop-decay": ("RMSprop", {"alpha": 0.4, "eps": 1e-4, "weight_decay": 0.02, "maximize": True}, True),
    "rmsprop-momentum": ("RMSprop", {"lr": 0.001, "momentum": 0.9}, False),
    "rmsprop-centered": ("RMSprop", {"centered": True}, False),
    "rmsprop-all": ("RMSprop", {"lr": 0.001, "momentum": 0.9, "centered": True, "weight_decay": 0.02}, False),
    "lion": ("Lion", {}, False),
    "lion-decay": ("Lion", {"lr": 0.001, "betas": (0.95, 0.98), "weight_decay": 0.5, "maximize": True}, True),
}

# torch clips by the norm in the dtype of the gradient, ours in float64, so these are compared within a bound.
CLIPPED = {
    "sgd-clipped": ("SGD", {"lr": 0.01, "momentum": 0.9, "clip_norm": 1.5}, False),
    "adam-clipped": ("Adam", {"lr": 0.01, "clip_norm": 1.5}, False),
}

# Of rows: the class, the class in torch, and their options.
SPARSE = {
    "sparse-sgd": ("SGD", "SGD", {"lr": 0.01}),
    "sparse-adagrad": ("Adagrad", "Adagrad", {"lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    # torch adds eps in another place, so this one is too small to matter.
    "sparse-adam": ("Adam", "SparseAdam", {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-30}),
    "sparse-adam-eps": ("Adam", "SparseAdam", {}),
}

OURS = ("no_decay", "lr_factor", "clip_norm", "ema")


def rate(step, lr):
    """A schedule that every machine computes alike."""
    return lr / (1 + step / 128)


def _raw(random, shape):
    # numpy promises that these numbers stay the same, unlike those of its distributions.
    return random.random_raw(math.prod(shape)).reshape(shape)


def _fractions(random, shape, dtype):
    raw = _raw(random, shape)
    mantissas = (raw % 2**21).astype(np.int32) - 2**20
    return np.ldexp(mantissas.astype(dtype), (raw >> 32).astype(np.int32) % 11 - 28)


def initial(dtype):
    """The weights before the first step."""
    random = np.random.PCG64(1)
    return {name: _fractions(random, shape, dtype) for name, shape in SHAPES.items()}


def gradients(dtype, steps=STEPS):
    """The mean gradient of each step. Some elements are 0, a few always."""
    random = np.random.PCG64(2)
    for _ in range(steps):
        every = {}
        for name, shape in SHAPES.items():
            every[name] = _fractions(random, shape, dtype)
            every[name][_raw(random, shape) % 8 == 0] = 0
            every[name][-1] = 0
        yield every


def table(dtype):
    """The rows before the first step."""
    return _fractions(np.random.PCG64(3), (ROWS, WIDTH), dtype)


def rows(dtype, steps=STEPS):
    """The row numbers and the rows of the mean gradient of each step. No element is 0."""
    random = np.random.PCG64(4)
    for _ in range(steps):
        (indices,) = (_raw(random, (ROWS,)) % 4 == 0).nonzero()
        values = _fractions(random, (len(indices), WIDTH), dtype)
        yield indices.astype(np.int64), values + values.dtype.type(2.0**-9) * (values == 0)


class Digest:
    """A digest of the arrays after every step. It does not tell -0 from 0."""

    def __init__(self):
        self._hash = hashlib.sha256()

    def add(self, arrays):
        for array in arrays:
            self._hash.update((array + array.dtype.type(0)).tobytes())

    def text(self):
        return self._hash.hexdigest()[:32]
