"""However large the keys of an accumulator are, a script does little work. Commands are counted, not time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import redis

import redisacc
from redisacc._format import buffered as buffered_format
from redisacc._format.keys import Keys
from redisacc._protocol.rounds import acknowledgement
from redisacc._protocol.scripts.accumulators import Scripts
from redisacc._protocol.scripts.sessions import Session
from redisacc._protocol.scripts.take_requirement import TakeRequirement
from redisacc._protocol.scripts.taking import Queued
from redisacc._redis import hash_scan
from redisacc._redis.connect import connect

KEYS = Keys("bounded")


def handle(client: redis.Redis, **options: object) -> redisacc.ConditionalAccumulator:
    return redisacc.ConditionalAccumulator("float32", [2], "bounded", redis=client, **options)


def commands(client: redis.Redis, operate: Callable[[], object]) -> dict[str, int]:
    """Returns how often the server ran each command, those that scripts call included, while ``operate`` ran."""
    client.config_resetstat()
    operate()
    stats = client.info("commandstats")
    ours = {name.removeprefix("cmdstat_"): found["calls"] for name, found in stats.items()}
    return {name: calls for name, calls in ours.items() if name not in ("info", "config|resetstat", "config")}


def queue(client: redis.Redis, number: int, lease_end_ms: int, score: float = 0) -> list[str]:
    """Puts takers into the queue, and returns their tokens."""
    tokens = [f"taker-{lease_end_ms}-{k:05}" for k in range(number)]
    client.zadd(KEYS.queue, {token: score + k for k, token in enumerate(tokens)})
    client.hset(KEYS.record, "tickets", int(score) + number)
    client.hset(KEYS.takers, mapping=dict.fromkeys(tokens, f"5 {lease_end_ms} somebody"))
    return tokens


def take(client: redis.Redis, acc: redisacc.ConditionalAccumulator) -> Callable[[], object]:
    session = Session(int(time.time() * 1000))
    return Scripts(connect(client), KEYS, incarnation=acc.info().incarnation).take(
        token=f"{session.id}-1", session=session, sequence=1, required=TakeRequirement(9, 9), lease_ms=60_000, taker="w"
    )


@pytest.mark.every_server
@pytest.mark.forges
def test_dead_takers_are_removed_together(real_client: redis.Redis) -> None:
    with handle(real_client) as acc:
        queue(real_client, 250, 1)
        attempt = take(real_client, acc)
        attempt()
        assert real_client.zcard(KEYS.queue) == real_client.hlen(KEYS.takers) == 151
        ran = commands(real_client, attempt)
        assert sum(ran.values()) < 40, ran
        assert real_client.zcard(KEYS.queue) == real_client.hlen(KEYS.takers) == 51
        reply = attempt()
        assert isinstance(reply, tuple)
        assert isinstance(reply[0], Queued)
        assert (reply[0].ahead, real_client.zcard(KEYS.queue)) == (0, 1)
        acc.delete()


@pytest.mark.parametrize(("dead", "live"), [(3, 2), (99, 1), (100, 1), (101, 1)])
@pytest.mark.forges
def test_live_takers_stay_in_the_queue(client: redis.Redis, dead: int, live: int) -> None:
    acc = handle(client)
    queue(client, dead, 1)
    lease_end = int(time.time() * 1000) + 60_000
    tokens = queue(client, live, lease_end, score=dead)
    # A taker without an entry counts as dead.
    client.hdel(KEYS.takers, "taker-1-00001")
    attempt = take(client, acc)
    attempt()
    attempt()
    left = client.zrange(KEYS.queue, 0, -1)
    assert [token.decode() for token in left[:-1]] == tokens
    assert client.hlen(KEYS.takers) == live + 1
    acc.delete()


@pytest.mark.every_server
@pytest.mark.forges
def test_info_reads_a_long_queue_in_pieces(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    acc = handle(client)
    tokens = queue(client, 2 * hash_scan.SCAN_FIELDS + 7, int(time.time() * 1000) + 60_000)
    asked = []
    transport = acc._transport
    for way in ("pipeline", "call"):
        send = getattr(transport, way)

        def noting(*args: object, send: Callable[..., object] = send, **options: object) -> object:
            asked.append(args)
            return send(*args, **options)

        monkeypatch.setattr(transport, way, noting)
    waiting = acc.info().waiting
    assert [taker.token for taker in waiting] == tokens
    # The first piece travels with other commands.
    assert sum(args[0] == "ZRANGE" for args in asked) == 2
    acc.delete()


def test_compacting_looks_up_the_gradients_together(real_client: redis.Redis) -> None:
    with handle(real_client, limits=redisacc.Limits(in_place=0, buffer=60 * 8)) as acc:
        for _ in range(60):
            acc.apply_grad([1, 1])
        ran = commands(real_client, lambda: acc.apply_grad([1, 1]))
        assert acc.info().buffered == 1
        # One for each gradient that is replaced, and few others.
        assert ran["hstrlen"] == 60
        assert sum(ran.values()) - ran["hstrlen"] < 50, ran
        acc.delete()


@pytest.mark.usefixtures("force_parts")
def test_few_parts_are_removed_by_one_script(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = []
    for name, parts in (("buffer", "replaced_parts"), ("acknowledge", "parts")):
        run = getattr(Scripts, name)

        def noting(*args: object, run: Callable[..., object] = run, given: str = parts, **options: object) -> object:
            removed.append(len(options[given]))
            return run(*args, **options)

        monkeypatch.setattr(Scripts, name, noting)
    monkeypatch.setattr(buffered_format, "PART_SIZES", (8,))
    limit = acknowledgement.PARTS_PER_CALL
    with redisacc.SparseConditionalAccumulator(
        "float32", None, "bounded", redis=client, limits=redisacc.Limits(in_place=0, buffer=1_400)
    ) as acc:
        # Gradients of 12 bytes in two parts each: 116 of them are more than one script may replace.
        for _ in range(117):
            acc.apply_grad([1], [1])
        assert max(removed) == limit
        assert acc.info().buffered == 117 - limit // 2
        for _ in range(60):
            acc.apply_grad([1], [1])
        removed.clear()
        acc.take_grad(177)
        assert len(removed) > 1
        assert max(removed) <= limit
        acc.delete()


def test_hashes_are_read_in_small_pieces(real_client: redis.Redis) -> None:
    with redisacc.SparseConditionalAccumulator(
        "float32", None, "bounded", redis=real_client, limits=redisacc.Limits(in_place=10**6)
    ) as acc:
        acc.apply_grad(range(2000), [1] * 2000)
        assert commands(real_client, acc.peek)["hscan"] >= 2000 // 250
        acc.delete()


@pytest.mark.servers("valkey")
def test_leaves_without_rows_cost_a_script_nothing_and_many_leaves_are_buffered(real_client: redis.Redis) -> None:
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
