"""The mark of a deletion, by which a deletion is told from a loss of data.

A server that loses its data loses the mark as well. So parameters that are gone without a mark were not deleted.
``lua/delete.lua`` writes the mark, and says how long it lasts.
"""

from __future__ import annotations

from redisacc._format.keys import ParameterKeys
from redisacc._redis.transport import Transport


def deleted_incarnations(transport: Transport, keys: ParameterKeys) -> list[str]:
    """Returns the incarnations of these parameters that were deleted in the last days, the latest first."""
    return (transport.call("GET", keys.deleted) or b"").decode("ascii", "replace").split()


def is_lost(transport: Transport, keys: ParameterKeys, incarnation: str) -> bool:
    """Returns whether the server has lost these parameters: nothing is there, and they were not deleted.

    Args:
        transport: the way to the server.
        keys: the keys of the parameters.
        incarnation: the incarnation that was seen before; of a version that has only been begun, it may be there.
    """
    found, version = transport.call("HMGET", keys.record, "incarnation", "version")
    if version is not None or found not in (None, incarnation.encode()):
        return False
    return incarnation not in deleted_incarnations(transport, keys)
