"""Removes parameters: large strings one by one, and so that another process can finish if this one dies."""

from __future__ import annotations

import contextlib

from redisacc._format.keys import Keys, ParameterKeys
from redisacc._format.parameter_record import Blob, ParameterRecord
from redisacc._protocol.lifecycle.deletion import delete_in_steps, remove_attempted
from redisacc._protocol.rounds.current_round import with_partitions
from redisacc._wire.transport import Transport
from redisacc.errors import CorruptDataError


def delete_parameters(transport: Transport, keys: ParameterKeys, incarnation: str) -> None:
    """Deletes an incarnation for everybody. Does nothing if it is gone, or was replaced by another one.

    Args:
        transport: the way to the server.
        keys: the keys of the parameters.
        incarnation: which parameters of that name.
    """
    delete_in_steps(
        transport,
        keys,
        incarnation,
        # Only operators may touch `guard`, by the rules of `redisacc acl`.
        [keys.attempts, keys.claims, keys.history, keys.guard],
        lambda: _remove_contents(transport, keys),
        marks=[keys.deleted],
        sibling=Keys(keys.name),
    )


def _remove_contents(transport: Transport, keys: ParameterKeys) -> None:
    objects = listed_objects(transport, keys)
    if objects:
        # One part to a command, because freeing a large string takes the server some time: others get between.
        transport.pipeline([("UNLINK", key) for key in objects])
    # A list that redisacc did not write is removed with the keys.
    with contextlib.suppress(CorruptDataError):
        remove_attempted(transport, with_partitions(transport, keys))


def listed_objects(transport: Transport, keys: ParameterKeys) -> list[str]:
    """Returns the keys of all parts that the record lists; none if redisacc did not write it."""
    try:
        keys = with_partitions(transport, keys)
        return [key for blob in listed_blobs(transport, keys) for key in blob.keys(keys)]
    except CorruptDataError:
        # `redisacc doctor --fix` finds the parts that cannot be found this way.
        return []


def listed_blobs(transport: Transport, keys: ParameterKeys) -> list[Blob]:
    """Returns all blobs that the record lists, including earlier versions'; none if there is no version.

    Raises:
        CorruptDataError: redisacc did not write the record, or another version of it did.
    """
    more = "structure", "retired"
    record = ParameterRecord.parse(keys, transport.call(*ParameterRecord.command(keys, *more)), *more)
    return [] if record is None else record.stored(record.schema())
