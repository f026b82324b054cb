"""Processes that a fault can meet anywhere, because all that they send passes through a proxy."""

import pytest


@pytest.fixture
def time_runs(clock, server):
    """Leases run out while the test waits. A process that is to meet a fault first would miss its deadlines.

    It ends before the clients of the server are closed, by which the clock moves.
    """
    with clock.running():
        yield
