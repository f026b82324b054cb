"""A client that dies half-way leaves work that the next one finishes."""

from __future__ import annotations

import numpy as np
import pytest
import redis

import redisacc
from redisacc import _deletion, _parked, _private, _rounds
from redisacc._keys import Keys
from redisacc._scripts import Scripts


def fill(client: redis.Redis, gradients: int = 3) -> redisacc.ConditionalAccumulator:
    accumulator = redisacc.ConditionalAccumulator("float64", [6], "half", redis=client, in_place_limit=0)
    for _ in range(gradients):
        accumulator.apply_grad(np.ones(6), accumulator.global_step())
    return accumulator


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one element, two parts to a call."""
    monkeypatch.setattr(_parked, "SMALL_BYTES", 0)
    monkeypatch.setattr(_parked, "PART_BYTES", 8)
    monkeypatch.setattr(_rounds, "BATCH", 2)


class Died(Exception):
    """Stands for a kill."""


def test_a_deletion_that_was_begun_is_finished_by_who_opens_the_name(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, small_pieces: None
) -> None:
    accumulator = fill(client)
    with pytest.raises(Died), accumulator.take(1):
        raise Died
    fill(client)

    def die(*_: object) -> None:
        raise Died

    monkeypatch.setattr(_deletion, "_unlink_parts", die)
    with pytest.raises(Died):
        accumulator.delete()
    monkeypatch.undo()
    with pytest.raises(redisacc.AccumulatorNotFoundError):
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
    # The gradient was in the taker's memory: handing it out again would count it twice.
    assert accumulator.info().unacknowledged == []
    with accumulator.recover() as found:
        assert found is None
    assert not [key for key in client.scan_iter() if b":part:" in key or b":taken" in key]


def test_a_round_of_many_parts_is_acknowledged_whole(client: redis.Redis, small_pieces: None) -> None:
    accumulator = fill(client)
    np.testing.assert_array_equal(accumulator.take_grad(3), np.ones(6))
    assert not [key for key in client.scan_iter() if b":part:" in key or b":taken" in key]


def test_an_acknowledgement_that_comes_too_late_is_said_in_the_log(
    client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    accumulator = fill(client)
    with accumulator.take(1) as taken, accumulator.recover() as recovered:
        assert recovered is not None
        np.testing.assert_array_equal(taken.gradient, recovered.gradient)
    assert "no longer there to be acknowledged" in caplog.text


def test_every_key_of_a_private_accumulator_has_an_end_that_its_owner_moves(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, small_pieces: None
) -> None:
    with redisacc.ConditionalAccumulator("float64", [6], redis=client, in_place_limit=0) as accumulator:
        accumulator.apply_grad(np.ones(6))
        with pytest.raises(Died), accumulator.take(1):
            raise Died
        accumulator.apply_grad(np.ones(6), 1)
        with redisacc.ConditionalAccumulator("float64", [6], redis=client) as another:
            another.apply_grad(np.ones(6))
            keys = list(client.scan_iter())
            assert len([key for key in keys if b":part:" in key]) >= 12
            for key in keys:
                assert 0 < client.pttl(key) <= _private.LEASE_MS, key
        for key in client.scan_iter():
            client.pexpire(key, 5_000)
        name = accumulator.accumulator_ref
        _private.renew(accumulator._link, Keys.of_ref(name), _private.LEASE_MS)
        for key in client.scan_iter():
            assert client.pttl(key) > 5_000, key
    assert list(client.scan_iter()) == []


@pytest.mark.parametrize("dies", [False, True])
def test_large_parts_are_freed_by_the_client_or_go_by_themselves(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """To free them in a script would hold everybody up."""
    accumulator = redisacc.ConditionalAccumulator(
        "float64", [700_000], "large", redis=client, in_place_limit=0, parked_limit=18_000_000
    )
    if dies:
        monkeypatch.setattr(_parked, "remove_large", lambda *_: None)
    for _ in range(4):
        # The fourth makes room by folding the others.
        accumulator.apply_grad(np.ones(700_000))
    assert accumulator.info().parked == 1
    accumulator.take_grad(4)
    left = [key for key in client.scan_iter() if b":part:" in key]
    # The scripts free 4 MiB each, of 17 MB that were folded and 6 MB that were taken.
    assert len(left) == (8 if dies else 0)
    for key in left:
        assert 0 < client.pttl(key) <= 10_000
