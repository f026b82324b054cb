"""Nothing that an operation needs stays until Python's garbage collector comes: a round may be large."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import redisacc


@pytest.fixture
def collected():
    """What of ours the collector has found since the last call: it could not go by itself."""

    def collect() -> list[str]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        found = [repr(thing) for thing in gc.garbage if str(getattr(thing, "__module__", "")).startswith("redisacc")]
        gc.garbage.clear()
        # What was saved is still what it was.
        gc.collect()
        return found

    gc.collect()
    gc.disable()
    yield collect
    gc.enable()


# In place; parked, small; parked, in parts; and so large that parts are fetched ahead and added one by one.
@pytest.mark.parametrize("rows", [10, 100, 2000, 40_000])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_applying_and_taking_leave_no_cycles(client, collected, background, until, rows, sparse):
    kind = redisacc.SparseConditionalAccumulator if sparse else redisacc.ConditionalAccumulator
    acc = kind("float32", (rows, 16), "cycles", redis=client)
    gradient = (np.arange(rows), np.ones((rows, 16), np.float32))[0 if sparse else 1 :]
    for step in range(3):
        taken = background(acc.take_grad, 3)
        until(lambda: acc.info().waiting)
        collected()
        for _ in range(3):
            assert acc.apply_grad(*gradient, local_step=step)
        result = taken.result()
        assert (result[1] if sparse else result).min() == 1.0
        # The first time things are imported and prepared.
        if step:
            assert collected() == []
