"""Forks while other threads of the parent hold locks: the child can make every call, with every kind of client."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import redis
import support
from support import clients
from support.leaks import remaining

import redisacc

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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.every_server
@pytest.mark.servers("valkey", "cluster")
@pytest.mark.fixed("client")
def test_children_that_are_forked_while_threads_open_connections_end(real_server, real_client, everything):
    # On Valkey, with every kind of client, that is 500 in all.
    fork("at_random", real_server, CLIENTS[real_server.name], 20 if everything else 1)
    assert remaining(real_client) == []


@pytest.mark.servers("valkey")
def test_a_fork_waits_for_a_thread_that_opens_a_connection(real_server, background):
    """OpenSSL has locks that a child cannot release, and a child would wait for them without a word."""
    is_slow, started, forking, opened = (threading.Event() for _ in range(4))
    # The latest of these calls is made first.
    os.register_at_fork(before=forking.set)

    class Connection(redis.Connection):
        def _connect(self):
            if is_slow.is_set() and not started.is_set():
                started.set()
                assert forking.wait(30)
                # By then, a fork that does not wait is over.
                time.sleep(0.2)
                opened.set()
            return super()._connect()

    def child(function):
        pid = os.fork()
        if not pid:
            os._exit(0 if function() else 1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    pool = redis.ConnectionPool(host="127.0.0.1", port=real_server.port, connection_class=Connection)
    with redisacc.ConditionalAccumulator("float32", [1], "w", redis=redis.Redis(connection_pool=pool)) as acc:
        is_slow.set()
        pool.disconnect()
        opening = background(acc.num_accumulated)
        assert started.wait(30)
        assert child(opened.is_set) == 0
        assert opening.result() == 0
        # Neither side is left waiting.
        assert child(lambda: acc.num_accumulated() == 0) == 0
        acc.delete()
    pool.disconnect()
