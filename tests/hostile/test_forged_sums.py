"""Sums of a reducer, and messages about them, that are not what they claim to be: every round is right all the same."""

from __future__ import annotations

import numpy as np
import pytest
from support.selection import thorough

import redisacc
from redisacc._format.keys import Keys
from redisacc._protocol.sums.expected_gradients import ExpectedGradients

KEYS = Keys("w")
# A gradient has five parts.
ELEMENTS = 300_000
DIGEST = "0123456789abcdef" * 2
PART = 2**18 - 64
LENGTHS = [PART] * 4 + [4 * ELEMENTS - 4 * PART]


@pytest.fixture
def known_digest(monkeypatch):
    """All sums have one digest, as if it could be guessed."""
    monkeypatch.setattr(ExpectedGradients, "digest", property(lambda _: DIGEST))


def pretend(client):
    """Makes takers believe that a reducer works."""
    client.hset(KEYS.reducer(None), "who", "forged")
    client.pexpire(KEYS.reducer(None), 60_000)


def forge(client, what, number):
    """Stores something as a part of the sum."""
    key = KEYS.sum(DIGEST, number)
    if what == "list":
        client.rpush(key, "x")
        client.pexpire(key, 60_000)
    elif what != "missing":
        length = {"short": LENGTHS[number] - 4, "empty": 0, "long": LENGTHS[number] + 4, "huge": 10**7}[what]
        client.set(key, bytes(length), px=60_000)
    client.publish(KEYS.wake, f"sum={DIGEST} part={number}")


@pytest.mark.servers("valkey")
@pytest.mark.usefixtures("known_digest")
@pytest.mark.parametrize("numbers", thorough([[0], [4], [0, 1, 2, 3, 4]], usual=[[4]]))
@pytest.mark.parametrize(
    "what", thorough(["short", "long", "empty", "huge", "missing", "list"], usual=["long", "list"])
)
def test_a_part_of_a_sum_that_is_none_is_not_used(open_dense, real_client, background, until, what, numbers):
    acc = open_dense("float32", [ELEMENTS], "w", reduction_type="SUM", limits=redisacc.Limits(in_place=0))
    rows = np.random.default_rng(1).normal(size=(3, ELEMENTS)).astype(np.float32)
    pretend(real_client)
    take = background(acc.take_grad, 3)
    until(lambda: acc.info().waiting)
    for number in numbers:
        forge(real_client, what, number)
    for row in rows:
        acc.apply_grad(row)
    np.testing.assert_array_equal(take.result(), rows[0] + rows[1] + rows[2])


@pytest.mark.servers("valkey")
def test_messages_about_sums_that_there_are_not(open_dense, real_client, background, until):
    acc = open_dense("float32", [ELEMENTS], "w", reduction_type="SUM", limits=redisacc.Limits(in_place=0))
    rows = np.random.default_rng(1).normal(size=(3, ELEMENTS)).astype(np.float32)
    pretend(real_client)
    take = background(acc.take_grad, 3)
    until(lambda: acc.info().waiting)
    for text in ("sum= part=", f"sum={DIGEST} part=-1", f"sum={DIGEST} part=999999", f"sum={DIGEST[:-1]} part=0"):
        real_client.publish(KEYS.wake, text)
    for row in rows:
        acc.apply_grad(row)
        for number in range(5):
            real_client.publish(KEYS.wake, f"sum={DIGEST} part={number}")
    np.testing.assert_array_equal(take.result(), rows[0] + rows[1] + rows[2])
