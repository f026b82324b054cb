"""Removes parameters: large strings one by one, and so that another process can finish if this one dies."""

from __future__ import annotations

import contextlib

from redisacc._format.keys import NAMES, Keys, ParameterKeys
from redisacc._format.parameter_record import Blob, ParameterRecord, parse_schema, with_partitions_text
from redisacc._protocol.attempt_scripts import listed_attempts
from redisacc._protocol.parameter_scripts import ParameterScripts
from redisacc._protocol.partition_sweep import remove_parts
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
    _remove_attempted(transport, keys, timeout)
    if not transport.call("EXISTS", Keys(keys.name).record, timeout=timeout):
        # The accumulator of this name would still be listed.
        with contextlib.suppress(CorruptDataError, NotPermittedError):
            transport.call("SREM", NAMES, keys.name, timeout=timeout)
    scripts.delete_parameters(incarnation=incarnation, finish=True, timeout=timeout)


def _remove_attempted(transport: Transport, keys: ParameterKeys, timeout: float) -> None:
    """Removes the parts of attempts that are under way, and of those whose parts are to be removed."""
    # What redisacc did not write is removed with the keys.
    with contextlib.suppress(CorruptDataError):
        keys = read_partitions(transport, keys, timeout=timeout)
        if keys.partitions:
            attempts = listed_attempts(transport, keys, timeout=timeout)
            remove_parts(transport, keys, attempts, timeout=timeout)


def read_partitions(transport: Transport, keys: ParameterKeys, *, timeout: float = TIMEOUT) -> ParameterKeys:
    """Returns the keys of parameters with the partitions that the record lists, whatever else that holds.

    Raises:
        CorruptDataError: redisacc did not write what the record says of partitions.
    """
    text = transport.call("HGET", keys.record, "partitions", timeout=timeout)
    return with_partitions_text(keys, (text or b"").decode(errors="replace"))


def listed_objects(transport: Transport, keys: ParameterKeys, *, timeout: float = TIMEOUT) -> list[str]:
    """Returns the keys of all parts that the record lists; none if redisacc did not write it."""
    try:
        keys = read_partitions(transport, keys, timeout=timeout)
        return [key for blob in listed_blobs(transport, keys, timeout=timeout) for key in blob.keys(keys)]
    except (CorruptDataError, SchemaMismatchError):
        # What cannot be found this way is found by `redisacc gc`.
        return []


def listed_blobs(transport: Transport, keys: ParameterKeys, *, timeout: float = TIMEOUT) -> list[Blob]:
    """Returns all blobs that the record lists, those of earlier versions included; none if there is no version.

    Raises:
        CorruptDataError: redisacc did not write the record.
        SchemaMismatchError: another version of redisacc wrote it.
    """
    *fields, text, retired = transport.call(*ParameterRecord.command(keys), "structure", "retired", timeout=timeout)
    record = ParameterRecord.parse(keys, fields)
    if record is None:
        return []
    schema = parse_schema(keys, "structure", text)
    return [*record.manifest(schema).blobs(schema.stored(record.wire)).values(), *record.retired(retired)]
