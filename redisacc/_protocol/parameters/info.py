"""What Redis holds about parameters apart from their values, for people and programs that watch them."""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass

from redisacc._format.history_entries import PastStep, parse_history
from redisacc._format.keys import DELETING, ParameterKeys
from redisacc._format.parameter_record import ParameterRecord, parse_optimizer
from redisacc._format.stored_text import clock_ms, parse_number, parse_time, time_of
from redisacc._protocol.parameters.announcements import parse_until, parse_workers
from redisacc._text import printable
from redisacc._wire.transport import Transport

# The further fields of the record that are read.
_FIELDS = (
    *("structure", "retired", "publisher", "created_ms", "published_ms"),
    *("workers", "optimizer", "updates", "until", "history_latest"),
)


@dataclass(frozen=True)
class ParametersInfo:
    """Parameters, as they are now.

    Attributes:
        name: their name.
        incarnation: a random id that they got with their first version.
        step: the step of the latest version.
        finished: whether its publisher declared it the last one.
        workers: among how many workers the chief of a run says that they share the data; None without a chief.
        until: the step with which the chief of a run will end it, as far as it was told; None if it was not.
        latest: the latest step of a run whose gradients had metrics; None if none had.
        leaves: the number of arrays in their tree.
        nbytes: the total size of these arrays in bytes.
        encoding: how elements of float32 are stored: "float32" or "bfloat16".
        partitions: the numbers p of the slots ``{NAME/p}`` that hold the values; empty if that is the slot of the
            record.
        optimizer: the name of the optimizer that updates them, such as "adamw"; None if their publisher computes them.
        updates: how many updates the state of the optimizer has seen; None without one.
        state_bytes: the size of the publisher's state in bytes, or of all slots of the optimizer; 0 if there is none.
            If readers get rounded parameters, this includes the parameters as they are.
        stored_bytes: the size of everything that is stored, earlier versions for slow readers included, in bytes.
        parts: the number of keys that hold all this.
        publisher: the name of the publisher of the latest version.
        created_at: when the first version was published.
        published_at: when the latest version was.
        read_at: when this was read. All times are the server's.
    """

    name: str
    incarnation: str
    step: int
    finished: bool
    workers: int | None
    until: int | None
    latest: PastStep | None
    leaves: int
    nbytes: int
    encoding: str
    partitions: tuple[int, ...]
    optimizer: str | None
    updates: int | None
    state_bytes: int
    stored_bytes: int
    parts: int
    publisher: str
    created_at: datetime.datetime
    published_at: datetime.datetime
    read_at: datetime.datetime

    @property
    def step_seconds(self) -> float | None:
        """How many seconds the latest step took; None if that is unknown."""
        return None if self.latest is None or not math.isfinite(self.latest.seconds) else self.latest.seconds


def read_parameters_info(transport: Transport, keys: ParameterKeys) -> ParametersInfo | None:
    """Parses the record. Returns None if nothing is published.

    Raises:
        CorruptDataError: redisacc did not write it, or another version of it did.
    """
    reply, two, clock = transport.pipeline(
        [
            ParameterRecord.command(keys, *_FIELDS),
            # A time is that of a step and of the one before it.
            ("ZRANGE", keys.history, -2, -1),
            ("TIME",),
        ]
    )
    record = ParameterRecord.parse(keys, reply, *_FIELDS)
    if record is None or record.incarnation.startswith(DELETING):
        return None
    schema, found = record.schema(), record.found
    manifest, stored = record.manifest(schema), record.stored(schema)
    latest, created_at = found["history_latest"], record.read("created_ms", parse_time)
    # A publisher without an optimizer leaves these fields as they are, and publishes no such blobs.
    is_updated = any(blob.part_bytes for blob in manifest.full)
    return ParametersInfo(
        name=keys.name,
        incarnation=record.incarnation,
        step=record.step,
        finished=record.finished,
        workers=record.read("workers", parse_workers),
        until=record.read("until", parse_until),
        latest=None if latest is None else parse_history(keys.history, [*two, latest], int(found["created_ms"]))[-1],
        leaves=len(schema.leaves),
        nbytes=schema.nbytes,
        encoding=record.encoding,
        partitions=record.keys.partitions,
        optimizer=parse_optimizer(keys, found["optimizer"]).name if is_updated else None,
        updates=record.read("updates", parse_number) if is_updated else None,
        state_bytes=sum(blob.nbytes for blob in (manifest.state, *manifest.slots) if blob is not None),
        stored_bytes=sum(blob.nbytes for blob in stored),
        parts=sum(len(blob.keys(record.keys)) for blob in stored),
        publisher=printable(found["publisher"] or b""),
        created_at=created_at,
        published_at=record.read("published_ms", parse_time),
        read_at=time_of(clock_ms(clock)),
    )
