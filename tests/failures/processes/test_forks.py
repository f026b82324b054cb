"""Forks while other threads of the parent hold locks: the child can make every call, with every kind of client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import support
from support import clients
from support.leaks import remaining

PROGRAM = Path(support.__file__).with_name("forking_parent.py")
CLIENTS = {"valkey": ["url", *clients.ALL], "cluster": ["url", "client"]}
# TLS and Unix sockets have no locks of their own.
CLIENTS_BY_LOCKS = {
    "valkey": ["url", *(name for name, kind in clients.ALL.items() if kind.wire in ("tcp", "sentinel"))],
    "cluster": CLIENTS["cluster"],
}


def fork(mode, server, kinds, forks):
    """Runs forking_parent.py, and returns the number that it prints for each kind of client."""
    port = server.client().get_nodes()[0].port if server.name == "cluster" else server.port
    arguments = [mode, "1" if server.name == "cluster" else "0", port, forks, *kinds]
    process = subprocess.run(
        [sys.executable, PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    printed = [line.split() for line in process.stdout.splitlines()]
    assert [kind for kind, _ in printed] == kinds
    return [int(number) for _, number in printed]


@pytest.mark.timeout(500)
@pytest.mark.every_server
@pytest.mark.servers("valkey", "cluster")
@pytest.mark.fixed("client")
def test_a_child_makes_every_call_though_another_thread_of_its_parent_held_every_lock(
    real_server, real_client, everything
):
    found = fork("held", real_server, (CLIENTS if everything else CLIENTS_BY_LOCKS)[real_server.name], 1)
    # A pool alone has two locks, and each handle has some.
    assert min(found) > 20
    assert remaining(real_client) == []


@pytest.mark.timeout(500)
@pytest.mark.every_server
@pytest.mark.servers("valkey", "cluster")
@pytest.mark.fixed("client")
def test_children_that_are_forked_while_threads_open_connections_end(real_server, real_client, everything):
    # On Valkey, with every kind of client, that is 500 in all.
    fork("at_random", real_server, CLIENTS[real_server.name], 20 if everything else 1)
    assert remaining(real_client) == []
