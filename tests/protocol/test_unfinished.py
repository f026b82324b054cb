"""A client that dies half-way leaves work that the next one finishes."""

import numpy as np
import pytest

import redisacc

pytestmark = pytest.mark.every_server
# Each gradient is a part.
IN_PARTS = redisacc.Limits(in_place=0, inline=0)


class Died(Exception):
    """Raised in place of a kill."""


def opened(where):
    return redisacc.ConditionalAccumulator("float64", [6], "half", redis=where, limits=IN_PARTS)


def fill(accumulator, gradients):
    for _ in range(gradients):
        accumulator.apply_grad(np.ones(6), accumulator.global_step())


def parts(client):
    return [key for key in client.scan_iter() if b":part:" in key]


@pytest.fixture
def dies(proxy):
    """From now on, nothing of a process behind the proxy reaches the server."""

    def die():
        proxy.refuses = True
        proxy.cut_all()

    return die


def test_a_deletion_that_was_begun_is_finished_by_who_opens_the_name(real_client, proxy, dies, durations):
    accumulator, other = opened(proxy.where), opened(real_client)
    fill(other, 3)
    with pytest.raises(Died), accumulator.take(1):
        raise Died
    fill(other, 3)
    proxy.before("UNLINK", dies)
    with durations(call=0.5), pytest.raises(redisacc.RedisAccError):
        accumulator.delete()
    with pytest.raises(redisacc.NotFoundError, match="accumulator"):
        other.num_accumulated()
    assert parts(real_client)
    fresh = opened(real_client)
    assert (fresh.num_accumulated(), fresh.global_step(), fresh.info().unacknowledged) == (0, 0, [])
    assert sorted(real_client.scan_iter()) == [b"redisacc:names", b"redisacc:{half}"]


def test_an_acknowledgement_that_was_begun_is_finished_and_its_round_not_handed_out(
    real_client, proxy, dies, durations
):
    accumulator, other = opened(proxy.where), opened(real_client)
    # A script removes 100 parts at most.
    fill(other, 120)
    proxy.after("acknowledge", dies)
    with durations(call=0.5), pytest.raises(redisacc.RedisAccError):
        accumulator.take_grad(120)
    assert len(parts(real_client)) == 20
    # The gradient is in the taker's memory, so handing it out to another process would count it twice.
    assert other.info().unacknowledged == []
    with other.recover() as found:
        assert found is None
    assert not [key for key in real_client.scan_iter() if b":part:" in key or b":taken" in key]


def test_every_key_of_a_private_accumulator_has_an_end_that_its_owner_moves(real_client, clock):
    with redisacc.ConditionalAccumulator("float64", [6], redis=real_client, limits=IN_PARTS) as accumulator:
        accumulator.apply_grad(np.ones(6))
        with pytest.raises(Died), accumulator.take(1):
            raise Died
        with pytest.raises(Died), accumulator.recover():
            raise Died
        accumulator.apply_grad(np.ones(6), 1)
        keys = sorted(real_client.scan_iter())
        assert len(parts(real_client)) == 2
        assert [key for key in keys if key.endswith(b":recovered")]
        # They last for a minute.
        for _ in range(3):
            for key in keys:
                assert 0 < real_client.pttl(key) <= 60_000, key
            clock.advance(50)
            assert sorted(real_client.scan_iter()) == keys
    assert list(real_client.scan_iter()) == []


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_large_parts_are_freed_by_the_client_or_go_by_themselves(
    real_client,
    proxy,
    dies,
    durations,
    is_cut_off,
):
    """Freeing them in a script would delay all other clients. They cost nobody a gradient if they cannot be freed."""
    accumulator = redisacc.ConditionalAccumulator(
        "float64", [700_000], "large", redis=proxy.where, limits=redisacc.Limits(in_place=0, buffer=18_000_000)
    )
    # The fourth compacts the others. Each has six parts of 1 MiB, and so has the sum.
    for _ in range(4):
        accumulator.apply_grad(np.ones(700_000))
    assert len(parts(real_client)) == 6
    if is_cut_off:
        proxy.before("UNLINK", dies)
    with durations(call=3.0):
        assert accumulator.take_grad(4).sum() == 700_000
    assert proxy.refuses == is_cut_off
    proxy.refuses = False
    info = accumulator.info()
    assert (info.buffered, info.unacknowledged) == (0, [])
    left = parts(real_client)
    # The script frees 4 MiB.
    assert len(left) == (2 if is_cut_off else 0)
    for key in left:
        assert 0 < real_client.pttl(key) <= 10_000
