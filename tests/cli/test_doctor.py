"""The command `doctor`."""

import contextlib
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import redis
from support.selection import ONE_NODE

from redisacc.embedded import Server

pytestmark = pytest.mark.servers("valkey", "cluster")


@pytest.fixture
def examine(cli):
    """Returns what doctor finds: what it looks at → a finding."""

    def found(*words):
        findings = json.loads(cli("doctor", "--json", *words).stdout)
        return {finding["what"]: SimpleNamespace(**finding) for finding in findings}

    return found


@pytest.mark.servers("valkey", "redis7", "redis62", "cluster")
def test_doctor_on_a_server_of_ours(cli, cli_json, client, server_name):
    # The tests' servers keep nothing on disk.
    client.config_set("save", "60 1")
    client.config_set("maxmemory", 2**30)
    try:
        findings = {finding["what"]: finding for finding in cli_json("doctor")}
    finally:
        client.config_set("maxmemory", 0)
        client.config_set("save", "")
    checks = "client version role eviction memory persistence access lua clock latency trial"
    expected = dict.fromkeys(checks.split(), "ok")
    # No master of the tests' cluster has a replica.
    if server_name == "cluster":
        expected |= {"cluster": "warn"}
    # While other tests run, round trips are slow.
    assert findings["latency"]["status"] in ("ok", "warn")
    assert {what: finding["status"] for what, finding in findings.items()} == expected | {
        "latency": findings["latency"]["status"]
    }
    if server_name == "cluster":
        assert findings["cluster"]["advice"].startswith(
            "give every master a replica, because a master without one takes"
        )
    assert client.keys() == []
    said = cli("doctor")
    assert said.exit_code == 0
    assert max(map(len, said.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("settings", "what", "status", "advice"),
    [
        (
            {"maxmemory-policy": "allkeys-lru", "maxmemory": 2**30},
            "eviction",
            "bad",
            "run CONFIG SET maxmemory-policy noeviction, and set it in",
        ),
        (
            {"maxmemory-policy": "volatile-ttl", "maxmemory": 0},
            "eviction",
            "warn",
            "run CONFIG SET maxmemory-policy noeviction, and set it in",
        ),
        ({"maxmemory": 0}, "memory", "warn", "run CONFIG SET maxmemory, so that a full server refuses data"),
        ({"maxmemory": 10**6}, "memory", "bad", "take rounds or delete accumulators, or give the server more memory"),
        ({"maxmemory": 10**6}, "trial", "bad", "mend the server first"),
        (
            {"appendonly": "no", "save": ""},
            "persistence",
            "warn",
            "run CONFIG SET appendonly yes if accumulators must survive",
        ),
    ],
)
def test_doctor_finds_settings_that_are_wrong(cli, client, examine, settings, what, status, advice):
    before = {name: client.config_get(name)[name] for name in settings}
    for name, value in settings.items():
        client.config_set(name, value)
    try:
        findings = examine()
        code = cli("doctor").exit_code
    finally:
        client.config_set("maxmemory", 0)
        for name, value in before.items():
            client.config_set(name, value)
    assert findings[what].status == status
    assert advice in findings[what].advice
    # A server without room for a gradient also fails the trial.
    assert code == (1 if any(finding.status == "bad" for finding in findings.values()) else 0)


@pytest.mark.slow
def test_doctor_knows_each_kind_of_persistence(examine, tmp_path):
    def finding(url):
        return examine("--redis", url)["persistence"]

    with Server(tmp_path) as server:
        first = finding(server.url)
        assert (first.status, first.found) == ("ok", "snapshots; a crash now would lose 0 changes")
        # The trial at its end has changed something.
        assert re.fullmatch(r"snapshots; a crash now would lose [1-9]\d* changes", finding(server.url).found)
        with contextlib.closing(server.client()) as client:
            client.acl_setuser("looker", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-config"])
        unknown = finding(server.url.replace("redis://", "redis://looker:x@"))
        assert unknown.status == "warn"
        assert "may not run CONFIG GET" in unknown.found
    with Server(tmp_path, durable=True) as server:
        assert (finding(server.url).status, finding(server.url).found) == ("ok", "append-only file")
    with Server() as server:
        assert (finding(server.url).status, finding(server.url).found) == ("warn", "nothing is kept on disk")


def test_doctor_as_a_user_who_may_do_little(client, real_server, cli, examine):
    # In a cluster, nothing works without the map of slots.
    commands = ["+@read", "+ping", "+time", "+cluster|slots"]
    client.acl_setuser("looker", enabled=True, passwords=["+secret"], keys=["*"], commands=commands)
    url = real_server.url.replace("://", "://looker:secret@")
    try:
        findings = examine("--redis", url)
        said = cli("doctor", "--redis", url)
    finally:
        client.acl_deluser("looker")
    for what in ("version", "role", "eviction", "memory", "persistence"):
        assert findings[what].status == "warn"
        assert findings[what].advice == "run doctor as a user who may run INFO"
    for what in ("lua", "trial"):
        assert findings[what].status == "warn"
        assert findings[what].advice.startswith("run doctor once as a user who may, such as an operator of all names")
    assert findings["lua"].found == "not looked at, because this user may not run EVAL"
    assert findings["trial"].found.startswith("broken off: creating an accumulator is not permitted to this user")
    assert findings["access"].found == "user looker"
    assert "secret" not in said.output
    # What this user may not do says nothing about the server.
    assert said.exit_code == 0


@pytest.mark.servers(*ONE_NODE)
def test_doctor_knows_a_replica(client, cli_json, cli):
    with Server() as other:
        replica = redis.Redis.from_url(other.url)
        host, port = client.connection_pool.connection_kwargs["host"], client.connection_pool.connection_kwargs["port"]
        replica.replicaof(host, port)
        said = cli("doctor", "--redis", other.url)
        replica.close()
    assert said.exit_code == 1
    assert re.search(
        r"^BAD +role +a replica of .*\n +-> connect to the primary, or through Sentinel$", said.stdout, re.M
    )


@pytest.mark.servers("valkey")
def test_a_trial_whose_gradient_comes_back_changed(client, examine, proxy):
    def change():
        (key,) = client.keys("redisacc:{private-*}:inline")
        (gradient,) = client.hkeys(key)
        client.hset(key, gradient, np.zeros(2, np.float32).tobytes())

    proxy.after("commit", change)
    finding = examine("--redis", proxy.where)["trial"]
    assert (finding.status, finding.advice) == ("bad", "use another server")


@pytest.mark.servers("valkey")
def test_a_trial_of_a_user_who_hears_no_events(client, examine, real_server, clock):
    rules = ("on", ">secret", "resetchannels", "~*", "+@all")
    client.execute_command("ACL", "SETUSER", "deaf", *rules)
    try:
        with clock.running():
            finding = examine("--redis", real_server.url.replace("://", "://deaf:secret@"))["trial"]
    finally:
        client.acl_deluser("deaf")
    assert (finding.status, finding.found) == ("warn", "no events arrive")
    assert finding.advice.startswith(
        "allow the channels redisacc:*; without events, a waiting take polls once a second"
    )
