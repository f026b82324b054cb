"""What a chief writes into the record of the parameters: how many workers share the data, the last step, and the end.

``redisacc._training.quorum`` decides the first number.
"""

from __future__ import annotations

from redisacc._format.keys import ParameterKeys
from redisacc._format.stored_text import parse_int64, parsed
from redisacc._protocol.parameters.version_writer import amend_latest
from redisacc._wire.transport import Transport


def announce_workers(transport: Transport, keys: ParameterKeys, workers: int, until: int | None) -> None:
    """Writes among how many workers the data is shared, and publishes an event. Something must have been published.

    Args:
        transport: the way to the server.
        keys: the keys of the parameters.
        workers: the number of workers.
        until: the step with which the run ends, for people; None if nobody knows.

    Raises:
        NotFoundError: the parameters were deleted.
    """
    amend_latest(
        transport,
        keys,
        event=f"workers {workers}",
        fields=["workers", str(workers), "until", "" if until is None else str(until)],
    )


def read_workers(transport: Transport, keys: ParameterKeys) -> int | None:
    """Returns among how many workers the data is shared; None if no chief has announced it yet.

    Raises:
        CorruptDataError: redisacc did not write what is there.
    """
    # The rules for workers let them read the record by this command only.
    [text] = transport.call("HMGET", keys.record, "workers")
    return parsed(keys.record, "workers", text, parse_workers)


def parse_workers(text: bytes | None) -> int | None:
    """Returns the number in the field ``workers`` of the record; None if there is no such field.

    Raises:
        ValueError: redisacc did not write it.
    """
    if text is None:
        return None
    number = parse_int64(text)
    if number < 1:
        raise ValueError(text)
    return number


def parse_until(text: bytes | None) -> int | None:
    """Returns the step with which a run ends; None if nobody knows.

    Raises:
        ValueError: redisacc did not write it.
    """
    return parse_int64(text) if text else None


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
