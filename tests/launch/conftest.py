"""Fixtures of runs."""

from __future__ import annotations

import pytest
from runs import starter
from several_hosts import Hosts
from support.servers import executable


@pytest.fixture
def start(tmp_path, real_server):
    """Starts runs that use the test's server; ends what they leave."""
    with starter(tmp_path, real_server.url) as started:
        yield started


@pytest.fixture
def host(start):
    """Starts runs on hosts."""
    return Hosts(start)


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A file: as long as it exists, every server is killed while it starts."""
    program = tmp_path / "a-server"
    refuse = f'if [ -e {tmp_path}/broken ] && [ "$1" != --version ]; then kill -9 $$; fi'
    program.write_text(f'#!/bin/sh\n{refuse}\nexec {executable("valkey")} "$@"\n')
    program.chmod(0o700)
    monkeypatch.setenv("REDISACC_SERVER", str(program))
    return tmp_path / "broken"
