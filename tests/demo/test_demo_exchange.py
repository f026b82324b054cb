"""The exchange of the demo's processes through Redis, and their errors for invalid data in it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import redis
from demo_text import settings_for, small_corpus

from redisacc.demo import DemoError, exchange
from redisacc.demo.exchange import (
    ChiefExchange,
    Settings,
    Update,
    WorkerExchange,
    parameters_digest,
)
from redisacc.demo.skipgram import Parameters

# The exchange uses plain commands, which all servers answer alike: the fake one, the oldest and the newest will do.
pytestmark = pytest.mark.servers("fakeredis", "redis62", "valkey")

CORPUS = small_corpus()
SETTINGS = settings_for(CORPUS)


def parameters() -> Parameters:
    made = Parameters.initial(SETTINGS.words, SETTINGS.dim, SETTINGS.window, 1)
    generator = np.random.default_rng(2)
    made.output[:] = generator.normal(size=made.output.shape)
    made.position[:] = generator.normal(size=made.position.shape)
    return made


def update() -> Update:
    return Update.of(parameters(), np.array([0, 3, SETTINGS.words - 1]), np.array([2, 5]))


# Encodings


def test_an_update_arrives_as_it_was_sent() -> None:
    start = Parameters.initial(SETTINGS.words, SETTINGS.dim, SETTINGS.window, 9)
    expected = start.copy()
    for index in (0, 3, SETTINGS.words - 1):
        expected.input[index] = parameters().input[index]
    for index in (2, 5):
        expected.output[index] = parameters().output[index]
    expected.position[:] = parameters().position
    Update.decode(update().encode(), SETTINGS).write_to(start)
    assert parameters_digest(start) == parameters_digest(expected)
    expected.output[2, 0] = np.nextafter(expected.output[2, 0], np.float32(9))
    assert parameters_digest(start) != parameters_digest(expected)


def test_an_update_may_be_empty() -> None:
    none = np.zeros(0, np.int64)
    found = Update.decode(Update.of(parameters(), none, none).encode(), SETTINGS)
    assert found.input[1].shape == found.output[1].shape == (0, SETTINGS.dim)


@pytest.mark.parametrize("name", ["input", "input_indices", "output", "output_indices", "position"])
@pytest.mark.parametrize("damage", ["missing", "short", "odd", "long", "empty"])
def test_a_damaged_update_is_refused(name: str, damage: str) -> None:
    entry = update().encode()
    field = name.encode()
    if damage == "missing":
        del entry[field]
    else:
        data = entry[field]
        entry[field] = {"short": data[:-4], "odd": data[:-1], "long": data + bytes(4), "empty": b""}[damage]
    with pytest.raises(DemoError, match="an update in Redis has"):
        Update.decode(entry, SETTINGS)


@pytest.mark.parametrize("indices", [[0, 3, 3], [3, 0, 4], [-1, 0, 1], [0, 1, SETTINGS.words]])
def test_wrong_rows_are_refused(indices: list[int]) -> None:
    entry = update().encode()
    entry[b"input_indices"] = np.array(indices, "<i4").tobytes()
    with pytest.raises(DemoError, match="invalid row numbers of input"):
        Update.decode(entry, SETTINGS)


def test_settings_arrive_as_they_were_sent() -> None:
    assert Settings.from_json(SETTINGS.to_json().encode()) == SETTINGS


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": None},
        {"dim": 0},
        {"dim": 10**9},
        {"dim": "8"},
        {"dim": 8.0},
        {"workers": True},
        {"words": -1},
        {"steps": 2**63},
        {"seed": -1},
        {"rate": 0.0},
        {"rate": float("nan")},
        {"subsampling": float("inf")},
        {"digest": None},
        {"unknown": 1},
    ],
    ids=str,
)
def test_wrong_settings_are_refused(change: dict[str, Any]) -> None:
    found = json.loads(SETTINGS.to_json()) | change
    with pytest.raises(DemoError, match="the chief"):
        Settings.from_json(json.dumps(found).encode())


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000, b"{}"])
def test_text_that_is_not_settings_is_refused(text: bytes) -> None:
    with pytest.raises(DemoError, match="the chief"):
        Settings.from_json(text)


# Chief and workers


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_BLOCK", 100)


@pytest.fixture
def chief(client: redis.Redis) -> Any:
    made = ChiefExchange(client, "t")
    made.claim()
    made.announce(SETTINGS)
    yield made
    made.close()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short leases, renewed at every call."""
    monkeypatch.setattr(exchange, "LEASE", 3)
    monkeypatch.setattr(exchange, "_RENEW", 0.0)


def joined(client: redis.Redis, index: int | None = None) -> WorkerExchange:
    worker = WorkerExchange(client, "t")
    worker.claim(index, worker.find_chief(1.0))
    return worker


def test_workers_find_the_chief_and_take_numbers(client: redis.Redis, chief: ChiefExchange) -> None:
    assert chief.workers() == {}
    first = WorkerExchange(client, "t")
    assert first.find_chief(1.0) == SETTINGS
    assert first.claim(None, SETTINGS) == 0
    second = joined(client, 1)
    assert list(chief.workers()) == [0, 1]
    with pytest.raises(DemoError, match="already has all of its 2 workers"):
        joined(client)
    with pytest.raises(DemoError, match="already has a worker 1"):
        joined(client, 1)
    with pytest.raises(DemoError, match="there is no worker 2 in run 't', which has workers 0 to 1"):
        joined(client, 2)
    first.close()
    assert list(chief.workers()) == [1]
    assert joined(client)._index == 0
    second.close()


def test_no_chief_comes(client: redis.Redis) -> None:
    with pytest.raises(DemoError, match=r"no chief appeared for run 't' within 0\.1 seconds"):
        WorkerExchange(client, "t").find_chief(0.1)


def test_a_worker_waits_for_the_chief(client: redis.Redis, background: Callable[..., Any]) -> None:
    waiting = background(WorkerExchange(client, "t").find_chief, 20.0)
    made = ChiefExchange(client, "t")
    made.claim()
    # The claimed name is not enough, because the accumulators may not exist yet.
    time.sleep(0.6)
    assert waiting.running
    made.announce(SETTINGS)
    assert waiting.result() == SETTINGS
    made.close()


def test_updates_come_in_order(client: redis.Redis, chief: ChiefExchange) -> None:
    worker = joined(client)
    for step in range(3):
        made = parameters()
        made.position[:] = step
        chief.publish(step, Update.of(made, np.array([step]), np.array([7])))
    for step in range(3):
        found = worker.next_update(step, SETTINGS)
        assert found.input[0].tolist() == [step]
        assert float(found.position[0, 0]) == step
    worker.close()


def test_a_late_worker_is_told(client: redis.Redis, chief: ChiefExchange) -> None:
    for step in range(6):
        chief.publish(step, update())
    worker = joined(client)
    with pytest.raises(DemoError, match="step 0 of run 't' is over"):
        worker.next_update(0, SETTINGS)
    # The stream stays short, however long the run is.
    assert client.xlen(chief._keys.updates) == exchange._KEPT_UPDATES
    worker.close()


def test_publishing_twice_is_publishing_once(client: redis.Redis, chief: ChiefExchange) -> None:
    # redis-py sends it again when the connection breaks before the reply.
    chief.publish(0, update())
    chief.publish(0, update())
    assert client.xlen(chief._keys.updates) == 1
    client.delete(chief._keys.updates)
    client.set(chief._keys.updates, "foreign")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        chief.publish(1, update())


def test_a_waiting_worker_notices_that_the_chief_is_gone(
    client: redis.Redis, chief: ChiefExchange, background: Callable[..., Any]
) -> None:
    worker = joined(client)
    waiting = background(worker.next_update, 0, SETTINGS)
    chief.close()
    with pytest.raises(DemoError, match="the chief of run 't' is gone"):
        waiting.result()


def test_a_waiting_worker_notices_that_the_chief_died(
    client: redis.Redis, chief: ChiefExchange, background: Callable[..., Any]
) -> None:
    worker = joined(client)
    waiting = background(worker.next_update, 0, SETTINGS)
    client.delete(chief._keys.chief)  # as when its lease runs out
    with pytest.raises(DemoError, match="the chief of run 't' is gone"):
        waiting.result(5)
    assert chief.workers() != {}, "the worker noticed something else"
    worker.close()


def test_a_waiting_worker_notices_another_chief(
    client: redis.Redis, chief: ChiefExchange, background: Callable[..., Any]
) -> None:
    worker = joined(client)
    waiting = background(worker.next_update, 0, SETTINGS)
    chief.close()
    other = ChiefExchange(client, "t")
    other.claim()
    with pytest.raises(DemoError, match="run 't' has another chief now"):
        waiting.result()
    other.close()


@pytest.mark.servers("valkey")
def test_one_chief_at_a_time(client: redis.Redis, chief: ChiefExchange, monkeypatch: pytest.MonkeyPatch) -> None:
    # The other chief's lease is longer than what the second one waits for.
    monkeypatch.setattr(exchange, "LEASE", 1)
    monkeypatch.setattr(exchange, "_CLAIM_MARGIN", 0.0)
    with pytest.raises(DemoError, match=r"run 't' already has a chief \(.*, process \d+\); choose another"):
        ChiefExchange(client, "t").claim()
    assert client.get(chief._keys.chief) == chief._card


@pytest.mark.servers("redis62", "valkey")
def test_the_name_of_a_dead_chief_becomes_free(
    client: redis.Redis, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = ChiefExchange(client, "t")
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "LEASE", 1)
        dead.claim()
        dead.announce(SETTINGS)
    successor = ChiefExchange(client, "t")
    started = time.monotonic()
    successor.claim()
    assert time.monotonic() - started < 10
    # The first chief was not dead; its process had only been stopped.
    with pytest.raises(DemoError, match="another chief took over run 't'"):
        dead.renew()
    dead.close()
    assert client.get(successor._keys.chief) == successor._card
    successor.close()


def test_a_chief_that_slept_goes_on_if_nobody_took_its_place(client: redis.Redis, soon: None) -> None:
    made = ChiefExchange(client, "t")
    made.claim()
    client.delete(made._keys.chief)
    made.renew()
    assert client.get(made._keys.chief) == made._card
    made.close()


def test_a_worker_whose_lease_ran_out_ends(client: redis.Redis, chief: ChiefExchange, soon: None) -> None:
    worker = joined(client, 0)
    worker.renew()
    client.delete(chief._keys.worker(0))
    with pytest.raises(DemoError, match="the lease of this worker expired"):
        worker.renew()
    # The renewal does not restore the lease, and does not take that of a successor.
    assert chief.workers() == {}
    successor = joined(client, 0)
    client.set(chief._keys.worker(0), b'{"host": "elsewhere", "pid": 1}', ex=5)
    with pytest.raises(DemoError, match="the lease of this worker expired"):
        worker.renew()
    worker.close()
    successor.close()
    assert chief.workers() == {0: "elsewhere, process 1"}


def test_a_renewal_brings_no_key_back(
    client: redis.Redis, chief: ChiefExchange, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = joined(client, 0)
    get = client.get

    def deleted_after_a_look(key: str) -> Any:
        found = get(key)
        client.delete(chief._keys.worker(0))
        return found

    monkeypatch.setattr(client, "get", deleted_after_a_look)
    with pytest.raises(DemoError, match="the lease of this worker expired"):
        worker.renew()
    assert chief.workers() == {}


def test_reports(client: redis.Redis, chief: ChiefExchange) -> None:
    first, second = joined(client), joined(client)
    second.finish("b")
    assert chief.finished() == {1: "b"}
    first.finish("a")
    assert chief.finished() == {0: "a", 1: "b"}
    client.hset(chief._keys.finished, "x", "c")
    with pytest.raises(DemoError, match="cannot be read"):
        chief.finished()


def test_every_key_expires_and_none_is_left(client: redis.Redis, chief: ChiefExchange) -> None:
    worker = joined(client)
    chief.publish(0, update())
    worker.finish("a")
    keys = sorted(client.keys("*"))
    assert len(keys) == 5
    assert all(key.startswith(b"redisacc-demo:t") for key in keys)
    assert all(0 < client.ttl(key) <= exchange.LEASE for key in keys)
    chief.close()
    assert client.keys("*") == []


def test_renewing_keeps_the_keys(client: redis.Redis, chief: ChiefExchange, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_RENEW", 0.0)
    worker = joined(client)
    chief.publish(0, update())
    worker.finish("a")
    keys = client.keys("*")
    assert len(keys) == 5
    for key in keys:
        client.expire(key, 5)
    chief.renew()
    worker.renew()
    assert all(client.ttl(key) > 5 for key in keys)


@pytest.mark.parametrize("card", [b"", b"{", b"[]", b'{"nonce": 1}', b'{"nonce": "a:b"}', b'{"host": "x"}'])
def test_a_foreign_value_under_the_name_is_refused(client: redis.Redis, card: bytes) -> None:
    client.set("redisacc-demo:t", card, ex=5)
    with pytest.raises(DemoError, match="the chief's lease in Redis cannot be read"):
        WorkerExchange(client, "t").find_chief(1.0)
    client.delete("redisacc-demo:t")
