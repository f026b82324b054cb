"""A server that goes away and comes back while parameters are published and read."""

import numpy as np
import pytest

import redisacc

pytestmark = pytest.mark.servers("valkey", "redis7", "redis62")


@pytest.mark.usefixtures("short_timeout")
def test_a_server_that_stays_away(daemon, durations):
    durations(poll=0.2, call=0.5)
    server = daemon("--appendonly", "yes", "--appendfsync", "always").start()
    with redisacc.Parameters("w", redis=server.url) as writer:
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
