"""The command `tail`."""

from __future__ import annotations

import json
import re

import pytest
from terminals import EVIL

pytestmark = pytest.mark.servers("valkey", "cluster")


def test_tail(cli, real_server, open_dense, background, client, until):
    # A name of its own, because the subscription of another test may still exist.
    acc = open_dense("float32", [1], "tailed", worker=EVIL.replace("\x1b", "-"))
    run = background(cli, "watch", "tailed", "--events", "-n", 3, "--json")
    until(lambda: client.pubsub_numsub("redisacc:{tailed}:events")[0][1])
    acc.apply_grad([1.0])
    client.publish("redisacc:{tailed}:events", f"applied step=5 count=2 worker={EVIL}")
    acc.delete()
    found = run.result()
    assert found.exit_code == 0
    events = [json.loads(line) for line in found.stdout.splitlines()]
    assert [event["event"] for event in events] == ["applied", "applied", "deleted"]
    assert (events[1]["step"], events[1]["count"], events[1]["who"]) == (5, 2, EVIL)


def test_tail_as_text_escapes(cli, open_dense, background, client, until):
    acc = open_dense("float32", [1], "escaped")
    run = background(cli, "watch", "escaped", "--events")
    until(lambda: client.pubsub_numsub("redisacc:{escaped}:events")[0][1])
    client.publish("redisacc:{escaped}:events", f"applied step=5 count=2 worker={EVIL}")
    client.publish("redisacc:{escaped}:events", "\x1b[31m\u202efoo")
    acc.delete()
    lines = run.result().stdout.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3}  applied    step 5  count 2  w\\x1b\[2Jx", lines[0])
    assert lines[1].endswith("unknown    text \\x1b[31m\\u202efoo")
    assert "deleted" in lines[2]


def test_tail_of_one_that_is_being_deleted(cli, open_dense, client):
    """The event of the deletion was published before the command listened, and the record still exists."""
    open_dense("float32", [1], "w")
    client.hset("redisacc:{w}", "incarnation", b"deleted:" + client.hget("redisacc:{w}", "incarnation"))
    found = cli("watch", "w", "--events")
    assert (found.exit_code, found.stdout.split()[1:]) == (0, ["deleted"])


def test_tail_ends_with_its_timeout(cli, open_dense):
    open_dense("float32", [1], "w")
    found = cli("watch", "w", "--events", "--timeout", "0.05")
    assert (found.exit_code, found.stdout) == (0, "")
    open_dense("float32", [1], "w").delete()
