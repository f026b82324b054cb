"""No object of an operation waits for Python's garbage collector, because a round may be large."""

import gc

import numpy as np
import pytest
from support.selection import thorough

import redisacc


@pytest.fixture
def collected():
    """Returns our objects that only the garbage collector has freed since the last call."""

    def collect():
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        found = [repr(thing) for thing in gc.garbage if str(getattr(thing, "__module__", "")).startswith("redisacc")]
        gc.garbage.clear()
        # The saved objects are still the same.
        gc.collect()
        return found

    gc.collect()
    gc.disable()
    yield collect
    gc.enable()


# In place; inline; in parts; and so large that parts are fetched ahead and added one by one.
@pytest.mark.parametrize("rows", thorough([10, 100, 2000, 40_000], usual=[10, 2000, 40_000]))
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


def test_a_peek_that_fails_leaves_no_cycle(client, collected):
    """The error's traceback refers to the frames that held the round."""
    acc = redisacc.ConditionalAccumulator(
        "float32", [40_000], "cycles", redis=client, limits=redisacc.Limits(in_place=0)
    )
    acc.apply_grad(np.ones(40_000))
    (part,) = client.keys("redisacc:{cycles}:part:*")
    client.delete(part)
    for attempt in range(2):
        with pytest.raises(redisacc.CorruptDataError, match="is missing"):
            acc.peek()
        found = collected()
        # The first time things are imported and prepared.
        if attempt:
            assert found == []
