"""Rounds as objects: take() and its acknowledgement, recover(), peek(), info()."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from support.model import assert_same

import redisacc


def f32(*values):
    return np.array(values, np.float32)


@pytest.mark.every_server
def test_a_round_says_what_it_is(open_dense_stored):
    acc = open_dense_stored("float32", [1], "w", worker="ann")
    bob = open_dense_stored("float32", [1], "w", worker="bob")
    acc.set_global_step(6)
    for who, value in ((acc, 1), (bob, 2), (acc, 6)):
        who.apply_grad(f32(value), local_step=6)
    with bob.take(2) as taken:
        assert isinstance(taken, redisacc.Round)
        assert_same(taken.gradient, f32(3))
        assert taken.global_step == 6
        assert taken.num_accumulated == 3
        assert taken.workers == {"ann": 2, "bob": 1}
        assert acc.global_step() == 7
        (held,) = acc.info().unacknowledged
        assert (held.global_step, held.num_accumulated, held.taker) == (6, 3, "bob")
    assert acc.info().unacknowledged == []
    assert acc.info().takes == 1
    acc.delete()


@pytest.mark.every_server
def test_a_round_stays_until_it_is_taken(clock, open_dense_stored):
    acc = open_dense_stored("float32", [900], "w")
    acc.apply_grad(np.ones(900, np.float32))
    clock.advance(600.0)
    assert_same(acc.take_grad(1), np.ones(900, np.float32))
    acc.delete()


def test_acknowledged_rounds_leave_nothing(open_dense_stored, open_sparse_stored, client):
    dense, sparse = open_dense_stored("float32", [900], "d"), open_sparse_stored("float32", [900, 2], "s")
    dense.apply_grad(np.ones(900, np.float32))
    sparse.apply_grad(np.arange(900), np.ones((900, 2), np.float32))
    with dense.take(1), sparse.take(1):
        pass
    for key in client.scan_iter():
        assert not any(word in key for word in (b":taken", b":part", b":place", b":sums", b":buffered")), key
    dense.delete()
    sparse.delete()


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
    acc.delete()


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


def test_there_is_nothing_to_recover_under_another_token(open_dense):
    acc = open_dense("float32", [1])
    acc.apply_grad(f32(1))
    with pytest.raises(Broken), acc.take(1):
        raise Broken
    before = acc.info()
    for token in ("", "nonsense", "*", "a" * 5000, 3, b"x", ["x"]):
        with contextlib.suppress(redisacc.InvalidArgumentError), acc.recover(token) as taken:
            assert taken is None
        assert acc.info() == before


CHIEF = """
import sys, redisacc
acc = redisacc.SparseConditionalAccumulator(
    "float32", [9, 1], "w", redis=sys.argv[1], limits=redisacc.Limits(in_place=int(sys.argv[2])), worker="chief"
)
with acc.take(2) as taken:
    print(taken.num_accumulated, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow(keep="valkey-in_place")
@pytest.mark.every_server(storage="in_place")
@pytest.mark.servers("valkey", "redis62")
def test_a_killed_chief_loses_no_round(real_server, open_sparse_stored, storage):
    acc = open_sparse_stored("float32", [9, 1], "w")
    acc.apply_grad([1, 2], [[1.0], [2.0]])
    acc.apply_grad([2], [[4.0]])
    limit = "1000000000" if storage == "in_place" else "0"
    process = subprocess.Popen(
        [sys.executable, "-c", CHIEF, real_server.url, limit], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"2\n"
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    assert [one.taker for one in acc.info().unacknowledged] == ["chief"]
    with acc.recover() as taken:
        assert taken.gradient.indices.tolist() == [1, 2]
        assert taken.gradient.values.tolist() == [[1.0], [3.0]]
    acc.delete()


@pytest.mark.every_server
def test_peek_shows_and_takes_nothing(open_dense_stored, open_sparse_stored):
    dense, sparse = open_dense_stored("float32", [2], worker="ann"), open_sparse_stored("float32", [5, 1], worker="ann")
    for acc in (dense, sparse):
        empty = acc.peek()
        assert empty.gradient is None
        assert (empty.num_accumulated, empty.workers, empty.global_step) == (0, {}, 0)
    for value in (1, 2, 6):
        dense.apply_grad(f32(value, 0))
        sparse.apply_grad([value % 2, 4], [[value], [value]])
        for acc in (dense, sparse):
            before = acc.info()
            looked = acc.peek()
            assert looked.workers == {"ann": before.num_accumulated}
            assert looked.num_accumulated == before.num_accumulated
            assert acc.info() == before
    assert_same(dense.peek().gradient, f32(3, 0))
    looked = sparse.peek().gradient
    assert looked.indices.tolist() == [0, 1, 4]
    assert looked.values.tolist() == [[4], [1], [3]]
    assert_same(dense.take_grad(3), f32(3, 0))
    assert sparse.take_grad(3)[1].tolist() == [[4], [1], [3]]
    assert dense.peek().gradient is None
    assert dense.peek().global_step == 1


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
    acc.delete()


def test_info_of_a_new_accumulator(open_dense, open_sparse):
    info = open_dense("float32", [2, None]).info()
    assert (info.kind, info.dtype, info.reduction_type) == ("dense", "float32", "MEAN")
    assert info.shape == (2, None)
    assert (info.global_step, info.num_accumulated) == (0, 0)
    assert (info.applied, info.stale, info.duplicates, info.takes, info.buffered) == (0, 0, 0, 0, 0)
    assert (info.workers, info.waiting, info.unacknowledged) == ({}, [], [])
    assert info.incarnation
    info = open_sparse("quint8", reduction_type="SUM").info()
    assert (info.kind, info.dtype, info.shape, info.reduction_type) == ("sparse", "quint8", None, "SUM")


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


def test_waiting_takers_are_listed_in_order(open_dense, background, until):
    acc = open_dense("float32", [1])
    takes = []
    for number in (4, 2, 3):
        takes.append(background(acc.take_grad, number))
        until(lambda: len(acc.info().waiting) == len(takes))
    assert [one.num_required for one in acc.info().waiting] == [4, 2, 3]
    assert len({one.token for one in acc.info().waiting}) == 3
    acc.close()
    for take in takes:
        with pytest.raises(redisacc.CancelledError):
            take.result()


@pytest.mark.servers("valkey")
def test_when_a_round_was_granted(real_server, open_dense):
    acc = open_dense("float32", [1])
    acc.apply_grad(f32(1))
    with acc.take(1):
        granted = acc.info().unacknowledged[0].granted_at
        seconds = granted.timestamp() if hasattr(granted, "timestamp") else granted
        assert abs(seconds - time.time()) < 60
