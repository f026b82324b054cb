"""How many Python functions a small apply and a take enter.

The number is the same on every machine, so it can be held where a time cannot. It measures how long a small call takes,
and how far a reader has to follow it. If one of these fails: a feature that a call does not use must cost that call
nothing. Decide when the handle is opened, compute once, and make rare things where they are needed.
"""

import functools
import sys

import numpy as np
import pytest

import redisacc

# One server is enough, and a fake one has no sockets.
pytestmark = pytest.mark.servers("valkey")


# Entered once for each packet of replies, or piece of a request. On some machines, they never come or go in one.
IN_PIECES = ("ReplyReader.read", "check_silence")


def functions_entered(call):
    """Returns how many Python functions a call enters, those of libraries included."""
    entered = []

    def note(frame, event, _argument):
        name = frame.f_code.co_qualname
        if event == "call" and (name not in IN_PIECES or name not in entered):
            entered.append(name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    # The function that was given is not part of the call.
    return len(entered) - 1


def check(apply, take, of_apply, of_take):
    """Checks that an apply and a take of a handle that is warm enter at most so many functions, each at least once.

    A call enters more functions when the kernel accepts or hands out only a part of its bytes, which is usual while
    other processes use the processors, or when garbage of other tests is collected meanwhile. Neither belongs to the
    path that is counted.
    """
    for step in range(5):
        apply(step)
        take()
    fewest = (10**6, 10**6)
    for step in range(5, 305):
        counts = functions_entered(functools.partial(apply, step)), functions_entered(take)
        fewest = min(fewest[0], counts[0]), min(fewest[1], counts[1])
        if fewest[0] <= of_apply and fewest[1] <= of_take:
            return
    pytest.fail(f"an apply and a take enter {fewest} functions, and not at most {(of_apply, of_take)}")


@pytest.mark.parametrize(("rows", "width", "of_apply", "of_take"), [(10, 16, 45, 123), (1000, 64, 75, 198)])
def test_a_sparse_gradient(real_client, rows, width, of_apply, of_take):
    indices, values = np.arange(rows), np.ones((rows, width), np.float32)
    with redisacc.SparseConditionalAccumulator("float32", [None, width], "calls", redis=real_client) as acc:
        check(
            lambda step: acc.apply_grad(indices, values, None, step),
            lambda: acc.take_indexed_slices_grad(1),
            of_apply,
            of_take,
        )


@pytest.mark.parametrize(
    ("shape", "of_apply", "of_take"), [((10, 16), 44, 122), ((1000, 64), 71, 175), ((2**20,), 80, 217)]
)
def test_a_dense_gradient(real_client, shape, of_apply, of_take):
    gradient = np.ones(shape, np.float32)
    with redisacc.ConditionalAccumulator("float32", gradient.shape, "calls", redis=real_client) as acc:
        check(lambda step: acc.apply_grad(gradient, step), lambda: acc.take_grad(1), of_apply, of_take)
