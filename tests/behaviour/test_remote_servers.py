"""A taker on another machine fetches over several connections."""

import os
import socket

import numpy as np
import pytest
from support.selection import ONE_NODE

import redisacc

# The connections of a node of a cluster are the same, but are found elsewhere.
# On an event loop, a large fetch uses one connection.
pytestmark = [pytest.mark.servers(*ONE_NODE), pytest.mark.fixed("client")]

ELEMENTS = 400_000
# How many connections a fetch uses besides its first one.
MORE = 3


@pytest.fixture(autouse=True)
def _server_is_elsewhere(monkeypatch):
    # A server of another machine has another address. 192.0.2.0/24 is for examples.
    monkeypatch.setattr(socket.socket, "getpeername", lambda _: ("192.0.2.1", 6379))


@pytest.fixture
def connections(real_server):
    """Returns the ids of the connections to the server, or of those that have sent a GET last."""
    admin = real_server.client()
    # A client of an earlier test may be garbage that nobody has collected yet.
    others = {entry["id"] for entry in admin.client_list(_type="normal")}

    def listed(command=None):
        entries = admin.client_list(_type="normal")
        return {entry["id"] for entry in entries if command in (None, entry["cmd"])} - others

    return listed


@pytest.fixture
def opened(open_dense, connections, until, proxy):
    """An accumulator behind a proxy that has had a round, and so has opened its connections."""
    acc = open_dense("float32", [ELEMENTS], "w", reduction_type="SUM", redis=proxy.where)
    acc.apply_grad(np.zeros(ELEMENTS, np.float32))
    before = connections()
    acc.take_grad(1)
    until(lambda: len(connections() - before) == MORE)
    return acc


def gradients(number):
    return np.random.default_rng(7).normal(size=(number, ELEMENTS)).astype(np.float32)


def take_all(acc, rows):
    """Applies gradients and takes their sum."""
    step = acc.global_step()
    for row in rows:
        acc.apply_grad(row, step)
    return acc.take_grad(len(rows))


def added(rows):
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total


def test_a_round_is_the_same_over_several_connections(opened, connections):
    rows = gradients(3)
    assert connections("get") == set()
    np.testing.assert_array_equal(take_all(opened, rows), added(rows))
    # The first one has acknowledged the round since.
    assert len(connections("get")) == MORE


def test_a_round_survives_the_end_of_its_connections(opened, connections, proxy):
    rows = gradients(3)
    proxy.listen_anew()
    proxy.before("GET", proxy.cut_all)
    np.testing.assert_array_equal(take_all(opened, rows), added(rows))
    assert proxy.sent.count("GET") > len(rows)
    # The rest came over one connection.
    assert connections("get") == set()


def test_a_child_process_opens_connections_of_its_own(opened, connections):
    rows = gradients(2)
    before = connections()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            total = take_all(opened, rows)
            status = 0 if np.array_equal(total, added(rows)) and not before & connections("get") else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    # Those of the parent are as they were.
    np.testing.assert_array_equal(take_all(opened, rows), added(rows))
    assert len(before & connections("get")) == MORE


def test_connections_end_with_the_last_handle(real_server, connections, until):
    # Clients of other tests may not have been collected yet.
    others = connections()
    held = [redisacc.ConditionalAccumulator("float32", [ELEMENTS], redis=real_server.client(), reduction_type="SUM")]
    rows = gradients(2)
    # When all of them have been used, none is being opened, which would escape.
    until(lambda: take_all(held[0], rows) is not None and len(connections("get") - others) == MORE)
    used = connections() - others
    held.pop().close()
    until(lambda: not used & connections())
