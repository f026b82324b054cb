"""`embedded.Cluster`: a real cluster in a few lines, which ends with its owner and leaves nothing behind."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from owners import alive
from support.servers import executable

import redisacc
from redisacc.embedded import Cluster, Server

OWNER = """
import os, signal, sys
from redisacc.embedded import Cluster
cluster = Cluster(2, executable=sys.argv[1])
cluster.start()
print(*(node.pid for node in cluster.nodes), *(node.dir for node in cluster.nodes), flush=True)
signal.pause()
"""


@pytest.mark.slow
def test_a_killed_owner_leaves_nothing_behind(until):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, executable("valkey")], stdout=subprocess.PIPE, text=True)
    first, second, *folders = owner.stdout.readline().split()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until(lambda: not alive(int(first)) and not alive(int(second)))
    until(lambda: not any(Path(folder).exists() for folder in folders))


@pytest.mark.thorough
@pytest.mark.parametrize("program", ["valkey", "redis7", "redis62"])
def test_masters_share_the_slots_and_replicas_follow(program):
    with Cluster(3, 1, executable=executable(program)) as cluster:
        assert len(cluster.nodes) == 6
        assert all(isinstance(node, Server) and node.running for node in cluster.nodes)
        assert cluster.url == "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in cluster.nodes)
        ranges = cluster.nodes[5].ask("CLUSTER", "SLOTS")
        assert sorted((start, end) for start, end, *_ in ranges) == [(0, 5460), (5461, 10921), (10922, 16383)]
        assert all(len(entry) == 4 for entry in ranges)
        client = cluster.client()
        client.set("foo", 1)
        assert cluster.owner("foo").ask("GET", "foo") == "1"
        client.close()
        pids = [node.pid for node in cluster.nodes]
    assert not any(map(alive, pids))
    assert repr(cluster).endswith("0 of 6 nodes running>")


@pytest.mark.thorough
def test_data_survive_in_a_directory(tmp_path):
    where = {"dir": tmp_path / "data", "executable": executable("valkey")}
    with Cluster(2, durable=True, **where) as cluster:
        for name in "abc":
            with redisacc.ConditionalAccumulator("int32", [1], name, redis=cluster.url) as acc:
                acc.apply_grad([7])
    # Other ports, and snapshots instead of an append-only file.
    with Cluster(2, **where) as cluster:
        for name in "abc":
            with redisacc.ConditionalAccumulator("int32", [1], name, redis=cluster.url) as acc:
                assert acc.take_grad(1, timeout=20).tolist() == [7]
    with pytest.raises(
        redisacc.ServerError,
        match="a cluster of 2 nodes, not 3: choose the same numbers of masters and replicas, or another directory",
    ):
        Cluster(3, **where).start()


@pytest.mark.thorough
def test_a_killed_node_comes_back_as_itself():
    with Cluster(2, executable=executable("valkey")) as cluster:
        node = cluster.nodes[1]
        before = node.port, node.ask("CLUSTER", "MYID")
        node.kill()
        assert not node.running
        cluster.start()
        assert (node.port, node.ask("CLUSTER", "MYID")) == before


@pytest.mark.thorough
def test_a_master_comes_and_goes(tmp_path):
    with Cluster(2, dir=tmp_path / "data", executable=executable("valkey")) as cluster:
        for _ in range(2):
            added = cluster.add_master()
            assert cluster.nodes[2:] == (added,)
            cluster.remove_master(added)
            assert not added.running
            assert len(cluster.nodes) == 2
            assert all(len(node.ask("CLUSTER", "NODES").splitlines()) == 2 for node in cluster.nodes)
        for node, message in {
            cluster.nodes[0]: "other than its first",
            cluster.nodes[1]: "owns slots: move them to others before it goes",
        }.items():
            with pytest.raises(redisacc.InvalidArgumentError, match=message):
                cluster.remove_master(node)
        assert all(node.running for node in cluster.nodes)
    # Of the same size as before.
    with Cluster(2, dir=tmp_path / "data", executable=executable("valkey")):
        pass


@pytest.mark.thorough
def test_the_command(tmp_path):
    # Below those that the system hands out: the port that follows must be free as well.
    port = random.randrange(12_000, 20_000)
    command = [sys.executable, "-m", "redisacc", "server", "--cluster", "2", "--port", str(port), "--dir", "data"]
    environment = {**os.environ, "REDISACC_SERVER": executable("valkey")}
    with (
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as running,
        contextlib.ExitStack() as stack,
    ):
        # If something fails, nothing is left running.
        stack.callback(running.terminate)
        text = ""
        while "server.log" not in text:
            line = running.stdout.readline()
            assert line, text
            text += line
        url = re.search(r"URL +(\S+)", text)
        assert url is not None
        assert url[1] == f"redis+cluster://127.0.0.1:{port},127.0.0.1:{port + 1}"
        found = subprocess.run(
            [sys.executable, "-m", "redisacc", "doctor", "--redis", url[1]],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert "2 masters, 0 replicas each" in found.stdout
        assert re.search(r"^ok +reducers", found.stdout, re.MULTILINE)
        running.send_signal(signal.SIGTERM)
        rest = running.stdout.read()
        assert running.wait(60) == 0
    assert "Stopped. The data are in data." in rest
