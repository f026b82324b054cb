"""Updates weights and state, given a gradient and the numbers of a step.

The same input gives the same bits on every machine, however it is cut into pieces: each element is computed by itself,
with operations that IEEE 754 rounds correctly (+, -, *, /, square root) or that do not round (comparisons, signs). No
two of them are fused. The exception is the sign and the payload of a NaN, which depend on the processor: where one
result has NaN, the other has it as well, perhaps with other bits.

The order of operations is that of torch's single-tensor implementations on the CPU. They give the same bits where torch
does not fuse a multiplication with an addition; on processors with AVX2 it does, so results differ by a rounding there.

Work proceeds in blocks that stay in the cache of a processor core, in scratch memory that a call allocates once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from redisacc._arrays.validation import Array
from redisacc.optim.base import Arrays, Number, Optimizer, Scalars

# The bytes of each array that are updated together. Half of it is slower by a tenth, because calls of numpy take a
# noticeable share of the time; in one piece, Adam takes up to twice as long, because nothing stays in the cache.
BLOCK_BYTES = 256 * 1024

# The number of running sums of squares, a power of two. Part of the result: another number adds in another order.
LANES = 16384


def update_part(
    optimizer: Optimizer,
    weights: Array,
    gradient: Array,
    state: Sequence[Array],
    *,
    scalars: Scalars,
    divisor: float = 1,
    clip: float = 1.0,
    out_weights: Array,
    out_state: Sequence[Array],
) -> None:
    """Updates consecutive elements that lie in one group.

    All arrays are vectors of one length and dtype, float32 or float64. Inputs are not modified, unless they are passed
    as outputs as well: an output may be the input of the same name, or memory that overlaps none of the inputs.

    Args:
        optimizer: the optimizer. Its ``lr`` is not used.
        weights: the weights.
        gradient: the sum of gradients.
        state: an array for each of ``optimizer.slots``.
        scalars: the numbers of this step for the group, from ``optimizer.scalars``.
        divisor: what the mean divides the sum by, in the dtype of the arrays, as a take does: the number of gradients
            (int) or the sum of their weights (float).
        clip: what the mean is multiplied by then, from ``optimizer.clip_scale``. With NaN, all weights become NaN.
        out_weights: where the new weights go.
        out_state: where the new state goes, an array for each slot.
    """
    dtype = weights.dtype
    number = dtype.type
    # Infinities and NaN come from the callers' gradients: they are results, and no reason for numpy to warn.
    with np.errstate(all="ignore"):
        by = _divisor(divisor, dtype)
        scale = None if clip == 1 else number(clip)
        step = optimizer._step(scalars, number)
        average = None if optimizer.ema is None else lerp(number(1 - optimizer.ema), number)
        size = BLOCK_BYTES // dtype.itemsize
        scratch = list(np.empty((3, min(size, weights.size)), dtype))
        for start in range(0, weights.size, size):
            stop = start + size
            g = gradient[start:stop]
            if len(g) < len(scratch[0]):
                scratch = [each[: len(g)] for each in scratch]
            if by is not None:
                g = np.divide(g, by, out=scratch[0])
            if scale is not None:
                g = np.multiply(g, scale, out=scratch[0])
            if optimizer.maximize:
                g = np.negative(g, out=scratch[0])
            old, new = [each[start:stop] for each in state], [each[start:stop] for each in out_state]
            block = Arrays(weights[start:stop], g, old, out_weights[start:stop], new)
            step(block, scratch)
            if average is not None:
                average(old[-1], block.out, new[-1], scratch[0])


def updated_rows(
    optimizer: Optimizer,
    weights: Array,
    indices: Array,
    values: Array,
    state: Sequence[Array],
    *,
    scalars: Scalars,
    divisor: float | Array = 1,
    clip: float = 1.0,
) -> list[Array]:
    """Returns some rows of weights that lie in one group, and of their state, updated as ``update_part`` would.

    Args:
        optimizer: the optimizer.
        weights: the weights ``[rows, *row]``.
        indices: strictly increasing numbers of rows that there are, int64 ``[n]``.
        values: the sum of gradients ``[n, *row]``.
        state: an array of the shape of the weights for each of ``optimizer.slots``.
        scalars: the numbers of this step for the group.
        divisor: what the mean divides the sum by; or, for each row, the number of gradients that had it ``[n]``.
        clip: what the mean is multiplied by then.

    Returns:
        The rows ``[n, *row]`` of the weights, and those of each slot, in new memory. Nothing else changes.
    """
    found = [np.empty(values.shape, weights.dtype) for _ in (weights, *state)]
    at_once = max(1, BLOCK_BYTES // (weights.itemsize * max(math.prod(weights.shape[1:]), 1)))
    for start in range(0, len(indices), at_once):
        block = slice(start, start + at_once)
        rows = values[block]
        whole: float = 1
        if isinstance(divisor, np.ndarray):
            rows = _mean_of_rows(rows, divisor[block])
        else:
            whole = divisor
        # "clip": every index is that of a row, and numpy would use further memory otherwise.
        for array, new in zip((weights, *state), found, strict=True):
            array.take(indices[block], axis=0, out=new[block], mode="clip")
        of_rows, *flat = [new[block].reshape(-1) for new in found]
        update_part(
            optimizer,
            of_rows,
            rows.reshape(-1),
            flat,
            scalars=scalars,
            divisor=whole,
            clip=clip,
            out_weights=of_rows,
            out_state=flat,
        )
    return found


def sum_of_squares(gradient: Array, divisor: float | Array = 1) -> float:
    """Returns the sum of the squares of the mean, for a clipping, the same bits on every machine.

    The mean is rounded to the dtype of the gradient, as ``update_part`` computes it. Squares and sums are float64: with
    float32, squares are exact. Element i is added to sum i mod 16384, in ascending order of i; then the upper half of
    the sums is added to the lower half, until one is left. numpy's own sum depends on the processor.

    NaN and infinities propagate.

    Args:
        gradient: a sum of gradients, float32 or float64, of any shape, read in C order.
        divisor: what the mean divides the sum by; or, for each row, the number of gradients that had it.
    """
    if isinstance(divisor, np.ndarray):
        gradient, divisor = _mean_of_rows(gradient, divisor), 1
    flat = gradient.reshape(-1)
    # The others of the sums would stay 0, which changes nothing when it is added.
    lanes = min(LANES, 1 << max(flat.size - 1, 0).bit_length())
    sums, squares, mean = np.zeros(lanes), np.empty(lanes), np.empty(lanes, flat.dtype)
    by = _divisor(divisor, flat.dtype)
    with np.errstate(all="ignore"):
        for start in range(0, flat.size, lanes):
            block = flat[start : start + lanes]
            size = len(block)
            if by is not None:
                block = np.divide(block, by, out=mean[:size])
            np.copyto(squares[:size], block)
            np.multiply(squares[:size], squares[:size], out=squares[:size])
            np.add(sums[:size], squares[:size], out=sums[:size])
        while lanes > 1:
            lanes //= 2
            np.add(sums[:lanes], sums[lanes : 2 * lanes], out=sums[:lanes])
    return float(sums[0])


def _divisor(divisor: float, dtype: np.dtype[Any]) -> Any:
    """Returns the divisor in the dtype of the sum, or None if there is nothing to divide, as in a take."""
    if (isinstance(divisor, int) and divisor <= 1) or divisor == 1:
        return None
    with np.errstate(all="ignore"):
        return dtype.type(divisor)


def _mean_of_rows(rows: Array, counts: Array) -> Array:
    divisors = counts.astype(rows.dtype).reshape(-1, *[1] * (rows.ndim - 1))
    with np.errstate(all="ignore"):
        mean: Array = rows / divisors
    return mean


# What optimizers do to a block, in scratch memory: a, b.


def lerp(share: Any, number: Number) -> Callable[[Array, Array, Array, Array], None]:
    """Returns what moves the old values toward others by a share of the distance, as torch.lerp does."""
    if abs(share) < 0.5:

        def move(old: Array, toward: Array, out: Array, b: Array) -> None:
            np.subtract(toward, old, out=b)
            np.multiply(b, share, out=b)
            np.add(old, b, out=out)

        return move
    rest = share - number(1)

    def approach(old: Array, toward: Array, out: Array, b: Array) -> None:
        np.subtract(toward, old, out=b)
        np.multiply(b, rest, out=b)
        np.add(toward, b, out=out)

    return approach


def mean_square(rate: float, number: Number) -> Callable[[Array, Array, Array, Array], None]:
    """Returns what moves a mean of squares: rate * old + (1 - rate) * g * g."""
    keep, share = number(rate), number(1 - rate)

    def move(old: Array, g: Array, out: Array, b: Array) -> None:
        np.multiply(g, share, out=b)
        np.multiply(b, g, out=b)
        np.multiply(old, keep, out=out)
        np.add(out, b, out=out)

    return move


def decayed(w: Array, g: Array, decay: Any, a: Array, b: Array) -> Array:
    """Returns the gradient with decay * weights."""
    return np.add(g, np.multiply(w, decay, out=b), out=a) if decay else g


def quotient(above: Array, below: Array, factor: Any, a: Array) -> Array:
    """Returns factor * above / below, in the scratch memory a."""
    np.multiply(above, factor, out=a)
    np.divide(a, below, out=a)
    return a
