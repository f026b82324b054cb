"""Each reply of the scripts of parameters, and what they leave."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from support.selection import ONE_NODE

import redisacc
from redisacc._format.keys import ParameterKeys
from redisacc._protocol.scripts.parameters import BeingDeleted, Follows, ParameterScripts
from redisacc._redis.connect import connect

KEYS = ParameterKeys("w")


class Sent:
    """Sends versions of one part."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.scripts = ParameterScripts(connect(client), KEYS)

    def publish(
        self, version: str, step: int, previous: str, *, stage: bool = True, incarnation: str = "one", **options: Any
    ) -> Any:
        if stage:
            self.client.set(KEYS.part(version, 0), b"1234", nx=True, px=50_000)
        return self.scripts.publish(
            Follows(incarnation, previous, step),
            **{
                "version": version,
                "event": f"published {version}",
                "fields": ["full", version, "publisher", "me"],
                "parts": {KEYS.part(version, 0): 4},
                "unused": [KEYS.part(previous, 0)] if previous else [],
                **options,
            },
        )

    def record(self) -> dict[bytes, bytes]:
        return self.client.hgetall(KEYS.record)


def endless(client: redis.Redis) -> set[str]:
    """The keys that do not expire by themselves."""
    return {key.decode() for key in client.scan_iter() if client.pttl(key) == -1}


@pytest.fixture
def sent(client: redis.Redis) -> Sent:
    return Sent(client)


@pytest.mark.forges
def test_what_was_deleted_is_not_published_again(client):
    scripts = ParameterScripts(connect(client), KEYS)
    client.set(KEYS.deleted, "two one", px=60_000)
    begin = {"version": "v", "event": "e", "fields": ["a", "b"]}
    for incarnation in ("one", "two"):
        assert scripts.publish(Follows(incarnation, "", 3), **begin) == "changed"
        registered = scripts.register_version(
            Follows(incarnation, "", 3), version="v", partitions="0,1", lease_ms=1000, blobs=["full 2"]
        )
        assert registered == "changed"
    assert client.exists(KEYS.record) == 0
    assert scripts.publish(Follows("on", "", 3), **begin) == "published"
    client.delete(KEYS.record)


def test_a_version_and_its_successor(sent: Sent, client: redis.Redis) -> None:
    assert sent.publish("a", 1, "") == "published"
    first = sent.record()
    assert {**first, b"created_ms": b"", b"published_ms": b""} == {
        b"incarnation": b"one", b"version": b"a", b"step": b"1", b"full": b"a", b"publisher": b"me",
        b"created_ms": b"", b"published_ms": b"",
    }  # fmt: skip
    assert int(first[b"created_ms"]) == int(first[b"published_ms"]) > 1_600_000_000_000
    assert client.keys(f"{KEYS.record}:*") == [KEYS.part("a", 0).encode()]
    assert client.pttl(KEYS.part("a", 0)) == -1
    assert sent.publish("b", 2, "a") == "published"
    assert sent.record()[b"created_ms"] == first[b"created_ms"]
    assert 0 < client.pttl(KEYS.part("a", 0)) <= 60_000
    assert client.pttl(KEYS.part("b", 0)) == -1


@pytest.mark.servers(*ONE_NODE)
@pytest.mark.forges
def test_an_event_for_each_version_and_for_the_deletion(sent: Sent, client: redis.Redis) -> None:
    with client.pubsub(ignore_subscribe_messages=True) as heard:
        heard.subscribe(KEYS.events)
        heard.get_message(timeout=5)
        sent.publish("a", 1, "")
        sent.publish("a", 1, "")
        sent.publish("b", 1, "a")
        assert sent.scripts.delete(incarnation="one", finish=False) == "closed"
        texts = []
        while (message := heard.get_message(timeout=0.5)) is not None:
            texts.append(message["data"])
    assert texts == [b"published a", b"deleted"]


@pytest.mark.forges
@pytest.mark.parametrize(
    ("arguments", "options", "reply"),
    [
        (("b", 2, "a"), {}, "published"),
        (("b", 1, "a"), {}, "published"),
        (("c", 3, "a"), {}, "changed"),
        (("c", 3, ""), {"incarnation": "other"}, "changed"),
        (("c", 2, "b"), {}, "older"),
        (("c", -(2**63), "b"), {}, "older"),
        (("c", 3, "b"), {"stage": False}, "expired"),
        (("c", 3, "b"), {"parts": {KEYS.part("c", 0): 5}}, "expired"),
    ],
)
def test_requests_that_change_nothing(
    sent: Sent, client: redis.Redis, arguments: tuple[str, int, str], options: dict[str, Any], reply: str
) -> None:
    """The first two are sent again: the version is there, whatever else they say."""
    sent.publish("a", 1, "")
    sent.publish("b", 2, "a")
    before = sent.record()
    assert sent.publish(*arguments, **options) == reply
    assert sent.record() == before
    assert client.get(KEYS.part("b", 0)) == b"1234"
    assert endless(client) == {KEYS.record, KEYS.part("b", 0)}


@pytest.mark.forges
def test_parameters_that_are_gone(sent: Sent, client: redis.Redis) -> None:
    with pytest.raises(redisacc.NotFoundError, match="any longer"):
        sent.publish("b", 2, "a")
    assert endless(client) == set()
    sent.publish("a", 1, "")
    with pytest.raises(redisacc.NotFoundError, match="published again"):
        sent.publish("b", 2, "a", incarnation="other")
    delete = sent.scripts.delete
    assert delete(incarnation="other", finish=False) == "replaced"
    assert delete(incarnation="one", finish=True) == "replaced"
    for _ in range(2):
        assert delete(incarnation="one", finish=False) == "closed"
    for previous in ("", "a"):
        assert sent.publish("b", 2, previous) == BeingDeleted("one")
    assert endless(client) == {KEYS.record, KEYS.part("a", 0)}
    assert delete(incarnation="one", finish=True) == "deleted"
    assert delete(incarnation="one", finish=True) == "missing"
    assert client.exists(KEYS.record) == 0


@pytest.mark.forges
@pytest.mark.parametrize(("field", "value"), [("step", b"x"), ("step", None), ("incarnation", None)])
def test_a_record_that_is_corrupt(sent: Sent, client: redis.Redis, field: str, value: bytes | None) -> None:
    sent.publish("a", 1, "")
    if value is None:
        client.hdel(KEYS.record, field)
    else:
        client.hset(KEYS.record, field, value)
    before = sent.record()
    with pytest.raises(redisacc.CorruptDataError, match=f"{field} holds"):
        sent.publish("b", 2, "a")
    assert sent.record() == before
    assert endless(client) == {KEYS.record, KEYS.part("a", 0)}
