"""What publications of parameters leave on the server, whatever gets in between."""

import numpy as np
import pytest
from support.leaks import remaining
from support.proxy import Fault
from support.selection import ONE_NODE

import redisacc

RECORD = "redisacc:{w}:parameters"


def opened(where):
    return redisacc.Parameters("w", redis=where, publisher="me")


def parts(client):
    return sorted(client.scan_iter(f"{RECORD}:object:*"))


@pytest.mark.servers(*ONE_NODE)
def test_a_version_and_its_successor(client):
    weights = opened(client)
    with client.pubsub(ignore_subscribe_messages=True) as heard:
        heard.subscribe(f"{RECORD}:events")
        heard.get_message(timeout=5)
        weights.publish(np.zeros(3), 1)
        first, (part,) = client.hgetall(RECORD), parts(client)
        assert first.keys() >= {b"incarnation", b"version", b"step", b"full", b"publisher", b"structure"}
        assert (first[b"step"], first[b"publisher"]) == (b"1", b"me")
        assert int(first[b"created_ms"]) == int(first[b"published_ms"]) > 1_600_000_000_000
        assert client.pttl(part) == -1
        # It is sent once more, and tells nobody.
        weights.publish(np.zeros(3), 1)
        weights.publish(np.ones(3), 2)
        second = client.hgetall(RECORD)
        assert [name for name in first if second[name] == first[name]] >= [b"incarnation", b"created_ms"]
        assert 0 < client.pttl(part) <= 60_000
        assert [client.pttl(one) for one in parts(client) if one != part] == [-1]
        weights.delete()
        with pytest.raises(redisacc.NotFoundError, match="no parameters"):
            weights.finish()
        texts = []
        while (message := heard.get_message(timeout=0.5)) is not None:
            texts.append(message["data"].split(b" ")[0])
    assert texts == [b"published", b"published", b"deleted"]


@pytest.mark.every_server
def test_a_part_that_is_gone_before_its_version_is_visible_is_written_again(real_client, proxy, until):
    weights = opened(proxy.where)
    weights.publish(np.zeros(40_000), 0)
    known = parts(real_client)
    proxy.listen_anew()
    # It was sent before the script.
    proxy.before("publish", lambda: real_client.unlink(*until(lambda: set(parts(real_client)).difference(known))))
    weights.publish(np.ones(40_000), 1)
    assert set(weights.latest()[1]) == {1.0}
    assert proxy.sent.count("publish") == 2


@pytest.mark.every_server
@pytest.mark.parametrize("operation", ["publish", "delete"])
def test_a_late_copy_brings_nothing_back(real_client, proxy, operation):
    """Parameters that were deleted are not published again, and those that follow them are not deleted."""
    weights = opened(proxy.where)
    # The parts and the script are sent together.
    first = "SET" if operation == "publish" else "delete"
    proxy.before(first, lambda: proxy.arm(Fault("request", 0, 0, "late")))
    weights.publish(np.ones(3), 0)
    weights.delete()
    assert proxy.happened()
    assert remaining(real_client) == []
    if operation == "delete":
        weights = opened(real_client)
        weights.publish(np.zeros(3), 0)
    assert proxy.deliver_late() == 1
    if operation == "publish":
        # A part that was written again expires.
        assert [key for key in remaining(real_client) if real_client.pttl(key) == -1] == []
    else:
        assert weights.latest()[0] == 0
        weights.delete()
