"""Parameters with partitions in the commands `ls`, `show`, `rm`, `gc` and `doctor`."""

import os
import signal
import subprocess

import numpy as np
import pytest
from support.leaks import remaining
from support.warm_python import WarmPython

on_one_server = pytest.mark.servers("valkey")


@pytest.fixture
def weights(open_parameters):
    handle = open_parameters("w", partitions=3)
    for step in range(2):
        handle.publish(np.full(30_000, step), step)
    yield handle
    handle.delete()


@on_one_server
def test_show_and_ls_say_how_many(cli, cli_json, weights):
    assert "  partitions   3 (0, 1, 2)\n" in cli("show", "w").stdout
    assert cli_json("show", "w")["parameters"]["partitions"] == [0, 1, 2]
    assert cli_json("ls", "w")[0]["parameters"]["partitions"] == [0, 1, 2]
    # The version, and the one before.
    assert cli_json("show", "w")["parameters"]["stored_bytes"] == 2 * 240_000


@on_one_server
def test_a_first_version_under_way_can_only_be_deleted(cli, client, proxy):
    code = "import sys, redisacc; input(); redisacc.Parameters('w', redis=sys.argv[1], partitions=3).publish([1.0], 0)"

    def begin():
        """A process is killed before it has written the first part."""
        with WarmPython(["-c", code, proxy.url], stdin=subprocess.PIPE, text=True) as process:
            proxy.before("SET", lambda: os.kill(process.pid, signal.SIGKILL))
            print(file=process.stdin, flush=True)
            assert process.wait(20) == -signal.SIGKILL

    begin()
    assert cli("show", "w").exit_code == 3
    assert "w: parameters without a version: somebody has begun to publish" in cli("rm", "w", "--yes").stderr
    assert remaining(client) == []
    begin()
    assert cli("doctor", "--fix").stdout == "no garbage\n"
    assert 0 < client.pttl("redisacc:{w}:parameters") <= 121_000
    client.delete("redisacc:{w}:parameters")
    assert "objects that no parameters refer to" in cli("doctor", "--fix", "--yes").output
    assert remaining(client) == []
