"""The mark of a deletion, by which a deletion is told from a loss of data.

A server that loses its data loses the mark as well. So parameters that are gone without a mark were not deleted.
``lua/delete.lua`` writes the mark, and says how long it lasts.
"""

from __future__ import annotations

from redisacc._format.keys import ParameterKeys
from redisacc._wire.transport import Transport


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
    return version is None and not _is_over(transport, keys, incarnation, found)


def is_over(transport: Transport, keys: ParameterKeys, incarnation: str) -> bool:
    """Returns whether these parameters were deleted, or others are in their place. If not, they are there, or lost."""
    return _is_over(transport, keys, incarnation, transport.call("HGET", keys.record, "incarnation"))


def _is_over(transport: Transport, keys: ParameterKeys, incarnation: str, found: bytes | None) -> bool:
    return found not in (None, incarnation.encode()) or incarnation in deleted_incarnations(transport, keys)
