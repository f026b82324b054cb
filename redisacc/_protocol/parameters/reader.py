"""Reads parameters: the record, and of the values only what changed since the version that was read last."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from redisacc._arrays.trees import Structure
from redisacc._clock import durations, running_time
from redisacc._format.buffered import PartMissingError
from redisacc._format.keys import DELETING, ParameterKeys
from redisacc._format.leaves import Schema, arrays_in, ranges_text
from redisacc._format.parameter_record import (
    EXACT,
    UPDATES,
    Manifest,
    ParameterRecord,
    parse_schema,
    with_partitions_text,
)
from redisacc._format.stored_text import parse_number
from redisacc._protocol.parameters.ahead import PartsAhead
from redisacc._protocol.parameters.memory import MemoryPool
from redisacc._protocol.parameters.tables import fetch_tables
from redisacc._protocol.parameters.update import Snapshot, Update, check_booleans
from redisacc._protocol.parts.fetch import are_there, fetch_blobs, fetched_blobs
from redisacc._protocol.parts.write import call_nodes
from redisacc._protocol.scripts import OF_PARAMETERS, refused
from redisacc._text import EVICTED, shown
from redisacc._wire.sockets import Command
from redisacc._wire.transport import Transport
from redisacc.errors import CorruptDataError, DataLossError, WaitTimeoutError

# A version of at most this many bytes is fetched together with the record, if an event has said where it is.
TOGETHER_BYTES = 64 * 1024

# The further fields of the record that readers of the publisher's state need, and those that need earlier versions.
OF_STATE = ("state_structure", "optimizer", UPDATES)
RETIRED = "retired"


class ParameterReader:
    """Reads the parameters of one name, and remembers the version that it has read last. Threads may share it.

    It belongs to the incarnation that it finds first. If that is deleted, it raises NotFoundError.

    Args:
        transport: the way to the server.
        keys: the keys of the parameters.
        incarnation: the only incarnation that it reads; "": the first that it finds.
    """

    def __init__(self, transport: Transport, keys: ParameterKeys, incarnation: str = "") -> None:
        self._transport = transport
        self._keys = keys
        self.incarnation = incarnation
        self._schema: Schema | None = None
        # "tree" or "state" → the structure that the program has given, in whose form it gets what is read.
        self.given: dict[str, Structure] = {}
        # The value that the program keeps with the version that was read last, as text.
        self.kept = ""
        # The step that a wait has seen last, and how many events had been heard before.
        self.seen: tuple[int, int] | None = None
        # Guards what follows.
        self._lock = transport.waits.lock()
        self._process = os.getpid()
        self._pool = MemoryPool()
        self._read: Snapshot | None = None
        # Fetches parts of the next version ahead; None means nothing does.
        self._ahead: PartsAhead | None = None

    def fetch_ahead(self, ahead: PartsAhead) -> None:
        """Fetches parts of each next version before it is published, if an optimizer makes it."""
        self._ahead = ahead

    def note_given(self, what: str, structure: Structure) -> None:
        """Notes the form of a tree that the program has given: "tree" or "state"."""
        if self.given.get(what) != structure:
            self.given[what] = structure

    def _build(self, what: str, structure: Structure, leaves: Sequence[Any]) -> Any:
        given = self.given.get(what)
        return (given if given == structure else structure).build(leaves)

    @property
    def keys(self) -> ParameterKeys:
        """The keys of the parameters, with their partitions once something has been found or published."""
        return self._keys

    def poll(self, *more: str) -> ParameterRecord | None:
        """Returns the record, or None if nothing has been published. This is one short round trip.

        Args:
            more: further fields, such as ``OF_STATE``.

        Raises:
            NotFoundError: the parameters were deleted.
        """
        command = ParameterRecord.command(self._keys, *more)
        return self._accepted(self._transport.call(*command), *more)

    def poll_and_fetch(self, wanted: Sequence[str]) -> tuple[ParameterRecord | None, dict[str, Any]]:
        """Does the same as ``poll``, and GETs some keys in the same round trip.

        Returns:
            The record, and the values of the keys, for ``values``.
        """
        commands: list[Command] = [ParameterRecord.command(self._keys), *(("GET", key) for key in wanted)]
        reply, *found = self._transport.pipeline(commands)
        return self._accepted(reply), dict(zip(wanted, found, strict=True))

    def _accepted(self, reply: object, *more: str) -> ParameterRecord | None:
        record = ParameterRecord.parse(self._keys, reply, *more)
        if record is not None and record.incarnation.startswith(DELETING):
            record = None
        if record is not None:
            if not self.incarnation:
                self.incarnation = record.incarnation
            if record.incarnation == self.incarnation:
                # Partitions never change, but become known with the first record.
                self._keys = record.keys
                return record
        if not self.incarnation:
            return None
        # If the version is published again after a loss, it may be another one of the same step.
        self._read = None
        raise refused(OF_PARAMETERS["missing" if record is None else "replaced"], self._keys)

    def is_complete(self, record: ParameterRecord) -> bool:
        """Returns whether all parts of a version are there, if they are in partitions. Asks all nodes at once."""
        if not record.keys.partitions:
            # One server has the record and all parts, and loses both or neither.
            return True
        schema = self.schema()
        return are_there(self._transport, record.keys, record.stored(schema))

    def schema(self) -> Schema:
        """Returns the schema of the leaves, which never changes. Call it after ``poll`` has returned a record."""
        if self._schema is None:
            self._schema = read_schema(self._transport, self._keys, self.incarnation)
        return self._schema

    def begun(self) -> tuple[str, ParameterKeys] | None:
        """Returns the incarnation and the keys of parameters whose first version is being published in partitions.

        Returns None if nobody has begun, or if a version is there.
        """
        fields = self._transport.call("HMGET", self._keys.record, "incarnation", "version", "partitions")
        incarnation, version, partitions = [
            None if field is None else field.decode("ascii", "replace") for field in fields
        ]
        if incarnation is None or partitions is None or version is not None or incarnation.startswith(DELETING):
            return None
        return incarnation, with_partitions_text(self._keys, partitions)

    def learn(self, incarnation: str, keys: ParameterKeys, schema: Schema) -> None:
        """Notes the parameters that this process has published."""
        self.incarnation, self._keys, self._schema = incarnation, keys, schema

    def latest(self, *, state: bool = False, tree: bool = True) -> tuple[ParameterRecord, Any, Any] | None:
        """Returns the record of the latest version, its tree and its state; None if nothing has been published.

        One version may be published while they are read: its parts are kept until there is another one.

        Args:
            state: whether to read the publisher's state. If not, None is in its place.
            tree: whether to read the tree. If not, None is in its place.

        Raises:
            WaitTimeoutError: versions were replaced faster than they could be read, for 30 seconds.
        """
        deadline = running_time() + durations.call
        record = self.poll(*OF_STATE) if state else self.poll()
        while record is not None:
            try:
                of_state = self.state(record) if state else None
                return record, self.values(record) if tree else None, of_state
            except PartMissingError as error:
                record = self.after_loss(record, error, deadline)
        return None

    def after_loss(self, record: ParameterRecord, error: PartMissingError, deadline: float) -> ParameterRecord | None:
        """Returns the record that has replaced one whose version has lost a part.

        Raises:
            DataLossError: it is still there, and the part should have been in a partition: its node has lost it.
            CorruptDataError: it is still there, so the part should have been there.
            WaitTimeoutError: the deadline has passed.
        """
        found = self.poll(*[name for name in record.found if name not in ParameterRecord.FIELDS])
        if found is not None and found.version == record.version:
            if found.keys.partitions and error.args[0] != found.keys.record:
                raise part_lost(found, error, ". Publish the values again, for this step or a later one")
            raise CorruptDataError(str(error)) from error
        if running_time() >= deadline:
            raise WaitTimeoutError(
                f"parameters {shown(self._keys.name)} changed during every attempt to read them, for "
                f"{durations.call:.0f} s: versions are published faster than they can be read"
            )
        return found

    def values(self, record: ParameterRecord, fetched: Mapping[str, Any] | None = None) -> Any:
        """Returns the tree of a version.

        Args:
            record: the record of the version.
            fetched: the values of some keys of parts, as ``poll_and_fetch`` returned them.

        Returns:
            The tree. Its arrays are read-only and never change.

        Raises:
            PartMissingError: a part is no longer there.
            CorruptDataError: redisacc did not write it.
        """
        schema = self.schema()
        self.kept = record.kept
        with self._lock:
            if self._process != os.getpid():
                # What another thread of the parent was writing to may be half-done.
                self._pool, self._read, self._process = MemoryPool(), None, os.getpid()
            known = self._read
            if known is None or known.version != record.version:
                update = Update(record, schema, known, self._pool)
                there = self._take_ahead(update)
                fetch_blobs(
                    self._transport, self._keys, update.blobs, update.allocate, fetched=fetched or {}, in_place=there
                )
                self._read = known = update.snapshot()
                if self._ahead is not None and update.flat is not None:
                    self._ahead.expect(self._keys, update.flat, update.spare())
            return self._build(
                "tree",
                schema.structure,
                [
                    place.memory.array(place.offset, leaf.shape, leaf.given)
                    for place, leaf in zip(known.places, schema.leaves, strict=True)
                ],
            )

    def _take_ahead(self, update: Update) -> Collection[str]:
        """Uses the parts of a version that were fetched ahead, and returns their keys."""
        taken = self._ahead.take(update.flat) if self._ahead is not None and update.flat is not None else None
        if taken is None:
            return ()
        memory, there = taken
        update.use(memory)
        return there

    def log(self, after: int) -> Iterator[tuple[int, Any]]:
        """Yields the steps and the trees of earlier versions that are kept, from the one after a step on.

        Args:
            after: the step.

        Raises:
            PartMissingError: versions after that step are kept no longer.
        """
        record = self.poll(RETIRED)
        if record is None:
            return
        schema = self.schema()
        kept = record.manifest(schema)
        first = record.step - len(kept.log)
        if first > after + 1:
            raise PartMissingError(self._keys.record)
        for step, blob in enumerate(kept.log, first):
            if step <= after:
                continue
            # The lengths of its parts are not known any longer.
            parts = call_nodes(self._transport, [("GET", key) for key in blob.keys(self._keys)])
            if None in parts:
                raise PartMissingError(self._keys.record)
            data = np.frombuffer(b"".join(parts), np.uint8)
            # Another leader may have published it with another encoding.
            for stored in (schema, schema.stored("bfloat16")):
                layout = stored.flat(kept.full[0].leaves).layout
                if layout.nbytes == len(data):
                    arrays = arrays_in(stored, layout, data)
                    leaves = [arrays[n].astype(leaf.given) for n, leaf in enumerate(schema.leaves)]
                    yield step, self._build("tree", schema.structure, leaves)
                    break
            else:
                raise CorruptDataError(f"{self._keys.part(blob.id, 0)}: {len(data)} bytes are no version")

    def state(self, record: ParameterRecord) -> Any:
        """Returns the publisher's state of a version, None if it has none. The record was read with ``OF_STATE``.

        Raises:
            PartMissingError: a part is no longer there.
            CorruptDataError: redisacc did not write it.
        """
        manifest = record.manifest(self.schema())
        blob = manifest.state
        if blob is None:
            return self._state_of_optimizer(record, manifest) if manifest.full[0].part_bytes else None
        schema = record.schema("state_structure")
        layout = schema.layout(ranges_text(range(len(schema.leaves))))
        if layout.nbytes != blob.nbytes:
            raise CorruptDataError(
                f"{self._keys.record}: state has {blob.nbytes} bytes, and its structure {layout.nbytes}"
            )
        (data,) = fetched_blobs(self._transport, self._keys, [blob])
        check_booleans(schema, range(len(schema.leaves)), layout.offset_of, data, self._keys.part(blob.id, 0))
        # The caller's own, so it may write to it.
        state = self._build(
            "state",
            schema.structure,
            [
                np.ndarray(leaf.shape, leaf.given, data, offset)
                for leaf, offset in zip(schema.leaves, layout.offsets, strict=True)
            ],
        )
        if isinstance(state, dict) and EXACT in state and state.get("state") is not None and "state" in self.given:
            state["state"] = self.given["state"].formed(state["state"])
        return state

    def _state_of_optimizer(self, record: ParameterRecord, manifest: Manifest) -> dict[str, Any] | None:
        """Returns an optimizer's state: the leaves of each slot, by its name, and how many updates it has seen.

        None if no optimizer updates the version.
        """
        if not record.found["optimizer"]:
            return None
        number = record.read(UPDATES, parse_number)
        schema = self.schema()
        blobs = [blob for blob in manifest.slots if blob.number]
        data = fetched_blobs(self._transport, self._keys, blobs)
        tables = fetch_tables(self._transport, record, schema, len(blobs), weights=False)
        layout = schema.flat(manifest.full[0].leaves).layout
        found: dict[str, Any] = {UPDATES: np.array(number)}
        exact = None
        for place, blob in enumerate(blobs):
            of_slot = arrays_in(schema, layout, data[place])
            of_slot.update({leaf: arrays[place] for leaf, arrays in tables.items()})
            leaves = [of_slot[leaf] for leaf in range(len(schema.leaves))]
            if blob.id.endswith("-exact"):
                exact = [leaf for leaf in leaves if leaf.dtype == np.float32]
            else:
                found[blob.id.rpartition("-")[2]] = self._build("tree", schema.structure, leaves)
        return found if exact is None else {EXACT: exact, "state": found}


def read_schema(transport: Transport, keys: ParameterKeys, incarnation: str) -> Schema:
    """Returns the schema of the leaves of an incarnation of parameters.

    Raises:
        NotFoundError: they were deleted, or replaced by others.
        CorruptDataError: redisacc did not write it.
    """
    found, text = transport.call("HMGET", keys.record, "incarnation", "structure")
    if found is None or found.decode(errors="replace") != incarnation:
        raise refused(OF_PARAMETERS["missing"], keys)
    return parse_schema(keys, "structure", text)


def part_lost(record: ParameterRecord, error: PartMissingError, advice: str = "") -> DataLossError:
    """Returns the error for a part of a version that its node has lost."""
    return DataLossError(
        f"parameters {shown(record.keys.name)}: part {error.args[0]} of step {record.step} is lost: its node failed, "
        f"and a replica that lagged behind has taken its place, or the part was {EVICTED} or removed by hand{advice}",
        part=error.args[0],
    )
