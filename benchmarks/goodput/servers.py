"""Where the data of the training are, and how a process of each kind is killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import redis

from redisacc.embedded import Cluster
from redisacc.embedded.cluster_node import ClusterNode

MASTERS = 3
# Seconds between two looks at the nodes after one was killed.
_LOOK = 0.1


class OneServer:
    """The server that `redisacc run` starts, without anything beside it."""

    options = ("--server",)
    partitions = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def kill(self, victim: str, folder: Path, choose: random.Random) -> bool:
        """Kills a process of a kind: "chief", "worker" or "any". Returns whether there was one."""
        path = choose.choice(sorted(folder.glob("*.pid" if victim == "any" else f"{victim}*.pid")))
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)
            return True
        return False

    def look_after(self) -> None:
        """Starts again what was killed, unless `redisacc run` does."""


class OnCluster(OneServer):
    """A cluster of masters with a replica each, and a reducer for every node.

    A reducer that is killed is started again at once. A node is when its replica has taken its place.
    """

    partitions = MASTERS

    def __init__(self) -> None:
        self._cluster = Cluster(MASTERS, 1)
        self._reducers: list[subprocess.Popen[bytes]] = []
        self._killed: ClusterNode | None = None
        self._next_look = 0.0

    def __enter__(self) -> Self:
        self._cluster.start()
        self._reducers = [self._reducer(node) for node in self._cluster.nodes]
        return self

    def __exit__(self, *_: object) -> None:
        for reducer in self._reducers:
            reducer.kill()
            reducer.wait()
        self._cluster.stop()

    @property
    def options(self) -> tuple[str, ...]:  # type: ignore[override]
        """The options of `redisacc run`."""
        return ("--redis", self._cluster.url)

    def _reducer(self, node: ClusterNode) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "redisacc", "reduce", "--redis", self._cluster.url]
        command += ["--node", f"127.0.0.1:{node.port}"]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self, victim: str, folder: Path, choose: random.Random) -> bool:
        """Kills a process of a kind: also "reducer", of a master, or "node", a master whose replica is in step."""
        if victim not in ("reducer", "node"):
            return super().kill(victim, folder, choose)
        masters = [number for number, node in enumerate(self._cluster.nodes) if _role(node) == "master"]
        if self._killed is not None or len(masters) < MASTERS or not all(map(_is_in_step, self._cluster.nodes)):
            return False
        number = choose.choice(masters)
        if victim == "node":
            self._killed = self._cluster.nodes[number]
            self._killed.kill()
        else:
            self._reducers[number].kill()
        return True

    def look_after(self) -> None:
        """Starts again what was killed."""
        for number, reducer in enumerate(self._reducers):
            if reducer.poll() is not None:
                self._reducers[number] = self._reducer(self._cluster.nodes[number])
        if self._killed is None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK
        if [_role(node) for node in self._cluster.nodes if node is not self._killed].count("master") == MASTERS:
            self._killed.start()
            self._killed = None


def _role(node: ClusterNode) -> str:
    with contextlib.suppress(redis.RedisError):
        return str(node.ask("ROLE")[0])
    return ""


def _is_in_step(node: ClusterNode) -> bool:
    """Returns whether a node is a master with a replica, or a replica that has what its master has."""
    with contextlib.suppress(redis.RedisError):
        facts = node.ask("INFO", "replication")
        return "master_link_status:up" in facts or "connected_slaves:1" in facts
    return False
