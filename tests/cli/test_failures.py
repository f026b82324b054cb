"""Exit codes and messages that several commands share."""

import pytest


@pytest.mark.servers("valkey")
@pytest.mark.parametrize("words", ["show nowhere", "watch nowhere --events", "watch nowhere", "show nowhere --index 1"])
def test_no_such_accumulator(cli, words):
    found = cli(*words.split())
    assert found.exit_code == 3
    assert found.stderr.startswith("redisacc: there is no accumulator")


@pytest.mark.parametrize(
    "words", ["ls", "show w", "watch w --events", "watch", "doctor --fix", "rm w --yes", "acl --load"]
)
def test_no_server(offline_cli, words):
    found = offline_cli(*words.split(), "--redis", "redis://:secret@127.0.0.1:1")
    assert found.exit_code == 6
    assert found.stderr.startswith("redisacc: no Redis server answers at 127.0.0.1:1/0")
    assert "secret" not in found.output


@pytest.mark.servers("valkey")
def test_a_user_who_may_only_look(cli, client, real_server, open_dense):
    acc = open_dense("float32", [1], "w")
    acc.apply_grad([1.0])
    commands = ["+ping", "+hmget", "+hget", "+hlen", "+hscan", "+zrange", "+time", "+sscan"]
    client.acl_setuser("looker", enabled=True, passwords=["+secret"], keys=["*"], commands=commands)
    url = real_server.url.replace("redis://", "redis://looker:secret@")
    try:
        assert " - " in cli("ls", "--redis", url).stdout
        assert "memory: unknown, because this user may not run MEMORY USAGE" in cli("show", "w", "--redis", url).stdout
        assert cli("watch", "-n", 1, "--redis", url).exit_code == 0
        refused = cli("rm", "w", "--yes", "--redis", url)
    finally:
        client.acl_deluser("looker")
    assert refused.exit_code == 1
    assert "access control list refuses" in refused.stderr
    assert acc.num_accumulated() == 1
