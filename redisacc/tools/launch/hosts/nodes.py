"""The nodes of this host: they start with the cluster, or return to it, and are kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import redis

from redisacc.embedded.addresses import TCPAddress
from redisacc.embedded.cluster_node import BUS_OFFSET, CONFIGURATION, ClusterNode
from redisacc.embedded.forming import form, is_complete
from redisacc.embedded.program import find_program
from redisacc.embedded.rejoining import configuration_of, find_master_to_follow, hand_over
from redisacc.errors import ServerError
from redisacc.tools.launch.hosts.agreement import Member
from redisacc.tools.launch.restarts import Restarts
from redisacc.tools.launch.run import Look
from redisacc.tools.launch.server_keeper import ServerKeeper

# A node counts as failed after this many milliseconds without an answer, and a replica takes over about as much later.
_NODE_TIMEOUT_MS = 5_000

_FORMING = 60.0
_HANDING_OVER = 30.0
# How long a node that returns may take to see the whole cluster. Other hosts may be gone as well, so it is no failure.
_RETURNING = 15.0
_PAUSE = 0.1

_NAMES = ("node", "replica")


class Nodes:
    """The nodes of this host: a master, and a replica of another host's master if there are replicas.

    Args:
        address: where the first one is, and what clients and other nodes need there. The others have the next ports.
        number: how many there are, one or two.
        directory: where they keep their data. None means in temporary directories.
        durable: whether they write every change to disk.
        restarts: returns what is known of the deaths of a node.
        others: returns the other hosts.
    """

    def __init__(
        self,
        address: TCPAddress,
        number: int,
        *,
        directory: Path | None,
        durable: bool,
        restarts: Callable[[], Restarts],
        others: Callable[[], Sequence[Member]],
    ) -> None:
        self._address = address
        self._other_hosts = others
        self._has_replicas = number > 1
        # The ids of the nodes, once they have started.
        self._known: tuple[str, ...] = ()
        names = _NAMES[:number]
        self._directories = [None if directory is None else directory / name for name in names]
        self._nodes = [
            ClusterNode(
                node_timeout_ms=_NODE_TIMEOUT_MS,
                dir=folder,
                durable=durable,
                port=port,
                host=address.host,
                password=address.password,
                tls=address.tls,
            )
            for port, folder in enumerate(self._directories, address.port)
        ]
        self._keepers = [
            ServerKeeper(
                node,
                restarts(),
                keeps_data=directory is not None,
                name=f"the {name}",
                start=partial(self._start_again, place),
            )
            for place, (name, node) in enumerate(zip(names, self._nodes, strict=True))
        ]

    def start(self) -> tuple[str, ...]:
        """Starts nodes that are to become a cluster. Returns their ids.

        Raises:
            ServerError: a node could not be started.
        """
        for node in self._nodes:
            node.start()
        self._known = self._identities()
        return self._known

    def come_back(self, identities: Sequence[str]) -> None:
        """Starts the nodes as those that the cluster knows, and blocks until all see them as a part of it again.

        Args:
            identities: their ids.

        Raises:
            NoNodeAnswersError: no other node answers. It may be called again.
            ServerError: a node could not be started.
        """
        for number, identity in enumerate(identities):
            if not self._nodes[number].running:
                self._start_as(number, identity)
        found = self._identities()
        if found != tuple(identities):
            raise ServerError(
                f"the directory {self._directories[0]} holds a node of another run, {found[0]} instead of "
                f"{identities[0]}: choose another directory, or remove it"
            )
        self._known = found
        deadline = time.monotonic() + _RETURNING
        # The others count a master as failed for up to twice the node timeout after it is back.
        while time.monotonic() < deadline:
            if all(map(_is_complete, [*(node.where for node in self._nodes), *self._others()])):
                return
            time.sleep(_PAUSE)

    def look(self) -> Look | None:
        """Looks after the nodes. Returns what there is to say. Never blocks."""
        return next(filter(None, (keeper.look() for keeper in self._keepers)), None)

    def stop(self) -> None:
        """Stops the nodes and blocks until they have ended."""
        for node in self._nodes:
            node.stop()

    def _identities(self) -> tuple[str, ...]:
        try:
            return tuple(str(node.ask("CLUSTER", "MYID")) for node in self._nodes)
        except redis.RedisError as error:
            raise ServerError(f"the node on this host does not do what makes it one: {error}") from error

    def _start_again(self, number: int) -> None:
        """Starts a node that has died."""
        node = self._nodes[number]
        if self._has_replicas and self._directories[number] is None:
            self._start_as(number, self._known[number])
        else:
            node.start()

    def _start_as(self, number: int, identity: str) -> None:
        node, folder = self._nodes[number], self._directories[number]
        others = [
            *self._others(),
            *(other.where for other in self._nodes if other is not node and other.running),
        ]
        if folder is None or not (folder / CONFIGURATION).exists():
            if self._has_replicas:
                hand_over(identity, others, time.monotonic() + _HANDING_OVER)
            node.configure(configuration_of(identity, others, find_program(None).release))
        node.start()
        if self._has_replicas:
            self._follow(node, identity, others)

    def _follow(self, node: ClusterNode, identity: str, others: Sequence[TCPAddress]) -> None:
        """Makes a node that has lost its slots to its replica the replica of a master that has none."""
        deadline = time.monotonic() + _HANDING_OVER
        while master := find_master_to_follow(identity, [node.where, *others], self._address.host):
            try:
                node.ask("CLUSTER", "REPLICATE", master)
                return
            except redis.RedisError as error:
                # It may not have met the master yet.
                if time.monotonic() >= deadline:
                    raise ServerError(f"the node cannot become a replica: {error}") from error
            time.sleep(_PAUSE)

    def _others(self) -> list[TCPAddress]:
        return self._addresses(self._other_hosts())

    def _addresses(self, members: Sequence[Member], wanted: slice = slice(None)) -> list[TCPAddress]:
        """Returns where the nodes of hosts are: of each host all, or a part of them."""
        return [
            replace(self._address, host=member.address, port=port)
            for member in members
            for port in member.node_ports[wanted]
        ]

    def form(self, members: Sequence[Member]) -> None:
        """Makes the nodes of all hosts a cluster, and blocks until it is complete. Called on the meeting host.

        Raises:
            ServerError: they did not become one in time, or a node does not answer.
        """
        hosts = {member.address: member.name for member in members}

        def explain(node: TCPAddress) -> str:
            return (
                f"; one is {node} on host {hosts[node.host]}. Check that all hosts reach each other at the ports "
                f"{node.port} and {node.port + BUS_OFFSET}"
            )

        # The replica of each master, if there are any, is on the next host.
        replicas = self._addresses([*members[1:], members[0]], slice(1, 2))
        try:
            form([*self._addresses(members, slice(1)), *replicas], len(members), time.monotonic() + _FORMING, explain)
        except redis.RedisError as error:
            raise ServerError(f"a node does not do what makes it one of the cluster: {error}") from error


def _is_complete(node: TCPAddress) -> bool:
    try:
        return is_complete(node)
    except redis.RedisError:
        # Its host is gone, or it is only starting.
        return False
