"""What the record of parameters says of updates: the version to begin with, the optimizer, and the next numbers."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from redisacc._format.keys import ParameterKeys
from redisacc._format.parameter_record import (
    Manifest,
    ParameterRecord,
    check_kept,
    parse_count,
    parse_optimizer,
    tables_of,
)
from redisacc._format.stored_text import foreign
from redisacc._protocol.parameters.reader import read_schema
from redisacc._protocol.parameters.version_writer import Follows, VersionWriter
from redisacc._protocol.updates.model import UpdateModel
from redisacc._text import shown
from redisacc._wire.sockets import Command
from redisacc._wire.transport import Transport
from redisacc.errors import CorruptDataError, InvalidArgumentError
from redisacc.optim.base import Scalars
from redisacc.optim.scalars import pack_scalars, unpack_scalars

# The most numbers of attempts that are used up at once. An update gets the next one, so it cannot have a number that is
# higher by more than this while a few parts are removed.
MOST_USED_UP = 100

_FIELDS = ("optimizer", "updates", "scalars", "attempts", "registered", "retired")


@dataclass(frozen=True)
class UpdateRecord:
    """A version that an optimizer can update.

    Attributes:
        record: the record of the version.
        manifest: its blobs, with the retired ones.
        model: the leaves and the optimizer.
        updates: how many updates the state has seen.
        scalars: the numbers of the next step; None if they are not known.
        number: the number of the attempt that is under way, or of the next one.
    """

    record: ParameterRecord
    manifest: Manifest
    model: UpdateModel
    updates: int
    scalars: tuple[Scalars, ...] | None
    number: int


@dataclass(frozen=True)
class KnownVersion:
    """A version that an optimizer has made, as a chief knows it without the server.

    Attributes:
        id: its id.
        step: its step.
        updates: how many updates its state has seen.
        model: the leaves and the optimizer.
    """

    id: str
    step: int
    updates: int
    model: UpdateModel

    @classmethod
    def of(cls, record: UpdateRecord) -> KnownVersion:
        """Returns the version that a record names."""
        return cls(record.record.version, record.record.step, record.updates, record.model)

    def following(self, version: str, updates: int) -> KnownVersion:
        """Returns the version that an update has made of this one."""
        return KnownVersion(version, self.step + 1, updates, self.model)


def update_command(keys: ParameterKeys) -> Command:
    """Returns the command that reads what ``parse_update_record`` parses."""
    return (*ParameterRecord.command(keys), *_FIELDS)


def read_update_record(
    transport: Transport, keys: ParameterKeys, known: UpdateRecord | None = None
) -> UpdateRecord | None:
    """Returns the version that is published, as ``parse_update_record`` does."""
    return parse_update_record(transport, keys, transport.call(*update_command(keys)), known)


def parse_update_record(
    transport: Transport, keys: ParameterKeys, reply: object, known: UpdateRecord | None
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
    of_record = len(ParameterRecord.FIELDS)
    if not isinstance(reply, list) or len(reply) != of_record + len(_FIELDS):
        raise CorruptDataError(f"{keys.record}: HMGET must reply {of_record + len(_FIELDS)} values, not {shown(reply)}")
    record = ParameterRecord.parse(keys, reply[:of_record])
    config, updates, scalars, attempts, registered, retired = reply[of_record:]
    if record is None or not config:
        return None
    model = _model_of(transport, record, config, known)
    manifest = record.manifest(model.schema)
    part_bytes = manifest.full[0].part_bytes
    tables = tuple(sorted([leaf for _, leaves in tables_of(manifest).shares(model.schema) for leaf in leaves]))
    of_rows = {leaf for blob in manifest.rows for leaf, _ in blob.counts}
    if not part_bytes or manifest.state is not None or not of_rows.issubset(tables):
        # A program has published it in a loop over rounds.
        return None
    cut = (part_bytes, record.encoding, record.keys.partitions, tables)
    if cut != (model.part_bytes, model.encoding, model.keys.partitions, model.tables):
        model = UpdateModel(model.schema, model.optimizer, record.keys, record.encoding, part_bytes, tables)
    dense = {manifest.full[0].id, *(blob.id for blob in manifest.slots if blob.number)}
    if manifest.full[0].leaves != model.dense or dense != {f"{record.version}-{sort}" for sort in model.sorts}:
        return None
    found = UpdateRecord(
        record,
        replace(manifest, retired=record.retired(retired or b"")),
        model,
        parse_count(keys, "updates", updates),
        _scalars(keys, scalars, model) if scalars else None,
        _number(parse_count(keys, "attempts", attempts or b"0"), registered, record.version),
    )
    check_kept(keys, model.schema, manifest, model.num_kept)
    return found


def _model_of(transport: Transport, record: ParameterRecord, config: object, known: UpdateRecord | None) -> UpdateModel:
    """Returns the model of a record, with a part size that is still to be set."""
    if known is not None and known.record.incarnation == record.incarnation:
        if isinstance(config, bytes) and config == known.model.config.encode():
            return known.model
        schema = known.model.schema
    else:
        schema = read_schema(transport, record.keys, record.incarnation)
    optimizer = parse_optimizer(record.keys, config)
    try:
        return UpdateModel.new(schema, optimizer, record.keys, record.encoding)
    except InvalidArgumentError as error:
        raise CorruptDataError(
            f"{record.keys.record}: optimizer holds {shown(config)}, which does not fit the leaves: {shown(str(error))}"
        ) from None


def _number(attempts: int, registered: object, version: str) -> int:
    """Returns the number of the attempt that follows a version: of one that is registered already, or the next one."""
    last = registered.decode(errors="replace") if isinstance(registered, bytes) else ""
    is_under_way = last != version and last.rpartition("-")[2] == str(attempts)
    return attempts if is_under_way else attempts + 1


def _scalars(keys: ParameterKeys, text: object, model: UpdateModel) -> tuple[Scalars, ...]:
    try:
        if isinstance(text, bytes):
            return unpack_scalars(text.decode(), model.optimizer)
    except ValueError:
        pass
    raise foreign(keys.record, "scalars", text)


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
        *reply, optimizer, attempts = transport.call(*ParameterRecord.command(keys), "optimizer", "attempts")
        record = ParameterRecord.parse(keys, reply)
        last = parse_count(keys, "attempts", attempts or b"0")
        # The ids of other versions are random, and never come twice.
        if record is None or not optimizer or not 0 < highest - last <= MOST_USED_UP:
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
