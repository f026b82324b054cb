"""The command `forget-worker`, and which workers are missing or gone."""

import time

import numpy as np
import pytest

import redisacc

# Seconds after which a worker that is not seen is gone.
GONE_AFTER = 600

pytestmark = pytest.mark.servers("valkey", "cluster")


def names(workers):
    return [worker.name for worker in workers]


def test_a_worker_is_forgotten_until_it_returns(cli, cli_json, open_dense):
    ann, bob = (open_dense("float32", [1], "w", worker=name) for name in ("ann", "bob"))
    again = open_dense("float32", [1], "w", worker="bob")
    for acc in (ann, bob, again):
        acc.apply_grad([1.0])
    ann.take_grad(3)
    found = cli("set", "w", "--forget", "bob")
    assert (found.exit_code, found.stdout.startswith("w has forgotten bob, last seen ")) == (0, True)
    assert names(ann.info().known_workers) == ["ann"]
    # Both sessions are still there: a copy of a request would be recognized.
    assert ann.info().applied == 3
    assert bob.apply_grad([1.0], 1)
    assert [(worker.name, worker.applied) for worker in ann.info().known_workers if worker.in_round] == [("bob", 1)]
    assert cli_json("set", "w", "--forget", "bob") == {"name": "w", "forgotten": "bob"}
    # Its gradient stays in the round.
    assert ann.info().workers == {"bob": 1}


def test_an_unknown_worker(cli, accumulator):
    accumulator.apply_grad([1, 2, 3])
    found = cli("set", "w", "--forget", "anne")
    assert found.exit_code == 3
    assert found.stderr == "redisacc: 'w' knows no worker 'anne'\n"
    assert cli("set", "w", "--forget", "").exit_code == 2
    assert cli("set", "ww", "--forget", "ann").exit_code == 3
    assert names(accumulator.info().known_workers) == ["ann"]


def test_a_worker_of_a_training_is_forgotten_when_its_lease_has_run_out(cli, client, real_server):
    with (
        redisacc.Chief("train", {"w": np.zeros(1)}, workers=1, redis=real_server.url) as chief,
        redisacc.Worker("train", redis=real_server.url) as worker,
    ):
        next(worker.steps())
        assert worker.apply({"w": [1.0]})
        found = cli("set", "train", "--forget", "worker 0")
        assert found.exit_code == 1
        assert "has a lease for" in found.stderr
        assert "wait for that time, and then forget it" in " ".join(found.stderr.split())
        assert next(chief.rounds()).num_accumulated == 1
    assert cli("set", "train", "--forget", "worker 0").exit_code == 0
    held = client.hget("redisacc:{train}:crew", "worker 0")
    assert held is None
    client.hset("redisacc:{train}:crew", "worker 5", "h 1 p who")
    assert cli("set", "train", "--forget", "worker 5").exit_code == 0
    assert not client.hexists("redisacc:{train}:crew", "worker 5")
    assert cli("set", "train", "--forget", "chief").exit_code == 3


def test_one_apply_leaves_no_worker_behind(cli, cli_json, accumulator, tmp_path):
    np.save(tmp_path / "g.npy", np.ones(3, np.float32))
    for words in ((), ("--worker", "laptop")):
        assert cli("apply", "w", tmp_path / "g.npy", *words).exit_code == 0
    assert cli("apply", "w", tmp_path / "g.npy", "--local-step", -1).exit_code == 5
    assert set(accumulator.info().workers) > {"laptop"}
    assert names(accumulator.info().known_workers) == []
    accumulator.apply_grad([1, 2, 3])
    # One that is known stays known.
    assert cli("apply", "w", tmp_path / "g.npy", "--worker", "ann").exit_code == 0
    assert [(worker.name, worker.applied) for worker in accumulator.info().known_workers] == [("ann", 2)]
    taken = cli_json("take", "w", 4, "--discard", "--yes")
    assert taken["num_accumulated"] == 4
    assert names(accumulator.info().known_workers) == ["ann"]
    with pytest.raises(redisacc.TakeTimeoutError, match=r"expected: ann \(last seen [^)]* ago\)$"):
        accumulator.take_grad(1, timeout=0)


@pytest.mark.forges
def test_who_was_not_seen_for_long_is_gone(cli, cli_json, open_dense, client):
    acc = open_dense("float32", [1], "w", worker="ann")
    acc.apply_grad([1.0], -1)
    cli("set", "w", "--forget", "ann")
    now = time.time() * 1000

    def plant(name, seconds):
        seen = int(now - seconds * 1000)
        client.hset("redisacc:{w}:sessions", f"{seen}-{name}", f"1 applied 0 1 {seen} 1 0 {name}")

    plant("bob", 40)
    plant("cyn", GONE_AFTER - 100)
    plant("dan", GONE_AFTER + 100)
    plant("eve", 5 * 3600)
    info = acc.info()
    assert (names(info.expected), names(info.gone)) == (["bob", "cyn"], ["dan", "eve"])
    with pytest.raises(
        redisacc.TakeTimeoutError,
        match=r"expected: bob \(last seen \d+ s ago\), cyn \(last seen \d min ago\); "
        r"gone: dan \(last seen 12 min ago\), eve \(last seen 5 h ago\)$",
    ) as caught:
        acc.take_grad(1, timeout=0)
    assert caught.value.expected == ["bob", "cyn"]
    assert caught.value.gone == ["dan", "eve"]
    line = cli("watch", "w", "-n", 1).stdout
    assert "expected: bob (last seen " in line
    assert "gone: dan (last seen 12 min ago), eve (last seen 5 h ago)" in line
    facts = cli_json("show", "w")
    assert (facts["expected"], facts["gone"]) == (["bob", "cyn"], ["dan", "eve"])
    shown = [line.split() for line in cli("show", "w").stdout.splitlines()]
    assert ["eve", "gone", "1", "0", "5", "h", "ago"] in shown
