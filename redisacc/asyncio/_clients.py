"""What users of asyncio bring: a URL, or a client whose settings are taken over.

The client itself is not used, because its connections are streams of asyncio, which copy everything that they receive.
Its settings make connections of redis-py, whose sockets the event loop watches.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import redis

from redisacc._redis.client_libraries import is_client, wire_for_asyncio
from redisacc._redis.connect import DEFAULT_URL, client_with
from redisacc.errors import InvalidArgumentError

_ACCEPTED = "None, a URL, or a client for asyncio (redis.asyncio.Redis or valkey.asyncio.Valkey)"
_CLASSES: dict[str, type[Any]] = {
    "tcp": redis.Connection,
    "tls": redis.SSLConnection,
    "unix": redis.UnixDomainSocketConnection,
}
# The settings that say where a connection leads, and as whom. Those of TLS begin with "ssl_".
_SETTINGS = frozenset(
    (
        "host",
        "port",
        "path",
        "db",
        "username",
        "password",
        "credential_provider",
        "client_name",
        "socket_type",
    )
)


def address_of(where: object) -> tuple[object, object]:
    """Returns what the blocking code connects to, and a key that is the same for the same way to a server.

    Args:
        where: None for the environment variable ``REDISACC_URL``, else ``redis://localhost:6379/0``; a URL, also of a
            cluster; or a client for asyncio.

    Raises:
        InvalidArgumentError: it is something else.
    """
    if where is None:
        where = os.environ.get("REDISACC_URL") or DEFAULT_URL
    if isinstance(where, str):
        return where, where
    wire = wire_for_asyncio(where)
    if wire is None:
        kind = type(where)
        raise InvalidArgumentError(
            f"redis must be {_ACCEPTED}, not {kind.__module__}.{kind.__qualname__:.100}{_remedy(where)}"
        )
    pool: Any = getattr(where, "connection_pool")  # noqa: B009 - of a class that is known by its name only
    given = pool.connection_kwargs
    if given.get("redis_connect_func") or given.get("valkey_connect_func"):
        raise InvalidArgumentError(
            "redisacc.asyncio takes over the settings of a client, and cannot await its connect function: give it a URL"
        )
    kind = _CLASSES[wire]
    known = {name for base in kind.__mro__ if base is not object for name in inspect.signature(base).parameters}
    settings = {
        name: value
        for name, value in given.items()
        if value is not None and name in known and (name in _SETTINGS or name.startswith("ssl_"))
    }
    return client_with(kind, settings), pool


def _remedy(where: object) -> str:
    if is_client(where):
        return ". That one blocks: use the class of the same name in redisacc, or give this one a client for asyncio"
    name = type(where).__name__
    if name.endswith("Cluster"):
        return ". Give it the URL of the cluster, as in redis+cluster://HOST:PORT"
    if name in ("Redis", "Valkey"):
        return ", whose connections are of an unknown class. Give it a URL"
    return ""
