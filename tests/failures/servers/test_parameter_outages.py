"""A server that goes away and comes back while parameters are published, read and waited for."""

import numpy as np
import pytest
from support.leaks import remaining

import redisacc

pytestmark = pytest.mark.servers("valkey", "redis7", "redis62")


@pytest.fixture
def opened():
    handles = []

    def open_one(server):
        handles.append(redisacc.Parameters("w", redis=server.url))
        return handles[-1]

    yield open_one
    for handle in handles:
        handle.close()


def until_heard(server, until):
    """Waits until somebody waits for parameters."""
    client, channel = server.client(), "redisacc:{w}:parameters:events"
    until(lambda: client.pubsub_numsub(channel)[0][1])


@pytest.mark.usefixtures("short_timeout")
def test_a_server_that_stays_away(daemon, opened, durations):
    durations(poll=0.2, call=0.5)
    server = daemon("--appendonly", "yes", "--appendfsync", "always").start()
    writer = opened(server)
    writer.publish(np.zeros(3), 0)
    server.kill()
    with pytest.raises(redisacc.ServerUnavailableError):
        writer.publish(np.ones(3), 1)
    with pytest.raises(redisacc.ServerUnavailableError):
        writer.latest()
    with pytest.raises(redisacc.WaitTimeoutError, match="the server did not report") as caught:
        writer.wait(after=0, timeout=0.1)
    assert isinstance(caught.value.__cause__, redisacc.ServerUnavailableError)
    server.start()
    # The same call again, whatever became of the first.
    writer.publish(np.ones(3), 1)
    assert writer.latest()[1].tolist() == [1, 1, 1]


def test_a_server_that_comes_back_empty(daemon, opened, background, until):
    server = daemon().start()
    writer, reader = opened(server), opened(server)
    writer.publish(np.zeros(3), 0)
    reader.latest()
    waiting = background(reader.wait, 0)
    until_heard(server, until)
    server.kill()
    server.start()
    for call in (waiting.result, reader.latest, lambda: writer.publish(np.ones(3), 1)):
        with pytest.raises(redisacc.NotFoundError, match="or the server has lost its data"):
            call()


def test_a_server_without_memory(daemon, opened):
    server = daemon("--maxmemory", "40mb").start()
    writer, reader = opened(server), opened(server)
    writer.publish(np.zeros(1_000_000), 0)

    def publish_too_much():
        for step in range(1, 20):
            writer.publish(np.full(1_000_000, float(step)), step, state=[np.zeros(4_000_000)])

    with pytest.raises(redisacc.ServerError, match="maxmemory"):
        publish_too_much()
    step, array = reader.latest()
    assert set(array.tolist()) == {step}
    writer.delete()
    assert remaining(server.client()) == []
