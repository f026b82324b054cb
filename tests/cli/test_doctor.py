"""The command `doctor`."""

import contextlib
import json
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import redis
from support.selection import ONE_NODE

import redisacc
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
    checks = "client version role eviction memory persistence access lua clock latency reducers trial"
    expected = dict.fromkeys(checks.split(), "ok")
    # No master of the tests' cluster has a replica.
    if server_name == "cluster":
        expected |= {"cluster": "warn", "moves": "ok", "partitions": "ok"}
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
    if "moves" in findings:
        assert findings["moves"].advice == "run doctor as a user who may run CLUSTER NODES and INFO"
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


@pytest.mark.servers("cluster")
@pytest.mark.forges
def test_partitions_that_one_master_has(open_dense, client, examine):
    open_dense("float32", [9], "w", partitions=2)
    finding = examine()["partitions"]
    assert (finding.status, finding.advice) == ("ok", "")
    at_first = [number for number in range(40) if client.keyslot(f"{{w/{number}}}") < 5000]
    client.hset("redisacc:{w}", "partitions", f"{at_first[0]},{at_first[1]}")
    finding = examine()["partitions"]
    assert finding.status == "warn"
    assert finding.advice == (
        "delete them when their training is finished and create them again: partitions are chosen at creation"
    )


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
def reducers(examine):
    """Returns what doctor finds out about reducers."""
    return lambda: examine()["reducers"]


def test_no_reducer_is_needed(open_dense, open_sparse, open_tree, reducers, take_round):
    not_needed = "not needed, because no take has waited for several large dense gradients"
    assert reducers().found == not_needed
    small = np.zeros(LARGE - 1, np.float32)
    take_round(open_dense("float32", [LARGE - 1], "small"), small)
    # The sum of one gradient has as many bytes as the gradient, and so has that of four in int8.
    take_round(open_dense("float32", [LARGE], "alone"), np.zeros(LARGE, np.float32), required=1)
    encoded = open_dense("float32", [5 * LARGE], "encoded")
    take_round(encoded, np.zeros(5 * LARGE, np.float32), required=4, encoding="int8")
    encoded.apply_grad(np.zeros(5 * LARGE, np.float32), local_step=1, encoding="int8")
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
        acc.apply_grad(gradient, local_step=1, encoding="int8" if kind == "encoded" else None)
    finding = reducers()
    size = 650 if kind == "encoded" else 512
    assert finding.status == "ok"
    assert finding.found == f"none works on w (gradients of {size} KiB)"
    assert "on the server's machine, or start both with `redisacc server --reduce`: takers then" in finding.advice
    said = cli("doctor")
    assert said.exit_code == 0
    assert re.search(r"^ok +reducers +none works on w", said.stdout, re.MULTILINE)
    assert max(map(len, said.stdout.splitlines())) <= 80


# On a cluster, the leases of reducers have other keys.
@pytest.mark.servers(*ONE_NODE)
def test_whether_reducers_keep_up(durations, open_dense, client, reducers, take_round, monkeypatch):
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
    assert finding.advice == "give the reducer a processor core of its own, and let it connect over a Unix socket"
    client.delete("redisacc:{w3}:reducer")
    assert reducers().found == "none works on w3 (gradients of 512 KiB)"
    acc = open_dense("float32", [LARGE], "p", partitions=2)
    take_round(acc, np.zeros(LARGE, np.float32))
    client.rename("redisacc:{w4}:reducer", f"redisacc:{{p}}:reducer:{acc.info().partitions[1]}")
    finding = reducers()
    assert (
        finding.found == "none works on some partitions of p (gradients of 512 KiB), so takers use none of the others"
    )
    assert finding.advice == "run `redisacc reduce --node HOST:PORT` on the machine of each node of the cluster"
    acc.delete()
    # A reducer leaves an accumulator that is idle.
    for number in (0, 1, 2):
        client.delete(f"redisacc:{{w{number}}}:reducer")
    durations(idle=0.0)
    finding = reducers()
    assert finding.found.startswith("unknown, because nothing has happened to w0 ")
    assert finding.advice == "run doctor again during the run"


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


def test_reducers_as_a_user_who_may_not_read(open_dense, client, real_server, examine):
    open_dense("float32", [LARGE], "w")
    client.acl_setuser("looker", enabled=True, passwords=["+secret"], keys=["redisacc:names"], commands=["+@all"])
    try:
        finding = examine("--redis", real_server.url.replace("://", "://looker:secret@"))["reducers"]
    finally:
        client.acl_deluser("looker")
    assert (finding.status, finding.found) == (
        "ok",
        "unknown, because this user may not list and read all accumulators",
    )
