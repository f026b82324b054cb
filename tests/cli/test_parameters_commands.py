"""Parameters in the commands `ls`, `show`, `rm` and `gc`."""

import numpy as np
import pytest
from support.leaks import remaining
from support.selection import thorough
from support.servers import contents

import redisacc

pytestmark = [
    pytest.mark.servers("valkey", "cluster"),
    pytest.mark.parametrize("parameter_partitions", thorough([None, 3], usual=[None]), indirect=True),
]


@pytest.fixture
def weights(open_parameters):
    handle = open_parameters("w", publisher="chief")
    tree = {"a": np.zeros((500, 2), np.float32), "b": np.zeros(3)}
    handle.publish(tree, 6)
    handle.publish(tree, 7, changed={"a": [1, 2]}, state=[np.zeros(10)])
    return handle


def test_ls(cli, cli_json, weights, open_dense, parameter_partitions):
    open_dense("float32", [2], "w")
    open_dense("float32", [2], "v")
    lines = [line.split() for line in cli("ls").stdout.splitlines()]
    assert [line[:2] for line in lines[1:]] == [["v", "dense"], ["w", "dense"], ["w", "parameters"]]
    assert lines[-1][2:8] == ["-", "2", "leaves", "7", "-", "-"]
    (listed,) = cli_json("ls", "w")
    assert (listed["kind"], listed["parameters"]["step"], listed["parameters"]["leaves"]) == ("dense", 7, 2)
    assert len(listed["parameters"]["partitions"]) == (parameter_partitions or 0)


def test_show(cli, cli_json, weights, open_dense):
    text = cli("show", "w").stdout
    for part in ("parameters", "step         7", "2 (3.93 KiB)", "state        80 B", "publisher    chief"):
        assert part in text
    found = cli_json("show", "w")["parameters"]
    assert (found["step"], found["leaves"], found["nbytes"], found["state_bytes"]) == (7, 2, 4024, 80)
    # Two versions of b, and two of the table's rows.
    assert found["stored_bytes"] == 4024 + 24 + 2 * 16 + 80
    assert found["publisher"] == "chief"
    open_dense("float32", [2], "w")
    text = cli("show", "w").stdout
    assert text.index("dense float32") < text.index("parameters")
    assert cli_json("show", "w")["parameters"]["step"] == 7
    assert cli("show", "nowhere").exit_code == 3


def test_show_of_a_training(cli, cli_json, client, weights):
    found = cli_json("show", "w")["parameters"]
    assert (found["finished"], found["workers"]) == (False, None)
    with redisacc.Chief("t", {"a": np.zeros(2)}, workers=3, redis=client) as chief:
        chief.finish()
    found = cli_json("show", "t")["parameters"]
    assert (found["finished"], found["workers"]) == (True, 3)
    text = cli("show", "t").stdout
    assert "step         0, the last one\n" in text
    assert "workers      3 share the data\n" in text
    client.hset("redisacc:{t}:parameters", "workers", "-3")
    assert "workers holds" in cli("show", "t").stderr


def test_rm(cli, client, weights, open_dense):
    found = cli("rm", "w", "--yes")
    assert (found.exit_code, found.stdout) == (0, "deleted w\n")
    assert found.stderr == "w: parameters of step 7, 2 leaves\n"
    assert remaining(client) == []
    with pytest.raises(redisacc.NotFoundError, match="parameters"):
        weights.latest()


def test_rm_of_both(cli, client, weights, open_dense):
    open_dense("float32", [2], "w").apply_grad([1, 2])
    before = contents(client)
    assert cli("rm", "w", "nowhere", "--yes").exit_code == 3
    assert contents(client) == before
    found = cli("rm", "w", "--yes")
    assert found.stderr == "w: step 0, 1 gradient in the round; parameters of step 7, 2 leaves\n"
    assert remaining(client) == []


@pytest.mark.parametrize("field", ["step", "full", "structure", "format"])
@pytest.mark.forges
def test_what_cannot_be_read_can_be_deleted(cli, client, weights, field, open_dense):
    client.hset("redisacc:{w}:parameters", field, "[" * 10_000)
    shown = cli("show", "w")
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert "parameters" in shown.stderr
    open_dense("float32", [2], "v")
    listed = cli("ls")
    assert "v" in listed.stdout
    assert "parameters" in listed.stderr
    found = cli("rm", "w", "v", "--yes")
    assert found.exit_code == 0, found.output
    assert "w: unreadable (" in found.stderr
    # What its record did not list is left to gc.
    assert cli("doctor", "--fix", "--yes").exit_code == 0
    assert [key for key in client.keys("*") if client.pttl(key) == -1] == []


@pytest.mark.forges
def test_gc_removes_what_nobody_refers_to(cli, cli_json, client, weights):
    before = contents(client)
    client.set("redisacc:{w}:parameters:object:0123-full:0", b"x")
    client.set("redisacc:{w}:parameters:object:0123-rows:0", b"x")
    client.set("redisacc:{gone}:parameters:object:0123-full:0", b"x")
    client.set("redisacc:{w}:parameters:object:4567-full:0", b"x", px=60_000)
    client.sadd("redisacc:names", "never")
    found = cli_json("doctor", "--fix", "--dry-run")["leftovers"]
    assert [(one["name"], one["why"], len(one["keys"])) for one in found] == [
        ("gone", "object", 1), ("w", "object", 2), ("never", "name", 0),
    ]  # fmt: skip
    assert cli_json("doctor", "--fix", "--yes")["removed"] == 4
    client.delete("redisacc:{w}:parameters:object:4567-full:0")
    assert contents(client).keys() == before.keys()
    assert weights.latest()[0] == 7


@pytest.mark.forges
def test_gc_finishes_a_deletion(cli, cli_json, client, weights):
    incarnation = client.hget("redisacc:{w}:parameters", "incarnation")
    client.hset("redisacc:{w}:parameters", "incarnation", b"deleted:" + incarnation)
    assert cli("show", "w").exit_code == 3
    (found,) = cli_json("doctor", "--fix", "--dry-run")["leftovers"]
    assert found["why"] == "parameters"
    assert cli_json("doctor", "--fix", "--yes")["removed"] == 1
    assert remaining(client) == []
