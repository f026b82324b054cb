"""A node of a cluster that is silent: what does not need it goes on, and what needs it ends in time."""

import contextlib
import os
import signal
import threading

import numpy as np
import pytest

import redisacc

pytestmark = pytest.mark.servers("cluster")

ELEMENTS = 400_000


@contextlib.contextmanager
def stopped(node):
    """Stops a node until the block ends."""
    os.kill(node.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(node.pid, signal.SIGCONT)


@pytest.fixture
def cluster(make_cluster):
    made = make_cluster(3, dir=None, durable=False)
    for node in made.nodes:
        with node.client() as client:
            # No node is found to have failed while a test lasts.
            client.config_set("cluster-node-timeout", 60_000)
    return made


def apply_all(acc, background, until, *, between=lambda: None):
    take, step = background(acc.take_grad, 3), acc.global_step()
    until(lambda: acc.info().waiting)
    for k in range(3):
        acc.apply_grad(np.full(ELEMENTS, k, np.float32), local_step=step)
        if k == 1:
            between()
    np.testing.assert_array_equal(take.result(60), np.full(ELEMENTS, 3, np.float32))


def test_a_take_does_not_wait_for_a_node_of_partitions(cluster, background, durations):
    durations(confirmation=100.0)
    with redisacc.ConditionalAccumulator("float32", [ELEMENTS], "w", redis=cluster.url, partitions=30) as acc:
        leader = cluster.owner(acc.accumulator_ref)
        homes = [f"redisacc:{{w/{partition:05}}}" for partition in acc.info().partitions]
        other = next(node for home in homes if (node := cluster.owner(home)) is not leader)
        with stopped(other):
            with pytest.raises(redisacc.TakeTimeoutError):
                background(acc.take_grad, 1, timeout=0.5).result(30)
            take = background(acc.take_grad, 1)
            acc.apply_grad(np.ones(ELEMENTS), local_step=-1)
            acc.close()
            with pytest.raises(redisacc.CancelledError):
                take.result(30)


@pytest.mark.thorough
def test_a_reducer_goes_on_where_nodes_answer(cluster, background, until, caplog):
    names = [f"w{number}" for number in range(12)]
    accs = [
        redisacc.ConditionalAccumulator("float32", [ELEMENTS], name, redis=cluster.url, reduction_type="SUM")
        for name in names
    ]
    by_node = {}
    for acc in accs:
        by_node.setdefault(cluster.owner(acc.accumulator_ref), acc)
    (silent, bad), (_, good), *_ = by_node.items()
    with redisacc.Reducer(redis=cluster.url) as reducer:
        run = background(reducer.run)
        for acc in (bad, good):
            apply_all(acc, background, until, between=lambda acc=acc: until(lambda: acc.info().reducer))
        lapsed, done = [], threading.Event()

        def watch():
            while not done.wait(0.2):
                if good.info().reducer is None:
                    lapsed.append(1)

        name = bad.info().name
        with stopped(silent):
            until(lambda: f"{name}: the reducer cannot reach the server" in caplog.text, 30)
            watching = background(watch)
            # Several attempts to reach it.
            done.wait(8)
            done.set()
            watching.result()
            assert len(lapsed) <= 5
        until(lambda: f"{name}: the server is back" in caplog.text, 60)
        reducer.close()
        run.result(30)
    for acc in accs:
        acc.close()


@pytest.mark.thorough
def test_a_reducer_hears_calls_through_its_own_node(cluster, background, until):
    with redisacc.ConditionalAccumulator("float32", [ELEMENTS], "w", redis=cluster.url, reduction_type="SUM") as acc:
        own = cluster.owner(acc.accumulator_ref)
        # Where a pattern of channels would belong, if it belonged anywhere.
        pattern = cluster.owner("redisacc:{*}:calls")
        silent = pattern if pattern is not own else next(node for node in cluster.nodes if node is not own)
        with redisacc.Reducer(redis=cluster.url, node=f"127.0.0.1:{own.port}") as reducer:
            with stopped(silent):
                run = background(reducer.run)
                apply_all(acc, background, until, between=lambda: until(lambda: acc.info().reducer))
            reducer.close()
            run.result(30)


@pytest.mark.slow
def test_a_reducer_waits_for_its_node(cluster, background, until, caplog):
    """It is started while the node is down, and works when the node is back."""
    with redisacc.ConditionalAccumulator("float32", [ELEMENTS], "w", redis=cluster.url, reduction_type="SUM") as acc:
        own = cluster.owner(acc.accumulator_ref)
        address = f"127.0.0.1:{own.port}"
        own.kill()
        with redisacc.Reducer(redis=cluster.url, node=address) as reducer:
            run = background(reducer.run)
            until(lambda: "the reducer cannot reach the server, and keeps trying" in caplog.text)
            assert address in caplog.text
            own.start()
            until(lambda: "the server is back" in caplog.text, 60)
            reducer.close()
            run.result(30)
