"""Takes that wait: order, timeouts, and every way in which a wait ends."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import redis
from support.selection import ONE_NODE, REAL

import redisacc


def one(value=1.0):
    return np.array([value], np.float32)


@pytest.mark.parametrize("num_required", [0, -1, -(2**70), 2**63])
def test_an_impossible_requirement_is_refused_at_once(open_dense, num_required):
    acc = open_dense("float32", [1])
    acc.apply_grad(one())
    before = acc.info()
    for take in (acc.take_grad, acc.take):
        with pytest.raises(redisacc.InvalidArgumentError):
            take(num_required).__enter__()
    assert acc.info() == before


@pytest.mark.every_server(storage="in_place")
def test_a_take_waits_for_what_it_requires(open_dense_stored, background, waiting):
    acc = open_dense_stored("float32", [1])
    acc.apply_grad(one(1))
    take = background(acc.take_grad, 3)
    waiting(acc, 1)
    acc.apply_grad(one(2))
    assert acc.num_accumulated() == 2
    assert take.running
    acc.apply_grad(one(6))
    assert take.result().tolist() == [3.0]
    assert acc.global_step() == 1
    assert acc.num_accumulated() == 0
    assert acc.info().waiting == []


@pytest.mark.every_server(storage="in_place")
def test_a_sparse_take_waits(open_sparse_stored, background, waiting):
    acc = open_sparse_stored("float32", [4, 1])
    take = background(acc.take_grad, 2, timeout=20)
    waiting(acc, 1)
    acc.apply_grad([1], [[1.0]])
    acc.apply_grad([1], [[2.0]])
    indices, values, _ = take.result()
    assert (indices.tolist(), values.tolist()) == ([1], [[1.5]])


def test_a_second_take_with_nothing_new_waits(open_dense, background, waiting):
    acc = open_dense("float32", [1])
    acc.apply_grad(one())
    acc.take_grad(1)
    with pytest.raises(redisacc.TakeTimeoutError):
        acc.take_grad(1, timeout=0)
    take = background(acc.take_grad, 1)
    waiting(acc, 1)
    acc.apply_grad(one(5), local_step=1)
    assert take.result().tolist() == [5.0]


def test_stale_and_refused_gradients_serve_nobody(open_dense, background, waiting):
    acc = open_dense("float32", [1])
    acc.set_global_step(1)
    take = background(acc.take_grad, 1)
    waiting(acc, 1)
    assert not acc.apply_grad(one(), local_step=0)
    with pytest.raises(redisacc.InvalidArgumentError):
        acc.apply_grad(np.ones(2, np.float32), local_step=1)
    assert len(acc.info().waiting) == 1
    acc.apply_grad(one(9), local_step=1)
    assert take.result().tolist() == [9.0]


@pytest.mark.usual(client="asyncio")
@pytest.mark.every_server(storage="in_place")
def test_takers_are_served_in_order_of_arrival(open_dense_stored, background, waiting):
    acc = open_dense_stored("float32", [1])
    takes = []
    for number in range(4):
        takes.append(background(acc.take_grad, 1))
        waiting(acc, number + 1)
    for number, take in enumerate(takes):
        acc.apply_grad(one(number), local_step=number)
        assert take.result().tolist() == [number]


@pytest.mark.usual(client="asyncio")
def test_the_head_of_the_queue_blocks_those_behind_it(open_dense, background, waiting, server, clock):
    acc = open_dense("float32", [1], "queue")
    other = open_dense("float32", [1], "queue", redis=server.client())
    head = background(acc.take_grad, 3)
    waiting(acc, 1)
    second = background(other.take_grad, 1)
    waiting(acc, 2)
    acc.apply_grad(one(1))
    acc.apply_grad(one(2))
    # Each of them asks once a second.
    clock.advance(5.0)
    assert second.running
    assert acc.num_accumulated() == 2
    with pytest.raises(redisacc.TakeTimeoutError):
        acc.take_grad(1, timeout=0)
    acc.apply_grad(one(3))
    assert head.result().tolist() == [2.0]
    assert second.running
    other.apply_grad(one(7), local_step=1)
    assert second.result().tolist() == [7.0]
    acc.delete()


@pytest.mark.servers(*REAL)
def test_a_head_that_gives_up_lets_the_next_one_through(open_dense, background, waiting, clock):
    acc = open_dense("float32", [1])
    head = background(acc.take_grad, 5, timeout=100.0)
    waiting(acc, 1)
    second = background(acc.take_grad, 1)
    waiting(acc, 2)
    acc.apply_grad(one(4))
    clock.advance(100.0)
    with pytest.raises(redisacc.TakeTimeoutError) as failure:
        head.result()
    assert failure.value.num_accumulated == 1
    assert second.result().tolist() == [4.0]


@pytest.mark.usual(client="asyncio")
@pytest.mark.every_server
def test_a_head_that_is_closed_lets_the_next_one_through(open_dense, background, waiting, server):
    acc = open_dense("float32", [1], "queue")
    other = open_dense("float32", [1], "queue", redis=server.client())
    head = background(acc.take_grad, 5)
    waiting(other, 1)
    second = background(other.take_grad, 1)
    waiting(other, 2)
    other.apply_grad(one(4))
    acc.close()
    with pytest.raises(redisacc.CancelledError):
        head.result(timeout=5)
    assert second.result(timeout=5).tolist() == [4.0]
    other.delete()


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
    watcher.delete()


@pytest.mark.usual(client="asyncio")
def test_a_closed_handle_refuses_everything(open_dense, open_sparse):
    dense, sparse = open_dense("float32", [1], "a"), open_sparse("float32", [1], "b")
    for acc in (dense, sparse):
        acc.close()
        acc.close()
        calls = [
            acc.num_accumulated,
            acc.global_step,
            acc.info,
            acc.peek,
            lambda acc=acc: acc.set_global_step(1),
            lambda acc=acc: acc.take_grad(1),
            lambda acc=acc: acc.take(1).__enter__(),
            lambda acc=acc: acc.recover().__enter__(),
        ]
        for call in calls:
            with pytest.raises(redisacc.CancelledError):
                call()
    with pytest.raises(redisacc.CancelledError):
        dense.apply_grad(one())
    with pytest.raises(redisacc.CancelledError):
        sparse.apply_grad([0], one())
    open_dense("float32", [1], "a").delete()
    open_sparse("float32", [1], "b").delete()


@pytest.mark.usual(client="asyncio")
def test_a_timeout_says_how_many_had_come_and_from_whom(open_dense, open_sparse):
    for kind in ("dense", "sparse"):
        opener, args = (open_dense, (one(),)) if kind == "dense" else (open_sparse, ([0], one()))
        ann = opener("float32", [1], "team", worker="ann")
        bob = opener("float32", [1], "team", worker="bob")
        for acc in (ann, bob, ann):
            acc.apply_grad(*args)
        for take in (bob.take_grad, lambda num, timeout, bob=bob: bob.take(num, timeout=timeout).__enter__()):
            with pytest.raises(redisacc.TakeTimeoutError) as failure:
                take(4, timeout=0)
            error = failure.value
            assert (error.num_required, error.num_accumulated) == (4, 3)
            assert error.workers == {"ann": 2, "bob": 1}
            assert isinstance(error, TimeoutError)
            for word in ("3", "4", "ann", "bob"):
                assert word in str(error)
        ann.delete()


def test_a_timeout_comes_in_time(open_dense, background, waiting, clock):
    acc = open_dense("float32", [1])
    take = background(acc.take_grad, 1, timeout=200.0)
    waiting(acc, 1)
    clock.advance(50.0)
    assert take.running
    clock.advance(150.0)
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


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), "1", [1], True])
def test_a_timeout_that_is_none_is_refused(open_dense, timeout):
    acc = open_dense("float32", [1])
    acc.apply_grad(one())
    for take in (acc.take_grad, acc.take):
        with pytest.raises(redisacc.InvalidArgumentError, match="timeout"):
            take(1, timeout=timeout).__enter__()
    assert acc.num_accumulated() == 1


def test_a_take_that_can_be_served_needs_no_time(open_dense):
    acc = open_dense("float32", [1])
    acc.apply_grad(one(2))
    assert acc.take_grad(1, timeout=0).tolist() == [2.0]


def test_a_changed_step_does_not_disturb_a_wait(open_dense, background, waiting):
    acc = open_dense("float32", [1])
    take = background(acc.take_grad, 1)
    waiting(acc, 1)
    acc.set_global_step(100)
    assert not acc.apply_grad(one(1), local_step=99)
    acc.apply_grad(one(2), local_step=100)
    assert take.result().tolist() == [2.0]
    assert acc.global_step() == 101


@pytest.mark.every_server
def test_a_wait_ends_when_the_accumulator_is_deleted(open_dense, background, waiting, server):
    acc = open_dense("float32", [1], "doomed")
    other = open_dense("float32", [1], "doomed", redis=server.client())
    take = background(acc.take_grad, 1)
    waiting(other, 1)
    other.delete()
    with pytest.raises(redisacc.NotFoundError, match="accumulator"):
        take.result(timeout=5)


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


def test_waits_of_many_accumulators_do_not_disturb_each_other(open_dense, background, waiting):
    accumulators = [open_dense("float32", [1]) for _ in range(5)]
    takes = [background(acc.take_grad, 1) for acc in accumulators]
    for acc in accumulators:
        waiting(acc, 1)
    for number in (3, 0, 4, 2, 1):
        accumulators[number].apply_grad(one(number))
        assert takes[number].result().tolist() == [number]


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


@pytest.mark.servers(*ONE_NODE)
@pytest.mark.every_server
def test_a_lost_listening_connection_is_replaced(real_client, open_dense, background, waiting, until):
    acc = open_dense("float32", [1])
    take = background(acc.take_grad, 2)
    waiting(acc, 1)
    acc.apply_grad(one(1))
    until(lambda: [entry for entry in real_client.client_list(_type="pubsub") if int(entry["sub"])])
    assert real_client.client_kill_filter(_type="pubsub") >= 1
    acc.apply_grad(one(3))
    assert take.result(timeout=5).tolist() == [2.0]


def test_a_long_wait_says_what_it_waits_for(open_dense, background, waiting, until, durations, caplog):
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


def test_several_takers_and_appliers_in_threads(open_dense_stored, background):
    acc = open_dense_stored("float64", [1], reduction_type="SUM")
    appliers, each = 4, 25
    sums, lock, done = [], threading.Lock(), threading.Event()

    def apply(number):
        for k in range(each):
            assert acc.apply_grad([float(number * each + k)], local_step=2**40)

    def take():
        while True:
            last = done.is_set()
            try:
                value = acc.take_grad(1, timeout=0.1)
            except redisacc.TakeTimeoutError:
                if last:
                    return
                continue
            with lock:
                sums.append(float(value[0]))

    takers = [background(take) for _ in range(2)]
    for applier in [background(apply, number) for number in range(appliers)]:
        applier.result()
    done.set()
    for taker in takers:
        taker.result()
    assert sum(sums) == sum(range(appliers * each))
    assert acc.global_step() == len(sums)


INTERRUPTED = """
import sys, redisacc
acc = redisacc.ConditionalAccumulator("float32", [1], "interrupted", redis=sys.argv[1])
try:
    acc.take_grad(1)
except KeyboardInterrupt:
    # Still good, and no longer in the queue.
    assert acc.info().waiting == [], acc.info()
    acc.apply_grad([1.0])
    print("interrupted", acc.take_grad(1, timeout=0).tolist())
"""


def test_ctrl_c_ends_a_wait_at_once(real_server, open_dense, waiting, background):
    acc = open_dense("float32", [1], "interrupted")
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, real_server.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        waiting(acc, 1)
        process.send_signal(signal.SIGINT)
        # It would wait without end.
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert out == "interrupted [1.0]\n", err
    acc.delete()


KILLED = """
import sys, redisacc
acc = redisacc.ConditionalAccumulator("float32", [1], "killed", redis=sys.argv[1])
acc.take_grad(100)
"""


@pytest.mark.servers("valkey")
def test_a_killed_head_lets_the_next_one_through_when_its_lease_runs_out(
    real_server, open_dense, waiting, background, clock
):
    acc = open_dense("float32", [1], "killed")
    process = subprocess.Popen([sys.executable, "-c", KILLED, real_server.url])
    try:
        waiting(acc, 1)
        take = background(acc.take_grad, 1)
        waiting(acc, 2)
        acc.apply_grad(one(8))
        assert take.running
        os.kill(process.pid, signal.SIGKILL)
        clock.advance(4)
        assert take.result(timeout=30).tolist() == [8.0]
    finally:
        process.kill()
        process.wait()
    acc.delete()
