"""The kernel of optimizers: the same bits however often, by whom and in which pieces; what it refuses."""

import hashlib
import itertools
import math
import os
import subprocess
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rows import every_row

from redisacc import optim
from redisacc._arrays.dtypes import find_dtype
from redisacc._arrays.gradient import Section
from redisacc._arrays.sums import DenseSum, SparseSum
from redisacc.errors import InvalidArgumentError
from redisacc.optim import kernel

try:
    from numpy._core._multiarray_umath import __cpu_dispatch__ as DISPATCHED
    from numpy._core._multiarray_umath import __cpu_features__ as FEATURES
except ImportError:
    # numpy 1.
    from numpy.core._multiarray_umath import __cpu_dispatch__ as DISPATCHED
    from numpy.core._multiarray_umath import __cpu_features__ as FEATURES

OPTIMIZERS = {
    "sgd": optim.SGD(0.1, weight_decay=0.1),
    "sgd-nesterov": optim.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1, ema=0.9),
    "sgd-dampening": optim.SGD(0.1, momentum=0.9, dampening=0.5, maximize=True),
    "adam": optim.Adam(0.1, weight_decay=0.1, amsgrad=True, ema=0.1),
    "adamw": optim.AdamW(0.1),
    "adagrad": optim.Adagrad(0.1, weight_decay=0.1),
    "rmsprop": optim.RMSprop(0.1, weight_decay=0.1, maximize=True),
    "rmsprop-all": optim.RMSprop(0.1, momentum=0.9, centered=True, ema=0.5),
    "lion": optim.Lion(0.1, weight_decay=0.1),
}
DTYPES = (np.float32, np.float64)
BLOCK = 64


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few elements, so that a test has many."""

    def of(dtype):
        monkeypatch.setattr(kernel, "BLOCK_BYTES", BLOCK * np.dtype(dtype).itemsize)

    return of


def arrays(optimizer, size, dtype):
    """Weights, a sum of gradients with a few zeros, and state that is none of the first update."""
    random = np.random.default_rng(size)
    weights, gradient = (random.standard_normal(size).astype(dtype) for _ in range(2))
    gradient[::7] = 0
    state = [np.abs(random.standard_normal(size)).astype(dtype) for _ in optimizer.slots]
    if "grad_avg" in optimizer.slots:
        # The variance is positive.
        state[optimizer.slots.index("grad_avg")] *= dtype(0.01)
        state[0] += dtype(10)
    return weights, gradient, state


def updated(optimizer, weights, gradient, state, *, divisor=3, clip=0.7, in_place=False):
    """The new weights and state."""
    out, to = (weights, state) if in_place else (np.empty_like(weights), [np.empty_like(each) for each in state])
    scalars = optimizer.scalars(10, 11)[0]
    kernel.update_part(
        optimizer, weights, gradient, state, scalars=scalars, divisor=divisor, clip=clip, out_weights=out, out_state=to
    )
    return [out, *to]


def assert_same_bits(one, other):
    for mine, theirs in zip(one, other, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.tobytes() == theirs.tobytes()


@every_row("dtype", DTYPES)
@every_row("name", OPTIMIZERS)
def test_repeated_cut_or_in_place_it_gives_the_same_bits(name, dtype, small_blocks):
    optimizer = OPTIMIZERS[name]
    size = 300
    given = arrays(optimizer, size, dtype)
    before = [array.copy() for array in (*given[:2], *given[2])]
    expected = updated(optimizer, *given)
    assert all(np.isfinite(array).all() for array in expected)
    small_blocks(dtype)
    assert_same_bits(updated(optimizer, *given), expected)
    assert [len(array) for array in updated(optimizer, *arrays(optimizer, 0, dtype))] == [0] * len(expected)
    for cut in (1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, size - 1):
        bounds = [*range(0, size, cut), size]
        pieces = [
            updated(optimizer, given[0][a:b], given[1][a:b], [each[a:b] for each in given[2]])
            for a, b in itertools.pairwise(bounds)
        ]
        assert_same_bits([np.concatenate(every) for every in zip(*pieces, strict=True)], expected)
    # Nothing has modified an input, with whichever of the steps before the update.
    for divisor, clip in ((1, 1.0), (1, 0.5), (3, 1.0)):
        updated(optimizer, *given, divisor=divisor, clip=clip)
    assert_same_bits((*given[:2], *given[2]), before)
    read_only = given[1].copy()
    read_only.flags.writeable = False
    assert_same_bits(updated(optimizer, given[0], read_only, given[2], in_place=True), expected)


def test_it_reads_memory_that_is_not_aligned():
    optimizer = optim.AdamW(0.1)
    weights, gradient, state = arrays(optimizer, 100, np.float32)
    shifted = np.frombuffer(b"x" + gradient.tobytes(), np.float32, offset=1)
    assert not shifted.flags.aligned
    assert_same_bits(updated(optimizer, weights, shifted, state), updated(optimizer, weights, gradient, state))


@every_row("dtype", DTYPES)
def test_the_mean_is_that_of_a_take(dtype):
    _, gradient, _ = arrays(optim.SGD(), 1000, dtype)
    zeros = np.zeros_like(gradient)
    for divisor in (1, 3, 1.0, 0.3, 7.1, 10**9):
        found = DenseSum(find_dtype(dtype), gradient.shape)
        found.add(Section(gradient))
        # One of these leaves the mean: 0 - 1 * mean.
        (weights,) = updated(optim.SGD(1.0, maximize=True), zeros, gradient, [], divisor=divisor, clip=1.0)
        np.testing.assert_array_equal(weights, found.result("MEAN", divisor), f"divided by {divisor}")


@every_row("dtype", DTYPES)
def test_the_mean_of_rows_is_that_of_a_take(dtype):
    element = find_dtype(dtype)
    total = SparseSum(element, (5,), bound=40, where="here")
    random = np.random.default_rng(1)
    for _ in range(3):
        indices = np.sort(random.choice(40, 20, replace=False))
        total.add(Section(random.standard_normal((20, 5)).astype(dtype), indices))
    section = total.sum()
    # The take divides in the memory of the section.
    values = section.values.copy()
    indices, mean = total.result("MEAN", 3)
    weights = np.zeros((40, 5), dtype)
    (new,) = kernel.updated_rows(
        optim.SGD(1.0, maximize=True),
        weights,
        section.indices,
        values,
        [],
        scalars=(1.0, 0.0, 1.0),
        divisor=section.counts,
    )
    np.testing.assert_array_equal(section.indices, indices)
    np.testing.assert_array_equal(new, mean)
    assert kernel.sum_of_squares(values, section.counts) == kernel.sum_of_squares(mean)


@every_row("name", OPTIMIZERS)
def test_rows_are_updated_as_parts_are(name, small_blocks):
    optimizer = OPTIMIZERS[name]
    small_blocks(np.float32)
    rows = np.array([0, 3, 4, 20, 49])
    for width, indices in itertools.product([(), (1,), (3,), (2, 3), (0,), (BLOCK + 1,)], (rows, rows[:0])):
        inner = math.prod(width)
        flat, _, flat_state = arrays(optimizer, 50 * inner, np.float32)
        given = [each.reshape(50, *width) for each in (flat, *flat_state)]
        before = [array.copy() for array in given]
        _, values, _ = arrays(optimizer, len(indices) * inner, np.float32)
        values = values.reshape(len(indices), *width)
        parts, *state = [each[indices].reshape(-1) for each in given]
        expected = updated(optimizer, parts, values.reshape(-1), state)
        scalars = optimizer.scalars(10, 11)[0]
        new = kernel.updated_rows(optimizer, given[0], indices, values, given[1:], scalars=scalars, divisor=3, clip=0.7)
        assert_same_bits([array.reshape(-1) for array in new], expected)
        assert_same_bits(given, before)


def digest():
    """A digest of what every optimizer does, and of sums of squares."""
    found = hashlib.sha256()
    for optimizer in OPTIMIZERS.values():
        for dtype in DTYPES:
            weights, gradient, state = arrays(optimizer, 20_011, dtype)
            for array in updated(optimizer, weights, gradient, state):
                found.update(array.tobytes())
            found.update(kernel.sum_of_squares(gradient, 3).hex().encode())
    return found.hexdigest()


@pytest.mark.slow
def test_a_processor_with_fewer_instructions_gives_the_same_bits():
    program = f"import runpy; print(runpy.run_path({__file__!r})['digest']())"
    environment = {
        **os.environ,
        # What numpy chooses between when it starts; it warns about what this processor lacks.
        "NPY_DISABLE_CPU_FEATURES": " ".join(name for name, there in FEATURES.items() if there and name in DISPATCHED),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest()


# NaN, infinities, extremes.


@every_row("dtype", DTYPES)
@every_row("name", OPTIMIZERS)
def test_nan_shows_in_the_weights_and_only_there(name, dtype):
    optimizer = OPTIMIZERS[name]
    weights, gradient, state = arrays(optimizer, 100, dtype)
    expected = updated(optimizer, weights, gradient, state)
    gradient[17] = np.nan
    changed = updated(optimizer, weights, gradient, state)
    for mine, theirs in zip(changed, expected, strict=True):
        assert np.isnan(mine).nonzero()[0].tolist() in ([17], [])
        np.testing.assert_array_equal(np.delete(mine, 17), np.delete(theirs, 17))
    assert np.isnan(changed[0][17])
    # A scale of NaN makes all of them NaN.
    assert np.isnan(updated(optimizer, *arrays(optimizer, 100, dtype), clip=math.nan)[0]).all()


@every_row("dtype", DTYPES)
def test_lion_moves_by_the_sign_of_any_number(dtype):
    info = np.finfo(dtype)
    tiny = [info.smallest_subnormal, info.tiny, info.eps, 1, info.max, np.inf]
    gradient = np.array([0, -0.0, *tiny, *(-each for each in map(dtype, tiny))], dtype)
    zeros = np.zeros_like(gradient)
    # With betas of 0, the direction is the sign of the gradient.
    optimizer = optim.Lion(1.0, betas=(0, 0))
    weights, average = updated(optimizer, zeros, gradient, [zeros], divisor=1, clip=1.0)
    np.testing.assert_array_equal(weights, -np.sign(gradient))
    np.testing.assert_array_equal(average, gradient)


# Sums of squares.


def in_order(values):
    """The sum as its docstring says, in plain Python."""
    sums = [0.0] * kernel.LANES
    for place, value in enumerate(values.reshape(-1).tolist()):
        sums[place % kernel.LANES] += value * value
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [a + b for a, b in zip(sums[:half], sums[half:], strict=True)]
    return sums[0]


@every_row("dtype", DTYPES)
def test_the_order_of_a_sum_of_squares_is_fixed(dtype):
    for size in (0, 1, 2, 3, 5, 1000, 16383, 16384, 16385, 50_000):
        values = np.random.default_rng(size).standard_normal(size).astype(dtype)
        assert kernel.sum_of_squares(values) == in_order(values), size
        assert kernel.sum_of_squares(values, 3) == in_order(values / dtype(3)), size


@given(st.lists(st.floats(width=32), max_size=20))
def test_a_sum_of_squares_is_not_finite_if_an_element_is_not(values):
    found = kernel.sum_of_squares(np.array(values, np.float32))
    if any(map(math.isnan, values)):
        assert math.isnan(found)
    elif any(map(math.isinf, values)):
        assert found == math.inf
    else:
        # The square of the largest float32 fits into float64.
        assert found == pytest.approx(math.fsum(each * each for each in values))
    assert kernel.sum_of_squares(np.array([1e200, 1.0])) == math.inf


# Memory.


def test_an_update_allocates_its_scratch_memory_and_no_more():
    optimizer = optim.Adam()
    size = 8 * kernel.BLOCK_BYTES // 4
    weights, gradient, state = arrays(optimizer, size, np.float32)
    updated(optimizer, weights, gradient, state, in_place=True)
    tracemalloc.start()
    try:
        updated(optimizer, weights, gradient, state, in_place=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * kernel.BLOCK_BYTES + 50_000


# What is refused.


def test_leaves_of_other_dtypes_are_refused():
    message = (
        r"the weights must be float32 or float64 for an optimizer, not .*: updates in fewer bits get lost in rounding. "
        "Give it float32 weights, and encoding='bfloat16' if gradients have to be small"
    )
    for dtype in (np.float16, ml_dtypes.bfloat16, np.int32, np.complex64, ">f4"):
        weights = np.zeros(3, dtype)
        with pytest.raises(InvalidArgumentError, match=message):
            optim.Adam(ema=0.9).initial("ema", weights)
