"""Clusters of the tests' own, which these may reshard and break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers import executable

from redisacc.embedded import Cluster


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[Cluster]:
    """A cluster of three masters, whose slots tests may move but whose nodes they leave alone."""
    with Cluster(3, executable=executable("valkey")) as cluster:
        yield cluster


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
