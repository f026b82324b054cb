"""Errors that a server replies with: which of them pass by themselves, and what the others become."""

from __future__ import annotations

from redisacc._redis.faults import ReplyError
from redisacc.errors import CorruptDataError, NotPermittedError, ServerError, ServerOutOfMemoryError

# Refusals that pass by themselves: a server that runs a long script, a cluster that moves keys, a master that has just
# been demoted. A new connection, through Sentinel or a name that moves, finds the replica that was promoted.
PASSING = {
    "BUSY": "is busy",
    "LOADING": "is still loading its data",
    "TRYAGAIN": "is moving the key",
    "CLUSTERDOWN": "belongs to a cluster that is down, or has no master for the key: see `redisacc doctor`",
    "MASTERDOWN": "is a replica that has lost its master",
    "UNBLOCKED": "was demoted to a replica while it waited for its replicas",
    "READONLY": "is a read-only replica: name its master, or go through Sentinel",
}

# How a node of a cluster refuses a command for a key that another node has, or may have.
REDIRECTIONS = frozenset(("MOVED", "ASK"))


def refusal_of(error: ReplyError) -> ServerError | CorruptDataError:
    """Returns the error that callers get for a refusal of the server."""
    message = str(error)
    if "WRONGTYPE" in message:
        return CorruptDataError(f"a key of the accumulator has another type than redisacc gives it: {message}")
    if "not an integer" in message:
        return CorruptDataError(f"a field of the accumulator's record is not the number that belongs there: {message}")
    code = error.code
    if code == "NOPERM":
        return NotPermittedError(
            f"the server's access control list refuses this user: {message}. `redisacc acl` prints rules that suffice"
        )
    if code in REDIRECTIONS:
        # Over a cluster's transport, these never get here.
        return ServerError(
            f"the server is a node of a Redis Cluster, and another node has the key ({message}): give redis= a URL "
            "redis+cluster://HOST:PORT, or a redis.RedisCluster"
        )
    if code == "OOM":
        return ServerOutOfMemoryError(
            "the server has reached its maxmemory and stores nothing more. Take rounds, which still works and frees "
            f"memory, or give the server more ({message})"
        )
    return ServerError(f"the server refused: {message}")
