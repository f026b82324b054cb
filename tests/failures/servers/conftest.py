"""Shorter timeouts for tests that stop servers, and a server with a replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.daemons import Daemon

from redisacc._protocol.scripts import opening
from redisacc._redis.transport import Transport


@pytest.fixture
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that cannot reach the server raises after a second."""
    monkeypatch.setattr(opening, "OPENING_TIMEOUT", 0.5)
    monkeypatch.setattr("redisacc._protocol.waiting.wait.POLL_TIMEOUT", 0.5)
    monkeypatch.setattr("redisacc._redis.transport.TIMEOUT", 1.0)
    for name in ("run", "run_and_read", "call", "pipeline", "fetch"):
        function = getattr(Transport, name)
        monkeypatch.setitem(function.__kwdefaults__, "timeout", 1.0)


@pytest.fixture
def pair(daemon: Callable[..., Daemon], until: Callable[..., Any]) -> tuple[Daemon, Daemon]:
    """A master and its replica, in step."""
    master = daemon("--repl-diskless-sync-delay", "0", "--repl-diskless-sync", "yes").start()
    return master, replica_of(master, daemon, until)


def replica_of(master: Daemon, daemon: Callable[..., Daemon], until: Callable[..., Any]) -> Daemon:
    replica = daemon("--replicaof", "127.0.0.1", str(master.port), "--repl-diskless-sync-delay", "0").start()
    follower = replica.client()
    until(lambda: follower.info("replication")["master_link_status"] == "up")
    leader = master.client()
    until(lambda: leader.execute_command("WAIT", 1, 100) == 1)
    return replica
