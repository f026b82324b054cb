"""Fixtures of the dashboard: the command, in a process of its own."""

import os
import re

import pytest
from support.warm_python import WarmPython


class Dashboard:
    """A process that serves the page. ``url`` is where, with a slash at the end."""

    def __init__(self, server_url, *options, token=None):
        words = ["-m", "redisacc", "serve", "--interval", "0.2", "--redis", server_url, *options]
        environment = {name: value for name, value in os.environ.items() if name != "REDISACC_SERVE_TOKEN"}
        if token is not None:
            environment["REDISACC_SERVE_TOKEN"] = token
        self.process = WarmPython(words, text=True, env=environment)
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        found = re.search(r"at (http://\S+:\d+/)", self.line)
        assert found is not None, self.process.communicate(timeout=10)
        self.url = found[1]
        self.port = int(self.url.rstrip("/").rpartition(":")[2])

    def stop(self):
        """Ends the process as Ctrl-C does, and returns what it has written since."""
        self.process.send_signal(2)
        written = self.process.communicate(timeout=20)
        assert self.process.returncode == 130
        return written


@pytest.fixture
def dashboard(real_server):
    """Starts the command for the test's server, at a free port. At the end, it has to have written no error."""
    started = []

    def start(*options, url=None, token=None):
        port = () if "--port" in options else ("--port", "0")
        started.append(Dashboard(url or real_server.url, *port, *options, token=token))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            assert each.stop() == ("", "")
