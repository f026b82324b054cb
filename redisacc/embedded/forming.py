"""Makes nodes a cluster, wherever they run, and lets a node return to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import redis

from redisacc.embedded.addresses import TCPAddress, facts_in
from redisacc.errors import ServerError

__all__ = [
    "SLOTS",
    "Line",
    "await_nodes",
    "facts_of",
    "form",
    "is_complete",
    "knows",
    "lines_of",
    "own_slots",
]

SLOTS = 16_384

_ASK_PAUSE = 0.02  # seconds


def form(nodes: Sequence[TCPAddress], masters: int, deadline: float, explain: Callable[[TCPAddress], str]) -> None:
    """Makes nodes one cluster, unless an earlier run has done so. Blocks until all of them say that it is complete.

    Args:
        nodes: the masters, and then the replicas, of which the first is that of the first master, and so on.
        masters: the number of masters. They get equal shares of the slots.
        deadline: a time of the monotonic clock.
        explain: what to add to a message about a node.

    Raises:
        redis.RedisError: a node refuses what makes it one.
        ServerError: the deadline has passed.
    """
    first, *others = nodes
    bounds = [SLOTS * k // masters for k in range(masters + 1)]
    for number, (node, (start, end)) in enumerate(zip(nodes[:masters], pairwise(bounds), strict=True), 1):
        if facts_of(node)["cluster_slots_assigned"] == "0":
            _assign(node, start, end)
            # Different from the beginning, so that the nodes need not settle who yields.
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number)
    for node in others:
        # Also tells nodes that know each other where they are now.
        first.ask("CLUSTER", "MEET", node.host, node.port)
    await_nodes(nodes, deadline, "know each other", lambda node: knows(node, len(nodes)), explain)
    for number, node in enumerate(nodes[masters:]):
        if "slave" not in _own_line(node).flags and not own_slots(node):
            _replicate(node, nodes[number % masters], deadline)
    await_nodes(nodes, deadline, "report that the cluster is complete", is_complete, explain)
    replicas = len(nodes) - masters
    await_nodes(nodes, deadline, "know all replicas", lambda node: _known_replicas(node) >= replicas, explain)


def await_nodes(
    nodes: Sequence[TCPAddress],
    deadline: float,
    what: str,
    is_done: Callable[[TCPAddress], bool],
    explain: Callable[[TCPAddress], str],
) -> None:
    """Blocks until all nodes satisfy a condition.

    Raises:
        ServerError: the deadline has passed.
    """
    waiting = list(nodes)
    while waiting:
        waiting = [node for node in waiting if not is_done(node)]
        if waiting and time.monotonic() >= deadline:
            text = f"{len(waiting)} of {len(nodes)} nodes did not {what} in time"
            raise ServerError(f"{text}{explain(waiting[0])}")
        if waiting:
            time.sleep(_ASK_PAUSE)


def is_complete(node: TCPAddress) -> bool:
    """Returns whether a node sees an owner for every slot, and is in step with its master if it is a replica."""
    facts = facts_of(node)
    if facts["cluster_state"] != "ok" or facts["cluster_slots_ok"] != str(SLOTS):
        return False
    replication = node.ask("INFO", "replication")
    return "role:master" in replication or "master_link_status:up" in replication


def knows(node: TCPAddress, number: int) -> bool:
    """Returns whether a node knows this number of nodes, and has greeted all of them."""
    lines = lines_of(node)
    return len(lines) == number and not any({"handshake", "noaddr"} & set(line.flags) for line in lines)


def own_slots(node: TCPAddress) -> list[str]:
    """Returns the ranges of slots that a node owns in its own view, and those that are being moved."""
    return _own_line(node).rest[4:]


def _own_line(node: TCPAddress) -> Line:
    return next(line for line in lines_of(node) if "myself" in line.flags)


def facts_of(node: TCPAddress) -> dict[str, str]:
    """Returns a node's view of the cluster: the lines of CLUSTER INFO."""
    return facts_in(node.ask("CLUSTER", "INFO"))


class Line(NamedTuple):
    """A line of CLUSTER NODES: how one node sees another, or itself."""

    identity: str
    address: str
    flags: list[str]
    master: str
    rest: list[str]

    @property
    def slots(self) -> list[str]:
        """The ranges of slots that the node owns, without those that are being moved."""
        return [slots for slots in self.rest[4:] if not slots.startswith("[")]

    @property
    def fails(self) -> bool:
        """Whether the node has failed."""
        return "fail" in self.flags

    @property
    def shard(self) -> str:
        """The id of the master of its shard."""
        return self.identity if self.master == "-" else self.master

    def is_of(self, node: TCPAddress) -> bool:
        """Returns whether the line describes this node."""
        # CLUSTER NODES puts an IPv6 address into no brackets.
        return self.address.partition("@")[0] == f"{node.host}:{node.port}"


def lines_of(node: TCPAddress) -> list[Line]:
    """Returns what a node says about each node."""
    lines = [line.split() for line in str(node.ask("CLUSTER", "NODES")).splitlines()]
    return [Line(line[0], line[1], line[2].split(","), line[3], line[4:]) for line in lines if len(line) >= 8]


def _assign(node: TCPAddress, start: int, end: int) -> None:
    """Gives a node the slots from ``start`` up to, but not including, ``end``."""
    try:
        node.ask("CLUSTER", "ADDSLOTSRANGE", start, end - 1)
    except redis.ResponseError:
        # Redis 6.2 does not know ranges.
        node.ask("CLUSTER", "ADDSLOTS", *range(start, end))


def _known_replicas(node: TCPAddress) -> int:
    """Returns how many replicas a node knows, which it tells clients as well."""
    return len(
        {tuple(map(str, replica)) for _, _, _, *replicas in node.ask("CLUSTER", "SLOTS") for replica in replicas}
    )


def _replicate(node: TCPAddress, master: TCPAddress, deadline: float) -> None:
    identity = master.ask("CLUSTER", "MYID")
    while True:
        try:
            node.ask("CLUSTER", "REPLICATE", identity)
            return
        except redis.ResponseError:
            # It has just met the master and may not yet know that it is one.
            if time.monotonic() >= deadline:
                raise
        time.sleep(_ASK_PAUSE)
