"""Processes that a fault can meet anywhere, because all that they send passes through a proxy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.moved_clock import MovedClock
from support.servers import ServerUnderTest


@pytest.fixture
def time_runs(clock: MovedClock, server: ServerUnderTest) -> Iterator[None]:
    """Leases run out while the test waits. A process that is to meet a fault first would miss its deadlines.

    It ends before the clients of the server are closed, by which the clock moves.
    """
    with clock.running():
        yield
