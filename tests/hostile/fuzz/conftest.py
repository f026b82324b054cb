"""How long to search: a little in the suite, long with --long (`make fuzz`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from support.memory import limited_memory


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
    with limited_memory(2 * 2**30):
        yield
