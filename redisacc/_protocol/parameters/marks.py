"""The mark of a deletion, by which a deletion is told from a loss of data.

A server that loses its data loses the mark as well. So parameters that are gone without a mark were not deleted.
``lua/delete.lua`` writes the mark, and says how long it lasts.
"""

from __future__ import annotations

from typing import Literal

from redisacc._format.keys import ParameterKeys
from redisacc._wire.transport import Transport


def deleted_incarnations(transport: Transport, keys: ParameterKeys) -> list[str]:
    """Returns the incarnations of these parameters that were deleted in the last days, the latest first."""
    return _incarnations(transport.call("GET", keys.deleted))


def whereabouts(
    transport: Transport, keys: ParameterKeys, incarnation: str
) -> Literal["deleted", "replaced", "lost", "there"]:
    """Returns what has become of these parameters: the server may have lost them, or others may be in their place.

    Args:
        transport: the way to the server.
        keys: the keys of the parameters.
        incarnation: the incarnation that was seen before. If only its next version has been begun, it is lost as well.
    """
    (found, version), deleted = transport.pipeline(
        [("HMGET", keys.record, "incarnation", "version"), ("GET", keys.deleted)]
    )
    if incarnation in _incarnations(deleted):
        return "deleted"
    if found not in (None, incarnation.encode()):
        return "replaced"
    return "lost" if version is None else "there"


def _incarnations(text: bytes | None) -> list[str]:
    return (text or b"").decode("ascii", "replace").split()
