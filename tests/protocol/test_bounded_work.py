"""However large the keys of an accumulator are, a script does little work. Commands are counted, not time."""

import contextlib
import time

import numpy as np
import pytest
from support.selection import ONE_NODE

import redisacc

RECORD = "redisacc:{bounded}"
QUEUE, TAKERS = f"{RECORD}:queue", f"{RECORD}:takers"


def handle(client, **options):
    return redisacc.ConditionalAccumulator("float32", [2], "bounded", redis=client, **options)


def commands(client, operate):
    """Returns how often the server ran each command, those that scripts call included, while ``operate`` ran."""
    client.config_resetstat()
    operate()
    stats = client.info("commandstats")
    ours = {name.removeprefix("cmdstat_"): found["calls"] for name, found in stats.items()}
    return {name: calls for name, calls in ours.items() if name not in ("info", "config|resetstat", "config")}


def queue(client, number, lease_end_ms, score=0):
    """Puts takers into the queue, and returns their tokens."""
    tokens = [f"taker-{lease_end_ms}-{k:05}" for k in range(number)]
    client.zadd(QUEUE, {token: score + k for k, token in enumerate(tokens)})
    client.hset(RECORD, "tickets", int(score) + number)
    client.hset(TAKERS, mapping=dict.fromkeys(tokens, f"5 {lease_end_ms} somebody"))
    return tokens


def ask_once(acc):
    """Asks for a round that is not there, and leaves the queue."""
    with contextlib.suppress(redisacc.TakeTimeoutError):
        acc.take_grad(9, timeout=0)


@pytest.mark.every_server
@pytest.mark.forges
def test_dead_takers_are_removed_together(real_client):
    with handle(real_client) as acc:
        queue(real_client, 250, 1)
        for left in (150, 50):
            ran = commands(real_client, lambda: ask_once(acc))
            assert sum(ran.values()) < 60, ran
            assert real_client.zcard(QUEUE) == real_client.hlen(TAKERS) == left
        ask_once(acc)
        assert (real_client.zcard(QUEUE), real_client.hlen(TAKERS)) == (0, 0)
        acc.delete()


@pytest.mark.parametrize(("dead", "live"), [(3, 2), (99, 1), (100, 1), (101, 1)])
@pytest.mark.forges
def test_live_takers_stay_in_the_queue(client, dead, live):
    acc = handle(client)
    queue(client, dead, 1)
    tokens = queue(client, live, int(time.time() * 1000) + 60_000, score=dead)
    # A taker without an entry counts as dead.
    client.hdel(TAKERS, "taker-1-00001")
    for _ in range(2):
        ask_once(acc)
    assert [token.decode() for token in client.zrange(QUEUE, 0, -1)] == tokens
    assert client.hlen(TAKERS) == live


@pytest.mark.forges
def test_info_lists_the_beginning_of_a_long_queue(client):
    acc = handle(client)
    tokens = queue(client, 1001, int(time.time() * 1000) + 60_000)
    assert [taker.token for taker in acc.info().waiting] == tokens[:1000]


def test_compacting_looks_up_the_gradients_together(real_client):
    with handle(real_client, limits=redisacc.Limits(in_place=0, buffer=60 * 8)) as acc:
        for _ in range(60):
            acc.apply_grad([1, 1])
        ran = commands(real_client, lambda: acc.apply_grad([1, 1]))
        assert acc.info().buffered == 1
        # One for each gradient that is replaced, and few others.
        assert ran["hstrlen"] == 60
        assert sum(ran.values()) - ran["hstrlen"] < 50, ran
        acc.delete()


@pytest.mark.servers(*ONE_NODE)
def test_few_parts_are_removed_by_one_script(proxy):
    gradient = np.ones(120_000, np.float32)
    limits = redisacc.Limits(in_place=0, buffer=60 * gradient.nbytes)
    with redisacc.ConditionalAccumulator("float32", gradient.shape, "bounded", redis=proxy.where, limits=limits) as acc:
        acc.apply_grad(gradient)
        # From then on, the server knows the scripts.
        acc.take_grad(1)
        for _ in range(61):
            acc.apply_grad(gradient, local_step=1)
        # A script replaces 100 parts at most. Each gradient has two.
        assert acc.info().buffered == 61 - 50
        for _ in range(45):
            acc.apply_grad(gradient, local_step=1)
        proxy.listen_anew()
        acc.take_grad(106)
        # And it removes as many.
        assert proxy.sent.count("acknowledge") == 2
        acc.delete()


def test_hashes_are_read_in_small_pieces(real_client):
    with redisacc.SparseConditionalAccumulator(
        "float32", None, "bounded", redis=real_client, limits=redisacc.Limits(in_place=10**6)
    ) as acc:
        acc.apply_grad(range(2000), [1] * 2000)
        assert commands(real_client, acc.peek)["hscan"] >= 2000 // 250
        acc.delete()


@pytest.mark.servers("valkey")
def test_leaves_without_rows_cost_a_script_nothing_and_many_leaves_are_buffered(real_client):
    number = 400
    with redisacc.TreeAccumulator([redisacc.Sparse("float32", (9,))] * number, redis=real_client) as acc:
        acc.apply_grad([None] * number)
        ran = commands(real_client, lambda: acc.apply_grad([([1], [1.0]), *[None] * (number - 1)]))
        assert sum(ran.values()) < 20, ran
        assert acc.info().buffered == 0
        # A row in each leaf is 25 elements and 72 more for each leaf.
        acc.apply_grad([([1], [1.0])] * 13 + [None] * (number - 13))
        assert acc.info().buffered == 0
        acc.apply_grad([([1], [1.0])] * 14 + [None] * (number - 14))
        assert acc.info().buffered == 1
        total = acc.take_grad(4)
        assert [float(rows.values[0]) for rows in total[:14]] == [0.75] + [0.5] * 12 + [0.25]
        assert len(total[14].indices) == 0
