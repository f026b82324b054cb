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
