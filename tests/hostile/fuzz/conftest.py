"""How long to search: a little in the suite, long with --long (`make fuzz`)."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings


@pytest.fixture
def search(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Calls a function with drawn examples: the given number, and a hundred times as many with --long."""

    def run(function: Callable[..., None], *strategies: Any, examples: int) -> None:
        long = request.config.getoption("--long")
        limited = settings(
            max_examples=examples * (100 if long else 1),
            deadline=None,
            database=None,
            derandomize=not long,
            suppress_health_check=list(HealthCheck),
        )
        limited(given(*strategies)(function))()

    return run


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """An allocation of gigabytes, because a forged length says so, is an error here and not a slow machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
