"""Fixtures of the tests of the embedded server."""

import pytest
from owners import executable_of


@pytest.fixture
def executable(server_name):
    return executable_of(server_name)


@pytest.fixture
def any_executable():
    """For what doesn't depend on the server."""
    return executable_of("valkey")
