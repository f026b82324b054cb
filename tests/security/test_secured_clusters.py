"""TLS, passwords and access rules on a Redis Cluster."""

import logging
import urllib.parse

import numpy as np
import pytest
import redis
from support.daemons import free_port

import redisacc
from redisacc.tools.admin.acl import rules

pytestmark = [pytest.mark.servers("redis7"), pytest.mark.thorough]

PASSWORD = "geheim/ä:@%41"
QUOTED = urllib.parse.quote(PASSWORD, safe="")
NODES = 2


@pytest.fixture
def tls_cluster(daemon, certificates, until):
    """Two masters that speak TLS only, also with each other, and ask clients for certificates and a password."""
    nodes = []
    for _ in range(NODES):
        node = daemon(
            *certificates.of_server,
            *("--tls-cluster", "yes", "--cluster-enabled", "yes", "--cluster-port", str(free_port())),
            *("--cluster-announce-ip", "127.0.0.1", "--requirepass", PASSWORD),
            tls=certificates.of_client,
        )
        nodes.append(node.start(password=PASSWORD))
    asked = [node.client(password=PASSWORD) for node in nodes]
    for number, one in enumerate(asked):
        one.execute_command("CLUSTER", "ADDSLOTSRANGE", 8192 * number, 8192 * number + 8191)
        one.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    bus = asked[1].config_get("cluster-port")["cluster-port"]
    asked[0].execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[1].port, bus)
    until(lambda: all(b"cluster_state:ok" in one.execute_command("CLUSTER", "INFO") for one in asked))
    return nodes


def url_of(node, certificates, *, user="", password=QUOTED, authority="authority"):
    query = {
        "ssl_ca_certs": certificates[authority],
        "ssl_certfile": certificates["client"],
        "ssl_keyfile": certificates["client-key"],
    }
    return f"rediss+cluster://{user}:{password}@127.0.0.1:{node.port}?{urllib.parse.urlencode(query)}"


def test_rounds_on_all_nodes_over_tls(tls_cluster, certificates, open_accumulator, background, until):
    """The nodes have no other port, so every connection to them is one of TLS, with the password."""
    url = url_of(tls_cluster[0], certificates)
    client = redis.RedisCluster(
        host="127.0.0.1",
        port=tls_cluster[1].port,
        password=PASSWORD,
        **certificates.of_client,
    )
    owners = set()
    for name in "abcd":
        worker = open_accumulator("dense", "float32", [None], name, redis=url, limits=redisacc.Limits(in_place=0))
        chief = open_accumulator("dense", "float32", [None], name, redis=client)
        owners.add(client.get_node_from_key(chief.accumulator_ref).name)
        waiting = background(chief.take_grad, 2, timeout=60)
        until(lambda chief=chief: chief.info().waiting)
        for _ in range(2):
            assert worker.apply_grad(np.ones(1_000_000, np.float32))
        assert np.unique(waiting.result(60)).tolist() == [1]
    assert len(owners) == NODES
    client.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"authority": "stranger"}, "certificate verify failed"),
        ({"password": "wrong-" + QUOTED}, "refuses the connection"),
        ({"user": "nobody"}, "refuses the connection"),
    ],
)
def test_what_a_cluster_keeps_out(tls_cluster, certificates, settings, message, caplog):
    with (
        caplog.at_level(logging.DEBUG),
        pytest.raises(redisacc.ServerError, match=message) as failure,
    ):
        redisacc.ConditionalAccumulator("float32", [3], "w", redis=url_of(tls_cluster[0], certificates, **settings))
    for text in (str(failure.value), caplog.text):
        assert PASSWORD not in text
        assert QUOTED not in text


def test_a_cluster_of_tls_without_tls(tls_cluster, short_opening):
    """The message says what a server does with what it does not take for TLS."""
    with pytest.raises(redisacc.ServerUnavailableError, match=r"closed the connection|reset"):
        redisacc.ConditionalAccumulator("float32", [3], "w", redis=f"redis+cluster://127.0.0.1:{tls_cluster[0].port}")


def test_a_user_without_rights_on_some_of_the_keys(tls_cluster, certificates, open_accumulator):
    """Errors name what is missing: the command, the key, and where rules come from."""
    for node in tls_cluster:
        node.client(password=PASSWORD).execute_command(
            "ACL", "SETUSER", "w1", f">{PASSWORD}", *rules("worker", "team/*", cluster=True, eval_=True)
        )
    url = url_of(tls_cluster[0], certificates, user="w1")
    for name in ("team/a", "team/b", "team/c"):
        acc = open_accumulator("dense", "float32", [3], name, redis=url)
        assert acc.apply_grad(np.ones(3))
        with pytest.raises(redisacc.ServerError, match=r"keys.*`redisacc acl` prints rules that suffice"):
            acc.take_grad(1, timeout=5)
    with pytest.raises(redisacc.ServerError, match="keys"):
        open_accumulator("dense", "float32", [3], "others/a", redis=url)
