"""Which chief was the last to say that a training is finished. The record of the parameters names it."""

from __future__ import annotations

from redisacc._format.keys import ParameterKeys
from redisacc._protocol.parameters.version_writer import amend_latest
from redisacc._wire.transport import Transport


def conclude(transport: Transport, keys: ParameterKeys, chief: str) -> None:
    """Says that the latest version is the last one, and who says it. Something must have been published.

    Args:
        transport: the way to the server.
        keys: of the parameters.
        chief: the run id of the chief's place.

    Raises:
        NotFoundError: the parameters were deleted.
    """
    amend_latest(transport, keys, event="finished", fields=["finished", "1", "finished_by", chief])


def is_concluded_by(transport: Transport, keys: ParameterKeys, chief: str) -> bool:
    """Returns whether the latest version is the last one, and this chief has said so."""
    # The rules for workers let them read the record by this command only.
    return list(transport.call("HMGET", keys.record, "finished", "finished_by")) == [b"1", chief.encode()]
