"""One transport for all handles of an event loop that lead to the same server."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass

from redisacc._redis import forks
from redisacc._redis.connect import transport_to
from redisacc._redis.transport import Transport
from redisacc.asyncio._clients import address_of
from redisacc.asyncio._waits import LoopWaits


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


# Guards the next one: loops run in several threads.
_lock = forks.lock()
_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[object, Shared]] = weakref.WeakKeyDictionary()


def borrow(where: object) -> Shared:
    """Returns the transport for a server on the running loop. Nothing is sent yet.

    Args:
        where: what users pass as ``redis=``.

    Raises:
        InvalidArgumentError: it leads nowhere.
    """
    address, key = address_of(where)
    with _lock:
        # What they share refers to its loop, so it would never go by itself.
        for ended in [loop for loop in list(_shared) if loop.is_closed()]:
            del _shared[ended]
        on_loop = _shared.setdefault(asyncio.get_running_loop(), {})
    shared = on_loop.get(key)
    if shared is None:
        waits = LoopWaits()
        transport = transport_to(address, waits, transport_to(address))
        shared = on_loop[key] = Shared(transport, waits, key)
    shared.users += 1
    return shared


def drop(shared: Shared) -> None:
    """Ends the use of a transport by a handle that was never closed. It cannot await, so the connections stay."""
    shared.users -= 1


async def give_back(shared: Shared) -> None:
    """Ends a handle's use of a transport. The last one closes its connections."""
    shared.users -= 1
    with _lock:
        on_loop = _shared[shared.waits.loop]
    if shared.users <= 0 and on_loop.pop(shared.key, None) is not None:
        await shared.waits.close()
        shared.transport.close()
