"""The class `Cluster`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

from redisacc.embedded.addresses import TCPAddress
from redisacc.embedded.cluster_node import BUS_OFFSET, CONFIGURATION, ClusterNode
from redisacc.embedded.forming import await_nodes, form, is_complete, knows, own_slots
from redisacc.errors import InvalidArgumentError, ServerError

__all__ = ["Cluster"]

# A node counts as failed after this many milliseconds without an answer, and a replica takes over about as much later.
# Shorter than the server's default of 15 seconds, because all nodes are on this machine; but a busy machine may keep a
# node from answering for a while.
_NODE_TIMEOUT_MS = 5_000


class Cluster:
    """A Redis Cluster whose nodes belong to this process, evict nothing, and are reachable from this machine only.

    `start()` or a `with` block starts it, which takes about two seconds. Each node is a `Server`: it ends with
    `stop()`, with the block, and with the process that called `start()`, even if that process is killed with SIGKILL.
    The masters own equal shares of the slots.

    Args:
        masters: the number of masters, 1 to 100.
        replicas: the number of replicas of each master, 0 to 5.
        dir: the directory for the nodes' data, each in its own subdirectory. It is created if it doesn't exist, and
            kept; a later cluster of the same size continues with the data. None means temporary directories, which are
            removed when the nodes end; no data is written to them.
        durable: as for `Server`: whether every change is written to disk, instead of snapshots. Needs `dir`.
        port: the TCP port of the first node; the others have the ports that follow. Each node also uses the port that
            is higher by 10,000, for the other nodes. At most 55,535 for the last node. None means free ports.
        executable: the server program, a path or a name on the `PATH`. None means `find_server()`.

    Raises:
        InvalidArgumentError: a number is out of range, or `durable` is given without `dir`.
    """

    def __init__(
        self,
        masters: int = 3,
        replicas: int = 0,
        # It shadows a builtin, as in Server.
        dir: str | os.PathLike[str] | None = None,  # noqa: A002
        *,
        durable: bool = False,
        port: int | None = None,
        executable: str | os.PathLike[str] | None = None,
    ) -> None:
        _check("masters", masters, 1, 100)
        _check("replicas", replicas, 0, 5)
        self._masters = masters
        self._replicas = replicas
        number = masters * (1 + replicas)
        if port is not None:
            _check("port", port, 1, 65_535 - BUS_OFFSET - number + 1)
        self._directory = None if dir is None else Path(os.path.abspath(os.fspath(dir)))
        self._durable = durable
        self._executable = executable
        self._nodes = [self._new_node(None if port is None else port + k, k) for k in range(number)]

    def _new_node(self, port: int | None, number: int) -> ClusterNode:
        directory = None if self._directory is None else self._directory / f"node-{number + 1}"
        return ClusterNode(
            node_timeout_ms=_NODE_TIMEOUT_MS,
            dir=directory,
            durable=self._durable,
            port=port,
            executable=self._executable,
        )

    def __repr__(self) -> str:
        """Returns the URL and how many nodes are running."""
        running = sum(node.running for node in self._nodes)
        try:
            where = f"at {self.url}"
        except ServerError:
            return "<redisacc.embedded.Cluster, not started>"
        return f"<redisacc.embedded.Cluster {where}, {running} of {len(self._nodes)} nodes running>"

    def start(self, timeout: float = 30.0) -> None:
        """Starts the nodes that are not running, and blocks until all nodes report that the cluster is complete.

        Args:
            timeout: maximum number of seconds for each node to answer, and then for all of them to agree.

        Raises:
            ServerError: a node could not be started, for one of the reasons that `Server.start` lists, or the nodes
                did not agree in time. No process is left running.
        """
        self._check_directory()
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.stop)
            for node in self._nodes:
                node.start(timeout)
            deadline = time.monotonic() + timeout
            try:
                form(self._addresses, self._masters, deadline, self._explain)
            except redis.RedisError as error:
                raise ServerError(f"a node of the cluster does not do what makes it one: {error}") from error
            on_failure.pop_all()

    def _check_directory(self) -> None:
        """Raises ServerError if the directory holds a cluster of another size, whose slots would be missing."""
        if self._directory is None:
            return
        found = len(list(self._directory.glob(f"node-*/{CONFIGURATION}")))
        if found not in (0, len(self._nodes)):
            raise ServerError(
                f"{self._directory} holds the data of a cluster of {found} nodes, not {len(self._nodes)}: choose the "
                "same numbers of masters and replicas, or another directory"
            )

    @property
    def _addresses(self) -> list[TCPAddress]:
        return [node.where for node in self._nodes]

    def _explain(self, address: TCPAddress) -> str:
        return f"; the log of one ends with:\n{self._nodes[self._addresses.index(address)].log_tail()}"

    def stop(self) -> None:
        """Stops all nodes and blocks until they have ended and their latest data is on disk."""
        for node in self._nodes:
            node.stop()

    @property
    def nodes(self) -> Sequence[ClusterNode]:
        """The nodes: first those that began as masters, then those that began as replicas.

        Each has the methods of a `Server`, and `kill()`; `start()` restarts a node that was killed.
        """
        return tuple(self._nodes)

    @property
    def url(self) -> str:
        """``redis+cluster://127.0.0.1:PORT,127.0.0.1:PORT,...``, with all nodes.

        Raises:
            ServerError: the cluster was never started.
        """
        return "redis+cluster://" + ",".join(map(str, self._addresses))

    def owner(self, key: str) -> ClusterNode:
        """Returns the node that owns the slot of a key at this moment.

        Raises:
            ServerError: no node that answers owns it.
        """
        for node in self._nodes:
            with contextlib.suppress(redis.RedisError, ServerError):
                slot = int(node.ask("CLUSTER", "KEYSLOT", key))
                # Each node knows best what it owns itself.
                for start, end, master, *_ in node.ask("CLUSTER", "SLOTS"):
                    if start <= slot <= end and master[1] == node.where.port:
                        return node
        raise ServerError(f"no node owns the slot of the key {key!r}")

    def add_master(self, timeout: float = 30.0) -> ClusterNode:
        """Starts another master, which owns no slots, and blocks until all nodes know it. Returns it.

        Raises:
            ServerError: it could not be started, or the nodes did not agree in time.
        """
        node = self._new_node(None, len(self._nodes))
        node.start(timeout)
        self._nodes.append(node)
        self._nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.where.port)
        deadline = time.monotonic() + timeout
        number = len(self._nodes)
        await_nodes(self._addresses, deadline, "know each other", lambda other: knows(other, number), self._explain)
        await_nodes(self._addresses, deadline, "report that the cluster is complete", is_complete, self._explain)
        return node

    def remove_master(self, node: ClusterNode) -> None:
        """Stops a master that owns no slots, and tells the other nodes to forget it.

        Args:
            node: one of `nodes`; not the first, which `client` and later changes of the cluster rely on.

        Raises:
            InvalidArgumentError: it is not such a node, or it owns slots. Nothing has changed.
        """
        if node not in self._nodes[1:]:
            raise InvalidArgumentError("only a node of this cluster other than its first one can be removed")
        if own_slots(node.where):
            raise InvalidArgumentError(f"the node at port {node.port} owns slots: move them to others before it goes")
        identity = node.ask("CLUSTER", "MYID")
        self._nodes.remove(node)
        directory = node.dir
        node.stop()
        # Its next owner must not be taken for this node.
        (directory / CONFIGURATION).unlink(missing_ok=True)
        for other in self._nodes:
            other.ask("CLUSTER", "FORGET", identity)

    def client(self, **kw: Any) -> redis.RedisCluster:
        """Returns a new redis-py client for the cluster.

        Args:
            **kw: arguments of `redis.RedisCluster`.
        """
        return redis.RedisCluster(host="127.0.0.1", port=self._nodes[0].where.port, **kw)

    def __enter__(self) -> Self:
        """Starts the cluster."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops the cluster."""
        self.stop()


def _check(what: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise InvalidArgumentError(f"{what} must be an int from {low} to {high}, not {value!r}")
