"""A reducer adds up beside the server, and a taker fetches the sum."""

import itertools
import os
import re
import signal
import time

import numpy as np
import pytest

import redisacc

pytestmark = [pytest.mark.servers("valkey", "redis7", "redis62", "cluster")]

# Two parts for each gradient, or more.
ELEMENTS = 400_000


def values(k):
    return (np.random.default_rng(k).normal(size=ELEMENTS) * 10.0 ** (k % 5 - 2)).astype(np.float32)


def total(*numbers):
    expected = values(numbers[0])
    for k in numbers[1:]:
        expected = expected + values(k)
    return expected


# Whether the gradients have parts, and whether these lie in partitions.
either = pytest.mark.parametrize("partitions", [None, 3])


@pytest.fixture
def reducer(client, background):
    """Runs a reducer until the test ends."""
    running = []

    def start(**options):
        made = redisacc.Reducer(redis=client, **options)
        running.append((made, background(made.run)))
        return made

    yield start
    for made, run in running:
        made.close()
        run.result(20)


@pytest.fixture
def fetched(proxy):
    """Returns how often takers behind the proxy have fetched as many bytes as a gradient has, since the last call."""

    def number():
        nbytes = sum(proxy.lengths["reply"])
        proxy.listen_anew()
        return round(nbytes / (4 * ELEMENTS))

    return number


@pytest.fixture
def open_taker(proxy, open_dense):
    """Opens an accumulator behind the proxy."""

    def open_one(**options):
        return open_dense("float32", [ELEMENTS], "w", redis=proxy.where, reduction_type="SUM", **options)

    return open_one


@pytest.fixture
def patient(durations):
    """Takers that wait for a reducer for as long as a busy machine needs."""
    durations(sum_patience=20.0)


def wait_for_leases(acc, until):
    until(lambda: (info := acc.info().reducer) is not None and not info.missing)


def settle(acc, background, until):
    """Has a round, after which reducers hold their leases and know how many gradients a take requires."""
    take = background(acc.take_grad, 3)
    until(lambda: len(acc.info().waiting) == 1)
    step = acc.global_step()
    for k in range(2):
        acc.apply_grad(values(k), local_step=step)
    # The taker calls until there are as many as there should be.
    wait_for_leases(acc, until)
    acc.apply_grad(values(2), local_step=step)
    # Longer than `patient`, in case the reducer began too late to store every part of this sum.
    take.result(60)


def round_of(acc, background, until, step, numbers, required=3):
    """Takes a round of these gradients while a taker waits. Returns the result."""
    take = background(acc.take_grad, required)
    until(lambda: len(acc.info().waiting) == 1)
    for k in numbers:
        acc.apply_grad(values(k), local_step=step)
    return take.result(30)


@pytest.mark.every_server
@either
def test_a_taker_fetches_the_sum_instead_of_the_gradients(
    open_taker, background, until, reducer, fetched, patient, partitions
):
    acc = open_taker(partitions=partitions)
    reducer()
    settle(acc, background, until)
    for step in (1, 2):
        fetched()
        result = round_of(acc, background, until, step, (5 * step, 6, 7))
        np.testing.assert_array_equal(result, total(5 * step, 6, 7))
        assert fetched() == 1
    info = acc.info().reducer
    assert info is not None
    assert info.keeps_up


@pytest.mark.every_server
@either
def test_a_sum_follows_the_workers_numbers_if_that_is_its_order(
    open_taker, background, until, reducer, fetched, patient, partitions
):
    crew = [open_taker(worker=f"worker {n}", partitions=partitions, order="worker") for n in range(3)]
    acc = crew[0]

    def take_round(step, order):
        take = background(acc.take_grad, 3)
        until(lambda: len(acc.info().waiting) == 1)
        for done, k in enumerate(order):
            crew[k].apply_grad(values(k), local_step=step)
            if step == 0 and done == 1:
                wait_for_leases(acc, until)
        return take.result(60)

    reducer()
    for step, order in enumerate([(0, 1, 2), *itertools.permutations(range(3))]):
        fetched()
        result = take_round(step, order)
        assert result.tobytes() == total(0, 1, 2).tobytes()
        # The first one may be earlier than the reducer. By then, it knows how many gradients a take requires.
        assert step == 0 or fetched() == 1


def test_without_a_reducer_that_works_a_taker_adds_up_itself_and_waits_no_more_for_a_while(
    open_dense, client, durations
):
    durations(sum_patience=2.0)
    acc = open_dense("float32", [ELEMENTS], "w", reduction_type="SUM")
    client.hset("redisacc:{w}:reducer", mapping={"holder": "x", "who": "nobody"})
    client.pexpire("redisacc:{w}:reducer", 60_000)
    lasted = []
    # For one second at first, and for twice as long each time: a slow machine may need some rounds.
    while not lasted or (lasted[-1] >= 2.0 and len(lasted) < 6):
        for k in (1, 2, 3):
            acc.apply_grad(values(k), local_step=len(lasted))
        began = time.monotonic()
        np.testing.assert_array_equal(acc.take_grad(3), total(1, 2, 3))
        lasted.append(time.monotonic() - began)
    assert lasted[0] >= 2.0 > lasted[-1]


@pytest.mark.servers("valkey")
def test_a_node_of_a_single_server_is_refused(client):
    with pytest.raises(redisacc.InvalidArgumentError, match="is a single server: leave it out"):
        redisacc.Reducer(redis=client, node="localhost:6379")


@pytest.mark.servers("cluster")
def test_what_is_no_address_of_a_node_is_refused(client):
    for node in ("localhost", "", "a b:1", ":1", 7):
        with pytest.raises(
            redisacc.InvalidArgumentError, match="node must be HOST:PORT, as the cluster announces it, not"
        ):
            redisacc.Reducer(redis=client, node=node)


@pytest.mark.servers("cluster")
def test_a_node_that_the_cluster_lacks_is_logged_and_waited_for(client, background, until, caplog):
    with redisacc.Reducer(redis=client, node="localhost:1") as reducer:
        run = background(reducer.run)
        until(lambda: "the reducer cannot reach the server, and keeps trying" in caplog.text)
        assert re.search(r"the cluster announces no node localhost:1, but 127\.0\.0\.1:\d+, 127", caplog.text)
        reducer.close()
        run.result(20)


def test_a_second_run_is_refused(client, background, until):
    reducer = redisacc.Reducer("w", redis=client, max_accumulators=1)
    runs = [background(reducer.run) for _ in range(2)]
    until(lambda: not all(run.running for run in runs))
    refused = runs[runs[0].running]
    with pytest.raises(redisacc.InvalidArgumentError, match="already running"):
        refused.result()
    reducer.close()
    runs[runs[0] is refused].result(20)


@either
def test_a_reducer_multiplies_by_the_weights(open_taker, background, until, reducer, fetched, patient, partitions):
    acc = open_taker(partitions=partitions)
    reducer()
    settle(acc, background, until)
    fetched()
    take = background(acc.take_grad, 3)
    until(lambda: len(acc.info().waiting) == 1)
    weights = {5: 0.1, 6: 1.0, 7: 3.0}
    for k, weight in weights.items():
        acc.apply_grad(values(k), local_step=1, weight=weight)
    first, second, third = (values(k) * np.float32(weight) for k, weight in weights.items())
    assert take.result(30).tobytes() == (first + second + third).tobytes()
    assert fetched() == 1


NODE = (
    r"is a node of a Redis Cluster: give redis= a URL redis\+cluster://HOST:PORT, or a redis\.RedisCluster, and the "
    "node as node="
)


@pytest.mark.servers("cluster")
def test_a_client_of_a_single_node_is_refused(real_server):
    node = real_server.url.partition("://")[2].partition(",")[0]
    with (
        redisacc.Reducer(redis=f"redis://{node}") as reducer,
        pytest.raises(redisacc.InvalidArgumentError, match=NODE),
    ):
        reducer.run()


@pytest.mark.slow
@pytest.mark.servers("cluster")
@pytest.mark.every_server
def test_reducers_beside_the_nodes_share_the_partitions(
    open_taker, client, background, until, reducer, fetched, patient
):
    acc = open_taker(partitions=6)
    nodes = [node.name for node in client.get_primaries()]
    at = {number: client.get_node_from_key(f"redisacc:{{w/{number:05}}}").name for number in acc.info().partitions}
    assert sorted(at.values()) == sorted(nodes * 2)
    reducers = {node: reducer(node=node) for node in nodes[:2]}
    take = background(acc.take_grad, 3)
    until(lambda: len(acc.info().waiting) == 1)
    for k in range(2):
        acc.apply_grad(values(k))
    until(lambda: (info := acc.info().reducer) is not None and info.missing == 2)
    assert not acc.info().reducer.keeps_up
    reducers[nodes[2]] = reducer(node=nodes[2])
    wait_for_leases(acc, until)
    # A holder for each node.
    held = {(node, client.hget(f"redisacc:{{w}}:reducer:{number}", "holder")) for number, node in at.items()}
    assert len(held) == len({holder for _, holder in held}) == len(reducers)
    acc.apply_grad(values(2))
    np.testing.assert_array_equal(take.result(60), total(0, 1, 2))
    fetched()
    np.testing.assert_array_equal(round_of(acc, background, until, 1, (3, 4, 5)), total(3, 4, 5))
    assert fetched() == 1


@pytest.mark.thorough
def test_an_accumulator_that_is_idle_makes_room_for_another_one(
    open_dense, client, background, until, reducer, durations
):
    reducer(max_accumulators=1)
    settle(open_dense("float32", [ELEMENTS], "w"), background, until)
    other = open_dense("float32", [ELEMENTS], "v")
    take = background(other.take_grad, 3)
    until(lambda: len(other.info().waiting) == 1)
    other.apply_grad(values(1))
    assert not client.exists("redisacc:{v}:reducer")
    durations(idle=0.0)
    # The taker calls again every second.
    wait_for_leases(other, until)
    until(lambda: not client.exists("redisacc:{w}:reducer"))
    for k in (2, 3):
        other.apply_grad(values(k))
    take.result(60)


@pytest.mark.thorough
@pytest.mark.forges
def test_an_accumulator_that_cannot_be_read_any_more_makes_room(open_dense, client, background, until, reducer, caplog):
    reducer(max_accumulators=1)
    acc = open_dense("float32", [ELEMENTS], "w")
    settle(acc, background, until)
    before = client.hget("redisacc:{w}", "format")
    client.hset("redisacc:{w}", "format", "999")
    until(lambda: "w: the reducer leaves it alone" in caplog.text)
    settle(open_dense("float32", [ELEMENTS], "v"), background, until)
    client.hset("redisacc:{w}", "format", before)


@pytest.mark.servers("valkey")
def test_a_reducer_that_may_not_hear_calls_says_so(real_server, client, background):
    rules = (">secret", "resetchannels", "&redisacc:{team/*}:calls", "~*", "+@all")
    client.execute_command("ACL", "SETUSER", "narrow", "on", *rules)
    try:
        reducer = redisacc.Reducer("team/a*", redis=real_server.url.replace("://", "://narrow:secret@"))
        with pytest.raises(
            redisacc.ServerError,
            match=r"not let this user subscribe to calls of 'team/a\*'.*; give the reducer the same pattern as these",
        ) as raised:
            background(reducer.run).result(20)
        assert "secret" not in str(raised.value)
    finally:
        client.execute_command("ACL", "DELUSER", "narrow")


@pytest.mark.slow
@pytest.mark.servers("valkey")
def test_a_reducer_ends_although_its_server_is_silent(daemon, background, until):
    server = daemon().start()
    with server.client() as client:
        acc = redisacc.ConditionalAccumulator("float32", [ELEMENTS], "w", redis=client, partitions=40)
        reducer = redisacc.Reducer(redis=server.url)
        run = background(reducer.run)
        settle(acc, background, until)
        pid = client.info("server")["process_id"]
        os.kill(pid, signal.SIGSTOP)
        reducer.close()
        # 40 leases, each of which would be waited for.
        run.result(20)
        os.kill(pid, signal.SIGCONT)
        acc.delete()
