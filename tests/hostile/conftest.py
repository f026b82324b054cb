"""Fixtures of tests with foreign bytes."""

import pytest
from support.memory import limited_memory
from support.searching import searching


@pytest.fixture(autouse=True)
def little_memory():
    """An allocation of gigabytes, because a forged length says so, is an error here and not a slow machine."""
    with limited_memory(2 * 2**30):
        yield


@pytest.fixture
def search(pytestconfig):
    """Calls a function with drawn examples."""
    return searching(pytestconfig)
