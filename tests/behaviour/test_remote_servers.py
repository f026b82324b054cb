"""A taker on another machine fetches over several connections."""

from __future__ import annotations

import os

import numpy as np
import pytest
from support.selection import ONE_NODE

from redisacc._redis import node
from redisacc._redis.sockets import lanes

# The connections of a node of a cluster are the same, but are found elsewhere.
# On an event loop, a large fetch uses one connection.
pytestmark = [pytest.mark.servers(*ONE_NODE), pytest.mark.fixed("client")]

ELEMENTS = 400_000


@pytest.fixture
def fetched_over(monkeypatch):
    """The server counts as one on another machine. Returns the number of connections of each fetch over several."""
    numbers = []
    fetch_over = lanes.fetch_over

    def noting(connections, *given):
        numbers.append(len(connections))
        fetch_over(connections, *given)

    monkeypatch.setattr(lanes, "is_remote", lambda _: True)
    monkeypatch.setattr(node, "fetch_over", noting)
    return numbers


@pytest.fixture
def open_lanes(until):
    """Takes a round, so that lanes are opened, and waits until they are."""

    def open_them(acc):
        acc.apply_grad(np.zeros(ELEMENTS, np.float32))
        acc.take_grad(1)
        idle = acc._transport._server._lanes.idle
        until(lambda: len(idle) == lanes.LANES - 1)
        return idle

    return open_them


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


def test_a_round_is_the_same_over_several_connections(open_dense, real_server, open_lanes, fetched_over):
    acc = open_dense("float32", [ELEMENTS], "w", reduction_type="SUM")
    open_lanes(acc)
    rows = gradients(3)
    np.testing.assert_array_equal(take_all(acc, rows), added(rows))
    assert fetched_over == [lanes.LANES]


def test_a_round_survives_the_end_of_its_connections(
    open_dense, real_server, real_client, open_lanes, fetched_over, monkeypatch
):
    acc = open_dense("float32", [ELEMENTS], "w", reduction_type="SUM")
    idle = open_lanes(acc)
    rows = gradients(3)
    request = lanes._Lane.request

    def broken_request(lane, wanted, deadline):
        request(lane, wanted, deadline)
        if wanted:
            # The first request of each fetch over several connections.
            real_client.client_kill_filter(_type="normal", skipme=True)

    monkeypatch.setattr(lanes._Lane, "request", broken_request)
    np.testing.assert_array_equal(take_all(acc, rows), added(rows))
    assert fetched_over == [lanes.LANES]
    # The rest came over one connection.
    assert idle == []


def test_a_child_process_opens_connections_of_its_own(open_dense, real_server, open_lanes, fetched_over):
    acc = open_dense("float32", [ELEMENTS], "w", reduction_type="SUM")
    idle = open_lanes(acc)
    before = [connection.sock.getpeername() for connection in idle]
    rows = gradients(2)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            total = take_all(acc, rows)
            status = 0 if np.array_equal(total, added(rows)) and fetched_over == [] else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    # Those of the parent are as they were.
    assert [connection.sock.getpeername() for connection in idle] == before
    np.testing.assert_array_equal(take_all(acc, rows), added(rows))
    assert fetched_over == [lanes.LANES]


def test_connections_end_with_their_client(open_dense, real_server, open_lanes, fetched_over):
    acc = open_dense("float32", [ELEMENTS], "w", reduction_type="SUM")
    idle = open_lanes(acc)
    acc._transport.where.connection_pool.disconnect()
    assert not any(connection.alive() for connection in idle)
    rows = gradients(2)
    np.testing.assert_array_equal(take_all(acc, rows), added(rows))
