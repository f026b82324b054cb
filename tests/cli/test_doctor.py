"""The command `doctor`."""

from __future__ import annotations

import contextlib
import re

import pytest
import redis

from redisacc._redis.connect import connect
from redisacc.cli.doctor import _access, _Server, _version, examine
from redisacc.embedded import Server

pytestmark = pytest.mark.servers("valkey")


@pytest.mark.servers("valkey", "redis7", "redis62")
def test_doctor_on_a_server_of_ours(cli, cli_json, client, monkeypatch):
    # While other tests run, round trips are slow.
    monkeypatch.setattr("redisacc.cli.doctor._SLOW", 1.0)
    # The tests' servers keep nothing on disk.
    client.config_set("save", "60 1")
    client.config_set("maxmemory", 2**30)
    try:
        findings = {finding["what"]: finding for finding in cli_json("doctor")}
    finally:
        client.config_set("maxmemory", 0)
        client.config_set("save", "")
    assert {what: finding["status"] for what, finding in findings.items()} == dict.fromkeys(findings, "ok")
    assert set(findings) == {
        "client", "version", "role", "eviction", "memory", "persistence", "access", "lua", "clock", "latency", "trial",
    }  # fmt: skip
    assert client.keys() == []
    said = cli("doctor")
    assert said.exit_code == 0
    assert max(map(len, said.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("settings", "what", "status", "advice"),
    [
        ({"maxmemory-policy": "allkeys-lru", "maxmemory": 2**30}, "eviction", "bad", "noeviction"),
        ({"maxmemory-policy": "volatile-ttl", "maxmemory": 0}, "eviction", "warn", "noeviction"),
        ({"maxmemory": 0}, "memory", "warn", "maxmemory"),
        ({"maxmemory": 10**6}, "memory", "bad", "more memory"),
        ({"appendonly": "no", "save": ""}, "persistence", "warn", "appendonly yes"),
    ],
)
def test_doctor_finds_settings_that_are_wrong(cli, client, real_server, settings, what, status, advice):
    before = {name: client.config_get(name)[name] for name in settings}
    for name, value in settings.items():
        client.config_set(name, value)
    try:
        findings = {finding.what: finding for finding in examine(connect(real_server.url), real_server.url)}
        code = cli("doctor").exit_code
    finally:
        client.config_set("maxmemory", 0)
        for name, value in before.items():
            client.config_set(name, value)
    assert findings[what].status == status
    assert advice in findings[what].advice
    # A server without room for a gradient also fails the trial.
    assert code == (1 if any(finding.status == "bad" for finding in findings.values()) else 0)


def test_doctor_knows_each_kind_of_persistence(tmp_path):
    def finding(url):
        return next(found for found in examine(connect(url), url) if found.what == "persistence")

    with Server(tmp_path) as server:
        assert (finding(server.url).status, finding(server.url).found) == (
            "ok",
            "snapshots; a crash now would lose 0 changes",
        )
        with contextlib.closing(server.client()) as client:
            client.set("a", 1)
            assert finding(server.url).found == "snapshots; a crash now would lose 1 change"
            client.acl_setuser("looker", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-config"])
        unknown = finding(server.url.replace("redis://", "redis://looker:x@"))
        assert unknown.status == "warn"
        assert "may not run CONFIG GET" in unknown.found
    with Server(tmp_path, durable=True) as server:
        assert (finding(server.url).status, finding(server.url).found) == ("ok", "append-only file")
    with Server() as server:
        assert (finding(server.url).status, finding(server.url).found) == ("warn", "nothing is kept on disk")


def test_doctor_as_a_user_who_may_do_little(client, real_server, cli):
    client.acl_setuser("looker", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@read", "+ping", "+time"])
    url = real_server.url.replace("redis://", "redis://looker:secret@")
    try:
        findings = {finding.what: finding for finding in examine(connect(url), url)}
        said = cli("doctor", "--redis", url)
    finally:
        client.acl_deluser("looker")
    assert findings["version"].status == "warn"
    assert findings["lua"].status == "bad"
    assert findings["trial"].status == "bad"
    assert findings["trial"].found.startswith("creating an accumulator failed: ")
    assert "secret" not in said.output
    assert said.exit_code == 1


def test_doctor_knows_a_replica(client, cli_json, cli):
    with Server() as other:
        replica = redis.Redis.from_url(other.url)
        host, port = client.connection_pool.connection_kwargs["host"], client.connection_pool.connection_kwargs["port"]
        replica.replicaof(host, port)
        said = cli("doctor", "--redis", other.url)
        replica.close()
    assert said.exit_code == 1
    assert re.search(r"^BAD +role +a replica of ", said.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("info", "status"),
    [
        ({"redis_version": "6.0.16"}, "bad"),
        ({"redis_version": "6.2.0"}, "ok"),
        ({"redis_version": "7.2.4", "valkey_version": "8.0.1"}, "ok"),
        ({"redis_version": "7.2.4", "valkey_version": "7.1.0"}, "bad"),
        ({"redis_version": "odd"}, "bad"),
        ({}, "warn"),
    ],
)
def test_versions(info, status):
    assert _version(_Server("here:1", info, snapshots=None)).status == status


@pytest.mark.parametrize(
    ("url", "status"),
    [
        (None, "ok"),
        ("redis://localhost:1", "ok"),
        ("unix:///x", "ok"),
        ("redis://box", "warn"),
        ("redis://:pw@box", "warn"),
        ("rediss://:pw@box", "ok"),
    ],
)
def test_access(url, status, real_server):
    finding = _access(connect(real_server.url), url)
    assert finding.status == status
    assert "pw" not in finding.found
