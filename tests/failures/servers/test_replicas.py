"""Replicas: promoted by Sentinel, behind their master, read-only; and waiting for them with min_replicas."""

import contextlib
import itertools
import time

import numpy as np
import pytest
import redis
from redis.sentinel import Sentinel
from support.clients import ClientKind
from support.proxy import proxy_before_server
from support.selection import thorough
from support.training_options import grouped

import redisacc

pytestmark = pytest.mark.servers("redis7", "redis62")

STORAGES = {"in_place": 10**9, "buffered": 0}


@pytest.fixture
def open_acc(open_accumulator):
    def make(where, **options):
        return open_accumulator("dense", "float32", [2], "w", redis=where, **{"reduction_type": "SUM", **options})

    return make


def apply(acc, value, step=0):
    return acc.apply_grad(np.full(2, value, np.float32), local_step=step)


class MovingAddress:
    """A client that finds its server by a name, which is then given to another server."""

    def __init__(self, server):
        self.client = server.client()

    def move_to(self, server):
        # Existing connections stay until the client reconnects.
        pool = self.client.connection_pool
        pool.connection_kwargs["port"] = server.port
        for connection in [*pool._available_connections, *pool._in_use_connections]:
            connection.port = server.port


# A replica


def test_a_master_that_is_demoted_under_us_is_left_for_the_new_one(pair, open_acc, background, until):
    master, replica = pair
    address = MovingAddress(master)
    acc = open_acc(address.client)
    apply(acc, 1)
    waiting = background(acc.take_grad, 3, timeout=60)
    until(lambda: acc.info().waiting)
    assert master.client().execute_command("WAIT", 1, 10_000) == 1
    replica.client().replicaof("NO", "ONE")
    master.client().replicaof("127.0.0.1", replica.port)
    # The name still leads to the old one.
    refused = background(apply, acc, 2)
    assert refused.running
    address.move_to(replica)
    assert refused.result(60)
    assert apply(acc, 4)
    assert waiting.result(60).tolist() == [7, 7]


# min_replicas


@pytest.fixture
def open_hasty(durations):
    """Opens a handle that does not wait for long for replicas, for calls that wait in vain."""

    def make(open_one, *args, seconds=0.3, **options):
        with durations(replication=seconds):
            return open_one(*args, **options)

    return make


PARTITIONED = {"limits": redisacc.Limits(in_place=0, inline=0), "partitions": 3}


@pytest.mark.slow(keep="partitions")
@pytest.mark.parametrize(
    "stored",
    [*({"limits": redisacc.Limits(in_place=limit)} for limit in STORAGES.values()), PARTITIONED],
    ids=[*STORAGES, "partitions"],
)
def test_replicas_that_do_not_confirm(pair, open_acc, open_hasty, durations, stored):
    """However short the time is in which a call must reach the server: it has longer to reply than its replicas."""
    master, replica = pair
    acc = open_hasty(open_acc, master.url, seconds=1.5, min_replicas=1, **stored)
    patient = open_acc(master.url, min_replicas=1, **stored)
    assert apply(acc, 1)
    replica.stall()
    with durations(call=1.0):
        with pytest.raises(redisacc.NotReplicatedError, match="counted") as failure:
            apply(acc, 2)
        assert (failure.value.replicas, failure.value.min_replicas) == (0, 1)
        # It is counted all the same.
        assert acc.num_accumulated() == 2
        hasty = open_hasty(open_acc, master.url, min_replicas=1, **stored)
        with pytest.raises(redisacc.NotReplicatedError, match="taken"):
            hasty.take_grad(2, timeout=20)
        assert acc.global_step() == 1
        assert [one.num_accumulated for one in acc.info().unacknowledged] == [2]
        # Recovering it is no way around the wait, except with a handle that does not ask for it.
        with pytest.raises(redisacc.NotReplicatedError, match="recovered"), hasty.recover():
            pass
    with open_acc(master.url).recover() as found:
        assert found.gradient.tolist() == [3, 3]
    # A stale one changes nothing that could be lost.
    assert apply(acc, 4, step=0).outcome == "stale"
    replica.go_on()
    assert apply(patient, 8, step=1)
    assert patient.take_grad(1, timeout=20).tolist() == [8, 8]


@pytest.mark.slow(keep="None")
@pytest.mark.parametrize("partitions", [None, 3])
def test_replicas_confirm_uploads_that_began_early(pair, open_accumulator, open_hasty, partitions):
    master, replica = pair
    options = {
        "reduction_type": "SUM",
        "min_replicas": 1,
        "partitions": partitions,
        "limits": redisacc.Limits(in_place=0),
    }
    schema = ("tree", {"a": ("float32", (200_000,))}, "w")
    acc = open_accumulator(*schema, redis=master.url, **options)
    hasty = open_hasty(open_accumulator, *schema, redis=master.url, **options)
    gradient = {"a": np.ones(200_000, np.float32)}

    def upload(acc, before_parts=lambda: None, before_commit=lambda: None):
        before_parts()
        begun = acc._begin(0)
        begun.put(0, gradient["a"])
        begun.complete()
        before_commit()
        return acc._commit(gradient, 1.0, None)

    def parts(client):
        return {key for key in client.scan_iter() if b":part:" in key or b":partition:" in key}

    assert upload(acc)
    # The call waited for the replica, so everything is there.
    copy = replica.client()
    assert copy.hget("redisacc:{w}", "num_accumulated") == b"1"
    assert parts(copy) == parts(master.client()) != set()
    with pytest.raises(redisacc.NotReplicatedError, match="counted") as failure:
        upload(hasty, before_commit=replica.stall)
    assert (failure.value.replicas, failure.value.min_replicas) == (0, 1)
    replica.go_on()
    if partitions:
        # In a cluster, the replica that confirms the commit is another one than those of the parts.
        with pytest.raises(redisacc.NotReplicatedError):
            upload(hasty, replica.stall, replica.go_on)
    else:
        assert upload(acc, replica.stall, replica.go_on)
    # They are counted all the same, and once.
    assert acc.num_accumulated() == 3
    found = acc.take_grad(3, timeout=20)
    assert set(found["a"].tolist()) == {3.0}


@pytest.mark.slow
def test_a_master_that_is_demoted_while_it_waits_for_its_replicas(pair, open_acc, open_hasty, background, until):
    """It did what it was asked to do; but only what the new master has counts."""
    master, replica = pair
    address = MovingAddress(master)
    assert apply(open_acc(address.client), 1)
    acc = open_hasty(open_acc, address.client, seconds=3.0, min_replicas=2)
    asked = background(apply, acc, 1)
    until(lambda: replica.client().hget("redisacc:{w}", "num_accumulated") == b"2")
    until(lambda: master.client().info("clients")["blocked_clients"])
    replica.client().replicaof("NO", "ONE")
    master.client().replicaof("127.0.0.1", replica.port)
    address.move_to(replica)
    with pytest.raises(redisacc.NotReplicatedError):
        asked.result(60)
    info = acc.info()
    assert (info.num_accumulated, info.applied, info.duplicates) == (2, 2, 1)


def test_opening_while_the_master_is_demoted(pair, open_acc, short_timeout):
    master, replica = pair
    open_acc(master.url)
    assert master.client().execute_command("WAIT", 1, 10_000) == 1
    with pytest.raises(
        redisacc.ServerUnavailableError, match="is a read-only replica: name its master, or go through Sentinel"
    ):
        open_acc(replica.url, min_replicas=1)


@pytest.mark.servers("redis7")
@pytest.mark.parametrize(
    ("library", "wire"),
    thorough(itertools.product(("redis-py", "valkey-py"), ("tcp", "tls")), usual=[("valkey-py", "tls")]),
)
def test_a_clients_own_retries_and_timeout_do_not_prolong_the_wait(daemon, open_acc, durations, wire, library):
    """There is no replica, and the client would give up on WAIT, and repeat it, before the server answers."""
    durations(replication=1.0)
    server = daemon().start()
    with ClientKind(library, wire, retries=True).connected(server.port, socket_timeout=0.3) as client:
        acc = open_acc(client, min_replicas=1)
        started = time.monotonic()
        with pytest.raises(redisacc.NotReplicatedError) as failure:
            apply(acc, 1)
        assert time.monotonic() - started < 10
        assert (failure.value.replicas, failure.value.min_replicas) == (0, 1)
        info = acc.info()
        assert (info.applied, info.duplicates) == (1, 0)


# Sentinel


@pytest.fixture
def watched(daemon, pair, until):
    """A pair that a Sentinel watches: the master, the replica, and what finds the master."""
    master, replica = pair
    config = f"""
        sentinel monitor main 127.0.0.1 {master.port} 1
        sentinel down-after-milliseconds main 500
        sentinel failover-timeout main 5000
        """
    sentinel = daemon("--sentinel", config=config).start()
    asked = sentinel.client(decode_responses=True)
    # By default, it asks the master for its replicas only every 10 seconds.
    asked.execute_command("SENTINEL DEBUG", "info-period", 100)
    until(lambda: asked.sentinel_master("main")["num-slaves"] == 1)
    until(lambda: asked.sentinel_slaves("main")[0]["slave-repl-offset"] > 0 if asked.sentinel_slaves("main") else False)
    finder = Sentinel([("127.0.0.1", sentinel.port)], socket_timeout=2)
    yield master, replica, finder
    for one in finder.sentinels:
        one.close()


def master_now(finder):
    try:
        return finder.discover_master("main")[1]
    except redis.sentinel.MasterNotFoundError:
        return None


@pytest.mark.slow
@pytest.mark.servers("redis7")
def test_a_failover_by_sentinel_loses_nothing_that_replicas_have(watched, open_acc, background, until, durations):
    durations(replication=2.0)
    master, replica, finder = watched
    clients = [finder.master_for("main", redis.Redis) for _ in range(3)]
    storages = [{"limits": redisacc.Limits(in_place=limit), "min_replicas": 1} for limit in STORAGES.values()]
    workers = [open_acc(client, **storage) for client, storage in zip(clients[1:], storages, strict=True)]
    chief = open_acc(clients[0])

    def work(acc, value):
        confirmed = 0
        while True:
            try:
                assert apply(acc, value)
            except redisacc.NotReplicatedError:
                # The promoted one has no replica of its own.
                return confirmed
            confirmed += 1

    crew = [background(work, acc, value) for acc, value in zip(workers, (1, 1000), strict=True)]
    until(lambda: chief.num_accumulated() >= 40)
    # It waits through the failover.
    waiting = background(chief.take_grad, 10**6, timeout=90)
    master.kill()
    confirmed = [one.result(100) for one in crew]
    assert master_now(finder) == replica.port
    # The unconfirmed ones are in it, too, because their requests were sent again to the new master.
    assert chief.num_accumulated() == sum(confirmed) + 2
    gradient = chief.peek().gradient
    assert gradient.tolist() == [confirmed[0] + 1 + 1000 * (confirmed[1] + 1)] * 2
    chief.close()
    with pytest.raises(redisacc.CancelledError):
        waiting.result()
    last = open_acc(clients[0])
    assert last.take_grad(sum(confirmed) + 2, timeout=20).tolist() == gradient.tolist()
    for client in clients:
        client.close()


# Parameters


@pytest.fixture
def open_weights():
    with contextlib.ExitStack() as opened:
        yield lambda where, **options: opened.enter_context(redisacc.Parameters("w", redis=where, **options))


@pytest.mark.slow(keep="1")
@pytest.mark.parametrize("partitions", [1, 3])
def test_replicas_that_do_not_confirm_a_version(pair, open_weights, partitions, durations):
    master, replica = pair
    weights = open_weights(master.url, min_replicas=1, partitions=partitions)
    tree = {"w": np.ones(3)}
    weights.publish(tree, 0)
    replica.stall()
    match = r"step 1 is published, but only 0 of the 1 .* Publish the same again, which waits again"
    with durations(replication=0.3):
        with pytest.raises(redisacc.NotReplicatedError, match=match) as failure:
            weights.publish(tree, 1)
        assert (failure.value.replicas, failure.value.min_replicas) == (0, 1)
        # It is published all the same. The same call, by any process, waits again.
        assert weights.step() == 1
        for again in (weights, open_weights(master.url, min_replicas=1)):
            with pytest.raises(redisacc.NotReplicatedError):
                again.publish(tree, 1)
    open_weights(master.url).publish(tree, 1)
    replica.go_on()
    weights.publish(tree, 1)
    assert replica.client().hget("redisacc:{w}:parameters", "step") == b"1"


@pytest.mark.slow(keep="3")
@pytest.mark.parametrize("partitions", [1, 3])
def test_a_chief_with_an_optimizer_waits_for_replicas_to_have_an_update(pair, durations, until, tmp_path, partitions):
    master, replica = pair
    parameters, gradient = {"w": np.zeros(40_000, np.float32)}, {"w": np.ones(40_000, np.float32)}
    with proxy_before_server(master.url) as proxy:
        options = {"workers": 1, "redis": proxy.url, "min_replicas": 1, "partitions": partitions}
        options["checkpoint"] = tmp_path
        with (
            redisacc.Chief("w", parameters, optimizer=redisacc.optim.Adam(0.1), **grouped(options)) as chief,
            redisacc.Worker("w", redis=master.url) as worker,
        ):
            steps = worker.steps()
            next(steps)
            worker.apply(gradient)
            for step in chief.updates():
                assert step == 1
                break
            next(steps)
            worker.apply(gradient)
            proxy.after("publish", replica.stall)
            with durations(replication=0.3), pytest.raises(redisacc.NotReplicatedError, match="step 2 is published"):
                list(chief.updates(until=2))
            replica.go_on()
            assert chief.step == 2
            assert list(chief.updates(until=2)) == []
            # The last step gets a checkpoint, also if it was confirmed too late.
            until((tmp_path / "step-00000002.safetensors").exists)
            clients = (replica.client(), master.client())
            ours, theirs = (
                {key for key in client.scan_iter() if b":object:" in key or b":partition:" in key} for client in clients
            )
            assert ours == theirs != set()
