"""A client that dies half-way leaves work that the next one finishes."""

from __future__ import annotations

import numpy as np
import pytest
import redis

import redisacc
from redisacc._format import buffered as buffered_format
from redisacc._format.keys import Keys
from redisacc._protocol.leases import private_leases
from redisacc._protocol.lifecycle import deletion
from redisacc._protocol.rounds import acknowledgement
from redisacc._protocol.scripts.accumulators import Scripts

pytestmark = pytest.mark.every_server


def fill(client: redis.Redis, gradients: int = 3) -> redisacc.ConditionalAccumulator:
    accumulator = redisacc.ConditionalAccumulator(
        "float64", [6], "half", redis=client, limits=redisacc.Limits(in_place=0)
    )
    for _ in range(gradients):
        accumulator.apply_grad(np.ones(6), accumulator.global_step())
    return accumulator


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one element, two parts to a call."""
    monkeypatch.setattr(buffered_format, "INLINE_BYTES", 0)
    monkeypatch.setattr(buffered_format, "PART_SIZES", (8,))
    monkeypatch.setattr(acknowledgement, "PARTS_PER_CALL", 2)


class Died(Exception):
    """Raised in place of a kill."""


def test_a_deletion_that_was_begun_is_finished_by_who_opens_the_name(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, small_pieces: None
) -> None:
    accumulator = fill(client)
    with pytest.raises(Died), accumulator.take(1):
        raise Died
    fill(client)

    def die(*_: object) -> None:
        raise Died

    monkeypatch.setattr(deletion, "_unlink_parts", die)
    with pytest.raises(Died):
        accumulator.delete()
    monkeypatch.undo()
    with pytest.raises(redisacc.NotFoundError, match="accumulator"):
        accumulator.num_accumulated()
    assert [key for key in client.scan_iter() if b":part:" in key]
    fresh = fill(client, 0)
    assert (fresh.num_accumulated(), fresh.global_step(), fresh.info().unacknowledged) == (0, 0, [])
    assert sorted(client.scan_iter()) == [b"redisacc:names", b"redisacc:{half}"]


def test_an_acknowledgement_that_was_begun_is_finished_and_its_round_not_handed_out(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, small_pieces: None
) -> None:
    accumulator = fill(client)
    acknowledge, calls = Scripts.acknowledge, []

    def die_at_second(self: Scripts, **kwargs: object) -> bool:
        calls.append(kwargs)
        if len(calls) == 2:
            raise Died
        return acknowledge(self, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Scripts, "acknowledge", die_at_second)
    with pytest.raises(Died):
        accumulator.take_grad(3)
    monkeypatch.setattr(Scripts, "acknowledge", acknowledge)
    assert [key for key in client.scan_iter() if b":part:" in key]
    # The gradient is in the taker's memory, so handing it out to another process would count it twice.
    another = fill(client, 0)
    assert another.info().unacknowledged == []
    with another.recover() as found:
        assert found is None
    assert not [key for key in client.scan_iter() if b":part:" in key or b":taken" in key]


def test_a_round_of_many_parts_is_acknowledged_whole(client: redis.Redis, small_pieces: None) -> None:
    accumulator = fill(client)
    np.testing.assert_array_equal(accumulator.take_grad(3), np.ones(6))
    assert not [key for key in client.scan_iter() if b":part:" in key or b":taken" in key]


def test_every_key_of_a_private_accumulator_has_an_end_that_its_owner_moves(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, small_pieces: None
) -> None:
    with redisacc.ConditionalAccumulator(
        "float64", [6], redis=client, limits=redisacc.Limits(in_place=0)
    ) as accumulator:
        accumulator.apply_grad(np.ones(6))
        with pytest.raises(Died), accumulator.take(1):
            raise Died
        with pytest.raises(Died), accumulator.recover():
            raise Died
        accumulator.apply_grad(np.ones(6), 1)
        with redisacc.ConditionalAccumulator("float64", [6], redis=client) as another:
            another.apply_grad(np.ones(6))
            keys = list(client.scan_iter())
            assert len([key for key in keys if b":part:" in key]) >= 12
            assert [key for key in keys if key.endswith(b":recovered")]
            for key in keys:
                assert 0 < client.pttl(key) <= private_leases.OWNER_LEASE_MS, key
        for key in client.scan_iter():
            client.pexpire(key, 5_000)
        name = accumulator.accumulator_ref
        private_leases.renew(accumulator._transport, Keys.of_ref(name), private_leases.OWNER_LEASE_MS)
        for key in client.scan_iter():
            assert client.pttl(key) > 5_000, key
    assert list(client.scan_iter()) == []


@pytest.mark.parametrize("dies", [False, True])
def test_large_parts_are_freed_by_the_client_or_go_by_themselves(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """Freeing them in a script would delay all other clients."""
    accumulator = redisacc.ConditionalAccumulator(
        "float64", [700_000], "large", redis=client, limits=redisacc.Limits(in_place=0, buffer=18_000_000)
    )
    if dies:
        monkeypatch.setattr(acknowledgement, "DROPPED_BYTES", 10**9)
    for _ in range(4):
        # The fourth compacts the others.
        accumulator.apply_grad(np.ones(700_000))
    assert accumulator.info().buffered == 1
    accumulator.take_grad(4)
    left = [key for key in client.scan_iter() if b":part:" in key]
    # Six parts of 1 MiB for each of three gradients that were compacted, and for the sum: each script frees 4 MiB.
    assert len(left) == (16 if dies else 0)
    for key in left:
        assert 0 < client.pttl(key) <= 10_000


def test_parts_that_cannot_be_freed_cost_nobody_a_gradient(client, monkeypatch):
    """They have an expiry already, and the round was acknowledged."""
    accumulator = redisacc.ConditionalAccumulator(
        "float64", [700_000], "large", redis=client, limits=redisacc.Limits(in_place=0)
    )
    accumulator.apply_grad(np.ones(700_000))
    pipeline = accumulator._transport.pipeline

    def refuse(commands, **options):
        if commands[0][0] == "UNLINK":
            raise redisacc.ServerUnavailableError("silent")
        return pipeline(commands, **options)

    monkeypatch.setattr(accumulator._transport, "pipeline", refuse)
    assert accumulator.take_grad(1).sum() == 700_000
    assert accumulator.info().unacknowledged == []
    assert all(0 < client.pttl(key) <= 10_000 for key in client.keys("*:part:*"))
    accumulator.delete()
