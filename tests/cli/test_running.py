"""doctor, export, completion, and the command itself."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
import urllib.request

import pytest
import redis

import redisacc.cli
from redisacc._link import link_to
from redisacc.cli.doctor import examine
from redisacc.embedded import Server

pytestmark = pytest.mark.servers("valkey")


# doctor


@pytest.mark.servers("valkey", "redis7", "redis62")
def test_doctor_on_a_server_of_ours(cli, cli_json, client, monkeypatch):
    # A machine that is busy with other tests is slow.
    monkeypatch.setattr("redisacc.cli.doctor._SLOW", 1.0)
    client.config_set("maxmemory", 2**30)
    try:
        findings = {finding["what"]: finding for finding in cli_json("doctor")}
    finally:
        client.config_set("maxmemory", 0)
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
        ({"appendonly": "no"}, "persistence", "warn", "appendonly yes"),
    ],
)
def test_doctor_finds_settings_that_are_wrong(cli, client, real_server, settings, what, status, advice):
    before = {name: client.config_get(name)[name] for name in settings}
    for name, value in settings.items():
        client.config_set(name, value)
    try:
        findings = {finding.what: finding for finding in examine(link_to(real_server.url), real_server.url)}
        code = cli("doctor").exit_code
    finally:
        client.config_set("maxmemory", 0)
        for name, value in before.items():
            client.config_set(name, value)
    assert findings[what].status == status
    assert advice in findings[what].advice
    # A server without room for a gradient fails the trial, too.
    assert code == (1 if any(finding.status == "bad" for finding in findings.values()) else 0)


def test_doctor_as_a_user_who_may_do_little(client, real_server, cli):
    client.acl_setuser("looker", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@read", "+ping", "+time"])
    url = real_server.url.replace("redis://", "redis://looker:secret@")
    try:
        findings = {finding.what: finding for finding in examine(link_to(url), url)}
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
    from redisacc.cli.doctor import _version

    assert _version(info).status == status


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
    from redisacc.cli.doctor import _access

    finding = _access(link_to(real_server.url), url)
    assert finding.status == status
    assert "pw" not in finding.found


# export


def test_export(real_server, open_dense, background, until):
    ann, bob = (open_dense("float32", [1], "w", worker=name) for name in ("ann", "bob"))
    other = open_dense("float32", [1], "other")
    ann.apply_grad([1.0])
    bob.apply_grad([1.0])
    ann.take_grad(2)
    ann.apply_grad([1.0], 1)
    ann.apply_grad([1.0], 0)
    take = background(ann.take_grad, 2, timeout=30)
    until(lambda: ann.info().waiting)
    words = [sys.executable, "-m", "redisacc", "export", "--port", "0", "--redis", real_server.url, "w*"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = re.search(r"at (http://127\.0\.0\.1:\d+/metrics),", process.stdout.readline())[1]
            with urllib.request.urlopen(url, timeout=20) as reply:
                lines = reply.read().decode().splitlines()
        finally:
            process.send_signal(2)
            assert process.wait(20) == 130
    for line in (
        "redisacc_up 1.0",
        'redisacc_global_step{accumulator="w"} 1.0',
        'redisacc_accumulated{accumulator="w"} 1.0',
        'redisacc_required{accumulator="w"} 2.0',
        'redisacc_applied_total{accumulator="w"} 3.0',
        'redisacc_stale_total{accumulator="w"} 1.0',
        'redisacc_takes_total{accumulator="w"} 1.0',
        'redisacc_worker_applied_total{accumulator="w",worker="ann"} 2.0',
        'redisacc_worker_missing{accumulator="w",worker="bob"} 1.0',
        'redisacc_worker_missing{accumulator="w",worker="ann"} 0.0',
    ):
        assert line in lines
    assert not any("other" in line for line in lines if not line.startswith("#"))
    bob.apply_grad([1.0], 1)
    take.result()
    ann.delete()
    other.delete()


def test_export_without_a_server_says_so_in_a_metric():
    from prometheus_client import CollectorRegistry, generate_latest

    from redisacc.cli.export import Metrics

    registry = CollectorRegistry()
    registry.register(Metrics(link_to("redis://127.0.0.1:1"), []))
    assert "redisacc_up 0.0" in generate_latest(registry).decode()


def test_export_on_a_port_that_is_taken(cli, real_server):
    port = real_server.url.rsplit(":", 1)[1].split("/")[0]
    found = cli("export", "--port", port)
    assert found.exit_code == 1
    assert "no way to listen on 127.0.0.1" in found.stderr


# The command


def test_every_command_is_a_module_with_help(cli):
    listed = cli("--help").stdout
    for name, (module, help_text) in redisacc.cli._COMMANDS.items():
        assert module == f"redisacc.cli.{name.replace('-', '_')}"
        assert re.search(rf"^  {name} +{re.escape(help_text)}$", listed, re.MULTILINE)
        said = cli(name, "--help")
        assert said.exit_code == 0
        assert max(map(len, said.stdout.splitlines())) <= 80
        if name not in ("acl", "completion", "demo", "server"):
            assert "--redis URL" in said.stdout
            assert "Exit codes: 0 done" in said.stdout


def test_help_imports_no_command():
    code = (
        "import sys, redisacc.cli as c; c.main(['--help'], standalone_mode=False); "
        "print([m for m in sys.modules if m.startswith('redisacc.cli.')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


def test_without_prometheus_client_export_says_what_to_install():
    code = "import sys; sys.modules['prometheus_client'] = None; import redisacc.cli as c; c.main(['export'])"
    found = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2
    assert found.stderr == "redisacc: export needs prometheus-client: pip install 'redisacc[export]'\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(cli, shell):
    said = cli("completion", shell).stdout
    assert "_REDISACC_COMPLETE" in said
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=said, text=True, check=True, timeout=20)


def test_names_are_completed(real_server, open_dense, client):
    for name in ("weights-1", "weights-2", "other"):
        open_dense("float32", [1], name)
    client.sadd("redisacc:names", "weights-\x1b[2J")

    def complete(*words: str) -> list[str]:
        environment = {
            **os.environ, "REDISACC_URL": real_server.url, "_REDISACC_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(("redisacc", *words)), "COMP_CWORD": str(len(words)),
        }  # fmt: skip
        code = "import redisacc.cli as c; c.main(prog_name='redisacc')"
        found = subprocess.run(
            [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment, timeout=60
        )
        return [line.partition(",")[2] for line in found.stdout.splitlines()]

    assert complete("sh") == ["show"]
    assert complete("show", "wei") == ["weights-1", "weights-2"]
    assert complete("watch", "other", "weights-2") == ["weights-2"]
    client.srem("redisacc:names", "weights-\x1b[2J")
    for name in ("weights-1", "weights-2", "other"):
        open_dense("float32", [1], name).delete()


def on_a_terminal(*words: str, until: str, lines: int = 24) -> str:
    """What a command writes to a terminal of 80 columns, until that is there; then it gets Ctrl-C."""
    pid, terminal = pty.fork()
    if pid == 0:
        command = [sys.executable, "-m", "redisacc", *words]
        os.execve(
            sys.executable, command, os.environ | {"COLUMNS": "80", "LINES": str(lines), "TERM": "xterm-256color"}
        )
    written, stopped = b"", False
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.5)[0]:
            try:
                chunk = os.read(terminal, 65536)
            except OSError:  # how Linux reports the other end's end
                break
            written += chunk
            if not chunk:
                break
            if not stopped and re.search(until, written.decode(errors="replace")):
                stopped = True
                os.write(terminal, b"\x03")
    os.close(terminal)
    os.waitpid(pid, 0)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())


def test_watch_on_a_terminal(real_server, open_dense, background, until):
    long_name = "a-name-that-is-much-too-long-for-a-terminal-of-eighty-columns-" + "x" * 40
    acc = open_dense("float32", [1], long_name, worker="ann-" + "y" * 80)
    take = background(acc.take_grad, 2, timeout=60)
    until(lambda: acc.info().waiting)
    acc.apply_grad([1.0])
    said = on_a_terminal("watch", "--redis", real_server.url, "--interval", "0.1", until=r"(?s)1 of 2.*1 of 2")
    lines = re.split(r"[\r\n]+", said)
    assert max(map(len, lines)) <= 80
    assert any("━" in line and "1 of 2 for ann-y" in line for line in lines)
    acc.apply_grad([1.0])
    take.result()
    said = on_a_terminal("ls", "--redis", real_server.url, until="never")
    assert max(map(len, re.split(r"[\r\n]+", said))) <= 80
    assert "a-name" in said
    acc.delete()
