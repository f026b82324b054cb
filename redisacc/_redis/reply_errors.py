"""Errors that a server replies with: which of them pass by themselves, and what the others become."""

from __future__ import annotations

from redisacc._redis.faults import RejectedError, ReplyError
from redisacc.errors import CorruptDataError, ServerError


class NotPermittedError(ServerError):
    """The server's access control list does not permit the command to the user."""


class ServerOutOfMemoryError(ServerError):
    """The server has reached its ``maxmemory``. Nothing was stored."""


class WritesRefusedError(ServerError):
    """The server stores nothing for the time being. Nothing was changed."""


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


_ELSEWHERE = (
    # Over a cluster's transport, these never get here.
    "the server is a node of a Redis Cluster, and another node has the key ({}): give redis= a URL "
    "redis+cluster://HOST:PORT, or a redis.RedisCluster"
)
# Codes of refusals → the error that callers get, and its message, which contains the server's text.
_MEANINGS: dict[str, tuple[type[ServerError], str]] = {
    "NOPERM": (
        NotPermittedError,
        "the server's access control list refuses this user: {}. `redisacc acl` prints rules that suffice",
    ),
    "NOAUTH": (
        ServerError,
        "the server asks for a password ({}): name it in the URL, as in redis://:PASSWORD@HOST:PORT, or as "
        "redis://USER:PASSWORD@HOST:PORT",
    ),
    "MOVED": (ServerError, _ELSEWHERE),
    "ASK": (ServerError, _ELSEWHERE),
    "MISCONF": (
        WritesRefusedError,
        "the server stores nothing as long as it cannot save its data: its disk may be full, or its folder gone ({})",
    ),
    "NOREPLICAS": (
        WritesRefusedError,
        "the server stores nothing as long as too few of its replicas are connected ({})",
    ),
    "OOM": (
        ServerOutOfMemoryError,
        "the server has reached its maxmemory and stores nothing more. Take rounds, which still works and frees "
        "memory, or give the server more ({})",
    ),
}


def refusal_of(error: ReplyError) -> ServerError | CorruptDataError:
    """Returns the error that callers get for a refusal of the server."""
    message = str(error)
    if "WRONGTYPE" in message:
        return CorruptDataError(f"a key of the accumulator has another type than redisacc gives it: {message}")
    if "not an integer" in message:
        return CorruptDataError(f"a field of the accumulator's record is not the number that belongs there: {message}")
    # A server refuses a long command before it has looked who sends it.
    code = "NOAUTH" if "unauthenticated" in message else error.code
    kind, text = _MEANINGS.get(code, (ServerError, "the server refused: {}"))
    return kind(text.format(message))


def rejection_of(error: RejectedError, address: str) -> ServerError:
    """Returns the error that callers get if the server at an address refuses the connection."""
    message = str(error)
    if "authentication required" in message.lower():
        kind, text = _MEANINGS["NOAUTH"]
        return kind(text.format(message))
    return ServerError(f"{address} refuses the connection: {message}")
