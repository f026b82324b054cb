"""Processes that a fault can meet anywhere, because all that they send passes through a proxy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.moved_clock import MovedClock


@pytest.fixture
def time_runs(clock: MovedClock) -> Iterator[None]:
    """Leases run out while the test waits. A process that is to meet a fault first would miss its deadlines."""
    with clock.running():
        yield
