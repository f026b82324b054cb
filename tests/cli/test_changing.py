"""take, apply, set-step, rm, recover, gc: what they do, what they ask first, and how they end."""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys

import ml_dtypes
import msgpack
import numpy as np
import pytest
from servers import contents

import redisacc
from redisacc import _collecting
from redisacc._link import link_to
from redisacc._scripts import Scripts

pytestmark = pytest.mark.servers("valkey")


@pytest.fixture
def dense(open_dense):
    acc = open_dense("float32", [3], "w", worker="ann")
    yield acc
    acc.delete()


def test_take_into_npy(cli, cli_json, dense, tmp_path):
    dense.apply_grad([1, 2, 3])
    dense.apply_grad([3, 2, 1])
    said = cli_json("take", "w", 2, "-o", tmp_path / "g.npy")
    assert said == {"global_step": 0, "num_accumulated": 2, "workers": {"ann": 2}, "file": str(tmp_path / "g.npy")}
    assert np.load(tmp_path / "g.npy").tolist() == [2, 2, 2]
    assert os.listdir(tmp_path) == ["g.npy"]
    dense.apply_grad([1, 2, 3], 1)
    found = cli("take", "w", 1, "-o", tmp_path / "g.npz")
    assert found.stdout == f"took the round of step 1 into {tmp_path}/g.npz: 1 gradient, from ann (1)\n"
    assert np.load(tmp_path / "g.npz")["gradient"].tolist() == [1, 2, 3]
    assert dense.info().unacknowledged == []


def test_take_to_stdout(cli, dense):
    dense.apply_grad([1, 2, 3])
    found = cli("take", "w", 1, "-o", "-")
    assert np.load(io.BytesIO(found.stdout_bytes)).tolist() == [1, 2, 3]
    assert "took the round of step 0: 1 gradient" in found.stderr


def test_take_and_apply_sparse(cli, cli_json, open_sparse, tmp_path):
    acc = open_sparse("float32", [None, 2], "s", worker="ann")
    acc.apply_grad([4, 1], [[1, 2], [3, 4]])
    cli_json("take", "s", 1, "-o", tmp_path / "g.npz")
    saved = dict(np.load(tmp_path / "g.npz"))
    assert {name: array.tolist() for name, array in saved.items()} == {
        "indices": [1, 4], "values": [[3, 4], [1, 2]], "shape": [-1, 2],
    }  # fmt: skip
    said = cli_json("apply", "s", tmp_path / "g.npz", "--worker", "bob")
    assert said == {"outcome": "applied", "local_step": 1, "global_step": 1, "num_accumulated": 1}
    assert acc.info().workers == {"bob": 1}
    assert acc.peek().gradient.indices.tolist() == [1, 4]
    acc.delete()


def test_bfloat16_goes_as_float32(cli, open_dense, tmp_path):
    acc = open_dense("bfloat16", [2], "b")
    acc.apply_grad(np.array([1.5, 3.140625], ml_dtypes.bfloat16))
    cli("take", "b", 1, "-o", tmp_path / "g.npy")
    saved = np.load(tmp_path / "g.npy")
    assert (saved.dtype, saved.tolist()) == (np.float32, [1.5, 3.140625])
    assert cli("apply", "b", tmp_path / "g.npy").exit_code == 0
    assert acc.peek().gradient.tolist() == [1.5, 3.140625]
    acc.delete()


def test_take_times_out(cli, dense, tmp_path):
    dense.apply_grad([1, 2, 3])
    found = cli("take", "w", 2, "-o", tmp_path / "g.npy", "--timeout", "0.1")
    assert found.exit_code == 4
    assert "1 of 2 gradients had come at step 0, from ann (1)" in found.stderr
    assert os.listdir(tmp_path) == []
    assert dense.num_accumulated() == 1


def test_a_take_that_cannot_write_takes_nothing_or_leaves_the_round(cli, dense, open_sparse, tmp_path, monkeypatch):
    dense.apply_grad([1, 2, 3])
    sparse = open_sparse("float32", [3], "s")
    sparse.apply_grad([1], [1.0])
    for words in (
        ("w", 1), ("w", 1, "-o", tmp_path / "g.txt"), ("w", 1, "-o", tmp_path / "no" / "g.npy"),
        ("w", 1, "-o", tmp_path / "g.npy", "--discard"), ("s", 1, "-o", tmp_path / "g.npy"), ("w", 0, "--discard"),
    ):  # fmt: skip
        assert cli("take", *words).exit_code == 2
    assert dense.num_accumulated() == sparse.num_accumulated() == 1

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    found = cli("take", "w", 1, "-o", tmp_path / "g.npy")
    assert (found.exit_code, found.stderr) == (1, "redisacc: [Errno 28] No space left on device\n")
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    (left,) = dense.info().unacknowledged
    monkeypatch.setenv("REDISACC_URL", redis_url(dense))
    assert left.token in cli("recover", "w").stdout
    assert cli("recover", "w", "-o", tmp_path / "g.npy", "--yes").exit_code == 0
    assert np.load(tmp_path / "g.npy").tolist() == [1, 2, 3]
    assert dense.info().unacknowledged == []
    sparse.delete()


def redis_url(acc):
    return f"redis://{acc._link.address}"


def test_take_discards_only_when_told(cli, dense):
    dense.apply_grad([1, 2, 3])
    found = cli("take", "w", 1, "--discard")
    assert (found.exit_code, dense.num_accumulated()) == (2, 1)
    assert "--yes" in found.stderr
    assert cli("take", "w", 1, "--discard", "--yes").exit_code == 0
    assert dense.num_accumulated() == 0


def test_ctrl_c_ends_a_take(real_server, dense, tmp_path, until):
    words = [sys.executable, "-m", "redisacc", "take", "w", "5", "-o", str(tmp_path / "g.npy")]
    with subprocess.Popen([*words, "--redis", real_server.url], stderr=subprocess.PIPE, text=True) as process:
        until(lambda: dense.info().waiting)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert dense.info().waiting == []


def test_apply(cli, cli_json, dense, tmp_path):
    np.save(tmp_path / "g.npy", np.array([1.0, 2, 3], np.float32))
    dense.set_global_step(7)
    assert cli("apply", "w", tmp_path / "g.npy").stdout == "applied: step 7, 1 gradient in this round\n"
    found = cli("apply", "w", tmp_path / "g.npy", "--local-step", 6)
    assert found.exit_code == 5
    assert found.stderr == "redisacc: the gradient is for step 6, and the step is 7: it was dropped\n"
    assert cli("apply", "w", "-", input=(tmp_path / "g.npy").read_bytes()).exit_code == 0
    np.savez(tmp_path / "g.npz", gradient=np.ones(3, np.float32))
    assert cli_json("apply", "w", tmp_path / "g.npz")["num_accumulated"] == 3


def test_apply_refuses_other_files(cli, dense, tmp_path):
    def file(data):
        (tmp_path / "x").write_bytes(data)
        return tmp_path / "x"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    buffer = io.BytesIO()
    np.save(buffer, np.array([Evil()]), allow_pickle=True)
    two = io.BytesIO()
    np.savez(two, gradient=np.ones(3), other=np.ones(3))
    sparse = io.BytesIO()
    np.savez(sparse, indices=[1], values=[1.0])
    half = two.getvalue()[:-50]
    for data in (b"", b"text", pickle.dumps(Evil()), buffer.getvalue(), two.getvalue(), sparse.getvalue(), half):
        assert cli("apply", "w", file(data)).exit_code == 1
    np.save(tmp_path / "wrong.npy", np.ones(4))
    assert cli("apply", "w", tmp_path / "wrong.npy").exit_code == 2
    assert cli("apply", "w", tmp_path / "nowhere").exit_code == 2
    assert not (tmp_path / "executed").exists()
    assert dense.num_accumulated() == 0


def test_set_step(cli, cli_json, dense):
    assert cli_json("set-step", "w", 2**53 + 1) == {"before": 0, "global_step": 2**53 + 1}
    found = cli("set-step", "w", 5)
    assert (found.exit_code, dense.global_step()) == (2, 2**53 + 1)
    found = cli("set-step", "w", -5, "--yes")
    assert found.exit_code == 0
    assert "the global step was lowered to -5" in found.stderr
    assert dense.global_step() == -5
    assert cli("set-step", "w", 2**63).exit_code == 2


def test_rm(cli, client, open_dense, monkeypatch):
    for name in ("a", "b"):
        open_dense("float32", [1], name).apply_grad([1.0])
    before = contents(client)
    assert cli("rm", "a", "b").exit_code == 2
    assert cli("rm", "a", "nowhere", "--yes").exit_code == 3
    assert cli("rm").exit_code == 2
    assert contents(client) == before
    monkeypatch.setattr("redisacc.cli._common.sys.stdin", Terminal())
    assert cli("rm", "a", "b", input="n\n").exit_code in (1, 2)
    monkeypatch.undo()
    monkeypatch.setenv("REDISACC_URL", redis_url(open_dense("float32", [1], "a")))
    found = cli("rm", "a", "b", "--yes")
    assert (found.exit_code, found.stdout) == (0, "removed a, b\n")
    assert "a: step 0, 1 gradient in this round" in found.stderr
    assert client.keys() == []


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_recover(cli, cli_json, dense, tmp_path):
    assert cli("recover", "w").stderr == "every round that was taken has been acknowledged\n"
    for step in range(2):
        dense.apply_grad([step, 2, 3], step)
        dense.take(1).__enter__()
    listed = cli_json("recover", "w")
    assert [taken["global_step"] for taken in listed] == [0, 1]
    assert cli("recover", "w", "-o", tmp_path / "g.npy").exit_code == 2
    assert cli("recover", "w", "-o", tmp_path / "g.npy", "--token", "none", "--yes").exit_code == 1
    said = cli_json("recover", "w", "-o", tmp_path / "g.npy", "--token", listed[1]["token"], "--yes")
    assert said["global_step"] == 1
    assert np.load(tmp_path / "g.npy").tolist() == [1, 2, 3]
    found = cli("recover", "w", "--discard", "--yes")
    assert "recovered the round of step 0: 1 gradient, from ann (1)" in found.stdout
    assert cli("recover", "w", "--discard", "--yes").exit_code == 1


# gc


@pytest.fixture
def busy(open_dense, open_sparse, monkeypatch):
    """Everything that is alive: a round in each way of holding, taken rounds, a waiting taker, a private one."""
    private = open_dense("float32", [2], in_place_limit=0)
    private.apply_grad([1, 2])
    monkeypatch.setattr("redisacc._parked.SMALL_BYTES", 5)
    dense = open_dense("float32", [3], "live", worker="ann", in_place_limit=0)
    dense.apply_grad([1, 2, 3])
    dense.take(1).__enter__()
    dense.apply_grad([4, 5, 6], 1)
    sparse = open_sparse("float32", [9, 1], "live2")
    sparse.apply_grad([1], [[1.0]])
    yield dense
    private.close()
    sparse.delete()
    dense.delete()


def test_gc_touches_nothing_that_lives(cli, cli_json, busy, client, background, until):
    take = background(busy.take_grad, 2, timeout=30)
    until(lambda: busy.info().waiting)
    before = contents(client)
    assert cli("gc").stdout == "nothing is left behind\n"
    assert cli_json("gc", "--yes") == {"leftovers": [], "removed": 0}
    after = contents(client)
    assert after.keys() == before.keys()
    busy.apply_grad([1, 1, 1], 1)
    assert take.result().tolist() == [2.5, 3, 3.5]


@pytest.mark.forges
def test_gc_finds_and_removes_what_is_left_behind(cli, cli_json, busy, client, open_dense):
    alive = contents(client)
    # Parts that no round names, a small and a large one; and a round that isn't listed, with a part of its own.
    client.set("redisacc:{live}:part:dead-1:0", b"x" * 10)
    client.set("redisacc:{live}:part:dead-1:1", b"x" * 5_000_000)
    header = msgpack.packb({"version": 1, "indices": [], "counts": [], "values": [3]})
    client.hset("redisacc:{live}:taken:lost:parked", "dead-2", b"1 " + header)
    client.hset("redisacc:{live}:taken:lost:workers", "ann", "1")
    client.set("redisacc:{live}:part:dead-2:0", b"xyz")
    client.set("redisacc:{live}:staged:dead-3:0", b"xyz")
    # An interrupted deletion; keys and a name without a record.
    gone = open_dense("float32", [3], "halfway", in_place_limit=0)
    gone.apply_grad([1, 2, 3])
    Scripts(gone._link, gone._keys, incarnation=gone.info().incarnation).delete(finish=False)
    client.hset("redisacc:{nobody}:sums", "1", b"x" * 16)
    client.set("redisacc:{nobody}:part:a-1:0", b"x")
    client.set("redisacc:{nobody}:staged:a-2:0", b"x", px=60_000)
    client.sadd("redisacc:names", "nowhere")
    # Not ours: left alone.
    client.set("redisacc:{nobody}:something:else", b"x")
    client.set("redisacc:{text}", b"x")
    client.hset("redisacc:{theirs}", "a", "b")
    client.set("redisacc:{theirs}:part:a-1:0", b"x")
    foreign = ("redisacc:{nobody}:something:else", "redisacc:{text}", "redisacc:{theirs}",
               "redisacc:{theirs}:part:a-1:0", "redisacc:{nobody}:staged:a-2:0")  # fmt: skip

    before = contents(client)
    found = cli_json("gc")
    assert sorted((left["name"], left["why"], len(left["keys"])) for left in found["leftovers"]) == [
        ("halfway", "deletion", 4), ("live", "part", 3), ("live", "round", 2), ("live", "staged", 1),
        ("nobody", "record", 2), ("nowhere", "name", 0),
    ]  # fmt: skip
    assert cli("gc", "--dry-run").exit_code == 0
    assert cli("gc").exit_code == 2
    assert contents(client) == before

    assert [left["name"] for left in cli_json("gc", "live")["leftovers"]] == ["live"] * 3
    said = cli("gc", "--yes")
    assert said.exit_code == 0
    assert said.stdout.endswith("removed 10 of 10\n")
    for key in foreign:
        assert client.exists(key)
        client.delete(key)
    # A large string may only have got an expiry, as everywhere.
    assert client.pttl("redisacc:{live}:part:dead-1:1") != -1
    client.delete("redisacc:{live}:part:dead-1:1")
    assert contents(client) == alive
    assert cli_json("gc")["leftovers"] == []


@pytest.mark.forges
def test_gc_finishes_what_a_taker_had_acknowledged(cli_json, busy, client):
    (token,) = client.hkeys("redisacc:{live}:taken")
    text = client.hget("redisacc:{live}:taken", token)
    client.hset("redisacc:{live}:taken", token, text.replace(b"granted", b"acknowledged"))
    found = cli_json("gc", "--yes")
    assert [(left["why"], found["removed"]) for left in found["leftovers"]] == [("acknowledged", 1)]
    assert client.hgetall("redisacc:{live}:taken") == {}
    assert client.keys("redisacc:{live}:taken:*") == []
    assert busy.peek().gradient.tolist() == [4, 5, 6]


@pytest.mark.forges
def test_gc_looks_again_when_it_removes(busy, client, real_server):
    """Between the look and the removal the accumulator goes on: what has an owner then stays."""
    link = link_to(real_server.url)
    (field,) = client.hkeys("redisacc:{live}:parked")
    entry = client.hget("redisacc:{live}:parked", field)
    part = next(key for key in client.keys(f"redisacc:{{live}}:part:{field.decode()}:*"))
    client.hdel("redisacc:{live}:parked", field)
    (found,) = _collecting.find(link)
    assert list(found.keys) == [part.decode()]
    client.hset("redisacc:{live}:parked", field, entry)
    assert _collecting.remove(link, found) == 0
    assert client.exists(part)

    # A round was granted meanwhile: its gradients were looked for in other places.
    client.set("redisacc:{live}:part:dead-1:0", b"x")
    (found,) = _collecting.find(link)
    with busy.take(1):
        assert _collecting.remove(link, found) == 0
    assert client.exists("redisacc:{live}:part:dead-1:0")
    # Somebody else is removing it already.
    (found,) = _collecting.find(link)
    client.pexpire("redisacc:{live}:part:dead-1:0", 60_000)
    assert _collecting.remove(link, found) == 0
    client.persist("redisacc:{live}:part:dead-1:0")
    # It was deleted and created anew.
    (found,) = _collecting.find(link)
    found.incarnation = "another"
    assert _collecting.remove(link, found) == 0
    found.incarnation = ""
    assert _collecting.remove(link, found) == 0
    # A round's hash that is listed again.
    client.hset("redisacc:{live}:taken:lost:workers", "ann", "1")
    lost = next(left for left in _collecting.find(link) if left.why == "round")
    client.hset("redisacc:{live}:taken", "lost", "granted 0 1 1 [3] ann")
    lost.tokens = [*lost.tokens, "lost"]
    assert _collecting.remove(link, lost) == 0
    client.hdel("redisacc:{live}:taken", "lost")
    # A name that exists again, and keys of one.
    client.sadd("redisacc:names", "nowhere")
    name = next(left for left in _collecting.find(link) if left.why == "name")
    again = redisacc.ConditionalAccumulator("float32", [1], "nowhere", redis=client)
    assert _collecting.remove(link, name) == 0
    assert client.sismember("redisacc:names", "nowhere")
    again.delete()
    assert sum(_collecting.remove(link, left) for left in _collecting.find(link)) == 2


def test_gc_while_everybody_is_at_work(open_dense, open_sparse, real_server, background, monkeypatch, client):
    """Rounds come and go under its looks, in parts, small and in place; nothing is lost and nothing is found."""
    monkeypatch.setattr("redisacc._parked.SMALL_BYTES", 100)
    accs = [
        open_sparse("float64", [99, 2], "sums", reduction_type="SUM", in_place_limit=limit) for limit in (0, 0, 10**9)
    ]
    number, rows = 120, ([1, 2, 3, 5, 8], [1, 2])

    def work(acc, indices):
        for _ in range(number):
            acc.apply_grad(indices, np.ones((len(indices), 2)), local_step=10**6)

    def take():
        total, taken = 0.0, 0
        while taken < 3 * number:
            with accs[2].take(1, timeout=60) as found:
                taken += found.num_accumulated
                total += found.gradient.values.sum()
        return total

    taker = background(take)
    workers = [background(work, acc, rows[n % 2]) for n, acc in enumerate(accs)]
    link = link_to(real_server.url)
    looks = 0
    while taker.running or looks == 0:
        looks += 1
        for leftover in _collecting.find(link):
            assert leftover.why == "acknowledged" or _collecting.remove(link, leftover) == 0, leftover
    for worker in workers:
        worker.result(60)
    assert taker.result(60) == number * 2 * (5 + 2 + 5)
    accs[0].delete()
