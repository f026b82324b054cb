"""The command `watch`, in a pipe and on a terminal."""

import json
import re
import signal

import pytest
from support.warm_python import WarmPython
from terminals import EVIL, on_a_terminal

pytestmark = pytest.mark.servers("valkey", "cluster")


@pytest.mark.usefixtures("nobody_is_late")
def test_watch_in_a_pipe(cli, open_dense, background, until):
    ann, bob = (open_dense("float32", [1], "w", worker=name) for name in ("ann", "bob"))
    open_dense("float32", [1], "other")
    ann.apply_grad([1.0])
    bob.apply_grad([1.0])
    ann.take_grad(2)
    take = background(ann.take_grad, 2, timeout=30)
    until(lambda: ann.info().waiting)
    ann.apply_grad([1.0], 1)
    facts = [json.loads(line) for line in cli("watch", "w", "-n", 2, "--interval", 0.05, "--json").stdout.splitlines()]
    assert len(facts) == 2
    assert facts[1]["expected"] == ["bob"]
    assert (facts[1]["num_accumulated"], [of["num_required"] for of in facts[1]["waiting"]]) == (1, [2])
    lines = cli("watch", "-n", 1).stdout.splitlines()
    assert len(lines) == 2
    assert "  other  step 0  0 gradients, no taker waiting" in lines[0]
    assert "  w  step 1  1 of 2 for ann" in lines[1]
    assert [json.loads(line)["name"] for line in cli("watch", "o*", "-n", 1, "--json").stdout.splitlines()] == ["other"]
    bob.apply_grad([1.0], 1)
    take.result()


@pytest.mark.usefixtures("nobody_is_late")
def test_workers_are_listed_in_the_order_of_their_numbers(cli, open_dense):
    """Whichever was seen last, so that nothing moves in a live display."""
    names = ["worker 2", "worker 10", "worker 1"]
    every = [open_dense("float32", [1], "w", worker=name) for name in names]
    for acc in every:
        acc.apply_grad([1.0])
    every[0].take_grad(3)
    for said in (cli("show", "w").stdout, cli("watch", "w", "-n", 1).stdout):
        assert re.findall(r"worker \d+", said) == ["worker 1", "worker 2", "worker 10"]


@pytest.mark.slow
@pytest.mark.servers("valkey")
def test_a_silent_server_is_reported_and_waited_for(open_dense, proxy):
    acc = open_dense("float32", [1], "w")
    command = ["-m", "redisacc", "watch", "w", "--interval", "0.05", "--redis", proxy.url]
    with WarmPython(command, text=True) as watch:
        assert "  w  step 0 " in watch.stdout.readline()
        proxy.stall()
        assert watch.stderr.readline().startswith("redisacc: no answer from ")
        assert "  w  step 0 " in watch.stdout.readline()
        acc.set_global_step(7)
        proxy.resume()
        assert next(line for line in watch.stdout if "  w  step 7 " in line)
        watch.send_signal(signal.SIGINT)
        watch.communicate(timeout=20)


@pytest.mark.parametrize(
    ("stored", "late", "text"), [(0, 0, "reducer has begun"), (3, 3, "reducer keeps up"), (3, 4, "reducer is late")]
)
def test_watch_says_whether_a_reducer_keeps_up(cli, open_dense, client, stored, late, text):
    open_dense("float32", [1], "w", worker="ann")
    assert "reducer" not in cli("watch", "w", "-n", 1).stdout
    assert json.loads(cli("watch", "w", "-n", 1, "--json").stdout)["reducer"] is None
    lease = {"holder": "x", "who": "box:1", "stored": stored, "late": late}
    client.hset("redisacc:{w}:reducer", mapping=lease)
    client.pexpire("redisacc:{w}:reducer", 60_000)
    assert cli("watch", "w", "-n", 1).stdout.endswith(f"  0.0 applied/s  0.0 stale/s  0.0 rounds/s  {text}\n")
    facts = json.loads(cli("watch", "w", "-n", 1, "--json").stdout)["reducer"]
    assert facts == {"who": "box:1", "stored": stored, "late": late, "missing": 0}


@pytest.mark.slow
def test_watch_on_a_terminal(real_server, open_dense, background, until):
    long_name = "a-name-that-is-much-too-long-for-a-terminal-of-eighty-columns-" + "x" * 40
    acc = open_dense("float32", [1], long_name, worker="ann-" + "y" * 80)
    take = background(acc.take_grad, 2, timeout=60)
    until(lambda: acc.info().waiting)
    acc.apply_grad([1.0])
    said = on_a_terminal("watch", "--redis", real_server.url, "--interval", "0.1", until=r"(?s)1 of 2.*1 of 2")
    lines = re.split(r"[\r\n]+", said)
    assert max(map(len, lines)) <= 80
    acc.apply_grad([1.0])
    take.result()


def test_events(cli, real_server, open_dense, background, client, until):
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


def test_events_as_text_are_escaped(cli, open_dense, background, client, until):
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


def test_events_of_one_that_is_being_deleted(cli, open_dense, client):
    """The event of the deletion was published before the command listened, and the record still exists."""
    open_dense("float32", [1], "w")
    client.hset("redisacc:{w}", "incarnation", b"deleted:" + client.hget("redisacc:{w}", "incarnation"))
    found = cli("watch", "w", "--events")
    assert (found.exit_code, found.stdout.split()[1:]) == (0, ["deleted"])


def test_events_end_with_its_timeout(cli, open_dense):
    open_dense("float32", [1], "w")
    found = cli("watch", "w", "--events", "--timeout", "0.05")
    assert (found.exit_code, found.stdout) == (0, "")
    open_dense("float32", [1], "w").delete()
