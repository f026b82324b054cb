"""A taker fetches what is buffered while it still waits."""

import tracemalloc

import msgpack
import numpy as np
import pytest

import redisacc

# A taker that waits is woken for each gradient from 512 KiB on.
COPIES = 100_000
NBYTES = 12 * COPIES


@pytest.fixture
def fetched(proxy):
    """Returns how much takers behind the proxy have fetched, as a multiple of a gradient."""
    return lambda: sum(proxy.lengths["reply"]) / NBYTES


@pytest.fixture
def open_taker(proxy, open_dense):
    """Opens an accumulator of gradients of `NBYTES` behind the proxy."""

    def open_one(shape=(3 * COPIES,), **options):
        return open_dense("float32", shape, "w", redis=proxy.where, **{"reduction_type": "SUM", **options})

    return open_one


def values(k):
    return np.tile(np.array([0.1 * 3**k, -(0.7**k), 1e-3 * k], np.float32), COPIES)


@pytest.mark.every_server
def test_what_is_announced_is_fetched_once_and_before_the_end(open_taker, background, waiting, until, fetched):
    acc = open_taker()
    acc.apply_grad(values(0))
    take = background(acc.take_grad, 6)
    waiting(acc, 1)
    expected = values(0)
    for k in range(1, 5):
        acc.apply_grad(values(k))
        expected = expected + values(k)
        until(lambda k=k: fetched() > k + 1)
    assert take.running
    acc.apply_grad(values(5))
    np.testing.assert_array_equal(take.result(), expected + values(5))
    assert 6 < fetched() < 6.2


def test_what_came_before_a_take_listens_is_fetched_as_well(proxy, open_taker, background, waiting, until, fetched):
    """The handle still listens, so no message says that others were missed."""
    acc = open_taker()
    take = background(acc.take_grad, 1)
    waiting(acc, 1)
    acc.apply_grad(values(0))
    take.result()
    acc.apply_grad(values(1), local_step=1)
    proxy.listen_anew()
    take = background(acc.take_grad, 2)
    until(lambda: fetched() > 1)
    acc.apply_grad(values(2), local_step=1)
    np.testing.assert_array_equal(take.result(), values(1) + values(2))


@pytest.mark.every_server
def test_by_worker_an_early_gradient_is_held(clock, proxy, open_taker, background, waiting, fetched):
    crew = [open_taker(worker=f"worker {k}", order="worker", reduction_type="MEAN") for k in range(3)]
    crew[0].set_global_step(5)
    for step, early in ((5, (1, 2)), (6, (2, 1))):
        proxy.listen_anew()
        take = background(crew[0].take_grad, 3)
        waiting(crew[0], 1)
        for k in early:
            crew[k].apply_grad(values(k), local_step=step)
        # It has looked ahead since it knows of both, and has fetched neither.
        clock.advance(3.0)
        assert fetched() < 0.1
        crew[0].apply_grad(values(0), local_step=step)
        expected = (values(0) + values(1) + values(2)) / np.float32(3)
        assert take.result().tobytes() == expected.tobytes()


@pytest.mark.servers("valkey")
def test_a_message_alone_makes_a_taker_allocate_little_memory(open_taker, client, background, waiting, until, fetched):
    acc = open_taker([None])
    take = background(acc.take_grad, 2)
    waiting(acc, 1)
    elements = 2**28
    described = {"version": 2, "sections": [["float32", [elements]]], "gradients": 1, "parts": [2**21] * 512}
    message = f"gradient=forged-1 place=0 shape=[{elements}] header={msgpack.packb(described).hex()}"
    tracemalloc.start()
    try:
        # The taker may be in the queue before it listens.
        until(lambda: client.publish("redisacc:{w}:wake", message))
        client.publish("redisacc:{w}:wake", "gradient=forged-1 parts=2")
        acc.apply_grad(values(1))
        # By now, it has heard all of that.
        until(lambda: fetched() > 1)
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()
    acc.apply_grad(values(2))
    np.testing.assert_array_equal(take.result(), values(1) + values(2))


def test_a_round_that_somebody_else_took_costs_only_the_work(open_taker, background, waiting, until, fetched):
    first = open_taker()
    head = background(first.take_grad, 3)
    waiting(first, 1)
    for k in range(2):
        first.apply_grad(values(k))
    until(lambda: fetched() > 2)
    # No taker can overtake the head of the queue, but a delete may remove its round, and the name may be created again.
    first.delete()
    with pytest.raises(redisacc.NotFoundError, match="accumulator"):
        head.result()
    again = open_taker()
    again.apply_grad(values(7))
    np.testing.assert_array_equal(again.take_grad(1), values(7))


def test_rounds_do_not_mix(open_taker, background, waiting, until, fetched):
    """Two takers wait; the sum begun for the first round is no part of the second."""
    acc = open_taker()
    first = background(acc.take_grad, 2)
    waiting(acc, 1)
    second = background(acc.take_grad, 2)
    waiting(acc, 2)
    for take, k in ((first, 0), (second, 2)):
        acc.apply_grad(values(k), local_step=10)
        until(lambda k=k: fetched() > k + 1)
        acc.apply_grad(values(k + 1), local_step=10)
        np.testing.assert_array_equal(take.result(), values(k) + values(k + 1))


def test_what_was_compacted_meanwhile_is_read_anew(proxy, open_dense, background, waiting, until, fetched):
    options = {"reduction_type": "SUM", "limits": redisacc.Limits(buffer=4 * 2**20)}
    acc, taker = (open_dense("int64", [2**17], "w", **options, **where) for where in ({}, {"redis": proxy.where}))
    take = background(taker.take_grad, 12)
    waiting(acc, 1)
    for k in range(11):
        acc.apply_grad(np.full(2**17, 10**k))
        until(lambda: fetched() > 0.8)
    acc.apply_grad(np.full(2**17, 10**11))
    assert set(take.result()) == {111_111_111_111}


def test_announcements_that_are_forged_do_no_harm(client, open_taker, background, waiting):
    acc = open_taker()
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


def test_a_forged_header_of_a_huge_gradient_does_not_end_a_take(client, proxy, open_sparse, background, waiting, until):
    """The taker meets it while it looks ahead."""
    options = {"reduction_type": "SUM", "limits": redisacc.Limits(in_place=0)}
    acc = open_sparse("float32", [None, 3], "w", redis=proxy.where, **options)
    take = background(acc.take_grad, 2)
    waiting(acc, 1)
    acc.apply_grad([1], [[1.0, 2.0, 3.0]])
    rows = 2**44
    described = {"version": 2, "sections": [["float32", [rows, 3]]], "gradients": 1, "parts": [rows * 20]}
    header = msgpack.packb(described)
    client.hset("redisacc:{w}:buffered", "a-1", b"7 " + header)
    # The taker may be in the queue before it listens.
    until(lambda: client.publish("redisacc:{w}:wake", "gradient=b-0 parts=2"))
    proxy.listen_anew()
    for number in range(2000):
        client.publish("redisacc:{w}:wake", f"gradient=b-{number} place={number} shape=[3] header={header.hex()}")
    client.publish("redisacc:{w}:wake", "applied step=0 count=1 buffered=a-1")
    # It looks the last one up when it has used all messages before it.
    until(lambda: "HMGET" in proxy.sent or not take.running)
    client.hdel("redisacc:{w}:buffered", "a-1")
    acc.apply_grad([1], [[1.0, 2.0, 3.0]])
    assert take.result()[1].tolist() == [[2.0, 4.0, 6.0]]


def test_small_ones_are_fetched_when_there_are_many(open_taker, background, waiting, until, fetched):
    acc = open_taker([10_000])
    take = background(acc.take_grad, 41)
    waiting(acc, 1)
    for k in range(40):
        acc.apply_grad(np.full(10_000, float(k)))
    # 14 of them exceed 512 KiB, and 27 of them 1 MiB; 40 of them wake no taker again.
    until(lambda: fetched() > 27 / 30)
    assert take.running
    acc.apply_grad(np.zeros(10_000))
    assert set(take.result()) == {sum(range(40))}
