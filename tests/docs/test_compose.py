"""The cluster of docker-compose.yml starts with the same commands on this machine, without containers."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import redis
import yaml
from support.servers import executable

import redisacc
from redisacc.embedded.addresses import free_port
from redisacc.embedded.cluster_node import BUS_OFFSET

FILE = Path(__file__).resolve().parents[2] / "docker-compose.yml"
NODES = 6
PASSWORD = "for-trying-out"

pytestmark = [
    pytest.mark.skipif(not FILE.exists(), reason="docker-compose.yml isn't part of an installation"),
    pytest.mark.skipif(shutil.which("redis-cli") is None, reason="no redis-cli"),
    pytest.mark.thorough,
]


def services():
    return yaml.safe_load(FILE.read_text())["services"]


def script_of(service):
    """Returns the shell script of a service, as compose hands it over."""
    shell, option, text = service["command"]
    assert (shell, option) == ("sh", "-c")
    return str(text).replace("$$", "$")


def cluster_ports():
    found = []
    while len(found) < NODES:
        port = free_port()
        if port + BUS_OFFSET <= 65_535 and port not in found:
            found.append(port)
    return found


@pytest.fixture
def nodes(tmp_path):
    """The nodes' ports. What would be the image's entry point adds a port and a directory to the command."""
    entry = tmp_path / "docker-entrypoint.sh"
    entry.write_text(f'#!/bin/sh\nshift\nexec {executable("redis7")} "$@" --port $PORT --bind 127.0.0.1 --dir $DIR\n')
    entry.chmod(0o755)
    ports, running = cluster_ports(), []
    for number, port in enumerate(ports, 1):
        directory = tmp_path / f"node-{number}"
        directory.mkdir()
        environment = {"PORT": str(port), "DIR": str(directory), "REDISCLI_AUTH": PASSWORD}
        environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        command = ["sh", "-c", script_of(services()[f"node-{number}"])]
        running.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    yield ports
    for process in running:
        process.kill()
        process.wait(20)


def answers(port):
    try:
        with redis.Redis(port=port, password=PASSWORD) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


def test_the_cluster_starts_and_serves(nodes, until):
    until(lambda: all(map(answers, nodes)))
    create = services()["cluster-create"]
    assert len(create["environment"]["NODES"].split()) == len(create["depends_on"]) == NODES
    environment = {"NODES": " ".join(f"127.0.0.1:{port}" for port in nodes), "REDISCLI_AUTH": PASSWORD}
    environment["PATH"] = os.environ["PATH"]
    # The second time, as when containers are started again, it finds the cluster complete.
    for _ in range(2):
        subprocess.run(["sh", "-c", script_of(create)], env=environment, check=True, timeout=60, capture_output=True)
    url = services()["cluster-training"]["environment"]["REDISACC_URL"]
    assert url == f"redis+cluster://:${{REDISACC_PASSWORD:-{PASSWORD}}}@node-1:6379,node-2:6379,node-3:6379"
    with redisacc.ConditionalAccumulator(
        "float32", [3], "w", redis=f"redis+cluster://:{PASSWORD}@127.0.0.1:{nodes[0]}", min_replicas=1
    ) as acc:
        assert acc.apply_grad([1, 2, 3])
        assert acc.take_grad(1, timeout=20).tolist() == [1, 2, 3]
        acc.delete()


def test_addresses_fit_together():
    """A node has the address under which it is made a member of the cluster."""
    addresses = [services()[f"node-{number}"]["networks"]["cluster"]["ipv4_address"] for number in range(1, NODES + 1)]
    assert services()["cluster-create"]["environment"]["NODES"].split() == [f"{one}:6379" for one in addresses]
