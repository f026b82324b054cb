"""The command `ls`."""

import re

import pytest
from terminals import on_a_terminal

pytestmark = pytest.mark.servers("valkey", "cluster")


def test_ls(cli, cli_json, open_dense, open_sparse, background, until):
    dense, _sparse = open_dense("float32", [3], "a-dense"), open_sparse("float64", [None, 2], "b-sparse")
    dense.apply_grad([1, 2, 3])
    dense.set_global_step(2**53 + 1)
    takes = [background(dense.take_grad, n, timeout=30) for n in (2, 3)]
    until(lambda: len(dense.info().waiting) == 2)
    first = dense.info().waiting[0].num_required
    said = cli("ls")
    lines = [line.split() for line in said.stdout.splitlines()]
    assert lines[0] == ["NAME", "KIND", "DTYPE", "SHAPE", "STEP", "COUNT", "WAITING", "BYTES", "ACTIVE"]
    assert lines[1][:8] == ["a-dense", "dense", "float32", "[3]", "9007199254740993", "1", str(first), "+1"]
    assert lines[2][:7] == ["b-sparse", "sparse", "float64", "[None,2]", "0", "0", "-"]
    (found,) = cli_json("ls", "a-*")
    assert (found["name"], found["global_step"], found["num_accumulated"]) == ("a-dense", 2**53 + 1, 1)
    assert (found["shape"], found["num_leaves"]) == ([3], None)
    assert sorted(taker["num_required"] for taker in found["waiting"]) == [2, 3]
    assert found["bytes"] > 100
    assert cli_json("ls", "nothing*") == []
    assert "no accumulators matching 'nothing*'" in cli("ls", "nothing*").stderr
    for _ in range(4):
        dense.apply_grad([1, 2, 3], 2**53 + 9)
    dense.apply_grad([1, 2, 3], 2**53 + 9)
    takes[0 if first == 2 else 1].result()
    for _ in range(3):
        dense.apply_grad([1, 2, 3], 2**53 + 9)
    for take in takes:
        take.result()


def test_ls_passes_over_names_without_a_record(cli, cli_json, client, open_dense):
    open_dense("float32", [3], "w")
    client.sadd("redisacc:names", "gone")
    assert [found["name"] for found in cli_json("ls")] == ["w"]
    client.srem("redisacc:names", "gone")
    open_dense("float32", [3], "w").delete()


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


@pytest.mark.slow
def test_ls_on_a_terminal_cuts_the_name(real_server, open_dense):
    open_dense("float32", [1000, 64], "a-name-that-is-much-too-long-for-a-terminal-of-eighty-columns-" + "x" * 40)
    lines = [line.rstrip() for line in on_a_terminal("ls", "--redis", real_server.url).splitlines() if line.strip()]
    assert max(map(len, lines)) <= 80
    assert len(lines) == 2
    # All other columns are whole.
    assert re.match(r"a-name-[\w-]*… dense +float32 +\[1000,64\] +0 +0 +- +\d", lines[1])
