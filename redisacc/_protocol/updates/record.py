"""What the record of parameters says of updates: the version to begin with, the optimizer, and the next numbers."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from redisacc._format.keys import ParameterKeys
from redisacc._format.parameter_record import (
    Manifest,
    ParameterRecord,
    check_kept,
    parse_optimizer,
    tables_of,
)
from redisacc._format.stored_text import parse_number
from redisacc._format.update_order import pack_scalars, unpack_scalars
from redisacc._protocol.parameters.reader import read_schema
from redisacc._protocol.parameters.version_writer import Follows, VersionWriter
from redisacc._protocol.updates.model import UpdateModel, check_leaves
from redisacc._text import shown
from redisacc._wire.sockets import Command
from redisacc._wire.transport import Transport
from redisacc.errors import CorruptDataError, InvalidArgumentError
from redisacc.optim.base import Scalars

# The most numbers of attempts that are used up at once. An update gets the next one, so it cannot have a number that is
# higher by more than this while a few parts are removed.
MOST_USED_UP = 100

_FIELDS = ("optimizer", "updates", "scalars", "attempts", "registered", "retired")


@dataclass(frozen=True)
class KnownVersion:
    """A version that an optimizer has made, as a chief knows it without the server.

    Attributes:
        incarnation: of the parameters.
        id: its id.
        step: its step.
        updates: how many updates its state has seen.
        model: the leaves and the optimizer.
    """

    incarnation: str
    id: str
    step: int
    updates: int
    model: UpdateModel


@dataclass(frozen=True)
class UpdateRecord(KnownVersion):
    """A version that is published, and that an optimizer can update.

    Attributes:
        record: the record of the version.
        manifest: its blobs, with the retired ones.
        scalars: the numbers of the next step; None if they are not known.
        number: the number of the attempt that is under way, or of the next one.
    """

    record: ParameterRecord
    manifest: Manifest
    scalars: tuple[Scalars, ...] | None
    number: int


def update_command(keys: ParameterKeys) -> Command:
    """Returns the command that reads what ``parse_update_record`` parses."""
    return ParameterRecord.command(keys, *_FIELDS)


def read_update_record(
    transport: Transport, keys: ParameterKeys, known: KnownVersion | None = None
) -> UpdateRecord | None:
    """Returns the version that is published, as ``parse_update_record`` does."""
    return parse_update_record(transport, keys, transport.call(*update_command(keys)), known)


def parse_update_record(
    transport: Transport, keys: ParameterKeys, reply: object, known: KnownVersion | None
) -> UpdateRecord | None:
    """Returns the version that is published, if an optimizer can update it; else None.

    Args:
        transport: the way to the server.
        keys: the keys of the parameters.
        reply: the reply to ``update_command``.
        known: what was read before: the model is the same object as long as it is the same.

    Raises:
        CorruptDataError: the record holds what redisacc never writes.
    """
    record = ParameterRecord.parse(keys, reply, *_FIELDS)
    if record is None or not record.found["optimizer"]:
        return None
    if known is not None and known.incarnation == record.incarnation:
        schema = known.model.schema
    else:
        known, schema = None, read_schema(transport, record.keys, record.incarnation)
    config = record.found["optimizer"]
    is_same = known is not None and config == known.model.config.encode()
    optimizer = known.model.optimizer if known and is_same else parse_optimizer(record.keys, config)
    manifest = record.manifest(schema)
    part_bytes = manifest.full[0].part_bytes
    tables = tuple(sorted([leaf for _, leaves in tables_of(manifest).shares(schema) for leaf in leaves]))
    of_rows = {leaf for blob in manifest.rows for leaf, _ in blob.counts}
    if not part_bytes or manifest.state is not None or not of_rows.issubset(tables):
        # A program has published it in a loop over rounds.
        return None
    model = UpdateModel(schema, optimizer, record.keys, record.encoding, part_bytes, tables)
    if known is not None and is_same and known.model.form == model.form:
        model = known.model
    else:
        _check_fits(record, model)
    dense = {manifest.full[0].id, *(blob.id for blob in manifest.slots if blob.number)}
    if manifest.full[0].leaves != model.dense or dense != {blob.id for blob in model.blobs(record.version)}:
        return None
    check_kept(keys, schema, manifest, model.num_kept)
    return UpdateRecord(
        record.incarnation,
        record.version,
        record.step,
        record.read("updates", parse_number),
        model,
        record,
        manifest,
        _scalars(record, model) if record.found["scalars"] else None,
        _number(_attempts(record), record.found["registered"], record.version),
    )


def _check_fits(record: ParameterRecord, model: UpdateModel) -> None:
    """Raises CorruptDataError if the optimizer in a record cannot update its leaves."""
    try:
        check_leaves(model.schema, model.optimizer)
    except InvalidArgumentError as error:
        raise CorruptDataError(
            f"{record.keys.record}: optimizer holds {shown(record.found['optimizer'])}, which does not fit the leaves: "
            f"{shown(str(error))}"
        ) from None


def _attempts(record: ParameterRecord) -> int:
    """Returns the number of the last attempt to publish a version."""
    return record.read("attempts", lambda text: parse_number(text or b"0"))


def _number(attempts: int, registered: object, version: str) -> int:
    """Returns the number of the attempt that follows a version: of one that is registered already, or the next one."""
    last = registered.decode(errors="replace") if isinstance(registered, bytes) else ""
    is_under_way = last != version and last.rpartition("-")[2] == str(attempts)
    return attempts if is_under_way else attempts + 1


def _scalars(record: ParameterRecord, model: UpdateModel) -> tuple[Scalars, ...]:
    return record.read("scalars", lambda text: unpack_scalars(text.decode(), model.optimizer))


def use_up_numbers(transport: Transport, keys: ParameterKeys, highest: int) -> bool:
    """Uses numbers of attempts up, so that no update can be registered with one up to ``highest``.

    Args:
        transport: the way to the server.
        keys: the keys of the parameters.
        highest: the number. If it is far too high, nothing has to be used up.

    Returns:
        Whether none can be registered; False if others publish all the time.

    Raises:
        CorruptDataError: the record holds what redisacc never writes, or another version of it wrote it.
        NotFoundError: the parameters were deleted.
    """
    for _ in range(MOST_USED_UP):
        record = ParameterRecord.parse(keys, transport.call(*update_command(keys)), *_FIELDS)
        # The ids of other versions are random, and never come twice.
        if record is None or not record.found["optimizer"]:
            return True
        last = _attempts(record)
        if not 0 < highest - last <= MOST_USED_UP:
            return True
        # An attempt without blobs: only its number is left of it.
        follows = Follows(record.incarnation, record.version, record.step + 1)
        version = f"{secrets.token_hex(8)}-{last + 1}"
        VersionWriter(transport, record.keys).register(follows, version, last + 1, ())
    return False


def update_fields(model: UpdateModel, updates: int, scalars: tuple[Scalars, ...] | None) -> Sequence[str]:
    """Returns the fields of the record that concern updates: names and values, alternately.

    Args:
        model: the model.
        updates: how many updates the state has seen.
        scalars: the numbers of the next step; None if there is none.
    """
    numbers = pack_scalars(scalars) if scalars else ""
    return ("optimizer", model.config, "updates", str(updates), "scalars", numbers, "state_structure", "")
