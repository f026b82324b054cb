"""Optimizers beside torch as it is on this machine: with fused multiply-add, and MKL's square root."""

import pytest
import torch_optimizers
from optimizer_cases import CASES, CLIPPED, DTYPES
from our_optimizers import distance, run

# Differences after 1,000 steps in units of epsilon, relative to the root mean square of an array.
BOUND = 32
# The variance of a gradient that is only weight decay is 0, give or take a rounding, and its root a divisor.
ILL_CONDITIONED = {"rmsprop-all"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", {**CASES, **CLIPPED})
def test_torch_as_it_is_differs_by_roundings(name, dtype):
    theirs = torch_optimizers.run(name, dtype)
    ours, _ = run(name, dtype)
    for path, arrays in ours.items():
        # The last element of each leaf never has a gradient.
        stop = -1 if name in ILL_CONDITIONED else None
        far = distance([array[:stop] for array in arrays], [array[:stop] for array in theirs[path]])
        assert far <= BOUND
