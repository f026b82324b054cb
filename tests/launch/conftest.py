"""Fixtures of runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import Starter, starter
from several_hosts import Hosts


@pytest.fixture
def start(tmp_path: Path, real_server: Any) -> Iterator[Starter]:
    """Starts runs that use the test's server; ends what they leave."""
    with starter(tmp_path, real_server.url) as started:
        yield started


@pytest.fixture
def host(start: Starter) -> Hosts:
    """Starts runs on hosts."""
    return Hosts(start)
