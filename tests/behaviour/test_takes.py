"""Takes that wait: order, timeouts, and every way in which a wait ends."""

import logging
import time

import numpy as np
import pytest
import redis
from support.selection import ONE_NODE

import redisacc


def one(value=1.0):
    return np.array([value], np.float32)


def test_the_last_gradient_wakes_the_take(open_dense, background, waiting):
    acc = open_dense("float32", [1])
    seconds = []
    for step in range(4):
        take = background(acc.take_grad, 2)
        waiting(acc, 1)
        acc.apply_grad(one(1), step)
        began = time.monotonic()
        acc.apply_grad(one(1), step)
        take.result()
        seconds.append(time.monotonic() - began)
    # The first take asks once more when it has begun to listen. Later ones would ask after a second.
    assert min(seconds[1:]) < 0.5


@pytest.mark.usual(client="asyncio")
def test_close_ends_every_wait_of_the_handle(open_dense, background, waiting):
    acc = open_dense("float32", [1], "closing")
    watcher = open_dense("float32", [1], "closing")
    takes = [background(acc.take_grad, 1) for _ in range(3)]
    takes.append(background(acc.take(1).__enter__))
    waiting(watcher, 4)
    acc.close()
    for take in takes:
        with pytest.raises(redisacc.CancelledError):
            take.result(timeout=5)
    assert watcher.info().waiting == []


def test_a_timeout_comes_in_time(open_dense, background, waiting, clock):
    acc = open_dense("float32", [1])
    take = background(acc.take_grad, 1, timeout=20.0)
    waiting(acc, 1)
    clock.advance(5.0)
    assert take.running
    clock.advance(15.0)
    with pytest.raises(redisacc.TakeTimeoutError):
        take.result()
    assert acc.info().waiting == []


def test_no_timeout_is_too_long(open_dense, background, waiting):
    acc = open_dense("float32", [1])
    for timeout in (None, 1e9, float("inf"), 10**400):
        step = acc.global_step()
        take = background(acc.take_grad, 1, timeout=timeout)
        waiting(acc, 1)
        acc.apply_grad(one(), local_step=step)
        assert take.result().tolist() == [1.0]


@pytest.mark.every_server
def test_a_wait_outlives_the_socket_timeout_of_the_client(real_server, open_dense, background, waiting):
    acc = open_dense("float32", [1], redis=real_server.client(socket_timeout=0.1))
    take = background(acc.take_grad, 1)
    waiting(acc, 1)
    # A reply that is waited for twice as long, by a client that has the same timeout.
    for _ in range(2):
        with pytest.raises(redis.TimeoutError):
            real_server.client(socket_timeout=0.1).blpop("nothing")
    assert take.running
    acc.apply_grad(one(3))
    assert take.result().tolist() == [3.0]


@pytest.mark.slow
@pytest.mark.servers(*ONE_NODE)
def test_a_process_listens_on_one_connection(real_client, open_dense, background, waiting, until):
    accumulators = [open_dense("float32", [1]) for _ in range(4)]
    takes = [background(acc.take_grad, 1) for acc in accumulators]
    for acc in accumulators:
        waiting(acc, 1)

    # It joins the queue before it listens, and listeners of other tests may linger.
    def channels():
        return [int(entry["sub"]) for entry in real_client.client_list(_type="pubsub") if int(entry["sub"])]

    until(lambda: channels() == [len(accumulators)])
    for number, acc in enumerate(accumulators):
        acc.apply_grad(one(number))
    assert [take.result().tolist() for take in takes] == [[number] for number in range(len(accumulators))]


def test_a_long_wait_says_what_it_waits_for(open_dense, background, until, durations, caplog):
    durations(report=0.1, poll_every=0.05)
    acc = open_dense("float32", [1], name="weights")
    acc.apply_grad(one())
    with caplog.at_level(logging.INFO, logger="redisacc"):
        take = background(acc.take_grad, 2)
        # Again and again, not once.
        records = until(lambda: len(caplog.records) >= 2 and list(caplog.records))
    for record in records:
        assert record.name == "redisacc"
        for word in ("weights", "1 of 2"):
            assert word in record.getMessage()
    acc.apply_grad(one())
    take.result()
