"""Reducers of a training's nodes, processes of their own, that are killed and stopped: no bit changes."""

import contextlib
import os
import signal
import time
from subprocess import DEVNULL

import numpy as np
import pytest
from support.local_updates import LocalTraining, differences, gradient_of, state_of
from support.servers import ClusterClient
from support.training_options import grouped
from support.warm_python import WarmPython

import redisacc

pytestmark = pytest.mark.servers("cluster")

CREW = 2
OPTIMIZER = redisacc.optim.AdamW(0.01)


@pytest.fixture
def reducer(shared_cluster):
    """Starts `redisacc reduce` for a node of the cluster."""
    running = []

    def start(node):
        command = ["-m", "redisacc", "reduce", "--redis", shared_cluster.url, "--node", f"127.0.0.1:{node.port}"]
        running.append(WarmPython(command, stdout=DEVNULL, stderr=DEVNULL))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_no_bit_changes_if_one_is_killed_and_one_is_stopped(shared_cluster, reducer, background, until):
    parameters = {"w": np.linspace(-1, 1, 300_000).astype(np.float32), "b": np.ones(3)}
    options = {"optimizer": OPTIMIZER, "workers": CREW, "partitions": 3, "redis": shared_cluster.url}
    with contextlib.ExitStack() as opened:
        chief = opened.enter_context(redisacc.Chief("reduced", parameters, **grouped(options)))
        client = ClusterClient(host="127.0.0.1", port=shared_cluster.nodes[0].port)
        partitions = client.hget("redisacc:{reduced}", "partitions").decode().split(",")
        processes = [reducer(node) for node in shared_cluster.nodes]

        def working():
            """Returns the processes that hold the lease of a partition."""
            read = [client.hget(f"redisacc:{{reduced}}:reducer:{partition}", "who") for partition in partitions]
            return {int(who.rpartition(b":")[2]) for who in read if who}

        def work(number):
            with redisacc.Worker("reduced", number=number, redis=shared_cluster.url) as worker:
                for step, found in worker.steps():
                    # Most steps only pass the time until a lease has ended.
                    time.sleep(0.05)
                    worker.apply(gradient_of(number, step, found))

        crew = [background(work, number) for number in range(CREW)]
        steps = chief.updates()

        def train_until(condition):
            """Trains for at least one step, and until the condition is true."""
            for _ in steps:
                # Chiefs that wait call for reducers.
                if condition():
                    return

        train_until(lambda: working() == {process.pid for process in processes})
        killed, stopped, _ = processes
        killed.kill()
        killed.wait()
        train_until(lambda: True)
        os.kill(stopped.pid, signal.SIGSTOP)
        # Its lease ends, and the chief does its part.
        train_until(lambda: stopped.pid not in working())
        os.kill(stopped.pid, signal.SIGCONT)
        replacement = reducer(shared_cluster.nodes[0])
        train_until(lambda: {replacement.pid, stopped.pid} <= working())
        train_until(lambda: True)
        chief.finish()
        assert list(steps) == []
        for one in crew:
            one.result(60)
        local = LocalTraining(OPTIMIZER, parameters, weights=(1.0,) * CREW).train(chief.step)
        assert differences(local, chief.latest()[1], state_of(chief)) == []
        chief.delete()


def test_a_reader_of_lost_parts_gets_an_error_until_the_chief_has_published_them_again(shared_cluster, background):
    """As if a node came back without data: it has lost its parts of the version, and of the state."""
    parameters = {"w": np.linspace(-1, 1, 300_000).astype(np.float32)}
    options = {"optimizer": OPTIMIZER, "workers": 1, "partitions": 3, "redis": shared_cluster.url}
    with (
        redisacc.Chief("lost", parameters, **grouped(options)) as chief,
        redisacc.Worker("lost", number=0, redis=shared_cluster.url) as worker,
        redisacc.Parameters("lost", redis=shared_cluster.url) as reader,
    ):
        leading = background(lambda: list(chief.updates(until=6)))
        for step, found in worker.steps():
            if step == 3:
                lost = 0
                for node in shared_cluster.nodes:
                    with node.client() as client:
                        for key in client.scan_iter("redisacc:{lost*:partition:blob:*:1"):
                            lost += client.delete(key)
                assert lost
                # Either it sees the loss, or the chief has been faster.
                with contextlib.suppress(redisacc.DataLossError):
                    assert reader.latest()[0] == 3
            worker.apply(gradient_of(0, step, found))
        assert leading.result(60) == [1, 2, 3, 4, 5, 6]
        local = LocalTraining(OPTIMIZER, parameters).train(6)
        assert differences(local, reader.latest()[1], state_of(chief)) == []
        chief.delete()
