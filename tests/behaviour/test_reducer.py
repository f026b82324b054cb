"""A reducer adds up beside the server, and a taker fetches the sum."""

from __future__ import annotations

import numpy as np
import pytest

import redisacc
from redisacc._protocol.part_sums import PartSums

pytestmark = [pytest.mark.servers("valkey", "redis7", "redis62")]

# Two parts for each gradient, or more.
ELEMENTS = 400_000


def values(k):
    return (np.random.default_rng(k).normal(size=ELEMENTS) * 10.0 ** (k % 5 - 2)).astype(np.float32)


def total(*numbers):
    expected = values(numbers[0])
    for k in numbers[1:]:
        expected = expected + values(k)
    return expected


@pytest.fixture
def reducer(client, background):
    """Runs a reducer until the test ends."""
    running = []

    def start(**options):
        made = redisacc.Reducer(redis=client, **options)
        running.append((made, background(made.run)))
        return made

    yield start
    for made, run in running:
        made.close()
        run.result(20)


@pytest.fixture
def fetched(monkeypatch):
    """The keys of all parts that takers have fetched, in this process, and not reducers."""
    keys = []
    finish = PartSums.finish

    def noting(self, part):
        if self._store is None:
            keys.append(part.key)
        finish(self, part)

    monkeypatch.setattr(PartSums, "finish", noting)
    return keys


@pytest.fixture
def patient(monkeypatch):
    """Takers that wait for a reducer for as long as a busy machine needs."""
    monkeypatch.setattr("redisacc._protocol.part_sums.SUM_PATIENCE", 20.0)


def wait_for_lease(client, until, name="w"):
    until(lambda: client.exists(f"redisacc:{{{name}}}:reducer"))


def settle(acc, client, background, until):
    """Has one round, after which the reducer holds its lease and knows how many gradients a take requires."""
    take = background(acc.take_grad, 3)
    until(lambda: len(acc.info().waiting) == 1)
    for k in range(3):
        acc.apply_grad(values(k), local_step=0)
    take.result(20)
    wait_for_lease(client, until)


def test_a_taker_fetches_the_sum_instead_of_the_gradients(
    open_dense, client, background, until, reducer, fetched, patient
):
    acc = open_dense("float32", [ELEMENTS], "w", reduction_type="SUM")
    reducer()
    settle(acc, client, background, until)
    fetched.clear()
    take = background(acc.take_grad, 3)
    until(lambda: len(acc.info().waiting) == 1)
    for k in (5, 6, 7):
        acc.apply_grad(values(k), local_step=1)
    np.testing.assert_array_equal(take.result(30), total(5, 6, 7))
    assert fetched
    assert all(":sum:" in key for key in fetched)
    acc.delete()
