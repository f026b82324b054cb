"""Runs the cases of optimizer_cases.py with redisacc.optim."""

from functools import partial

import numpy as np
from optimizer_cases import CASES, CLIPPED, SPARSE, Digest, gradients, initial, rate, rows, table

from redisacc import optim
from redisacc.optim import kernel

# A sum of as many gradients, so that the mean is exact.
DIVISOR = 4


def optimizer_of(name):
    """The optimizer of a case."""
    kind, options, scheduled = (CASES | CLIPPED)[name]
    cls = getattr(optim, kind)
    base = options.get("lr", cls().lr)
    return cls(**{**options, "lr": partial(_rate, lr=base) if scheduled else base})


def _rate(step, lr):
    return rate(step, lr)


def run(name, dtype):
    """Runs a case. Returns, for each leaf, the weights and the state at the end; and the digest of all steps."""
    optimizer = optimizer_of(name)
    leaves = {
        path: [array, *(optimizer.initial(slot, array) for slot in optimizer.slots)]
        for path, array in initial(dtype).items()
    }
    groups, _ = optimizer.groups(list(leaves))
    digest = Digest()
    for step, gradient in enumerate(gradients(dtype)):
        scalars = optimizer.scalars(step, step + 1)
        total = sum(kernel.sum_of_squares(gradient[path] * DIVISOR, DIVISOR) for path in leaves)
        for (path, arrays), group in zip(leaves.items(), groups, strict=True):
            kernel.update_part(
                optimizer,
                arrays[0],
                gradient[path] * DIVISOR,
                arrays[1:],
                scalars=scalars[group],
                divisor=DIVISOR,
                clip=optimizer.clip_scale(total),
                out_weights=arrays[0],
                out_state=arrays[1:],
            )
            digest.add(arrays)
    return leaves, digest.text()


def run_sparse(name, dtype):
    """Runs a case with rows. Returns the weights and the state at the end."""
    kind, _, options = SPARSE[name]
    optimizer = getattr(optim, kind)(**options)
    weights = table(dtype)
    state = [optimizer.initial(slot, weights) for slot in optimizer.slots]
    for step, (indices, values) in enumerate(rows(dtype)):
        new = kernel.updated_rows(
            optimizer,
            weights,
            indices,
            values * np.dtype(dtype).type(DIVISOR),
            state,
            scalars=optimizer.scalars(step, step + 1)[0],
            divisor=DIVISOR,
        )
        for array, of_rows in zip((weights, *state), new, strict=True):
            array[indices] = of_rows
    return [weights, *state]


def distance(ours, theirs):
    """The largest difference of two elements, relative to the root mean square of their array, in its epsilon."""
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        scale = np.sqrt(np.mean(other.astype(np.float64) ** 2)) * np.finfo(other.dtype).eps
        worst = max(worst, float(np.max(np.abs(mine.astype(np.float64) - other)) / (scale or 1)))
    return worst
