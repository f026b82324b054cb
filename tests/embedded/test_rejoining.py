"""A node that has lost its directory returns to its cluster as the same node."""

import re
import time

import pytest
import redis
from owners import REAL

from redisacc.embedded import Cluster
from redisacc.embedded.cluster_node import CONFIGURATION
from redisacc.embedded.forming import is_complete, own_slots
from redisacc.embedded.program import find_program
from redisacc.embedded.rejoining import configuration_of, hand_over
from redisacc.errors import ServerError


def shards_in_file(node):
    """What a node's file says of each node behind its address, once the server has written it again."""
    node.ask("CLUSTER", "SAVECONFIG")
    lines = [line.split() for line in (node.dir / CONFIGURATION).read_text().splitlines()]
    return {line[0]: line[1].partition(",")[2] for line in lines if line[0] != "vars"}


@pytest.mark.slow
@pytest.mark.servers(*REAL)
@pytest.mark.every_server
@pytest.mark.parametrize(
    ("replicas", "lost"), [(0, 0), (1, 0), (1, 2)], ids=["master", "master_with_replica", "replica"]
)
def test_a_node_without_its_directory_returns(executable, until, replicas, lost):
    release = find_program(executable).release
    with Cluster(2, replicas, executable=executable) as cluster:
        node = cluster.nodes[lost]
        others = [other.where for other in cluster.nodes if other is not node]
        identity = node.ask("CLUSTER", "MYID")
        node.stop()
        node.configure(configuration_of(identity, others, release))
        node.start()
        until(lambda: all(map(is_complete, cluster.nodes)))
        assert node.ask("CLUSTER", "MYID") == identity
        if release >= (7, 0):
            # The slots of the two keys belong to different masters.
            for key in ("b", "foo"):
                cluster.owner(key).ask("SPUBLISH", key, "message")
        if release >= (7, 2):
            told = {
                other.ask("CLUSTER", "MYID"): f",shard-id={other.ask('CLUSTER', 'MYSHARDID')}"
                for other in cluster.nodes
            }
            assert len(set(told.values())) == 2

            def agree():
                files = [shards_in_file(other) for other in cluster.nodes]
                return all(re.sub(",tls-port=0", "", file[name]) == told[name] for file in files for name in told)

            until(agree)
        else:
            assert set(shards_in_file(node).values()) == {""}
        assert all(other.running for other in cluster.nodes)


@pytest.mark.slow
@pytest.mark.servers("valkey")
def test_a_replica_that_the_others_vote_for_while_it_is_told_to_take_over(executable):
    with Cluster(2, 1, executable=executable) as cluster:
        master, other, replica, _ = cluster.nodes

        class Elected:
            host, port = replica.where.host, replica.where.port

            def ask(self, *command):
                for _ in range(1 + ("TAKEOVER" in command)):
                    reply = replica.ask(*command)
                return reply

        identity = master.ask("CLUSTER", "MYID")
        master.stop()
        hand_over(identity, [other.where, Elected()], time.monotonic() + 30)
        assert own_slots(replica)


class Told:
    """A node that says what it is told to say."""

    def __init__(self, number, **replies):
        self.port, self.host = number, "::1" if number == 3 else "127.0.0.1"
        self._replies = replies

    def ask(self, *command):
        if reply := self._replies.get(str(command[1])):
            return reply
        raise redis.ConnectionError("it is gone")


A, B, C, D, E, F = (letter * 40 for letter in "abcdef")
NODES = f"""\
{A} 127.0.0.1:1@10001 myself,master - 0 0 1 connected 0-99 200 [7->-{B}] [8-<-{B}]
{B} 127.0.0.1:2@10002,host.example.org master,fail - 5 6 2 disconnected 100-199
{C} ::1:3@10003 slave,nofailover {A} 0 7 1 connected
{D} 127.0.0.1:4@10004 slave,fail? {B} 0 8 2 connected
{E} :0@0 master,noaddr - 9 9 3 disconnected
{F} 127.0.0.1:6@10006 handshake - 0 0 0 disconnected
"""


def test_what_is_written_of_each_node():
    """As a server writes it, and nothing that only the node that tells it knows."""
    shard = "1" * 40
    others = [
        Told(2),
        Told(1, NODES=NODES, INFO="cluster_state:ok\r\ncluster_current_epoch:12\r\n"),
        Told(3, MYSHARDID=shard),
    ]
    expected = [
        f"{A} 127.0.0.1:1@10001,,shard-id={shard} master - 0 0 1 connected 0-99 200",
        f"{B} 127.0.0.1:2@10002,host.example.org,shard-id=NEW myself,master - 5 6 2 disconnected 100-199",
        f"{C} ::1:3@10003,,shard-id={shard} slave,nofailover {A} 0 7 1 connected",
        f"{D} 127.0.0.1:4@10004,,shard-id=NEW slave {B} 0 8 2 connected",
        f"{E} :0@0,,shard-id=OTHER master,noaddr - 9 9 3 disconnected",
        "vars currentEpoch 12 lastVoteEpoch 12",
    ]
    written = configuration_of(B, others, (7, 2)).decode()
    ids = re.findall("shard-id=([0-9a-f]{40}) ", written)
    assert len(set(ids)) == 3
    assert written.replace(ids[1], "NEW").replace(ids[4], "OTHER").splitlines() == expected
    # Earlier servers would read all of it as a host name.
    before = [re.sub(",?,shard-id=[^ ]+", "", line) for line in expected]
    assert configuration_of(B, others, (7, 0)).decode().splitlines() == before


def test_a_node_that_the_others_have_forgotten():
    told = Told(1, NODES=NODES, INFO="cluster_current_epoch:12")
    with pytest.raises(ServerError, match=f"the cluster does not know the node {'9' * 40}"):
        configuration_of("9" * 40, [told], (7, 2))
