"""Removes parameters: large strings one by one, and so that another process can finish if this one dies."""

from __future__ import annotations

import contextlib

from redisacc._format.keys import NAMES, Keys, ParameterKeys
from redisacc._format.parameter_record import ParameterRecord, parse_schema
from redisacc._protocol.parameter_scripts import ParameterScripts
from redisacc._redis.transport import TIMEOUT, Transport
from redisacc.errors import CorruptDataError, NotPermittedError, SchemaMismatchError


def delete_parameters(transport: Transport, keys: ParameterKeys, incarnation: str, *, timeout: float = TIMEOUT) -> None:
    """Deletes an incarnation for everybody. Does nothing if it is gone, or was replaced by another one.

    Args:
        transport: the way to the server.
        keys: the keys of the parameters.
        incarnation: which parameters of that name.
        timeout: seconds that each step tries to reach the server. The first step that fails ends the deletion.
    """
    scripts = ParameterScripts(transport, keys)
    if scripts.delete_parameters(incarnation=incarnation, finish=False, timeout=timeout) != "closed":
        return
    # From here on, nothing can be published until the record is removed.
    objects = listed_objects(transport, keys, timeout=timeout)
    if objects:
        # One part to a command, because freeing a large string takes the server some time: others get between.
        transport.pipeline([("UNLINK", key) for key in objects], timeout=timeout)
    if not transport.call("EXISTS", Keys(keys.name).record, timeout=timeout):
        # The accumulator of this name would still be listed.
        with contextlib.suppress(CorruptDataError, NotPermittedError):
            transport.call("SREM", NAMES, keys.name, timeout=timeout)
    scripts.delete_parameters(incarnation=incarnation, finish=True, timeout=timeout)


def listed_objects(transport: Transport, keys: ParameterKeys, *, timeout: float = TIMEOUT) -> list[str]:
    """Returns the keys of all parts that the record lists; none if redisacc did not write it."""
    *fields, text, retired = transport.call(*ParameterRecord.command(keys), "structure", "retired", timeout=timeout)
    try:
        record = ParameterRecord.parse(keys, fields)
        if record is None:
            return []
        schema = parse_schema(keys, "structure", text)
        blobs = [*record.manifest(schema).blobs(schema.stored(record.wire)).values(), *record.retired(retired)]
    except (CorruptDataError, SchemaMismatchError):
        # What cannot be found this way is found by `redisacc gc`.
        return []
    return [key for blob in blobs for key in blob.keys(keys)]
