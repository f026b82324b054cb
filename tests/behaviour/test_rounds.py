"""Rounds as objects: take() and its acknowledgement, recover(), peek(), info()."""

import time

import numpy as np
import pytest
from support.model import assert_same

import redisacc


def f32(*values):
    return np.array(values, np.float32)


@pytest.mark.every_server
def test_a_round_stays_until_it_is_taken(clock, open_dense_stored):
    acc = open_dense_stored("float32", [900], "w")
    acc.apply_grad(np.ones(900, np.float32))
    clock.advance(600.0)
    assert_same(acc.take_grad(1), np.ones(900, np.float32))


class Broken(Exception):
    pass


@pytest.mark.usual(client="asyncio")
@pytest.mark.every_server
def test_a_block_that_fails_leaves_its_round_to_be_recovered(open_dense_stored, server):
    acc = open_dense_stored("float32", [700], "w", worker="chief")
    acc.apply_grad(np.full(700, 2, np.float32))
    with pytest.raises(Broken), acc.take(1):
        raise Broken
    assert acc.global_step() == 1
    acc.apply_grad(np.full(700, 9, np.float32), local_step=1)
    other = open_dense_stored("float32", [700], "w", redis=server.client(), worker="heir")
    (held,) = other.info().unacknowledged
    assert (held.global_step, held.num_accumulated, held.taker) == (0, 1, "chief")
    assert isinstance(held.token, str)
    with other.recover() as taken:
        assert_same(taken.gradient, np.full(700, 2, np.float32))
        assert (taken.global_step, taken.num_accumulated, taken.workers) == (0, 1, {"chief": 1})
        assert other.info().unacknowledged[0].taker == "heir"
    assert acc.info().unacknowledged == []
    with acc.recover() as nothing:
        assert nothing is None
    assert acc.take_grad(1)[0] == 9


@pytest.mark.every_server
def test_rounds_are_recovered_oldest_first_or_by_token(open_dense):
    acc = open_dense("float32", [1])
    for step in range(3):
        acc.apply_grad(f32(step), local_step=step)
        with pytest.raises(Broken), acc.take(1):
            raise Broken
    held = acc.info().unacknowledged
    assert [one.global_step for one in held] == [0, 1, 2]
    with acc.recover(held[1].token) as taken:
        assert taken.global_step == 1
        assert_same(taken.gradient, f32(1))
    for expected in (0, 2):
        with acc.recover() as taken:
            assert taken.global_step == expected
    with acc.recover(held[1].token) as nothing:
        assert nothing is None


def test_peek_while_others_apply_and_take(open_dense_stored, background, server):
    acc = open_dense_stored("float64", [64], "w", reduction_type="SUM")
    other = open_dense_stored("float64", [64], "w", redis=server.client(), reduction_type="SUM")
    rounds = 6

    def work():
        for step in range(rounds):
            for _ in range(8):
                other.apply_grad(np.full(64, 1.0), local_step=step)
            other.take_grad(8)

    job = background(work)
    looks = 0
    while job.running or not looks:
        try:
            looked = acc.peek()
        except redisacc.WaitTimeoutError:
            continue
        looks += 1
        if looked.num_accumulated:
            # Complete gradients, and as many as num_accumulated says.
            assert looked.gradient.tolist() == [looked.num_accumulated] * 64
    job.result()


def test_workers_of_every_name(open_dense, background, until):
    for worker in ("a b  c", "wörker №1", "1 2 3", "granted 0 1", "é" * 100, " ", "*?[a]", "a=b,c:d;e", "weight=9 x"):
        acc = open_dense("float32", [1], "w", worker=worker)
        take = background(acc.take(2).__enter__)
        until(lambda acc=acc: acc.info().waiting)
        assert acc.info().waiting[0].taker == worker
        acc.apply_grad(f32(1))
        assert acc.info().workers == acc.peek().workers == {worker: 1}
        acc.apply_grad(f32(1))
        assert take.result().workers == {worker: 2}
        assert acc.info().unacknowledged[0].taker == worker
        acc.delete()


@pytest.mark.servers("valkey")
def test_when_a_round_was_granted(real_server, open_dense):
    acc = open_dense("float32", [1])
    acc.apply_grad(f32(1))
    with acc.take(1):
        granted = acc.info().unacknowledged[0].granted_at
        seconds = granted.timestamp() if hasattr(granted, "timestamp") else granted
        assert abs(seconds - time.time()) < 60
