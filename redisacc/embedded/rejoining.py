"""Lets a node that has lost its directory, or another machine in its place, return to its cluster as the same node."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import redis

from redisacc.embedded.forming import Node
from redisacc.errors import ServerError

__all__ = ["configuration_of", "find_master_to_follow", "hand_over"]

_PAUSE = 0.05  # seconds


class _Line(NamedTuple):
    """What a node says about a node in CLUSTER NODES."""

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
        return "fail" in self.flags


def _view(nodes: Sequence[Node]) -> tuple[list[_Line], str]:
    """Returns what the first node that answers knows of the cluster, and its current epoch.

    Raises:
        ServerError: none answers.
    """
    errors = []
    for node in nodes:
        try:
            lines = [line.split() for line in str(node.ask("CLUSTER", "NODES")).splitlines()]
            facts = dict(line.split(":", 1) for line in str(node.ask("CLUSTER", "INFO")).splitlines() if ":" in line)
        except redis.RedisError as error:
            errors.append(f"{node.where}: {error}")
            continue
        known = [_Line(line[0], line[1], line[2].split(","), line[3], line[4:]) for line in lines if len(line) >= 8]
        return known, facts.get("cluster_current_epoch", "0")
    raise ServerError(f"no other node of the cluster answers ({'; '.join(errors) or 'there is none'})")


def configuration_of(identity: str, others: Sequence[Node]) -> bytes:
    """Returns a configuration with which a node begins as a node that the cluster knows.

    Args:
        identity: the id of the node.
        others: the other nodes.

    Raises:
        ServerError: no other node answers, or they have forgotten this one.
    """
    lines, epoch = _view(others)
    if not any(line.identity == identity for line in lines):
        raise ServerError(f"the cluster does not know the node {identity}")
    text = []
    for line in lines:
        # Whether a node fails, the new one finds out for itself.
        flags = [flag for flag in line.flags if flag in ("master", "slave")]
        if line.identity == identity:
            flags.insert(0, "myself")
        fields = [line.identity, line.address, ",".join(flags), line.master, *line.rest[:4], *line.slots]
        text.append(" ".join(fields) + "\n")
    return "".join([*text, f"vars currentEpoch {int(epoch)} lastVoteEpoch 0\n"]).encode()


def hand_over(identity: str, others: Sequence[Node], deadline: float) -> None:
    """Lets a replica take over from a node that returns without data, and blocks until it has.

    Otherwise the replica would copy the emptiness of its master, and the data would be lost. Has no effect if the node
    owns no slots, or has no replica that answers.

    Raises:
        ServerError: no other node answers, or the replica did not take over in time.
    """
    while True:
        lines, _ = _view(others)
        if not any(line.identity == identity and line.slots for line in lines):
            return
        replicas = {line.address.partition("@")[0] for line in lines if line.master == identity and not line.fails}
        replica = next((node for node in others if str(node.where) in replicas and _answers(node)), None)
        if replica is None:
            return
        if time.monotonic() >= deadline:
            raise ServerError(f"the replica at {replica.where} did not take over from its master in time")
        # Without a vote: the master is gone, and this call comes from the host that has it.
        if "slave" in _flags_of_itself(replica):
            replica.ask("CLUSTER", "FAILOVER", "TAKEOVER")
        time.sleep(_PAUSE)


def _answers(node: Node) -> bool:
    try:
        return bool(node.ask("PING"))
    except redis.RedisError:
        return False


def _flags_of_itself(node: Node) -> list[str]:
    return next((line.flags for line in _view([node])[0] if "myself" in line.flags), [])


def find_master_to_follow(identity: str, others: Sequence[Node], host: str) -> str | None:
    """Returns the id of a master on another host that has slots and no replica; None if this node is not free.

    Args:
        identity: the id of this node. It is free if it is a master without slots.
        others: the other nodes.
        host: the address of this host.

    Raises:
        ServerError: no other node answers.
    """
    lines, _ = _view(others)
    own = next((line for line in lines if line.identity == identity), None)
    if own is None or "slave" in own.flags or own.slots:
        return None
    followed = {line.master for line in lines if "slave" in line.flags}
    free = [
        line.identity
        for line in lines
        if line.slots and not line.fails and line.identity not in followed and _host(line.address) != host
    ]
    return free[0] if free else None


def _host(address: str) -> str:
    return address.partition("@")[0].rpartition(":")[0]
