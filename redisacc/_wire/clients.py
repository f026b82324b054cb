"""The clients that users give, of redis-py and valkey-py: which they are, where they lead, and what their errors mean.

Their own connections are not used. Each of ours is opened from the client's settings by new objects of redis-py, which
nobody else has: neither a fork nor a thread that closes the client can get in between. redis-py does what it is good
at: addresses, authentication, TLS, Sentinel. The classes of both libraries have the same names, so they are recognized
by name, and valkey-py, which is optional, need not be imported.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import redis
from redis.connection import DefaultParser
from redis.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection

from redisacc._clock import durations
from redisacc._interrupts import interrupt_in
from redisacc._text import printable
from redisacc._wire import forks
from redisacc._wire.faults import (
    FAULTS,
    BrokenError,
    RejectedError,
    ReplyError,
    SilentError,
    reason_of,
)
from redisacc._wire.replies import ReplyReader

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
# How the addresses of this machine begin.
_LOCAL = ("unix://", "localhost:", "127.", "::1:")
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
    return instead_of(client) is not None and hasattr(client, "connection_pool")


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


# The settings that are taken over. Those of TLS begin with "ssl_". Others are about retries, which are ours, about the
# protocol, which is always RESP2, and about caches and notifications, which redisacc does not need, and whose objects
# all connections of a client share.
_SETTINGS = frozenset(
    (
        *("host", "port", "path", "db", "username", "password", "credential_provider", "encoding", "encoding_errors"),
        *("client_name", "driver_info", "redis_connect_func"),
        *("socket_type", "socket_timeout", "socket_connect_timeout", "socket_keepalive", "socket_keepalive_options"),
    )
)
# For connections of redis-py and valkey-py, also those for asyncio, by the names of their classes.
_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(redis.Connection, redis.SSLConnection, redis.UnixDomainSocketConnection),
        *(SentinelManagedConnection, SentinelManagedSSLConnection),
    )
}
# What max_connections is if nobody has chosen it.
_NO_LIMITS = frozenset((50, 100, 2**31))


class Endpoint:
    """Where connections lead, and as whom: what a client's pool says at the moment.

    Args:
        pool: the pool of the user's client, which is only read.
        settings: what differs from its settings.

    Attributes:
        address: where they lead, without a password.
        tls: whether they speak TLS.
        most: how many connections there may be; None means as many as are needed.
        freshness: for how many seconds a connection may be idle, and is still used.
        is_local: whether they lead to this machine.
    """

    is_own = True

    def __init__(self, pool: Any, **settings: Any) -> None:
        self._pool, self._given = pool, settings
        self._kind = _KINDS[pool.connection_class.__name__]
        self._has_sentinels = hasattr(pool, "sentinel_manager")
        self.address = _address({**pool.connection_kwargs, **settings}, pool)
        self.is_local = self.address.startswith(_LOCAL)
        self.tls = _speaks_tls(self._kind)
        most = getattr(pool, "max_connections", None)
        self.most = None if most in _NO_LIMITS else most
        self.freshness: float = pool.connection_kwargs.get("health_check_interval") or math.inf

    def having(self, **settings: Any) -> Endpoint:
        """Returns the same with other settings."""
        return Endpoint(self._pool, **{**self._given, **settings})

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of a connection of redis-py."""
        given = self._pool.connection_kwargs
        settings = {
            # They limit only redis-py's handshakes; an exchange has a limit of its own. Before redis-py 8 the default
            # was no limit, and a server that accepted a connection and then stalled blocked the caller forever.
            "socket_timeout": durations.handshake,
            "socket_connect_timeout": durations.handshake,
            "socket_keepalive": True,
            # redisacc needs nothing that RESP3 adds, and its handshake costs round trips.
            "protocol": 2,
            "redis_connect_func": given.get("valkey_connect_func"),
            **{name: value for name, value in given.items() if value is not None and _is_taken_over(name)},
            **self._given,
        }
        known = _arguments_of(self._kind)
        return {"parser_class": HandshakeParser, **{name: value for name, value in settings.items() if name in known}}

    def own(self) -> Any:
        """Returns a pool of redis-py with the same settings, whose objects nobody else has."""
        if not self._has_sentinels:
            return redis.ConnectionPool(connection_class=self._kind, **self.settings)
        given, manager = self._pool, self._pool.sentinel_manager
        finder: Any = Sentinel([], min_other_sentinels=manager.min_other_sentinels)  # type: ignore[no-untyped-call]
        finder._force_master_ip = getattr(manager, "_force_master_ip", None)
        finder.sentinels = [
            redis.Redis(connection_pool=Endpoint(client.connection_pool).own()) for client in manager.sentinels
        ]
        options = {"is_master": given.is_master, "check_connection": given.check_connection}
        kind: Any = SentinelConnectionPool
        return kind(given.service_name, finder, connection_class=self._kind, **options, **self.settings)

    def open(self) -> Any:
        """Returns a new connection of redis-py, which is ready for commands."""
        with forks.opening():
            pool = self.own() if self._has_sentinels else None
            pooled = self._kind(**(self.settings if pool is None else pool.connection_kwargs))
            try:
                pooled.connect()
            except BaseException:
                # Cut short by an interrupt, it would be one without a password, or one of database 0.
                disconnect(pooled)
                raise
            finally:
                for sentinel in () if pool is None else pool.sentinel_manager.sentinels:
                    sentinel.close()
            return pooled


class GivenPool:
    """The pool of a client whose connections cannot be copied, such as a fake one, or one of the user's own classes.

    Attributes:
        pool: the pool.
        address: where its connections lead, without a password.
        tls: whether they speak TLS.
    """

    is_own, is_local, most, freshness = False, False, None, math.inf

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.address = _address(getattr(pool, "connection_kwargs", None) or {}, pool)
        self.tls = _speaks_tls(getattr(pool, "connection_class", None))
        required = any(
            p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
            for p in inspect.signature(pool.get_connection).parameters.values()
        )
        # valkey-py, and redis-py before 5.3, require the command's name; later versions warn about it.
        self._arguments = ("EVALSHA",) if required else ()

    def open(self) -> Any:
        """Takes a connection out of the pool, which may have to open it."""
        try:
            with forks.opening():
                return self.pool.get_connection(*self._arguments)
        except BaseException as error:
            # An error of the library's own closes the connection that was being made. Another one, such as an
            # interrupt, leaves it in the pool as it is, and the pool would hand it out as ready.
            if not is_of_library(error):
                # Before redis-py 7, the blocking pool has no argument that leaves connections in use open.
                arguments = (False,) if inspect.signature(self.pool.disconnect).parameters else ()
                with contextlib.suppress(Exception):
                    self.pool.disconnect(*arguments)
            raise


def endpoint_of(pool: Any) -> Endpoint | GivenPool:
    """Returns where the connections of a client's pool lead."""
    return Endpoint(pool) if has_copyable_connections(pool) else GivenPool(pool)


def _is_taken_over(name: str) -> bool:
    return name in _SETTINGS or name.startswith("ssl_")


@functools.cache
def _arguments_of(kind: type) -> frozenset[str]:
    """Returns the names of the arguments of a class of connections."""
    bases = [base for base in kind.__mro__ if base is not object]
    return frozenset(name for base in bases for name in inspect.signature(base).parameters)


def _speaks_tls(kind: Any) -> bool:
    return "SSL" in getattr(kind, "__name__", "")


def _address(settings: Mapping[str, Any], pool: Any) -> str:
    if "path" in settings:
        return f"unix://{settings['path']}"
    if "host" in settings:
        return f"{settings['host']}:{settings.get('port', 6379)}/{settings.get('db', 0)}"
    return type(pool).__name__


class HandshakeParser(DefaultParser):  # type: ignore[misc,valid-type]
    """redis-py's parser, with bounds: refuses replies that cannot answer a handshake, or that drip in forever."""

    def on_connect(self, connection: Any, *args: Any, **options: Any) -> None:
        """Begins a handshake."""
        super().on_connect(connection, *args, **options)
        reader: Any = getattr(self, "_reader", None)
        # redis-py without hiredis reads an array element by element, and needs no bounds.
        if reader is not None:
            limit = max(durations.handshake, connection.socket_timeout or 0.0)
            self._reader = _BoundedReader(reader, time.monotonic() + limit)

    def on_disconnect(self) -> None:
        """Ends the connection, which is never made again."""
        super().on_disconnect()
        # redis-py's parser refers to itself: it, and its buffer, would stay until garbage is collected.
        self.pubsub_push_handler_func = None


class _BoundedReader:
    """The reader inside of redis-py's parser, with a second one before it that knows what is too much."""

    def __init__(self, reader: Any, deadline: float) -> None:
        self._reader = reader
        self._deadline = deadline
        self._bounds = ReplyReader()
        self._bounds.commands = [("HELLO",)]

    def feed(self, buffer: Any, start: int = 0, length: int = -1) -> None:
        if time.monotonic() >= self._deadline:
            raise redis.TimeoutError("the server took too long for the first replies of a connection")
        data = bytes(buffer[start : start + length] if length >= 0 else buffer[start:])
        try:
            self._bounds.read(data)
        except BrokenError as error:
            raise redis.ConnectionError(str(error)) from error
        self._reader.feed(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)
