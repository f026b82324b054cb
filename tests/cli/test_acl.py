"""The command `acl`: rules as text, and rules and scripts that are loaded."""

import numpy as np
import pytest

import redisacc

pytestmark = pytest.mark.servers("valkey", "redis62", "cluster")


def test_what_is_loaded_lets_a_user_work(cli, cli_json, real_server, server_name, client, open_dense):
    open_dense("float32", [2], "train-1")
    options = ["--redis62"] if server_name == "redis62" else []
    options += ["--cluster"] if server_name == "cluster" else []
    rules = cli_json("acl", "worker", "train-*", *options)["rules"]
    assert cli("acl", "worker", "train-*", *options, "--file").stdout == f"user redisacc-worker {' '.join(rules)}\n"
    client.script_flush()
    try:
        said = cli("acl", "worker", "train-*", "--user", "w1", *options, "--load").stdout
        assert said.startswith("set the rules of w1, and loaded ")
        assert "apply" in said
        client.acl_setuser("w1", enabled=True, passwords=["+secret"])
        as_worker = real_server.url.replace("://", "://w1:secret@")
        with redisacc.ConditionalAccumulator("float32", [2], "train-1", redis=as_worker) as worker:
            assert worker.apply_grad(np.ones(2, np.float32))
            with pytest.raises(redisacc.ServerError):
                worker.take_grad(1)
    finally:
        client.acl_deluser("w1")
    assert "apply" in cli_json("acl", "--load")
