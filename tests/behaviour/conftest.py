"""Fixtures of the tests of the public API."""

from __future__ import annotations

import pytest


@pytest.fixture
def waiting(until):
    """Waits until this number of takers is in the queue of an accumulator."""

    def wait(acc, number):
        until(lambda: len(acc.info().waiting) == number)

    return wait
