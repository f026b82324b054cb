"""How many Python functions a small apply and a take enter.

The number is the same on every machine, so it can be held where a time cannot. It measures how long a small call takes,
and how far a reader has to follow it. If one of these fails: a feature that a call does not use must cost that call
nothing. Decide when the handle is opened, compute once, and make rare things where they are needed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import redisacc

# One server is enough, and a fake one has no sockets.
pytestmark = pytest.mark.servers("valkey")


def functions_entered(call: Callable[[], Any]) -> int:
    """Returns how many Python functions a call enters, those of libraries included."""
    entered: list[str] = []

    def note(frame: Any, event: str, _argument: Any) -> None:
        if event == "call":
            entered.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    # The function that was given is not part of the call.
    return len(entered) - 1


def measured(apply: Callable[[int], Any], take: Callable[[], Any]) -> tuple[int, int]:
    """Returns the fewest functions that an apply and a take enter, of several calls of a handle that is warm.

    A call enters more functions when the kernel accepts only a part of its bytes, or when garbage of other tests is
    collected meanwhile. Neither belongs to the path that is counted.
    """
    for step in range(5):
        apply(step)
        take()
    counts = [(functions_entered(functools.partial(apply, step)), functions_entered(take)) for step in range(5, 30)]
    return min(applied for applied, _ in counts), min(taken for _, taken in counts)


@pytest.mark.parametrize(("rows", "width", "of_apply", "of_take"), [(10, 16, 60, 160), (1000, 64, 95, 240)])
def test_a_sparse_gradient(real_client: Any, rows: int, width: int, of_apply: int, of_take: int) -> None:
    indices, values = np.arange(rows), np.ones((rows, width), np.float32)
    with redisacc.SparseConditionalAccumulator("float32", [None, width], "calls", redis=real_client) as acc:
        applied, taken = measured(
            lambda step: acc.apply_grad(indices, values, None, step), lambda: acc.take_indexed_slices_grad(1)
        )
    assert (applied <= of_apply, taken <= of_take) == (True, True), (applied, taken)


def test_a_dense_gradient_of_four_megabytes(real_client: Any) -> None:
    gradient = np.ones(2**20, np.float32)
    with redisacc.ConditionalAccumulator("float32", gradient.shape, "calls", redis=real_client) as acc:
        applied, taken = measured(lambda step: acc.apply_grad(gradient, step), lambda: acc.take_grad(1))
    assert (applied <= 110, taken <= 270) == (True, True), (applied, taken)
