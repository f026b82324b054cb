"""Clusters of the tests' own, which these may reshard and break."""

import pytest
from support.servers import CLUSTER, executable

from redisacc.embedded import Cluster


@pytest.fixture
def shared_cluster(_servers):
    """The cluster of three masters on which other tests run, too, empty: tests may move its slots, and nothing else."""
    cluster = _servers.get(CLUSTER)
    assert isinstance(cluster, Cluster)
    # Its previous test may have left an accumulator under a name that this one uses.
    for node in cluster.nodes:
        node.ask("FLUSHALL")
    return cluster


@pytest.fixture
def make_cluster(tmp_path):
    """Starts clusters whose nodes keep every change on disk; they end with the test."""
    made = []

    def make(masters=3, replicas=0, **options):
        options = {
            "dir": tmp_path / f"cluster-{len(made)}",
            "durable": True,
            "executable": executable("valkey"),
            **options,
        }
        made.append(Cluster(masters, replicas, **options))
        made[-1].start()
        return made[-1]

    yield make
    for cluster in made:
        cluster.stop()
