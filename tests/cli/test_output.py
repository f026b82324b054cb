"""Safe text, and texts for numbers and times."""

from __future__ import annotations

import datetime

import pytest
from terminals import EVIL

from redisacc._text import age_text, printable, seconds_text
from redisacc.cli.shared.output import bytes_text


@pytest.mark.servers("valkey")
@pytest.mark.forges
def test_nothing_raw_reaches_the_output(cli, client, open_dense):
    acc = open_dense("float32", [1], "w")
    acc.apply_grad([1.0])
    client.sadd("redisacc:names", EVIL)
    client.copy("redisacc:{w}", f"redisacc:{{{EVIL}}}")
    client.hset("redisacc:{w}:workers", EVIL, "1")
    client.hset("redisacc:{w}:sessions", EVIL, f"1 applied 0 1 1795242299846 1 0 {EVIL}")
    client.hset("redisacc:{w}:takers", "t", f"3 1795242299846 {EVIL}")
    client.zadd("redisacc:{w}:queue", {"t": 1})
    client.hset("redisacc:{w}:taken", EVIL, f"granted 0 1 1795242299846 [1] {EVIL}")
    for words in (
        ("ls",), ("show", "w"), ("show", EVIL), ("watch", "-n", 1), ("recover", "w"), ("gc", "--dry-run"),
        ("show", "w\x1b[2J"), ("show", EVIL, "--top", 1),
    ):  # fmt: skip
        found = cli(*words)
        assert "\x1b" not in found.output, words
        assert "\x1b" not in cli(*words, "--json").output, words
    assert "w\\x1b[2Jx" in cli("show", "w").stdout


def test_text():
    assert printable("plain ünï 日本") == "plain ünï 日本"
    assert printable("a\nb\x9b\u202e\ud800") == "a\\nb\\x9b\\u202e\\ud800"
    assert [bytes_text(n) for n in (0, 999, 1023, 2048, 10**6, 5 * 2**30, 2**60)] == [
        "0 B", "999 B", "0.999 KiB", "2 KiB", "977 KiB", "5 GiB", "1048576 TiB",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (-1, 0.04, 9.94, 9.96, 89, 90, 5400, 86400, 2e5)] == [
        "0.0 s", "0.0 s", "9.9 s", "10 s", "89 s", "2 min", "2 h", "24 h", "2 d",
    ]  # fmt: skip
    start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    assert age_text(start + datetime.timedelta(seconds=90), start) == "2 min"
