"""The check for leaks after every test finds each kind of leak."""

import numpy as np
import pytest
from support.leaks import leftovers

import redisacc


@pytest.fixture
def held(client):
    """An accumulator with a buffered gradient, a taken round, and one of everything else."""
    acc = redisacc.ConditionalAccumulator("float32", [3], "leaky", redis=client, limits=redisacc.Limits(in_place=0))
    acc.apply_grad(np.ones(3))
    with pytest.raises(ZeroDivisionError), acc.take(1):
        raise ZeroDivisionError
    acc.apply_grad(np.ones(3), local_step=1)
    yield acc
    client.flushdb()


def test_what_has_an_owner_is_no_leak(client, held):
    assert leftovers(client) == []


def test_a_key_without_owner_is_a_leak(client, held):
    for key, what in (
        ("redisacc:{leaky}:part:nobodys-1:0", "no round has its gradient"),
        ("redisacc:{leaky}:place:nobodys-1", "nothing ever removes it"),
        ("redisacc:{leaky}:compacting", "nothing ever removes it"),
        ("redisacc:{gone}:sums", "no record"),
        ("redisacc:{leaky}:taken:nobodys:sums", "no such round is listed"),
        ("other", "not a key of ours"),
    ):
        client.set(key, "x")
        (found,) = leftovers(client)
        assert what in found
        if key != "other":
            client.pexpire(key, 60_000)
            assert leftovers(client) == []
            client.expire(key, 100)
            assert "stays for" in leftovers(client)[0]
        client.delete(key)


def test_leaks_of_a_round_that_is_over(client, held):
    client.hset("redisacc:{leaky}", "num_accumulated", 0)
    assert len(leftovers(client)) == 3  # buffered, inline, workers


def test_a_name_without_record_is_a_leak(client, held):
    client.sadd("redisacc:names", "gone")
    (found,) = leftovers(client)
    assert "has no record" in found
