"""Fixtures of the dashboard: the command, in a process of its own."""

import pytest
from support.exporter import Exporter


@pytest.fixture
def dashboard(real_server):
    """Starts the command for the test's server. At the end, it has to have written no error."""
    started = []

    def start(*options, url=None, token=""):
        started.append(Exporter(url or real_server.url, "--interval", "0.2", *options, token=token))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            assert each.stop() == ""
