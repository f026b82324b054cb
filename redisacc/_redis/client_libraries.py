"""redis-py and valkey-py, whose clients users bring: their clients, connections and errors.

Everything that knows these libraries apart from their common interface is here. Their classes have the same names, so
they are recognised by name, and valkey-py, which is optional, need not be imported.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from redisacc._interrupts import interrupt_in
from redisacc._redis.faults import (
    FAULTS,
    BrokenError,
    RejectedError,
    ReplyError,
    SilentError,
    reason_of,
)
from redisacc._text import printable

_LIBRARIES = ("redis", "valkey")


def _in_both(*names: str) -> frozenset[str]:
    return frozenset(f"{library}.{name}" for library in _LIBRARIES for name in names)


# Subclasses of these are accepted, too, such as the classes of FakeRedis and FakeValkey.
_CLUSTERS = frozenset(("redis.cluster.RedisCluster", "valkey.cluster.ValkeyCluster"))
_CLIENTS = frozenset(("redis.client.Redis", "valkey.client.Valkey")) | _CLUSTERS
# These are subclasses of clients, but collect commands instead of sending them.
_PIPELINES = _in_both("client.Pipeline", "cluster.ClusterPipeline")
# Clients for asyncio → the class that redisacc accepts instead.
_ASYNCIO = {
    "redis.asyncio.client.Redis": "redis.Redis",
    "redis.asyncio.cluster.RedisCluster": "redis.RedisCluster",
    "valkey.asyncio.client.Valkey": "valkey.Valkey",
    "valkey.asyncio.cluster.ValkeyCluster": "valkey.ValkeyCluster",
}
# The pools and connections whose settings are all there is to them. Exactly these classes, because a subclass may
# change where a connection leads, or the bytes that it sends and receives.
_POOLS = _in_both("connection.ConnectionPool", "connection.BlockingConnectionPool", "sentinel.SentinelConnectionPool")
_CONNECTIONS = _in_both(
    *("connection.Connection", "connection.SSLConnection", "connection.UnixDomainSocketConnection"),
    *("sentinel.SentinelManagedConnection", "sentinel.SentinelManagedSSLConnection"),
)
_SENTINELS = _in_both("sentinel.Sentinel")

# The libraries remove the code from the text of these errors.
_CODES = {
    "AskError": "ASK",
    "BusyLoadingError": "LOADING",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN",
    "MovedError": "MOVED",
    "NoPermissionError": "NOPERM",
    "NoScriptError": "NOSCRIPT",
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "TryAgainError": "TRYAGAIN",
}
# The errors that the libraries raise when another thread closes their client meanwhile.
STUMBLES = (TypeError, ValueError, AttributeError)

ACCEPTED = (
    "redis.Redis, redis.RedisCluster, valkey.Valkey, valkey.ValkeyCluster, or what Sentinel's master_for() returns"
)


@functools.lru_cache(maxsize=256)
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)


def _ancestors(thing: object) -> tuple[str, ...]:
    """Returns the full names of an object's class and of its base classes, nearest first."""
    # The type, not __class__, which a mock makes up.
    kind: Any = type(thing)
    return _names(kind)


def is_client(where: object) -> bool:
    """Returns whether redisacc can use an object as a client."""
    ancestors = _ancestors(where)
    return not _CLIENTS.isdisjoint(ancestors) and _PIPELINES.isdisjoint(ancestors)


def is_cluster(client: object) -> bool:
    """Returns whether a client leads to the nodes of a Redis Cluster."""
    return not _CLUSTERS.isdisjoint(_ancestors(client))


def instead_of(client: object) -> str | None:
    """Returns the class that redisacc accepts in place of an asyncio client's; None for anything else."""
    return next((_ASYNCIO[name] for name in _ancestors(client) if name in _ASYNCIO), None)


def is_for_asyncio(client: object) -> bool:
    """Returns whether an object is a client for asyncio of one server."""
    return not _ASYNCIO.keys().isdisjoint(_ancestors(client)) and hasattr(client, "connection_pool")


def has_copyable_connections(pool: Any) -> bool:
    """Returns whether the settings of a pool, also one for asyncio, are all that is needed to open its connections."""
    if not (_is_one_of(_POOLS, type(pool)) and _is_one_of(_CONNECTIONS, pool.connection_class)):
        return False
    manager = getattr(pool, "sentinel_manager", None)
    return manager is None or (
        _is_one_of(_SENTINELS, type(manager))
        and all(has_copyable_connections(client.connection_pool) for client in manager.sentinels)
    )


def _is_one_of(names: frozenset[str], kind: type) -> bool:
    return _names(kind)[0].replace(".asyncio.", ".") in names


def fault_of(error: Exception) -> Exception | None:
    """Returns the fault behind an error of a library or of a socket, or None for an error of another kind.

    The fault is the error itself if it is one, or if a signal handler raised it.

    Raises:
        BaseException: the exception of a signal handler that the library turned into this error.
    """
    known = error if isinstance(error, FAULTS) else interrupt_in(error)
    if known is error:
        return error
    if known is not None:
        raise known
    if isinstance(error, OSError):
        return BrokenError(reason_of(error))
    if isinstance(error, STUMBLES):
        return BrokenError(f"another thread may have closed the client ({type(error).__name__}: {reason_of(error)})")
    if isinstance(error, (RecursionError, MemoryError)):
        return BrokenError(f"a reply is too large or too deeply nested for the client ({type(error).__name__})")
    names = [name.rpartition(".")[2] for name in _ancestors(error) if name.partition(".")[0] in _LIBRARIES]
    if not names:
        return None
    _defuse(error)
    return _fault_of(names, reason_of(error))


def _defuse(error: BaseException) -> None:
    """Makes the texts of an error and of its causes printable: they are the server's, and tracebacks print them."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, Exception) and is_of_library(link):
            link.args = tuple(printable(arg) if isinstance(arg, str) else arg for arg in link.args)
        link = link.__cause__ or link.__context__


def _fault_of(names: list[str], text: str) -> Exception:
    """Returns the fault behind an error of a library, given the names of its class and of its base classes."""
    for name in names:
        if name in _CODES:
            return ReplyError(f"{_CODES[name]} {text}")
    if "ResponseError" in names:
        return ReplyError(text)
    if "AuthenticationError" in names or "AuthorizationError" in names:
        return RejectedError(text)
    return SilentError(text) if "TimeoutError" in names else BrokenError(text)


def is_of_library(error: BaseException) -> bool:
    """Returns whether an error is one of a library's own."""
    return any(name.partition(".")[0] in _LIBRARIES for name in _ancestors(error))


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raises the fault behind an error of a library or of a socket instead of that error."""
    try:
        yield
    except Exception as error:
        fault = fault_of(error)
        if fault is None or fault is error:
            raise
        raise fault from error


def disconnect(pooled: Any) -> None:
    """Closes a connection of a library, whatever that raises, unless a signal handler raises it."""
    with contextlib.suppress(*FAULTS), translated():
        pooled.disconnect()
