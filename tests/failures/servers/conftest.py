"""Shorter timeouts for tests that stop servers, and a server with a replica."""

import pytest


@pytest.fixture
def short_timeout(durations):
    """A call that cannot reach the server raises after a second."""
    durations(opening=0.5, poll=0.5, call=1.0)


@pytest.fixture
def pair(daemon, until):
    """A master and its replica, in step."""
    master = daemon("--repl-diskless-sync-delay", "0", "--repl-diskless-sync", "yes").start()
    return master, replica_of(master, daemon, until)


def replica_of(master, daemon, until):
    replica = daemon("--replicaof", "127.0.0.1", str(master.port), "--repl-diskless-sync-delay", "0").start()
    follower = replica.client()
    until(lambda: follower.info("replication")["master_link_status"] == "up")
    leader = master.client()
    until(lambda: leader.execute_command("WAIT", 1, 100) == 1)
    return replica
