"""Publishes versions that updates begin with: weights and the state of an optimizer, whole."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from redisacc._arrays.validation import Array
from redisacc._format.leaves import packed
from redisacc._format.parameter_record import Blob, Manifest, ParameterRecord
from redisacc._protocol.lifecycle.opening import list_name
from redisacc._protocol.parameters.reader import RETIRED, ParameterReader
from redisacc._protocol.parameters.upload_plan import Change, retire
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
from redisacc._protocol.updates.tables import NO_TABLES, brought_tables, manifest_of
from redisacc._text import shown
from redisacc._wire.transport import Transport
from redisacc.errors import ConflictError


@dataclass(frozen=True)
class Whole:
    """A version, whole: weights and the state of an optimizer.

    Attributes:
        model: the leaves and the optimizer.
        step: its step.
        weights: the leaves.
        state: the leaves of each slot.
        updates: how many updates the state has seen.
    """

    model: UpdateModel
    step: int
    weights: Sequence[Array]
    state: Mapping[str, Sequence[Array]]
    updates: int


def begin_updates(
    transport: Transport,
    reader: ParameterReader,
    wanted: UpdateModel,
    whole: Callable[[], Whole],
    publisher: str,
) -> UpdateRecord:
    """Returns the version that updates begin with, and publishes it if what is published is none.

    The state of an optimizer with the same slots is kept. Otherwise, the state begins here.

    Args:
        transport: the way to the server.
        reader: the reader of the parameters.
        wanted: the leaves and the optimizer, with the partitions of the gradients.
        whole: returns what to begin with if what is published cannot be updated as it is, or nothing is there.
        publisher: the name of this process in the record.
    """
    keys, optimizer = wanted.keys, wanted.optimizer
    found = read_update_record(transport, keys)
    if found is None or found.model.form != wanted.form or not optimizer.state_matches(found.model.optimizer):
        return publish_whole(transport, reader, whole(), publisher)
    scalars = None if found.record.finished else optimizer.scalars_ahead(found.step, found.updates + 1)
    if found.model.config != wanted.config or found.scalars != scalars:
        # Updaters must not compute with the numbers of another optimizer.
        amend_latest(transport, keys, event="optimizer", fields=update_fields(wanted, found.updates, scalars))
        found = read_update_record(transport, keys)
    assert found is not None
    return found


def publish_whole(transport: Transport, reader: ParameterReader, whole: Whole, publisher: str) -> UpdateRecord:
    """Publishes a version in place of what is published for its step or an earlier one.

    Args:
        transport: the way to the server.
        reader: the reader of the parameters.
        whole: the version.
        publisher: the name of this process in the record.

    Raises:
        ConflictError: a later step is published.
        ServerError: others get in between again and again.
    """
    tries = Tries(transport, whole.model.keys, whole.step)
    while isinstance(found := _try(transport, reader, whole, publisher), Reply):
        tries.pause(found)
    return found


def _try(transport: Transport, reader: ParameterReader, whole: Whole, publisher: str) -> UpdateRecord | Reply:
    record, model, step = reader.poll(RETIRED), whole.model, whole.step
    if record is not None and record.step > step:
        raise ConflictError(
            f"parameters {shown(model.keys.name)} have step {record.step} already, so step {step} cannot be published"
        )
    incarnation = reader.incarnation or (reader.begun() or (secrets.token_hex(16),))[0]
    previous = "" if record is None else record.version
    # It has the step of the version that it replaces if only the form differs.
    follows = Follows(incarnation, previous, step, replaces=record is not None and record.step == step)
    version, reply = VersionWriter(transport, model.keys).write(
        previous, lambda version: _version(version, follows, record, whole, publisher)
    )
    if reply.outcome != "published":
        return reply
    reader.learn(incarnation, model.keys, model.schema)
    list_name(transport, model.keys.name)
    found = read_update_record(transport, model.keys)
    # The server may have lost it already, and be at an older version, which has other values.
    return found if found is not None and found.id == version.id else Reply(outcome="changed")


def _version(version: str, follows: Follows, record: ParameterRecord | None, whole: Whole, publisher: str) -> Version:
    """Returns a version as it travels to the server, given its id and the record of the one before."""
    model, schema, exact = whole.model, whole.model.schema, {EXACT: whole.weights, **whole.state}
    step, stored = whole.step, schema.stored(model.encoding)
    sent, *slots = model.blobs(version)
    pieces: dict[Blob, Sequence[memoryview]] = {sent: packed(stored, whole.weights, model.sent_flat.layout)}
    pieces.update({blob: packed(schema, exact[blob.id.rpartition("-")[2]], model.flat.layout) for blob in slots})
    tables = NO_TABLES
    if model.tables:
        of_sorts = [whole.weights, *(whole.state[slot] for slot in model.optimizer.slots)]
        arrays = {leaf: [of_sort[leaf] for of_sort in of_sorts] for leaf in model.tables}
        tables = brought_tables(model, version, step, Manifest(()), arrays=arrays, rows={})
    before = Manifest(()) if record is None else record.manifest(schema)
    stored_before = stored if record is None else schema.stored(record.encoding)
    change = retire(manifest_of(model, version, step, tables), stored, before, stored_before)
    if model.is_mean:
        # The log of means ends before this version, or begins after it.
        log = before.log if follows.replaces else ()
        gone = [*before.blobs(stored_before).values(), *(() if log else before.retired)]
        change = Change(replace(change.manifest, retired=log), gone, gone)
    return Version(
        id=version,
        follows=follows,
        publisher=publisher,
        schema=schema,
        encoding=model.encoding,
        change=change,
        fields=update_fields(model, whole.updates, model.optimizer.scalars_ahead(step, whole.updates + 1)),
        pieces={**pieces, **tables.pieces},
    )
