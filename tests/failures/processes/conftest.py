"""Processes that a fault can meet anywhere, because all that they send passes through a proxy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from support.child_processes import ChildProcesses
from support.moved_clock import MovedClock
from support.proxy import Proxy


@pytest.fixture
def child_processes(
    proxy: Proxy, real_client: redis.Redis, tmp_path: Path, clock: MovedClock
) -> Iterator[ChildProcesses]:
    """Starts processes that do one operation each, through the proxy. They end before the server is looked at."""
    processes = ChildProcesses(proxy.url, tmp_path, clock.env)
    yield processes
    processes.end()


@pytest.fixture
def time_runs(clock: MovedClock) -> Iterator[None]:
    """Leases run out while the test waits. A process that is to meet a fault first would miss its deadlines."""
    with clock.running():
        yield
