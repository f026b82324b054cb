"""ls, show, watch, tail: what they say is so, and nothing that comes from Redis reaches a terminal raw."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

import redisacc
from redisacc._dtypes import TABLE
from redisacc.cli._common import age_text, bytes_text, plain, safe, seconds_text

pytestmark = pytest.mark.servers("valkey")

EVIL = "w\x1b[2Jx"


def test_ls(cli, cli_json, open_dense, open_sparse, background, until):
    dense, sparse = open_dense("float32", [3], "a-dense"), open_sparse("float64", [None, 2], "b-sparse")
    dense.apply_grad([1, 2, 3])
    dense.set_global_step(2**53 + 1)
    takes = [background(dense.take_grad, n, timeout=30) for n in (2, 3)]
    until(lambda: len(dense.info().waiting) == 2)
    first = dense.info().waiting[0].num_required
    said = cli("ls")
    lines = [line.split() for line in said.stdout.splitlines()]
    assert lines[0] == ["NAME", "KIND", "DTYPE", "SHAPE", "STEP", "COUNT", "WAITING", "BYTES", "ACTIVE"]
    assert lines[1][:8] == ["a-dense", "dense", "float32", "[3]", "9007199254740993", "1", str(first), "+1"]
    assert lines[2][:7] == ["b-sparse", "sparse", "float64", "[-1,2]", "0", "0", "-"]
    (found,) = cli_json("ls", "a-*")
    assert (found["name"], found["global_step"], found["num_accumulated"]) == ("a-dense", 2**53 + 1, 1)
    assert sorted(found["waiting"]) == [2, 3]
    assert found["bytes"] > 100
    assert cli_json("ls", "nothing*") == []
    assert "no accumulators of that pattern" in cli("ls", "nothing*").stderr
    for _ in range(4):
        dense.apply_grad([1, 2, 3], 2**53 + 9)
    dense.apply_grad([1, 2, 3], 2**53 + 9)
    takes[0 if first == 2 else 1].result()
    for _ in range(3):
        dense.apply_grad([1, 2, 3], 2**53 + 9)
    for take in takes:
        take.result()
    dense.delete()
    sparse.delete()


def test_ls_of_private_ones(cli, cli_json, open_dense):
    private = open_dense("float32", [3])
    name = private.accumulator_ref.removeprefix("redisacc:{").removesuffix("}")
    assert cli_json("ls") == []
    assert [found["name"] for found in cli_json("ls", "--private")] == [name]


def test_ls_passes_over_names_without_a_record(cli, cli_json, client, open_dense):
    open_dense("float32", [3], "w")
    client.sadd("redisacc:names", "gone")
    assert [found["name"] for found in cli_json("ls")] == ["w"]
    client.srem("redisacc:names", "gone")
    open_dense("float32", [3], "w").delete()


def test_show(cli, cli_json, open_sparse, background, until, monkeypatch):
    monkeypatch.setattr("redisacc._parked.SMALL_BYTES", 0)
    ann, bob = (open_sparse("float32", [100, 2], "w", worker=name) for name in ("ann", "bob"))
    for acc in (ann, bob):
        acc.apply_grad([1], [[1, 2]])
    chief = open_sparse("float32", [100, 2], "w", worker="chief")
    left = chief.take(2)
    left.__enter__()
    big = open_sparse("float32", [100, 2], "w", worker="ann", in_place_limit=0)
    big.apply_grad([1, 7], [[1, 2], [3, 4]], local_step=1)
    take = background(chief.take_grad, 2, timeout=30)
    until(lambda: chief.info().waiting)
    said = cli("show", "w").stdout
    for pattern in (
        r"^w  sparse float32 \[100,2\] MEAN$",
        r"^  step +1$",
        r"^  this round +1 of 2 gradients, each \[2\]$",
        r"^  so far +3 applied, 0 stale, 0 sent twice, 1 taken$",
        r"^  ann +1 +2 +0 +\d",
        r"^  bob +missing +1 +0 +\d",
        r"^  chief for 2$",
        r"^  step 0, 2 gradients, .* ago to chief$",
        r"^    token \d{13}-[0-9a-f]{16}-\d+$",
        r"^  parts +2 +32 B$",
    ):
        assert re.search(pattern, said, re.MULTILINE), (pattern, said)
    assert max(map(len, said.splitlines())) <= 80
    facts = cli_json("show", "w")
    assert facts["missing"] == ["bob"]
    assert facts["unacknowledged"][0]["num_accumulated"] == 2
    assert facts["memory"]["parts"] == {"keys": 2, "bytes": 32}
    assert facts["shape"] == [100, 2]
    assert cli_json("show", chief.accumulator_ref)["name"] == "w"
    bob.apply_grad([1], [[1, 2]], local_step=1)
    take.result()
    with chief.recover():
        pass
    chief.delete()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "uint8", "complex64"])
@pytest.mark.parametrize("reduction", ["MEAN", "SUM"])
def test_rows_equal_peek(cli_json, open_sparse, dtype, reduction, monkeypatch):
    # Some of the parked ones are small, others come in parts.
    monkeypatch.setattr("redisacc._parked.SMALL_BYTES", 64 + 8 * 4 * 4 - 1)
    accs = [
        open_sparse(dtype, [50, 2, 2], "w", reduction_type=reduction, in_place_limit=limit, parked_limit=10_000)
        for limit in (10**9, 0, 0)
    ]
    rng = np.random.default_rng(1)
    hits = np.zeros(50, int)
    for number in range(40):
        indices = rng.choice(49, 8, replace=False)
        hits[indices] += 1
        values = rng.normal(size=(8, 2, 2)) * 50
        accs[number % 3].apply_grad(indices, np.abs(values).astype(TABLE[dtype].storage))
    look = accs[0].peek().gradient
    wanted = [3, 0, 49, 17]
    found = cli_json("show", "w", *[word for index in wanted for word in ("--index", index)])
    assert [row["index"] for row in found["rows"]] == sorted(index for index in wanted if hits[index])
    for row in found["rows"]:
        expected = look.values[np.searchsorted(look.indices, row["index"])]
        assert row["count"] == hits[row["index"]]
        assert row["sum" if reduction == "SUM" else "mean"] == plain(expected)
    top = cli_json("show", "w", "--top", 5)["rows"]
    norms = np.linalg.norm(look.values.astype(np.complex128).reshape(len(look.values), -1), axis=1)
    assert [row["norm"] for row in top] == pytest.approx(sorted(norms, reverse=True)[:5])
    for row in top:
        expected = look.values[np.searchsorted(look.indices, row["index"])]
        assert row["sum" if reduction == "SUM" else "mean"] == plain(expected)
    most = cli_json("show", "w", "--top", 5, "--by", "hits")["rows"]
    assert [row["count"] for row in most] == sorted(hits, reverse=True)[:5]
    accs[0].delete()


def test_rows_of_dense_ones(cli, cli_json, open_dense):
    acc = open_dense("float64", [3, 2], "w")
    assert cli_json("show", "w", "--top", 2)["rows"] == []
    acc.apply_grad([[1, 2], [30, 40], [np.nan, 1]])
    acc.apply_grad([[3, 2], [30, 40], [5, np.inf]])
    rows = cli_json("show", "w", "--index", 0, "--index", 1)["rows"]
    assert rows[0] == {"index": 0, "count": 2, "norm": pytest.approx(8**0.5), "sum": [4, 4], "mean": [2, 2]}
    assert [row["index"] for row in cli_json("show", "w", "--top", 2)["rows"]] == [2, 1]
    assert cli_json("show", "w", "--index", 2)["rows"][0]["mean"] == ["nan", "inf"]
    said = cli("show", "w", "--index", 1, "--index", 9).stdout
    assert "row 1  held by 2  norm 50\n  sum   60.0 80.0\n  mean  30.0 40.0\n" in said
    assert "row 9  held by no gradient" in said
    acc.delete()


def test_tail(cli, real_server, open_dense, background, client, until):
    # Names of their own: a subscription of another test may linger.
    acc = open_dense("float32", [1], "tailed", worker=EVIL.replace("\x1b", "-"))
    run = background(cli, "tail", "tailed", "-n", 3, "--json")
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
    run = background(cli, "tail", "escaped")
    until(lambda: client.pubsub_numsub("redisacc:{escaped}:events")[0][1])
    client.publish("redisacc:{escaped}:events", f"applied step=5 count=2 worker={EVIL}")
    client.publish("redisacc:{escaped}:events", "\x1b[31m\u202efoo")
    acc.delete()
    lines = run.result().stdout.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3}  applied    step 5  count 2  w\\x1b\[2Jx", lines[0])
    assert lines[1].endswith("unknown    text \\x1b[31m\\u202efoo")
    assert "deleted" in lines[2]


def test_tail_of_one_that_is_being_deleted(cli, open_dense):
    """The word that it is deleted went out before anybody listened; its record still stands."""
    acc = open_dense("float32", [1], "w")
    assert acc._scripts.delete(finish=False) == "closed"
    found = cli("tail", "w")
    assert (found.exit_code, found.stdout.split()[1:]) == (0, ["deleted"])


def test_tail_ends_with_its_timeout(cli, open_dense):
    open_dense("float32", [1], "w")
    found = cli("tail", "w", "--timeout", "0.05")
    assert (found.exit_code, found.stdout) == (0, "")
    open_dense("float32", [1], "w").delete()


def test_watch_in_a_pipe(cli, open_dense, background, until):
    ann, bob = (open_dense("float32", [1], "w", worker=name) for name in ("ann", "bob"))
    other = open_dense("float32", [1], "other")
    ann.apply_grad([1.0])
    bob.apply_grad([1.0])
    ann.take_grad(2)
    take = background(ann.take_grad, 2, timeout=30)
    until(lambda: ann.info().waiting)
    ann.apply_grad([1.0], 1)
    facts = [json.loads(line) for line in cli("watch", "w", "-n", 2, "--interval", 0.05, "--json").stdout.splitlines()]
    assert len(facts) == 2
    assert list(facts[1]["missing"]) == ["bob"]
    assert (facts[1]["num_accumulated"], facts[1]["num_required"], facts[1]["waiting"]) == (1, 2, 1)
    lines = cli("watch", "-n", 1).stdout.splitlines()
    assert len(lines) == 2
    assert "  other  step 0  0 gradients, nobody waits" in lines[0]
    assert "  w  step 1  1 of 2 for ann" in lines[1]
    assert [json.loads(line)["name"] for line in cli("watch", "o*", "-n", 1, "--json").stdout.splitlines()] == ["other"]
    bob.apply_grad([1.0], 1)
    take.result()
    ann.delete()
    other.delete()


def test_rates_are_per_second(open_dense):
    import dataclasses
    import datetime

    from redisacc.cli.watch import View

    acc = open_dense("float32", [1], "w")
    info = acc.info()
    view = View(info)
    for seconds, applied in enumerate((10, 20, 60)):
        at = info.read_at + datetime.timedelta(seconds=seconds)
        view.add(dataclasses.replace(info, applied=applied, stale=2 * seconds, takes=seconds, read_at=at))
    assert view.rates == (25.0, 2.0, 1.0)
    acc.delete()


def times_out(chief):
    try:
        chief.take_grad(3, timeout=3)
    except redisacc.TakeTimeoutError:
        return True
    return False


WATCH = [sys.executable, "-m", "redisacc", "watch", "--json", "--interval", "0.1"]


def test_a_stopped_worker_is_named(real_server, open_dense, until, tmp_path):
    """Three real workers and a chief who asks for three; one is stopped."""
    code = """
import sys, redisacc
acc = redisacc.ConditionalAccumulator("float32", [1], "w", worker=sys.argv[1], redis=sys.argv[2])
step = 0
while True:
    acc.apply_grad([1.0], step)
    step = acc.wait_for_step(step + 1)
"""
    chief = open_dense("float32", [1], "w", worker="chief")
    workers = {
        name: subprocess.Popen([sys.executable, "-c", code, name, real_server.url], stderr=subprocess.DEVNULL)
        for name in ("ann", "bob", "cyn")
    }
    try:
        for _ in range(3):
            chief.take_grad(3, timeout=60)
        os.kill(workers["bob"].pid, signal.SIGSTOP)
        until(lambda: times_out(chief), 60)
        # What watch shows a terminal has to be complete in a pipe, too.
        with subprocess.Popen([*WATCH, "--redis", real_server.url, "w"], stdout=subprocess.PIPE, text=True) as watch:
            assert watch.stdout is not None
            facts = json.loads(watch.stdout.readline())
            watch.send_signal(signal.SIGINT)
            assert watch.wait(20) == 130
        assert list(facts["missing"]) == ["bob"]
        assert facts["num_accumulated"] == 2
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    chief.delete()


def test_a_server_that_is_silent_is_said_and_waited_for(open_dense, real_server):
    from redisacc._link import link_to
    from redisacc.cli.watch import Board

    acc = open_dense("float32", [1], "w")
    board = Board(link_to(real_server.url), ["w"])
    board.look()
    os.kill(real_server.pid, signal.SIGSTOP)
    try:
        board.look()
        assert board.problem.startswith("no answer from ")
        assert list(board.views) == ["w"]
    finally:
        os.kill(real_server.pid, signal.SIGCONT)
    board.look()
    assert board.problem == ""
    acc.delete()


@pytest.mark.forges
def test_nothing_raw_reaches_the_output(cli, client, open_dense):
    acc = open_dense("float32", [1], "w")
    acc.apply_grad([1.0])
    client.sadd("redisacc:names", EVIL)
    client.copy("redisacc:{w}", f"redisacc:{{{EVIL}}}")
    client.hset("redisacc:{w}:workers", EVIL, "1")
    client.hset("redisacc:{w}:clients", EVIL, f"1 applied 0 1 1795242299846 1 0 {EVIL}")
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


@pytest.mark.forges
def test_a_corrupt_one_does_not_hide_the_others(cli, client, open_dense):
    open_dense("float32", [1], "fine")
    open_dense("float32", [1], "odd")
    client.hset("redisacc:{odd}", "global_step", "x")
    found = cli("ls")
    assert found.exit_code == 0
    assert "fine" in found.stdout
    assert "global_step holds" in found.stderr
    assert "fine" in cli("watch", "-n", 1).stdout
    assert cli("show", "odd").exit_code == 1


@pytest.mark.parametrize(
    "words", [("show", "nowhere"), ("tail", "nowhere"), ("watch", "nowhere"), ("show", "nowhere", "--top", "1")]
)
def test_no_such_accumulator(cli, words):
    found = cli(*words)
    assert found.exit_code == 3
    assert found.stderr.startswith("redisacc: there is no accumulator")


@pytest.mark.parametrize("words", [("ls",), ("show", "w"), ("tail", "w"), ("watch",), ("gc",), ("rm", "w", "--yes")])
def test_no_server(cli, words):
    found = cli(*words, "--redis", "redis://:secret@127.0.0.1:1")
    assert found.exit_code == 6
    assert found.stderr.startswith("redisacc: no Redis server answers at 127.0.0.1:1/0")
    assert "secret" not in found.output


def test_a_user_who_may_only_look(cli, client, real_server, open_dense):
    acc = open_dense("float32", [1], "w")
    acc.apply_grad([1.0])
    commands = ["+ping", "+hmget", "+hget", "+hlen", "+hscan", "+zrange", "+time", "+sscan"]
    client.acl_setuser("looker", enabled=True, passwords=["+secret"], keys=["*"], commands=commands)
    url = real_server.url.replace("redis://", "redis://looker:secret@")
    try:
        assert " - " in cli("ls", "--redis", url).stdout
        assert "memory: this user may not ask" in cli("show", "w", "--redis", url).stdout
        assert cli("watch", "-n", 1, "--redis", url).exit_code == 0
        refused = cli("rm", "w", "--yes", "--redis", url)
    finally:
        client.acl_deluser("looker")
    assert refused.exit_code == 1
    assert "access control list refuses" in refused.stderr
    assert acc.num_accumulated() == 1
    acc.delete()


def test_wrong_usage(cli):
    assert cli("show", "w", "--index", "1", "--top", "1").exit_code == 2
    assert cli("show", "w", "--index", "-1").exit_code == 2
    assert cli("show", "a{b}").exit_code == 2
    assert cli("ls", "--redis", "http://x").exit_code == 2


def test_text():
    assert safe("plain ünï 日本") == "plain ünï 日本"
    assert safe("a\nb\x9b\u202e\ud800") == "a\\nb\\x9b\\u202e\\ud800"
    assert [bytes_text(n) for n in (0, 999, 1023, 2048, 10**6, 5 * 2**30, 2**60)] == [
        "0 B", "999 B", "0.999 KiB", "2 KiB", "977 KiB", "5 GiB", "1048576 TiB",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (-1, 0.04, 9.94, 9.96, 89, 90, 5400, 86400, 2e5)] == [
        "0.0 s", "0.0 s", "9.9 s", "10 s", "89 s", "2 min", "2 h", "24 h", "2 d",
    ]  # fmt: skip
    assert age_text.__doc__
