"""One transport for all handles of an event loop that lead to the same server.

A client for asyncio is not used itself, because its connections are streams of asyncio, which copy everything that they
receive. Its settings make connections of redis-py, whose sockets the event loop watches.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from dataclasses import dataclass
from typing import Any

from redisacc._wire import forks
from redisacc._wire.clients import Endpoint, endpoint_of, is_client, is_for_asyncio
from redisacc._wire.connect import DEFAULT_URL, transport_to
from redisacc._wire.transport import Transport
from redisacc.asyncio._waits import LoopWaits
from redisacc.errors import InvalidArgumentError

_ACCEPTED = "None, a URL, or a client for asyncio (redis.asyncio.Redis or valkey.asyncio.Valkey)"


@dataclass(eq=False)
class Shared:
    """A transport that some handles use.

    Attributes:
        transport: the transport.
        waits: how its calls wait.
        key: the URL or the pool of the client that leads there.
        users: the number of handles.
    """

    transport: Transport
    waits: LoopWaits
    key: object
    users: int = 0


# Guards the next one, and what is in it: loops run in several threads.
_lock = forks.lock()
_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[object, Shared]] = weakref.WeakKeyDictionary()


def borrow(where: object) -> Shared:
    """Returns the transport for a server on the running loop. Nothing is sent yet.

    Args:
        where: what users pass as ``redis=``: None for the environment variable ``REDISACC_URL``, else
            ``redis://localhost:6379/0``; a URL, also of a cluster; or a client for asyncio.

    Raises:
        InvalidArgumentError: it is something else.
    """
    way, key = _way_to(where)
    with _lock:
        # What they share refers to its loop, so it would never go by itself.
        for ended in [loop for loop in _shared.copy() if loop.is_closed()]:
            del _shared[ended]
        on_loop = _shared.setdefault(asyncio.get_running_loop(), {})
        shared = on_loop.get(key)
        if shared is None:
            waits = LoopWaits()
            shared = on_loop[key] = Shared(transport_to(way, waits, transport_to(way)), waits, key)
        shared.users += 1
    return shared


def drop(shared: Shared) -> None:
    """Ends the use of a transport by a handle that was never closed. It cannot await, so the connections stay."""
    shared.users -= 1


async def give_back(shared: Shared) -> None:
    """Ends a handle's use of a transport. The last one closes its connections."""
    with _lock:
        shared.users -= 1
        is_last = shared.users <= 0 and _shared[shared.waits.loop].pop(shared.key, None) is not None
    if is_last:
        await shared.waits.close()
        shared.transport.close()


def _way_to(where: object) -> tuple[str | Endpoint, object]:
    """Returns where a place leads, and a key that is the same for the same way."""
    if where is None:
        where = os.environ.get("REDISACC_URL") or DEFAULT_URL
    if isinstance(where, str):
        return where, where
    if is_for_asyncio(where):
        pool: Any = getattr(where, "connection_pool")  # noqa: B009 - of a class that is known by its name only
        given = pool.connection_kwargs
        if given.get("redis_connect_func") or given.get("valkey_connect_func"):
            raise InvalidArgumentError(
                "redisacc.asyncio takes over the settings of a client, and cannot await its connect function: give it "
                "a URL"
            )
        if isinstance(way := endpoint_of(pool), Endpoint):
            return way, pool
    kind = type(where)
    raise InvalidArgumentError(
        f"redis must be {_ACCEPTED}, not {kind.__module__}.{kind.__qualname__:.100}{_remedy(where)}"
    )


def _remedy(where: object) -> str:
    if is_client(where):
        return ". That one blocks: use the class of the same name in redisacc, or give this one a client for asyncio"
    name = type(where).__name__
    if name.endswith("Cluster"):
        return ". Give it the URL of the cluster, as in redis+cluster://HOST:PORT"
    if name in ("Redis", "Valkey"):
        return ", whose connections are of an unknown class. Give it a URL"
    return ""
