"""Publishes versions that updates begin with: weights and the state of an optimizer, whole."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from redisacc._arrays.validation import Array
from redisacc._format.keys import ParameterKeys
from redisacc._format.leaves import Schema, packed
from redisacc._format.parameter_record import Blob
from redisacc._protocol.lifecycle.opening import list_name
from redisacc._protocol.parameters.reader import ParameterReader
from redisacc._protocol.parameters.upload_plan import retire
from redisacc._protocol.parameters.version_writer import (
    Follows,
    Tries,
    Version,
    VersionWriter,
    amend_latest,
)
from redisacc._protocol.scripts import Reply
from redisacc._protocol.updates.model import EXACT, UpdateModel
from redisacc._protocol.updates.record import UpdateRecord, read_update_record, update_fields
from redisacc._protocol.updates.tables import TablesVersion, blobs_of, manifest_of, whole_tables
from redisacc._text import shown
from redisacc._wire.transport import Transport
from redisacc.errors import ConflictError
from redisacc.optim import Optimizer


@dataclass(frozen=True)
class Whole:
    """Weights and the state of an optimizer.

    Attributes:
        weights: the leaves.
        state: the leaves of each slot.
        updates: how many updates the state has seen.
    """

    weights: Sequence[Array]
    state: Mapping[str, Sequence[Array]]
    updates: int


def begin_updates(
    transport: Transport,
    reader: ParameterReader,
    gradients: ParameterKeys,
    *,
    encoding: str,
    optimizer: Optimizer,
    publisher: str,
    step: int,
    schema: Schema,
    tables: tuple[int, ...],
    whole: Callable[[], Whole],
) -> UpdateRecord:
    """Returns the version that updates begin with, and publishes it if what is published is none.

    The state of an optimizer with the same slots is kept. Otherwise, the state begins here.

    Args:
        transport: the way to the server.
        reader: the reader of the parameters.
        gradients: keys of parameters that have the partitions of the gradients.
        encoding: how leaves of float32 travel to workers.
        optimizer: the optimizer.
        publisher: the name of this process in the record.
        step: the step of the weights: what is published, or 0.
        schema: the leaves.
        tables: the numbers of those whose gradients are rows.
        whole: returns what to begin with if what is published cannot be updated as it is, or nothing is there.
    """
    wanted = UpdateModel.new(schema, optimizer, gradients, encoding, tables)
    found = read_update_record(transport, gradients)
    if found is not None and _continues(found, wanted):
        scalars = None if found.record.finished else optimizer.scalars_ahead(found.record.step, found.updates + 1)
        if found.model.config != wanted.config or found.scalars != scalars:
            # Updaters must not compute with the numbers of another optimizer.
            amend_latest(transport, gradients, event="optimizer", fields=update_fields(wanted, found.updates, scalars))
            found = read_update_record(transport, gradients)
        assert found is not None
        return found
    return publish_whole(transport, reader, wanted, step=step, whole=whole(), publisher=publisher)


def _continues(found: UpdateRecord, wanted: UpdateModel) -> bool:
    """Returns whether what is published can be updated as it is."""
    has, other = found.model, wanted
    return (
        has.schema.text == other.schema.text
        and has.encoding == other.encoding
        and has.part_bytes == other.part_bytes
        and has.tables == other.tables
        and has.keys.partitions == other.keys.partitions
        and other.optimizer.state_matches(has.optimizer)
    )


def publish_whole(
    transport: Transport,
    reader: ParameterReader,
    model: UpdateModel,
    *,
    step: int,
    whole: Whole,
    publisher: str,
) -> UpdateRecord:
    """Publishes weights and the state of an optimizer, in place of what is published for this step or an earlier one.

    Args:
        transport: the way to the server.
        reader: the reader of the parameters.
        model: the leaves and the optimizer.
        step: the step of the version.
        whole: the weights and the state.
        publisher: the name of this process in the record.

    Raises:
        ConflictError: a later step is published.
        ServerError: others get in between again and again.
    """
    tries = Tries(transport, model.keys, step)
    while isinstance(found := _try(transport, reader, model, step=step, whole=whole, publisher=publisher), Reply):
        tries.pause(found)
    return found


def _try(
    transport: Transport,
    reader: ParameterReader,
    model: UpdateModel,
    *,
    step: int,
    whole: Whole,
    publisher: str,
) -> UpdateRecord | Reply:
    record = reader.poll()
    before = None if record is None else reader.manifest(record)
    if record is not None and before is None:
        return Reply(outcome="changed")
    if record is not None and record.step > step:
        raise ConflictError(
            f"parameters {shown(model.keys.name)} have step {record.step} already, so step {step} cannot be published"
        )
    schema = model.schema
    stored = schema.stored(model.encoding)
    incarnation = reader.incarnation or (reader.begun() or (secrets.token_hex(16),))[0]
    previous = "" if record is None else record.version
    # It has the step of the version that it replaces if only the form differs.
    follows = Follows(incarnation, previous, step, replaces=record is not None and record.step == step)
    writer = VersionWriter(transport, model.keys)
    state = [whole.weights, *(whole.state[slot] for slot in model.optimizer.slots)]
    arrays = {leaf: [of_sort[leaf] for of_sort in state] for leaf in model.tables}

    @cache
    def tables_of(version: str) -> TablesVersion | None:
        return whole_tables(model, version, step, arrays) if arrays else None

    version = writer.begin(follows, lambda version: blobs_of(model, version, tables_of(version)))
    if not isinstance(version, str):
        return version
    tables = tables_of(version)
    manifest = manifest_of(model, version, step, tables)
    blobs_before = {} if record is None or before is None else before.blobs(schema.stored(record.encoding))
    waiting = () if before is None else before.retired
    manifest, retired, removed = retire(manifest, manifest.blobs(stored), blobs_before, waiting)
    if model.is_mean:
        # The log of means ends before this version, or begins after it.
        log = before.log if follows.replaces and before is not None else ()
        manifest, retired = replace(manifest, retired=log), [*blobs_before.values(), *(() if log else waiting)]
        removed = retired
    scalars = model.optimizer.scalars_ahead(step, whole.updates + 1)
    exact = {EXACT: whole.weights, **whole.state}
    sent, *slots = blobs_of(model, version, None)
    pieces: dict[Blob, Sequence[memoryview]] = {sent: packed(stored, whole.weights, model.sent_flat.layout)}
    pieces.update({blob: packed(schema, exact[blob.id.rpartition("-")[2]], model.flat.layout) for blob in slots})
    pieces.update({} if tables is None else tables.pieces)
    reply = writer.write(
        Version(
            id=version,
            follows=follows,
            publisher=publisher,
            schema=schema,
            encoding=model.encoding,
            manifest=manifest,
            fields=update_fields(model, whole.updates, scalars),
            pieces=pieces,
            retired=retired,
            removed=removed,
        )
    )
    if reply.outcome != "published":
        return reply
    reader.learn(incarnation, model.keys, schema)
    list_name(transport, model.keys.name)
    found = read_update_record(transport, model.keys)
    # The server may have lost it already, and be at an older version, which has other values.
    return found if found is not None and found.record.version == version else Reply(outcome="changed")
