"""The command `rm`."""

from __future__ import annotations

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
