"""Every script runs on every server family, in `make test`, too."""

import os
import signal

import numpy as np
import pytest
import redis
from click.testing import CliRunner
from support.command import collect_garbage
from support.planting import trees
from support.proxy import scripts

import redisacc
from redisacc.tools.cli import main

# A gradient that is announced, and left to reducers.
LARGE = 150_000


def ran(client):
    """Returns the names of the scripts that a server has run since they were flushed."""
    nodes = (
        [client.get_redis_connection(node) for node in client.get_primaries()]
        if isinstance(client, redis.RedisCluster)
        else [client]
    )
    known = scripts()
    found = set()
    for node in nodes:
        found |= {name for name, there in zip(known.values(), node.script_exists(*known), strict=True) if there}
    return found


class Died(Exception):
    """Raised in place of a kill."""


@pytest.mark.every_server
@pytest.mark.loses_data
def test_every_script(
    real_server,
    real_client,
    proxy,
    background,
    until,
):
    real_client.script_flush()
    small_gradients(real_server, real_client, proxy)
    large_gradients(real_server, real_client, background, until)
    parameters(real_client)
    updates(real_client, background)
    an_upload_leaf_by_leaf(real_client, until)
    a_loss_of_a_part(real_client, background, until)
    assert set(scripts().values()) - ran(real_client) == set()


def small_gradients(server, client, proxy):
    def opened(**limits):
        return redisacc.ConditionalAccumulator(
            "float32", [4], "every", reduction_type="SUM", redis=client, limits=redisacc.Limits(buffer=48, **limits)
        )

    acc, buffering, in_parts = opened(), opened(in_place=0), opened(in_place=0, inline=0)
    # A take that must wait, and leaves.
    with pytest.raises(redisacc.TakeTimeoutError):
        acc.take_grad(1, timeout=0)
    # Gradients stored in every way, of which the last has the others compacted.
    for value, handle in enumerate((acc, buffering, buffering, buffering, in_parts, in_parts)):
        assert handle.apply_grad(np.full(4, 2.0**value)).num_accumulated == value + 1
    # A round whose taker died.
    with pytest.raises(Died), acc.take(6):
        raise Died
    with acc.recover() as found:
        assert found is not None
        assert found.gradient.tolist() == [63.0] * 4
    acc.set_global_step(7)
    acc.set_quorum(least=2)
    # A request that was interrupted.
    with redisacc.ConditionalAccumulator("float32", [4], "every", reduction_type="SUM", redis=proxy.where) as other:
        proxy.before("apply", lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            other.apply_grad(np.ones(4), local_step=7)
        other.settle()
    for known in acc.info().known_workers:
        assert CliRunner().invoke(main, ["set", "every", "--forget", known.name, "--redis", server.url]).exit_code == 0
    # Garbage that only a bug or a person could leave.
    client.set("redisacc:{every}:part:nobodys-1:0", b"x")
    assert [one["keys"] for one in collect_garbage(server.url)] == [["redisacc:{every}:part:nobodys-1:0"]]
    acc.delete()


def large_gradients(server, client, background, until):
    """In partitions, and with a reducer."""
    acc = redisacc.ConditionalAccumulator("float32", [LARGE], "every", reduction_type="SUM", redis=client, partitions=2)
    with redisacc.Reducer("every", redis=server.url) as reducer:
        run = background(reducer.run)
        take = background(acc.take_grad, 2)
        until(lambda: acc.info().waiting)
        acc.apply_grad(np.ones(LARGE, np.float32))
        until(lambda: acc.info().reducer)
        acc.apply_grad(np.ones(LARGE, np.float32))
        assert set(take.result()) == {2.0}
        reducer.close()
        run.result()
    acc.delete()


def parameters(client):
    for partitions in (None, 2):
        weights = redisacc.Parameters("every", redis=client, partitions=partitions)
        for step, tree in enumerate(trees()):
            weights.publish(tree, step, changed={"table": [0, 2]}, state=[np.zeros(3)])
            assert weights.wait(after=step - 1, timeout=20)[0] == step
        weights.finish()
        weights.delete()


def updates(client, background):
    """Two updates of parameters that have the same partitions as their gradients, and of others without any."""

    def work():
        with redisacc.Worker("every", redis=client) as worker:
            for _, found in worker.steps():
                worker.apply({"w": found["w"], "table": ([3, 7], found["table"][[3, 7]])})

    weights = {"w": np.ones(20_000, np.float32), "table": np.ones((50, 2))}
    optimizer = redisacc.optim.SGD(0.5, momentum=0.5, clip_norm=3.0)
    for partitions in (None, 2):
        gradients = {"sparse": ["table"], "partitions": partitions}
        with redisacc.Chief(
            "every", weights, workers=1, optimizer=optimizer, redis=client, accumulator=gradients
        ) as chief:
            worker = background(work)
            assert list(chief.updates(until=2)) == [1, 2]
            worker.result(30)
            found = chief.latest()[1]
            assert np.unique(found["w"]).size == 1
            assert {*(found["table"] != 1).nonzero()[0]} == {3, 7}
            chief.delete()


def an_upload_leaf_by_leaf(client, until):
    with (
        redisacc.Chief("every", {"a": np.zeros(LARGE), "b": np.zeros(2)}, workers=1, redis=client) as chief,
        redisacc.Worker("every", redis=client) as worker,
    ):
        next(worker.steps())
        upload = worker.begin()
        upload.put("a", np.ones(LARGE))
        # It takes so long that its lease is renewed.
        until(lambda: "renew_upload" in ran(client))
        upload.put("b", np.ones(2))
        assert upload.commit()
        for taken in chief.rounds(until=1):
            chief.publish(taken.gradient)
        chief.delete()


def a_loss_of_a_part(client, background, until):
    """The server has lost a part of the parameters, which a worker has."""
    begun = []

    def work():
        with redisacc.Worker("every", redis=client) as worker:
            for step, found in worker.steps():
                begun.append(step)
                worker.apply(found)

    def chief():
        return redisacc.Chief("every", np.ones(40_000), workers=1, redis=client, accumulator={"partitions": 2})

    with chief() as first:
        worker = background(work)
        for taken in first.rounds():
            first.publish(first.parameters - taken.gradient / 2)
            break
    until(lambda: 1 in begun)
    blob = client.hget("redisacc:{every}:parameters", "full").decode().partition(":")[0]
    assert client.unlink(*client.scan_iter(f"redisacc:{{every/*}}:partition:blob:{blob}:*")) > 0
    with chief() as second:
        assert second.step == 1
        for taken in second.rounds(until=2):
            second.publish(second.parameters - taken.gradient / 2)
        worker.result(30)
        assert set(second.parameters) == {0.25}
        second.delete()
