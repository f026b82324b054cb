"""Addresses, users and clients that do not fit a cluster: a typed error says what to change."""

import shlex
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from support.until import until

import redisacc
from redisacc.embedded import Cluster
from redisacc.tools.cli import main


def dense(where, name="w", **options):
    return redisacc.ConditionalAccumulator("float32", [3], name, redis=where, **options)


@pytest.mark.servers("valkey")
def test_the_url_of_a_cluster_that_leads_to_a_single_server(real_server):
    url = real_server.url.replace("redis://", "redis+cluster://")
    with pytest.raises(
        redisacc.ServerError, match=f"not a node of a Redis Cluster: give redis= a URL redis://127.*:{real_server.port}"
    ):
        dense(url)


def test_the_url_of_a_single_server_that_leads_to_a_node(shared_cluster):
    owner = shared_cluster.owner("redisacc:{w}")
    other = next(node for node in shared_cluster.nodes if node is not owner)
    with pytest.raises(redisacc.ServerError, match=r"node of a Redis Cluster.*redis\+cluster://HOST:PORT") as failure:
        dense(other.url)
    assert "MOVED" in str(failure.value)


URLS = {
    "redis+cluster://": "at least one host",
    "redis+cluster://a:1,,b:2": "at least one host",
    "redis+cluster://:7000": "at least one host",
    "redis+cluster://a:1/3": "no database, because a cluster has only 0: leave out what follows the slash",
    "redis+cluster://a:x": r"redis\+cluster:// URL cannot be read",
    "redis+cluster://u:secret@a:1,b:99999999": "cannot be read",
    "redis+cluster://u:se/cret@a:1": "no database",
    "redis+cluster://a:1?nonsense=1": "cannot be read",
    "redis+sentinel://a:1": "must begin with",
}


@pytest.mark.parametrize(("url", "message"), URLS.items())
def test_urls_that_cannot_be_read(url, message):
    with pytest.raises(redisacc.InvalidArgumentError, match=message) as failure:
        dense(url)
    assert "secret" not in str(failure.value)
    assert "cret" not in str(failure.value).replace("percent-encoded", "")


def test_any_node_will_do(shared_cluster):
    """Those that do not answer are passed over."""
    last = shared_cluster.nodes[-1]
    with dense(f"redis+cluster://127.0.0.1:1,127.0.0.1:{last.port}") as acc:
        assert acc.apply_grad(np.ones(3))
        acc.delete()


@pytest.mark.thorough
def test_nodes_that_announce_an_unreachable_address(make_cluster):
    cluster = make_cluster(2, dir=None, durable=False)
    # Nobody listens there: a node announces a port for its clients that leads nowhere.
    owner = cluster.owner("redisacc:{w}")
    owner.ask("CONFIG", "SET", "cluster-announce-port", 1)
    other = next(node for node in cluster.nodes if node is not owner)
    until(lambda: any(entry[2][1] == 1 for entry in other.ask("CLUSTER", "SLOTS")))
    remedy = "it announces a wrong address: set cluster-announce-ip, or cluster-announce-hostname"
    expected = rf"127\.0\.0\.1:1, which cannot be reached.*{remedy}"
    with pytest.raises(redisacc.ServerUnavailableError, match=expected):
        dense(f"redis+cluster://127.0.0.1:{other.port}")


@pytest.mark.thorough
def test_a_user_with_the_rules_of_a_worker(shared_cluster):
    """The user may not load scripts, so an operator has done that."""
    printed = CliRunner().invoke(main, ["acl", "worker", "team/*", "--user", "w1", "--cluster"]).stdout
    for node in shared_cluster.nodes:
        node.ask(*shlex.split(printed), ">secret")
    command = [sys.executable, "-m", "redisacc", "acl", "--load", "--redis", shared_cluster.url]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    url = shared_cluster.url.replace("://", "://w1:secret@")
    for name in ("team/a", "team/b", "team/c"):
        with dense(url, name) as acc:
            assert acc.apply_grad(np.ones(3))
    with pytest.raises(redisacc.ServerError, match="access control list"):
        dense(url, "others/a")
    with pytest.raises(redisacc.ServerError, match="refuses the connection") as failure:
        dense(shared_cluster.url.replace("://", "://w1:wrong@"))
    assert "wrong" not in str(failure.value)
    for name in ("team/a", "team/b", "team/c"):
        with dense(shared_cluster.url, name) as acc:
            acc.delete()
    for node in shared_cluster.nodes:
        node.ask("ACL", "DELUSER", "w1")


def test_numbers_of_nodes():
    for options in ({"masters": 0}, {"masters": True}, {"masters": 101}, {"replicas": -1}, {"port": 60_000}):
        with pytest.raises(redisacc.InvalidArgumentError, match="must be an int from"):
            Cluster(**options)
