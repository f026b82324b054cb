"""What the command `doctor` concludes from what a server says."""

import time
from types import SimpleNamespace

from support.rows import every_row

import redisacc
from redisacc.tools.cli.checks import _persistence, access, clock, findings, latency, lua


@every_row(
    "info, status, advice",
    [
        ({"redis_version": "6.0.16"}, "bad", "use Redis 6.2 or later"),
        ({"redis_version": "6.2.0"}, "ok", ""),
        ({"redis_version": "7.2.4", "valkey_version": "8.0.1"}, "ok", ""),
        ({"redis_version": "7.2.4", "valkey_version": "7.1.0"}, "bad", "use Valkey 7.2 or later"),
        ({"redis_version": "odd"}, "bad", "use Redis 6.2 or later"),
        ({}, "warn", "run doctor as a user who may run INFO"),
    ],
)
def test_versions(info, status, advice):
    (finding,) = findings("version", {"here:1": info})
    assert (finding.status, finding.advice) == (status, advice)


@every_row("status", ["aof_last_write_status", "rdb_last_bgsave_status"])
def test_a_disk_that_refuses(status):
    finding = _persistence({"aof_enabled": "1", status: "err"})
    assert (finding.status, finding.advice) == ("bad", "read the server's log; the disk may be full")


def refuse(*_command):
    raise redisacc.ServerError("the server refused: ERR unknown command 'EVAL'")


@every_row(
    "check, answer, status, advice",
    [
        (lua, refuse, "bad", "use a server that runs Lua scripts, because every operation is one"),
        (
            lua,
            lambda *_: [b"", b"cmsgpack", b"bit"],
            "warn",
            "use a server with these libraries; without struct, every",
        ),
        (lua, lambda *_: [b"struct", b"", b""], "ok", ""),
        (
            clock,
            lambda *_: [b"7", b"0"],
            "warn",
            "run a time service; otherwise, times of events and in logs disagree",
        ),
        (clock, lambda *_: [b"%d" % time.time(), b"500000"], "ok", ""),
        (
            latency,
            lambda *_: time.sleep(0.006),
            "warn",
            "move the server closer, because a small gradient costs a round",
        ),
    ],
)
def test_what_a_server_can_do_and_how_fast(check, answer, status, advice):
    finding = check(SimpleNamespace(call=answer))
    assert finding.status == status
    assert finding.advice.startswith(advice)
    assert bool(finding.advice) == bool(advice)


@every_row(
    "url, advice",
    [
        (None, ""),
        ("redis://localhost:1", ""),
        ("unix:///x", ""),
        (
            "redis://box",
            "set a password or an ACL, because anybody who reaches the server can read and change everything",
        ),
        ("redis://:pw@box", "use rediss:// unless the network is trusted"),
        ("redis+cluster://:pw@box", "use rediss+cluster:// unless the network is trusted"),
        ("rediss://:pw@box", ""),
    ],
)
def testaccess(url, advice):
    finding = access(SimpleNamespace(call=lambda *_: b"ann"), url)
    assert (finding.status, finding.advice) == ("warn" if advice else "ok", advice)
    assert "pw" not in finding.found
