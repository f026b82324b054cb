"""Connects: finds the transport for a client, a URL or the environment."""

from __future__ import annotations

import contextlib

# The socket module imports this when it first connects to a name. If a process is forked during an import in another
# thread, that module's lock is never released in the child; so whatever is needed is imported now.
import encodings.idna  # noqa: F401
import logging
import os
import weakref
from typing import Any

import redis

from redisacc._clock import durations
from redisacc._text import is_unicode
from redisacc._wire import forks
from redisacc._wire.clients import ACCEPTED, Endpoint, endpoint_of, instead_of, is_client, is_cluster
from redisacc._wire.cluster import Cluster, cluster_of
from redisacc._wire.faults import NotPermittedError
from redisacc._wire.node import Node
from redisacc._wire.replies import info_number, parse_info
from redisacc._wire.slot_map import Address
from redisacc._wire.transport import Transport
from redisacc._wire.waits import BLOCKING, Waits
from redisacc.errors import InvalidArgumentError, ServerError

DEFAULT_URL = "redis://localhost:6379/0"
# The schemes of URLs, and redis-py's names for them. valkey-py's schemes are synonyms.
_SCHEMES = {"redis": "redis", "rediss": "rediss", "unix": "unix", "valkey": "redis", "valkeys": "rediss"}
# The same for clusters, whose URLs redis-py does not read.
_CLUSTER_SCHEMES = {
    "redis+cluster": "redis",
    "rediss+cluster": "rediss",
    "valkey+cluster": "redis",
    "valkeys+cluster": "rediss",
}

_FOR_ASYNCIO = (
    ". That is for asyncio, and this class blocks: use the class of the same name in redisacc.asyncio, or give this "
    "one a {}"
)

_transports: weakref.WeakValueDictionary[Any, Transport] = weakref.WeakValueDictionary()
_lock = forks.lock()


def connect(where: object) -> Transport:
    """Returns the transport for a server. Nothing is sent yet.

    The same client or URL gives the same transport for as long as it is in use.

    Args:
        where: a transport, which is returned; a redis-py or valkey-py client, a URL, or None for the environment
            variable ``REDISACC_URL``, else ``redis://localhost:6379/0``. The URL of a cluster is
            ``redis+cluster://[USER:PASSWORD@]HOST:PORT``, with further nodes after a comma, or the same with
            ``rediss+cluster``.

    Raises:
        InvalidArgumentError: it is none of these, or the URL cannot be read.
    """
    if isinstance(where, Transport):
        return where
    if where is None:
        where = os.environ.get("REDISACC_URL") or DEFAULT_URL
    if isinstance(where, str):
        key: Any = where
    elif is_client(where):
        # Clients that share a pool share the transport.
        key = id(getattr(where, "connection_pool", where))
    else:
        kind = type(where)
        accepted, name = instead_of(where), f"{kind.__module__}.{kind.__qualname__:.100}"
        remedy = "" if accepted is None else _FOR_ASYNCIO.format(accepted)
        raise InvalidArgumentError(f"redis must be None, a URL or a client ({ACCEPTED}), not {name}{remedy}")
    with _lock:
        transport = _transports.get(key)
        if transport is None:
            transport = _transports[key] = transport_to(where)
        return transport


def transport_to(where: Any, waits: Waits = BLOCKING, blocking: Transport | None = None) -> Transport:
    """Returns a new transport. Nothing is sent yet.

    Args:
        where: a URL, a client, or an endpoint.
        waits: how its calls wait.
        blocking: another transport to the same place, if they do not block.
    """
    server: Node | Cluster
    if isinstance(where, str):
        server = _cluster_at(where, waits) if _scheme_of(where) in _CLUSTER_SCHEMES else Node(_at(where), waits=waits)
    elif isinstance(where, Endpoint):
        server = Node(where, waits=waits)
    else:
        server = cluster_of(where) if is_cluster(where) else Node(endpoint_of(where.connection_pool), waits=waits)
    return Transport(where, server, waits=waits, blocking=blocking)


def _scheme_of(url: str) -> str:
    return url.partition(":")[0].lower()


def _cluster_at(url: str, waits: Waits) -> Cluster:
    """Returns the cluster to which a URL leads. Nothing is sent yet."""
    scheme = _CLUSTER_SCHEMES[_scheme_of(url)]
    address, mark, settings = url.partition("://")[2].partition("?")
    address, slash, database = address.partition("/")
    if database not in ("", "0"):
        raise InvalidArgumentError(
            "the URL of a cluster must have no database, because a cluster has only 0: leave out what follows the slash"
        )
    access, at, hosts = address.rpartition("@")
    ways = [_at(f"{scheme}://{access}{at}{host}{slash}{mark}{settings}", url) for host in hosts.split(",")]
    if any(not host or host.startswith(":") for host in hosts.split(",")):
        raise InvalidArgumentError("the URL of a cluster must name at least one host, as in redis+cluster://HOST:PORT")
    seeds = [Address(way.settings["host"], way.settings.get("port", 6379)) for way in ways]
    return Cluster(seeds, lambda at: ways[0].having(host=at.host, port=at.port), waits=waits)


def _at(url: str, given_url: str | None = None) -> Endpoint:
    """Returns where a URL leads.

    Args:
        url: the URL.
        given_url: the URL that the user gave, if it differs.
    """
    if not is_unicode(url):
        # Not quoted, because the URL may carry a password.
        raise InvalidArgumentError("a URL must be valid Unicode")
    given, colon, rest = url.partition(":")
    scheme = _SCHEMES.get(given.lower())
    if scheme is None:
        # The message does not quote the URL, which may carry a password.
        known = ", ".join(f"{known}://" for known in (*_SCHEMES, *_CLUSTER_SCHEMES))
        raise InvalidArgumentError(f"a URL must begin with {known}")
    url = scheme + colon + rest
    given = (given_url or given).partition(":")[0]
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        pool = redis.ConnectionPool.from_url(url)
        # A setting that redis-py does not know raises only when a connection is made.
        pool.connection_class(**pool.connection_kwargs)
        if isinstance(way := endpoint_of(pool), Endpoint):
            return way
    # Raised outside of the except clause, because redis-py's error quotes what it could not read: a part of the
    # password, if that was not percent-encoded.
    raise InvalidArgumentError(
        f"this {given}:// URL cannot be read: redis-py does not accept its port, its database or a setting after the "
        "question mark, or a password in it has characters that must be percent-encoded"
    )


# What a server says of itself that matters to data in it: whether it may have lost them, or may evict them.

logger = logging.getLogger("redisacc")


def may_have_lost_data(transport: Transport, key: str) -> bool:
    """Returns whether a server was started in the last seconds, or FLUSHALL or FLUSHDB was called since its start.

    Args:
        transport: the way to the server.
        key: in a cluster, the node that owns this one is asked.
    """
    if not durations.young:
        return False
    info: dict[str, str] = {}
    for section in ("server", "commandstats"):
        try:
            info |= parse_info(transport.call("INFO", section, beside=key))
        except NotPermittedError as error:
            # It is unknown.
            logger.debug("%s: cannot determine how old its data is: %s", transport.address, error)
            return True
        except ServerError:
            # fakeredis, which lacks the command, forgets nothing.
            return False
    uptime, flushes = info_number(info, "uptime_in_seconds"), ("cmdstat_flushall", "cmdstat_flushdb")
    was_flushed = any(not info.get(name, "calls=0,").startswith("calls=0,") for name in flushes)
    return (uptime is not None and uptime < durations.young) or was_flushed


# The policy that was last warned of, for each transport.
_warned_of: weakref.WeakKeyDictionary[Transport, str] = weakref.WeakKeyDictionary()


def warn_if_evicting(transport: Transport, key: str) -> None:
    """Logs a warning, once for each transport, if the server may evict keys.

    Args:
        transport: the way to the server.
        key: in a cluster, the node that owns this one is asked.
    """
    try:
        info = parse_info(transport.call("INFO", "memory", beside=key))
    except ServerError as error:
        # This user may not read the policy. Eviction is noticed anyway, when a key is missing.
        logger.debug("%s: cannot read the eviction policy: %s", transport.address, error)
        return
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and info_number(info, "maxmemory") and _warned_of.get(transport) != policy:
        _warned_of[transport] = policy
        logger.warning(
            "%s: the server may evict keys of accumulators, and gradients with them, when it is full "
            "(maxmemory-policy %s). Set it to noeviction: CONFIG SET maxmemory-policy noeviction, and in its "
            "configuration file",
            transport.address,
            policy,
        )
