"""The command `rm`."""

import pytest
from support.servers import contents

pytestmark = pytest.mark.servers("valkey", "cluster")


def test_rm(cli, client, open_dense):
    for name in ("a", "b"):
        open_dense("float32", [1], name).apply_grad([1.0])
    before = contents(client)
    assert cli("rm", "a", "b").exit_code == 2
    assert cli("rm", "a", "nowhere", "--yes").exit_code == 3
    assert contents(client) == before
    found = cli("rm", "a", "b", "--yes")
    assert (found.exit_code, found.stdout) == (0, "deleted a, b\n")
    assert "a: step 0, 1 gradient in the round" in found.stderr
    assert client.keys() == []


@pytest.mark.forges
@pytest.mark.parametrize(("key", "field"), [("", "round_shape"), ("", "created_ms"), ("", "kind"), (":takers", "t")])
def test_what_cannot_be_read_can_be_deleted(cli, client, open_dense, key, field):
    open_dense("float32", [1], "w")
    client.hset(f"redisacc:{{w}}{key}", field, "[" * 10_000)
    client.zadd("redisacc:{w}:queue", {"t": 1})
    assert cli("show", "w").exit_code == 1
    found = cli("rm", "w", "--yes")
    assert found.exit_code == 0, found.output
    assert "w: unreadable (" in found.stderr
    assert client.keys() == []


@pytest.fixture
def old(open_dense, open_parameters, client):
    """Accumulators and parameters to which nothing has happened for two hours, and newer ones."""
    for name in ("old", "old-too", "new"):
        open_dense("float32", [1], name)
    open_parameters("weights").publish([1.0], 0)
    hours_ago = client.time()[0] * 1000 - 2 * 3600 * 1000
    for name in ("old", "old-too"):
        client.hset(f"redisacc:{{{name}}}", "created_ms", hours_ago)
    client.hset("redisacc:{weights}:parameters", "published_ms", hours_ago)


def test_what_is_older(cli, cli_json, client, old, background, until, open_dense):
    assert cli("rm", "--older-than", "3h").stdout == "there is nothing that old\n"
    assert cli_json("rm", "nothing*", "--older-than", "1s", "--yes") == {"removed": []}
    found = cli("rm", "--older-than", "1h")
    assert (found.exit_code, "this needs a confirmation" in found.stderr) == (2, True)
    assert [line.partition(":")[0] for line in found.stderr.splitlines()[:3]] == ["old", "old-too", "weights"]
    assert cli_json("rm", "old*", "--older-than", "100m", "--yes") == {"removed": ["old", "old-too"]}
    # Somebody waits for this one, however long nothing has come.
    waiting = open_dense("float32", [1], "waiting")
    client.hset("redisacc:{waiting}", "created_ms", 1)
    take = background(waiting.take_grad, 1, timeout=60)
    until(lambda: waiting.info().waiting)
    assert cli_json("rm", "--older-than", "1h", "--yes") == {"removed": ["weights"]}
    assert cli("rm", "nowhere", "--older-than", "1h", "--yes").exit_code == 0
    waiting.apply_grad([1.0])
    take.result()
    assert sorted(client.smembers("redisacc:names")) == [b"new", b"waiting"]


@pytest.mark.servers("valkey")
def test_what_is_used_again_before_it_is_deleted_stays(cli_json, old, open_dense, proxy):
    acc = open_dense("float32", [1], "old-too")
    # The first of the two is deleted.
    proxy.before("delete", lambda: acc.apply_grad([1.0]))
    assert cli_json("rm", "old*", "--older-than", "1h", "--yes", "--redis", proxy.where) == {"removed": ["old"]}
    assert acc.num_accumulated() == 1
