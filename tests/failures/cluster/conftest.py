"""Clusters of the tests' own, which these may reshard and break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers import CLUSTER, Servers, executable

from redisacc.embedded import Cluster


@pytest.fixture
def shared_cluster(_servers: Servers) -> Cluster:
    """The cluster of three masters on which other tests run, too, empty: tests may move its slots, and nothing else."""
    cluster = _servers.get(CLUSTER)
    assert isinstance(cluster, Cluster)
    # Its previous test may have left an accumulator under a name that this one uses.
    for node in cluster.nodes:
        node.ask("FLUSHALL")
    return cluster


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Starts clusters whose nodes keep every change on disk; they end with the test."""
    made: list[Cluster] = []

    def make(masters: int = 3, replicas: int = 0, **options: Any) -> Cluster:
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
