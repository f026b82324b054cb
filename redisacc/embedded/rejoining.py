"""Lets a node that has lost its directory, or another machine in its place, return to its cluster as the same node."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence

import redis

from redisacc.embedded.addresses import TCPAddress
from redisacc.embedded.forming import Line, facts_of, lines_of
from redisacc.errors import ServerError

__all__ = ["NoNodeAnswersError", "configuration_of", "find_master_to_follow", "hand_over"]

_PAUSE = 0.05  # seconds

# From this release on, the nodes of a shard have an id in common. A node that begins without one crashes when it
# publishes a message to its shard.
_FIRST_WITH_SHARD_IDS = (7, 2)


class NoNodeAnswersError(ServerError):
    """No other node answers, or a replica has not taken over yet, which may pass."""


def _view(nodes: Sequence[TCPAddress]) -> tuple[list[Line], str]:
    """Returns what the first node that answers knows of the cluster, and its current epoch.

    Raises:
        NoNodeAnswersError: none answers.
    """
    errors = []
    for node in nodes:
        try:
            return lines_of(node), facts_of(node).get("cluster_current_epoch", "0")
        except redis.RedisError as error:
            errors.append(f"{node}: {error}")
    raise NoNodeAnswersError(f"no other node of the cluster answers ({'; '.join(errors) or 'there is none'})")


def configuration_of(identity: str, others: Sequence[TCPAddress], release: tuple[int, int]) -> bytes:
    """Returns a configuration with which a node begins as a node that the cluster knows.

    Args:
        identity: the id of the node.
        others: the other nodes.
        release: the release of the node's server program.

    Raises:
        NoNodeAnswersError: no other node answers, or they have forgotten this one.
    """
    lines, epoch = _view(others)
    if not any(line.identity == identity for line in lines):
        raise ServerError(f"the cluster does not know the node {identity}")
    shard_ids = _shard_ids(lines, others) if release >= _FIRST_WITH_SHARD_IDS else {}
    text = []
    for line in lines:
        if "handshake" in line.flags:
            continue
        # Whether a node fails, the new one finds out for itself.
        flags = [flag for flag in line.flags if flag not in ("myself", "fail", "fail?")]
        if line.identity == identity:
            flags.insert(0, "myself")
        address = line.address
        if shard_ids:
            # The second part is a host name, which may be empty.
            address += f"{'' if ',' in address else ','},shard-id={shard_ids[line.shard]}"
        fields = [line.identity, address, ",".join(flags), line.master, *line.rest[:4], *line.slots]
        text.append(" ".join(fields) + "\n")
    # It may have voted in this epoch, and no node may vote twice.
    return "".join([*text, f"vars currentEpoch {int(epoch)} lastVoteEpoch {int(epoch)}\n"]).encode()


def _shard_ids(lines: Sequence[Line], nodes: Sequence[TCPAddress]) -> dict[str, str]:
    """Returns the id of each shard by the id of its master. One that no node tells is new: the others accept it."""
    found = {line.shard: secrets.token_hex(20) for line in lines}
    for line in lines:
        for node in nodes:
            if line.is_of(node) and not line.fails:
                with contextlib.suppress(redis.RedisError):
                    found[line.shard] = str(node.ask("CLUSTER", "MYSHARDID"))
    return found


def hand_over(identity: str, others: Sequence[TCPAddress], deadline: float) -> None:
    """Lets a replica take over from a node that returns without data, and blocks until it has.

    Otherwise the replica would copy the emptiness of its master, and the data would be lost. Has no effect if the node
    owns no slots, or has no replica that answers.

    Raises:
        NoNodeAnswersError: no other node answers, or the replica did not take over in time.
    """
    while True:
        lines, _ = _view(others)
        if not any(line.identity == identity and line.slots for line in lines):
            return
        replicas = [line for line in lines if line.master == identity and not line.fails]
        replica = next((node for node in others if any(line.is_of(node) for line in replicas) and _answers(node)), None)
        if replica is None:
            return
        if time.monotonic() >= deadline:
            raise NoNodeAnswersError(f"the replica at {replica} did not take over from its master in time")
        # Without a vote: the master is gone, and this call comes from the host that has it. It is refused if the others
        # have voted for the replica just now.
        with contextlib.suppress(redis.RedisError):
            replica.ask("CLUSTER", "FAILOVER", "TAKEOVER")
        time.sleep(_PAUSE)


def _answers(node: TCPAddress) -> bool:
    try:
        return bool(node.ask("PING"))
    except redis.RedisError:
        return False


def find_master_to_follow(identity: str, others: Sequence[TCPAddress], host: str) -> str | None:
    """Returns the id of a master on another host that has slots and no replica; None if this node is not free.

    Args:
        identity: the id of this node. It is free if it is a master without slots.
        others: the other nodes.
        host: the address of this host.

    Raises:
        NoNodeAnswersError: no other node answers.
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
