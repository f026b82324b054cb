"""A chief that dies anywhere in an update leaves work that its successor finishes, or keys that end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import redis

import redisacc
from redisacc._admin import garbage
from redisacc._admin.garbage import find_garbage, remove_garbage
from redisacc._format.keys import ParameterKeys
from redisacc._protocol.parts.sweep import sweep
from redisacc._protocol.scripts.updates import UpdateScripts
from redisacc._protocol.updates.committer import Committer
from redisacc._redis.connect import connect

pytestmark = pytest.mark.every_server

WEIGHTS = {"w": np.arange(20_000, dtype=np.float32), "b": np.ones(3, np.float64)}


class Died(Exception):
    """Raised in place of a kill."""


def die(*_: Any, **__: Any) -> Any:
    raise Died


def die_after(method: Callable[..., Any]) -> Callable[..., Any]:
    """Does the work of a method, and raises before its caller sees the result."""

    def call(*args: Any, **options: Any) -> Any:
        method(*args, **options)
        raise Died

    return call


# Where the chief dies → what is replaced.
PLACES: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "before the order": (Committer, "_register", die),
    "after the order": (Committer, "_register", die_after(Committer._register)),
    "after the parts": (Committer, "_make", die_after(Committer._make)),
    "before the commit": (UpdateScripts, "commit_update", die),
    "after the commit": (UpdateScripts, "commit_update", die_after(UpdateScripts.commit_update)),
    "before cleaning up": (Committer, "_clean_up", die),
}


@pytest.fixture
def begin(real_client: redis.Redis) -> Callable[..., redisacc.Chief]:
    """Begins, or continues, a training with an optimiser."""

    def make(partitions: int | None, **options: Any) -> redisacc.Chief:
        optimizer = redisacc.optim.AdamW(0.1, **options)
        return redisacc.Chief(
            *("half", WEIGHTS),
            optimizer=optimizer,
            workers=1,
            accumulator={"partitions": partitions},
            redis=real_client,
        )

    return make


@pytest.fixture
def work(real_client: redis.Redis, background: Callable[..., Any]) -> Callable[[], Any]:
    """Starts a worker in a thread."""

    def run() -> None:
        with redisacc.Worker("half", redis=real_client) as worker:
            for step, parameters in worker.steps():
                worker.apply({path: values * step for path, values in parameters.items()}, metrics={"loss": step})

    return lambda: background(run)


def update(chief: redisacc.Chief, until: int) -> dict[str, bytes]:
    for _ in chief.updates(until=until):
        pass
    return {path: values.tobytes() for path, values in chief.latest()[1].items()}


@pytest.mark.slow(keep="valkey-2-")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("partitions", [None, 2])
def test_a_successor_makes_the_same_update(
    begin: Callable[..., redisacc.Chief],
    work: Callable[[], Any],
    real_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    partitions: int | None,
    place: str,
) -> None:
    with begin(partitions) as chief:
        worker = work()
        expected = update(chief, 3)
        worker.result(30)
        chief.delete()
    with begin(partitions) as chief:
        worker = work()
        where, name, fault = PLACES[place]
        with monkeypatch.context() as patch:
            patch.setattr(where, name, fault)
            with pytest.raises(Died):
                update(chief, 3)
    with begin(partitions) as chief:
        assert update(chief, 3) == expected
        worker.result(30)
        assert (chief.step, real_client.hget("redisacc:{half}:parameters", "updates")) == (3, b"3")
        assert [past.step for past in chief.history()] == [0, 1, 2]
        only_what_is_listed(real_client)
        chief.delete()
    assert left(real_client) == []


@pytest.mark.slow(keep="valkey")
@pytest.mark.parametrize("place", ["after the order", "after the parts", "before the commit"])
def test_what_nobody_continues_goes_when_its_lease_ends(
    begin: Callable[..., redisacc.Chief],
    work: Callable[[], Any],
    real_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    chief, worker = begin(2), work()
    update(chief, 1)
    worker.result(30)
    worker = work()
    where, name, fault = PLACES[place]
    with monkeypatch.context() as patch:
        patch.setattr(where, name, fault)
        with pytest.raises(Died):
            update(chief, 2)
    before = contents_of(real_client)
    # Until then, a successor may use all of it.
    assert find_garbage(connect(real_client)) == []
    end_leases(real_client)
    (leftover,) = find_garbage(connect(real_client))
    assert (leftover.why, remove_garbage(connect(real_client), leftover)) == ("blobs", 1)
    only_what_is_listed(real_client)
    assert contents_of(real_client) == before
    # Its successor gets another number, and makes the update again.
    assert chief.step == 1
    chief.close()
    with begin(2) as chief:
        update(chief, 2)
        worker.result(30)
        chief.delete()
    assert left(real_client) == []


def test_gc_removes_nothing_that_a_chief_takes_up_again_after_a_failover(
    begin: Callable[..., redisacc.Chief],
    work: Callable[[], Any],
    real_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chief, worker = begin(2), work()
    update(chief, 1)
    worker.result(30)
    worker = work()
    record, attempts = "redisacc:{half}:parameters", "redisacc:{half}:parameters:attempts"
    before = real_client.hmget(record, "attempts", "registered")
    with monkeypatch.context() as patch:
        patch.setattr(Committer, "_make", die_after(Committer._make))
        with pytest.raises(Died):
            update(chief, 2)
    chief.close()
    # The leader forgets the registration, as a replica does that lagged behind.
    new = [member for member in real_client.zrange(attempts, 0, -1) if member.split(b"-")[1] > before[0]]
    assert len(new) == 3
    real_client.zrem(attempts, *new)
    real_client.hset(record, mapping=dict(zip(["attempts", "registered"], before, strict=True)))
    (leftover,) = find_garbage(connect(real_client))
    assert (leftover.why, len(leftover.keys)) == ("blob", 6)
    remove, updated = garbage._unlink, []

    def remove_late(*args: Any) -> int:
        with begin(2) as successor:
            updated.append(update(successor, 2))
        worker.result(30)
        return remove(*args)

    monkeypatch.setattr(garbage, "_unlink", remove_late)
    assert remove_garbage(connect(real_client), leftover) == 6
    only_what_is_listed(real_client)
    latest = redisacc.Parameters("half", redis=real_client).latest()
    assert {path: values.tobytes() for path, values in latest[1].items()} == updated[0]
    with begin(2) as successor:
        successor.delete()
    assert left(real_client) == []


def test_gc_removes_a_part_whose_number_no_update_can_have(
    begin: Callable[..., redisacc.Chief], real_client: redis.Redis
) -> None:
    with begin(2) as chief:
        key = keys_of(real_client).part(f"{'0' * 16}-{10**15 - 1}-flat", 0)
        real_client.set(key, b"foreign")
        (leftover,) = find_garbage(connect(real_client))
        assert remove_garbage(connect(real_client), leftover) == 1
        # The numbers of updates are not used up by it.
        assert int(real_client.hget("redisacc:{half}:parameters", "attempts")) < 10
        chief.delete()


def test_another_optimizer_makes_the_update_under_another_name(
    begin: Callable[..., redisacc.Chief],
    work: Callable[[], Any],
    real_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order that its predecessor had registered is given up."""
    chief, worker = begin(2), work()
    where, name, fault = PLACES["before the commit"]
    with monkeypatch.context() as patch:
        patch.setattr(where, name, fault)
        with pytest.raises(Died):
            update(chief, 1)
    chief.close()
    abandoned = len(parts(real_client)) - len(listed(real_client))
    assert abandoned == 3 * 2
    with begin(2, weight_decay=0.5) as chief:
        update(chief, 1)
        worker.result(30)
        end_leases(real_client)
        assert sweep(connect(real_client), keys_of(real_client)) > 0
        only_what_is_listed(real_client)
        chief.delete()
    assert left(real_client) == []


def keys_of(client: redis.Redis) -> ParameterKeys:
    text = client.hget("redisacc:{half}:parameters", "partitions") or b""
    return ParameterKeys("half", tuple(map(int, text.split(b","))) if text else ())


def parts(client: redis.Redis) -> set[str]:
    """Returns the keys of all parts of parameters that do not expire."""
    found = [key.decode() for key in client.scan_iter("redisacc:{half*}:parameters:*:*-*:*")]
    return {key for key in found if client.pttl(key) == -1}


def listed(client: redis.Redis) -> set[str]:
    """Returns the keys of the parts of the version that is published."""
    fields = client.hmget("redisacc:{half}:parameters", "full", "slots")
    keys = keys_of(client)
    number = int(fields[1].split(b" ")[0].rsplit(b":", 1)[1])
    blobs = [entry.split(":")[0] for text in fields for entry in text.decode().split(" ")]
    return {keys.part(blob, part) for blob in blobs for part in range(number)}


def only_what_is_listed(client: redis.Redis) -> None:
    """Nothing is there for good but the version, and what the list of attempts has for slow readers."""
    waiting = {member.decode().split(" ")[0] for member in client.zrange("redisacc:{half}:parameters:attempts", 0, -1)}
    found = {key for key in parts(client) if key.split(":")[-2] not in waiting}
    assert found == listed(client)


def contents_of(client: redis.Redis) -> dict[bytes, bytes]:
    return {key: client.hget("redisacc:{half}:parameters", key) for key in (b"version", b"full", b"slots", b"step")}


def end_leases(client: redis.Redis) -> None:
    """Lets the leases of all attempts end, as if much time had passed."""
    for what in (":parameters", ""):
        key = f"redisacc:{{half}}{what}:attempts"
        for member in client.zrange(key, 0, -1):
            client.zadd(key, {member: 1})


def left(client: redis.Redis) -> list[bytes]:
    """Returns the keys that do not end by themselves."""
    return [key for key in client.scan_iter() if client.pttl(key) == -1]
