"""A taker fetches what is buffered while it still waits."""

from __future__ import annotations

import contextlib
import threading

import msgpack
import numpy as np
import pytest

import redisacc
from redisacc._data.gradient import Gradient, Section
from redisacc._format import buffered as buffered_format
from redisacc._format.keys import Keys
from redisacc._protocol.parts.staging import stage_commands
from redisacc._protocol.rounds.take_wait import TakeWait
from redisacc._protocol.sums.part_fetch import PartFetch
from redisacc._protocol.sums.part_sums import PartSums
from redisacc._redis.pubsub import pubsub_of

# A taker that waits is woken for each gradient from 512 KiB on.
COPIES = 100_000


class Fetched:
    """What takers have added up.

    Attributes:
        ids: gradients, in the order in which they were added whole.
        ahead: how many of them before the round was known.
        keys: the keys of all parts that were fetched.
        known: how many gradients of the round a taker knew of when it had last looked ahead.
    """

    def __init__(self):
        self.ids, self.ahead, self.keys, self.known = [], 0, [], 0

    def __len__(self):
        return len(self.ids)


@pytest.fixture
def fetched(monkeypatch):
    """What takers have added up."""
    found = Fetched()
    look_ahead, complete, finish = PartSums.look_ahead, PartSums.complete, PartFetch.finish

    def note(sums):
        ids = [upload.gradient.id for upload in sums._uploads.every[: sums._done]]
        found.ids += [name for name in ids if name not in found.ids]

    def noting_look_ahead(self, *given):
        look_ahead(self, *given)
        note(self)
        found.ahead, found.known = len(found), self.known

    def noting_complete(self, *given):
        complete(self, *given)
        note(self)

    def noting_finish(self, part):
        found.keys.append(part.key)
        finish(self, part)

    monkeypatch.setattr(PartSums, "look_ahead", noting_look_ahead)
    monkeypatch.setattr(PartSums, "complete", noting_complete)
    monkeypatch.setattr(PartFetch, "finish", noting_finish)
    return found


def values(k):
    return np.tile(np.array([0.1 * 3**k, -(0.7**k), 1e-3 * k], np.float32), COPIES)


@pytest.mark.every_server
def test_what_is_announced_is_fetched_once_and_before_the_end(open_dense, background, waiting, until, fetched):
    acc = open_dense("float32", [3 * COPIES], "w", reduction_type="SUM", limits=redisacc.Limits(in_place=0))
    acc.apply_grad(values(0))
    take = background(acc.take_grad, 6)
    waiting(acc, 1)
    expected = values(0)
    for k in range(1, 5):
        acc.apply_grad(values(k))
        expected = expected + values(k)
        until(lambda k=k: len(fetched) == k + 1)
    assert take.running
    acc.apply_grad(values(5))
    np.testing.assert_array_equal(take.result(), expected + values(5))
    assert len(fetched) == 6
    assert fetched.ahead >= 5
    assert len(fetched.keys) == len({key.replace(":staged:", ":part:") for key in fetched.keys}) == 30


@pytest.mark.every_server
def test_by_worker_an_early_gradient_is_held(open_dense, background, waiting, until, fetched):
    crew = [open_dense("float32", [3 * COPIES], "w", worker=f"worker {k}", order="worker") for k in range(3)]
    crew[0].set_global_step(5)
    for step, early in ((5, (1, 2)), (6, (2, 1))):
        fetched.keys.clear()
        take = background(crew[0].take_grad, 3)
        waiting(crew[0], 1)
        for k in early:
            crew[k].apply_grad(values(k), local_step=step)
        # It has looked ahead since it knows of both, and has fetched nothing.
        until(lambda: fetched.known == 2)
        assert fetched.keys == []
        crew[0].apply_grad(values(0), local_step=step)
        expected = (values(0) + values(1) + values(2)) / np.float32(3)
        assert take.result().tobytes() == expected.tobytes()


@pytest.mark.servers("valkey")
@pytest.mark.forges
@pytest.mark.parametrize("declared", [True, False])
def test_a_message_alone_makes_a_taker_allocate_little_memory(
    open_dense, client, background, waiting, until, fetched, monkeypatch, declared
):
    monkeypatch.setattr("redisacc._protocol.sums.round_so_far.TRUSTED_BYTES", 0)
    acc = open_dense(
        "float32", [3 * COPIES if declared else None], "w", reduction_type="SUM", limits=redisacc.Limits(in_place=0)
    )
    take = background(acc.take_grad, 2)
    waiting(acc, 1)
    keys, forged = Keys("w"), Gradient((Section(values(7)),))
    packed = buffered_format.pack(forged)
    for command in stage_commands(keys, "forged-1", packed.parts, announced=True):
        client.execute_command(*[bytes(word) if isinstance(word, memoryview) else word for word in command])
    message = f"place=0 shape=[{3 * COPIES}] header={packed.header.hex()}"
    # The taker may be in the queue before it listens.
    until(lambda: client.publish(keys.wake, f"gradient=forged-1 {message}"))
    client.publish(keys.wake, "gradient=forged-1 parts=2")
    first = keys.staged("forged-1", 0)
    if declared:
        until(lambda: first in fetched.keys)
    acc.apply_grad(values(1))
    until(lambda: any(":part:" in key for key in fetched.keys) or (declared and len(fetched.keys) > 2))
    assert (first in fetched.keys) == declared
    acc.apply_grad(values(2))
    np.testing.assert_array_equal(take.result(), values(1) + values(2))
    client.delete(*[keys.staged("forged-1", number) for number in range(len(packed.parts))])
    acc.delete()


@pytest.mark.every_server
def test_sparse_and_in_place_meet(open_sparse, real_server, background, waiting, until, fetched):
    buffered = open_sparse("float64", [9, COPIES], "w", limits=redisacc.Limits(in_place=0))
    placed = open_sparse("float64", [9, COPIES], "w", limits=redisacc.Limits(in_place=10**9))
    take = background(buffered.take_grad, 4)
    waiting(buffered, 1)
    buffered.apply_grad([1, 2], [[1.0] * COPIES, [2.0] * COPIES])
    placed.apply_grad([2, 3], [[4.0] * COPIES, [3.0] * COPIES])
    until(lambda: len(fetched) == 1)
    buffered.apply_grad([2], [[6.0] * COPIES])
    placed.apply_grad([8], [[8.0] * COPIES])
    indices, rows, _ = take.result()
    assert indices.tolist() == [1, 2, 3, 8]
    assert [set(row) for row in rows] == [{1}, {4}, {3}, {8}]


def test_a_round_that_somebody_else_took_costs_only_the_work(open_dense, background, waiting, until, fetched):
    first = open_dense("float32", [3 * COPIES], "w", reduction_type="SUM", limits=redisacc.Limits(in_place=0))
    head = background(first.take_grad, 3)
    waiting(first, 1)
    for k in range(2):
        first.apply_grad(values(k))
    until(lambda: len(fetched) == 2)
    # No taker can overtake the head of the queue, but a delete may remove its round, and the name may be created again.
    first.delete()
    with pytest.raises(redisacc.NotFoundError, match="accumulator"):
        head.result()
    again = open_dense("float32", [3 * COPIES], "w", reduction_type="SUM", limits=redisacc.Limits(in_place=0))
    again.apply_grad(values(7))
    np.testing.assert_array_equal(again.take_grad(1), values(7))


def test_rounds_do_not_mix(open_dense, background, waiting, until, fetched):
    """Two takers wait; the sum begun for the first round is no part of the second."""
    acc = open_dense("float32", [3 * COPIES], "w", reduction_type="SUM", limits=redisacc.Limits(in_place=0))
    first = background(acc.take_grad, 2)
    waiting(acc, 1)
    second = background(acc.take_grad, 2)
    waiting(acc, 2)
    for take, k in ((first, 0), (second, 2)):
        acc.apply_grad(values(k), local_step=10)
        until(lambda k=k: len(fetched) > k)
        acc.apply_grad(values(k + 1), local_step=10)
        np.testing.assert_array_equal(take.result(), values(k) + values(k + 1))


def test_what_was_compacted_meanwhile_is_read_anew(open_dense, background, waiting, until, fetched):
    acc = open_dense("int64", [2**17], "w", reduction_type="SUM", limits=redisacc.Limits(in_place=0, buffer=4 * 2**20))
    take = background(acc.take_grad, 12)
    waiting(acc, 1)
    for k in range(11):
        acc.apply_grad(np.full(2**17, 10**k))
        until(lambda: len(fetched) > 0)
    acc.apply_grad(np.full(2**17, 10**11))
    assert set(take.result()) == {111_111_111_111}


def test_announcements_that_are_forged_do_no_harm(client, open_dense, background, waiting):
    acc = open_dense("float32", [3 * COPIES], "w", reduction_type="SUM", limits=redisacc.Limits(in_place=0))
    take = background(acc.take_grad, 2)
    waiting(acc, 1)
    for text in (
        b"applied step=0 count=1 buffered=nobody worker=x",
        b"applied step=0 count=1 buffered= worker=x",
        b"applied step=0 count=9999999999999999999999 buffered=" + b"x" * 5000,
        b"taken",
        b"",
        b"\xff\xfe",
        b"=" * 100,
    ):
        client.publish("redisacc:{w}:wake", text)
    acc.apply_grad(values(1))
    acc.apply_grad(values(2))
    np.testing.assert_array_equal(take.result(), values(1) + values(2))


def test_a_forged_header_of_a_huge_gradient_does_not_end_a_take(
    client, open_sparse, background, waiting, until, monkeypatch
):
    """The taker meets it while it looks ahead."""
    looks, work = [], TakeWait.work
    monkeypatch.setattr(TakeWait, "work", lambda wait: looks.append(work(wait)) or looks[-1])
    acc = open_sparse("float32", [None, 3], "w", reduction_type="SUM", limits=redisacc.Limits(in_place=0))
    take = background(acc.take_grad, 2)
    waiting(acc, 1)
    acc.apply_grad([1], [[1.0, 2.0, 3.0]])
    heard, listening = [], contextlib.ExitStack()
    listening.enter_context(pubsub_of(acc._transport, "redisacc:{w}:wake").listen("redisacc:{w}:wake", heard.append))
    rows = 2**44
    described = {"version": 2, "sections": [["float32", [rows, 3]]], "gradients": 1, "parts": [rows * 20]}
    client.hset("redisacc:{w}:buffered", "a-1", b"7 " + msgpack.packb(described))
    client.publish("redisacc:{w}:wake", "applied step=0 count=1 buffered=a-1")
    header = msgpack.packb(described).hex()
    for number in range(2000):
        client.publish("redisacc:{w}:wake", f"gradient=b-{number} place={number} shape=[3] header={header}")
    # The taker has looked ahead since it heard the last one.
    until(lambda: len(heard) > 2000 or not take.running)
    looked = len(looks)
    until(lambda: len(looks) > looked + 1 or not take.running)
    listening.close()
    assert take.running
    client.hdel("redisacc:{w}:buffered", "a-1")
    acc.apply_grad([1], [[1.0, 2.0, 3.0]])
    assert take.result()[1].tolist() == [[2.0, 4.0, 6.0]]


def test_many_small_ones_while_the_taker_waits(open_sparse, background, waiting):
    acc = open_sparse("int64", None, "w", reduction_type="SUM", limits=redisacc.Limits(in_place=0))
    take = background(acc.take_grad, 300)
    waiting(acc, 1)

    def apply(worker):
        for k in range(100):
            acc.apply_grad([k, 1000 + worker], [1, 1], local_step=2**40)

    threads = [threading.Thread(target=apply, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    indices, sums, _ = take.result()
    assert indices.tolist() == [*range(100), 1000, 1001, 1002]
    assert sums.tolist() == [3] * 100 + [100] * 3


def test_small_ones_are_fetched_when_there_are_many(open_dense, background, waiting, until, fetched):
    acc = open_dense("float32", [10_000], "w", reduction_type="SUM", limits=redisacc.Limits(in_place=0))
    take = background(acc.take_grad, 41)
    waiting(acc, 1)
    for k in range(40):
        acc.apply_grad(np.full(10_000, float(k)))
    # 14 of them exceed 512 KiB, and 27 of them 1 MiB; 40 of them wake no taker again.
    until(lambda: len(fetched) >= 27)
    assert take.running
    acc.apply_grad(np.zeros(10_000))
    assert set(take.result()) == {sum(range(40))}
    assert len(fetched) == 41
