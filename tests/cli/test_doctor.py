"""The command `doctor`."""

from __future__ import annotations

import contextlib
import re
import time

import numpy as np
import pytest
import redis

import redisacc
from redisacc._redis.connect import connect
from redisacc.cli.doctor import _access, _Server, _version, examine
from redisacc.cli.reducer_check import examine_reducers
from redisacc.embedded import Server

pytestmark = pytest.mark.servers("valkey", "cluster")


@pytest.mark.servers("valkey", "redis7", "redis62", "cluster")
def test_doctor_on_a_server_of_ours(cli, cli_json, client, monkeypatch, server_name):
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
    checks = "client version role eviction memory persistence access lua clock latency reducers trial"
    expected = dict.fromkeys(checks.split(), "ok")
    # No master of the tests' cluster has a replica.
    if server_name == "cluster":
        expected |= {"cluster": "warn", "moves": "ok", "partitions": "ok"}
    assert {what: finding["status"] for what, finding in findings.items()} == expected
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
    # In a cluster, nothing works without the map of slots.
    commands = ["+@read", "+ping", "+time", "+cluster|slots"]
    client.acl_setuser("looker", enabled=True, passwords=["+secret"], keys=["*"], commands=commands)
    url = real_server.url.replace("://", "://looker:secret@")
    try:
        findings = {finding.what: finding for finding in examine(connect(url), url)}
        said = cli("doctor", "--redis", url)
    finally:
        client.acl_deluser("looker")
    assert findings["version"].status == "warn"
    for what in ("lua", "trial"):
        assert findings[what].status == "warn"
        assert "as an operator" in findings[what].advice
    assert findings["lua"].found == "not looked at, because this user may not run EVAL"
    assert findings["trial"].found.startswith("broken off: creating an accumulator is not permitted to this user")
    assert findings["access"].found == "user looker"
    assert "secret" not in said.output
    # What this user may not do says nothing about the server.
    assert said.exit_code == 0


@pytest.mark.single_server
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


# The elements of a float32 gradient that is just large enough for a reducer.
LARGE = 128 * 1024


def lease(client, name, stored, late):
    """Makes everybody believe that a reducer works on the accumulator."""
    key = f"redisacc:{{{name}}}:reducer"
    since = int(time.time() * 1000)
    client.hset(key, mapping={"holder": "x", "who": "box:1", "since_ms": since, "stored": stored, "late": late})
    client.pexpire(key, 60_000)


@pytest.fixture
def take_round(background, until):
    """Takes a round while its gradients arrive."""

    def take(acc, *gradient, required=2, **options):
        running = background(acc.take_grad, required, timeout=60)
        until(lambda: acc.info().waiting)
        for _ in range(required):
            acc.apply_grad(*gradient, **options)
        running.result()

    return take


@pytest.fixture
def reducers(client, real_server):
    """Returns what doctor finds out about reducers."""
    return lambda: examine_reducers(connect(real_server.url))


def test_no_reducer_is_needed(open_dense, open_sparse, open_tree, reducers, take_round):
    not_needed = "not needed, because no take has waited for several large dense gradients"
    assert reducers().found == not_needed
    small = np.zeros(LARGE - 1, np.float32)
    take_round(open_dense("float32", [LARGE - 1], "small"), small)
    # The sum of one gradient has as many bytes as the gradient, and so has that of four in int8.
    take_round(open_dense("float32", [LARGE], "alone"), np.zeros(LARGE, np.float32), required=1)
    encoded = open_dense("float32", [5 * LARGE], "encoded")
    take_round(encoded, np.zeros(5 * LARGE, np.float32), required=4, wire="int8")
    encoded.apply_grad(np.zeros(5 * LARGE, np.float32), local_step=1, wire="int8")
    rows = (np.arange(LARGE), np.zeros((LARGE, 1), np.float32))
    take_round(open_sparse("float32", [LARGE, 1], "sparse"), *rows)
    tree = open_tree({"d": ("float32", [LARGE - 1]), "s": redisacc.Sparse("float32", [LARGE, 1])}, "tree")
    take_round(tree, {"d": small, "s": rows})
    # No take has waited, so nobody knows how many gradients one requires.
    open_dense("float32", [LARGE], "new").apply_grad(np.zeros(LARGE, np.float32))
    open_dense("float32", None, "any").apply_grad(np.zeros(3))
    finding = reducers()
    assert (finding.status, finding.found, finding.advice) == ("ok", not_needed, "")


@pytest.mark.parametrize("kind", ["declared", "of any shape", "encoded", "tree"])
def test_a_reducer_would_pay_off(open_dense, open_tree, reducers, take_round, cli, kind):
    gradient = np.zeros(LARGE if kind != "encoded" else 5 * LARGE, np.float32)
    if kind == "tree":
        acc = open_tree({"d": ("float32", [LARGE])}, "w")
        take_round(acc, {"d": gradient})
    else:
        acc = open_dense("float32", None if kind == "of any shape" else gradient.shape, "w")
        take_round(acc, gradient, required=6 if kind == "encoded" else 2)
    if kind in ("of any shape", "encoded"):
        # The declared shape does not tell the size.
        acc.apply_grad(gradient, local_step=1, wire="int8" if kind == "encoded" else None)
    finding = reducers()
    size = 650 if kind == "encoded" else 512
    assert finding.status == "ok"
    assert finding.found == f"none works on w (gradients of {size} KiB)"
    assert "redisacc reduce" in finding.advice
    said = cli("doctor")
    assert said.exit_code == 0
    assert re.search(r"^ok +reducers +none works on w", said.stdout, re.MULTILINE)
    assert max(map(len, said.stdout.splitlines())) <= 80


# On a cluster, the leases of reducers have other keys.
@pytest.mark.single_server
def test_whether_reducers_keep_up(open_dense, client, reducers, take_round, monkeypatch):
    opened = [open_dense("float32", [LARGE], f"w{number}") for number in range(5)]
    for number, acc in enumerate(opened):
        take_round(acc, np.zeros(LARGE, np.float32))
        lease(client, f"w{number}", 5, number)
    finding = reducers()
    assert finding.status == "ok"
    assert finding.found.endswith("w2 (gradients of 512 KiB) and 2 more, and were in time for 25 of 35 rounds"), (
        finding.found
    )
    assert finding.advice == ""
    lease(client, "w3", 5, 6)
    finding = reducers()
    assert finding.status == "ok"
    assert finding.found == "too late for most rounds of w3 (gradients of 512 KiB)"
    assert "Unix socket" in finding.advice
    client.delete("redisacc:{w3}:reducer")
    assert reducers().found == "none works on w3 (gradients of 512 KiB)"
    acc = open_dense("float32", [LARGE], "p", partitions=2)
    take_round(acc, np.zeros(LARGE, np.float32))
    client.rename("redisacc:{w4}:reducer", f"redisacc:{{p}}:reducer:{acc.info().partitions[1]}")
    finding = reducers()
    assert (
        finding.found == "none works on some partitions of p (gradients of 512 KiB), so takers use none of the others"
    )
    assert "--node" in finding.advice
    acc.delete()
    # A reducer leaves an accumulator that is idle.
    for number in (0, 1, 2):
        client.delete(f"redisacc:{{w{number}}}:reducer")
    monkeypatch.setattr("redisacc.cli.reducer_check.IDLE", 0.0)
    finding = reducers()
    assert finding.found.startswith("unknown, because nothing has happened to w0 ")
    assert "during the training" in finding.advice


@pytest.mark.forges
def test_reducers_of_what_redisacc_did_not_write(open_dense, client, reducers, take_round):
    acc = open_dense("float32", [LARGE], "w")
    take_round(acc, np.zeros(LARGE, np.float32))
    for field, value in {"wanted": "many", "dtype": "text", "format": "1", "shape": "[-1]"}.items():
        before = client.hget("redisacc:{w}", field)
        client.hset("redisacc:{w}", field, value)
        assert reducers().found.startswith("not needed"), field
        client.hset("redisacc:{w}", field, before)
    client.sadd("redisacc:names", "nowhere")
    assert reducers().found.startswith("none works on w ")


def test_reducers_as_a_user_who_may_not_read(open_dense, client, real_server):
    open_dense("float32", [LARGE], "w")
    client.acl_setuser("looker", enabled=True, passwords=["+secret"], keys=["redisacc:names"], commands=["+@all"])
    try:
        finding = examine_reducers(connect(real_server.url.replace("://", "://looker:secret@")))
    finally:
        client.acl_deluser("looker")
    assert (finding.status, finding.found) == (
        "ok",
        "unknown, because this user may not list and read all accumulators",
    )
