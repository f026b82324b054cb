"""Reads parameters: the record, and of the values only what changed since the version that was read last."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from redisacc._data.validation import Array
from redisacc._format.keys import DELETING, ParameterKeys
from redisacc._format.leaves import Leaf, Schema, ranges_text
from redisacc._format.parameter_record import (
    INDEX_BYTES,
    Blob,
    Manifest,
    ParameterRecord,
    RowsBlob,
    parse_schema,
    with_partitions_text,
)
from redisacc._protocol.parameter_memory import Memory, MemoryPool
from redisacc._protocol.parameter_scripts import gone, replaced
from redisacc._protocol.partition_parts import are_there
from redisacc._protocol.whole_parts import TRUSTED_BYTES
from redisacc._redis.fast_socket import Command
from redisacc._redis.running_time import running_time
from redisacc._redis.transport import TIMEOUT, Transport
from redisacc._text import EVICTED, shown
from redisacc.errors import CorruptDataError, DataLossError, PeekTimeoutError

# How long to keep looking for a version that stays for as long as it takes to read it, in seconds.
READ_TIMEOUT = 30.0

# A version of at most this many bytes is fetched together with the record, if an event has said where it is.
TOGETHER_BYTES = 64 * 1024

_INDEX = np.dtype("<i8")


class VersionGoneError(Exception):
    """A part of the version that was being read is missing. The argument is its key."""

    def __str__(self) -> str:
        return f"{self.args[0]} is missing: it was {EVICTED} or removed by hand"


class _Place(NamedTuple):
    """Where the value of a leaf is.

    Attributes:
        memory: the memory.
        offset: where it begins, in bytes.
        spare: other memory of this leaf alone, which has the value of an earlier version.
        lacking: the rows blobs, fetched, that the spare memory lacks.
    """

    memory: Memory
    offset: int = 0
    spare: Memory | None = None
    lacking: Sequence[_Rows] = ()


@dataclass(frozen=True)
class _Rows:
    """Changed rows of a leaf: their indices, and their bytes, a row of bytes for each."""

    indices: Array
    rows: Array


@dataclass(frozen=True)
class _Snapshot:
    """The version that was read last."""

    version: str
    step: int
    places: tuple[_Place, ...]


class ParameterReader:
    """Reads the parameters of one name, and remembers the version that it has read last. Threads may share it.

    It belongs to the incarnation that it finds first. If that is deleted, it raises ParametersNotFoundError.

    Args:
        transport: the way to the server.
        keys: the keys of the parameters.
        incarnation: the only incarnation that it reads; "": the first that it finds.
    """

    def __init__(self, transport: Transport, keys: ParameterKeys, incarnation: str = "") -> None:
        self._transport = transport
        self._keys = keys
        self.incarnation = incarnation
        self._command = ParameterRecord.command(keys)
        self._schema: Schema | None = None
        # Guards what follows.
        self._lock = transport.waits.lock()
        self._process = os.getpid()
        self._pool = MemoryPool()
        self._read: _Snapshot | None = None

    @property
    def keys(self) -> ParameterKeys:
        """The keys of the parameters, with their partitions once something has been found or published."""
        return self._keys

    def poll(self, *, timeout: float = TIMEOUT) -> ParameterRecord | None:
        """Returns the record, or None if nothing has been published. This is one short round trip.

        Args:
            timeout: how long to try to reach the server, in seconds.

        Raises:
            ParametersNotFoundError: what was published was deleted.
        """
        return self._accepted(self._transport.call(*self._command, timeout=timeout))

    def poll_and_fetch(self, wanted: Sequence[str], *, timeout: float) -> tuple[ParameterRecord | None, dict[str, Any]]:
        """Does the same as ``poll``, and GETs some keys in the same round trip.

        Returns:
            The record, and what the keys hold, for ``values``.
        """
        commands: list[Command] = [self._command, *(("GET", key) for key in wanted)]
        reply, *found = self._transport.pipeline(commands, timeout=timeout)
        return self._accepted(reply), dict(zip(wanted, found, strict=True))

    def _accepted(self, reply: object) -> ParameterRecord | None:
        record = ParameterRecord.parse(self._keys, reply)
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
        raise gone(self._keys.name) if record is None else replaced(self._keys.name)

    def manifest(self, record: ParameterRecord) -> Manifest | None:
        """Returns the blobs of a version, also the retired ones, or None if it is no longer the latest."""
        version, retired = self._transport.call("HMGET", self._keys.record, "version", "retired")
        if version is None or version.decode(errors="replace") != record.version:
            return None
        return replace(record.manifest(self.schema()), retired=record.retired(retired))

    def is_complete(self, record: ParameterRecord) -> bool:
        """Returns whether all parts of a version are there, if they are in partitions. Asks all nodes at once."""
        if not record.keys.partitions:
            # One server has the record and all parts, and loses both or neither.
            return True
        schema = self.schema()
        blobs = record.manifest(schema).blobs(schema.stored(record.wire)).values()
        return are_there(self._transport, [part for blob in blobs for part in blob.parts(record.keys)])

    def schema(self) -> Schema:
        """Returns what the leaves are, which never changes. Call it after ``poll`` has returned a record."""
        if self._schema is None:
            incarnation, text = self._transport.call("HMGET", self._keys.record, "incarnation", "structure")
            if incarnation is None or incarnation.decode(errors="replace") != self.incarnation:
                raise gone(self._keys.name)
            self._schema = parse_schema(self._keys, "structure", text)
        return self._schema

    def begun(self) -> tuple[str, ParameterKeys] | None:
        """Returns the incarnation and the keys of parameters of which no version has been published in partitions yet.

        Returns None if nobody has begun to, or a version is there.
        """
        fields = self._transport.call("HMGET", self._keys.record, "incarnation", "version", "partitions")
        incarnation, version, partitions = [
            None if field is None else field.decode("ascii", "replace") for field in fields
        ]
        if incarnation is None or partitions is None or version is not None or incarnation.startswith(DELETING):
            return None
        return incarnation, with_partitions_text(self._keys, partitions)

    def learn(self, incarnation: str, keys: ParameterKeys, schema: Schema) -> None:
        """Notes what this process has published."""
        self.incarnation, self._keys, self._schema = incarnation, keys, schema

    def latest(self) -> tuple[ParameterRecord, Any] | None:
        """Returns the record of the latest version, and its tree; None if nothing has been published.

        Raises:
            PeekTimeoutError: versions were replaced faster than they could be read, for 30 seconds.
        """
        return self._latest(self.values)

    def latest_state(self) -> tuple[int, Any] | None:
        """Returns the step of the latest version, and the publisher's state; None if nothing has been published.

        Raises:
            PeekTimeoutError: versions were replaced faster than they could be read, for 30 seconds.
        """
        found = self._latest(self.state)
        return None if found is None else (found[0].step, found[1])

    def _latest(self, read: Callable[[ParameterRecord], Any]) -> tuple[ParameterRecord, Any] | None:
        deadline = running_time() + READ_TIMEOUT
        record = self.poll()
        while record is not None:
            try:
                return record, read(record)
            except VersionGoneError as error:
                record = self.after_loss(record, error, deadline)
        return None

    def after_loss(self, record: ParameterRecord, error: VersionGoneError, deadline: float) -> ParameterRecord | None:
        """Returns the record that has taken the place of one of which a part was missing.

        Raises:
            DataLossError: none has, and the part should have been in a partition: its node has lost it.
            CorruptDataError: none has, so the part should have been there.
            PeekTimeoutError: the deadline has passed.
        """
        found = self.poll()
        if found is not None and found.version == record.version:
            if found.keys.partitions and error.args[0] != found.keys.record:
                raise DataLossError(
                    f"parameters {shown(self._keys.name)}: part {error.args[0]} of step {found.step} is lost: its node "
                    f"failed, and a replica that lagged behind has taken its place, or the part was {EVICTED} or "
                    "removed by hand. Publish the values again, for this step or a later one",
                    part=error.args[0],
                )
            raise CorruptDataError(str(error)) from error
        if running_time() >= deadline:
            raise PeekTimeoutError(
                f"parameters {shown(self._keys.name)} changed during every attempt to read them, for "
                f"{READ_TIMEOUT:.0f} s: versions are published faster than they can be read"
            )
        return found

    def values(self, record: ParameterRecord, fetched: Mapping[str, Any] | None = None) -> Any:
        """Returns the tree of a version.

        Args:
            record: the record of the version.
            fetched: what some keys of parts hold, as ``poll_and_fetch`` has returned it.

        Returns:
            The tree. Its arrays are read-only and never change.

        Raises:
            VersionGoneError: a part is no longer there.
            CorruptDataError: redisacc did not write it.
        """
        schema = self.schema()
        with self._lock:
            if self._process != os.getpid():
                # What another thread of the parent was writing to may be half-done.
                self._pool, self._read, self._process = MemoryPool(), None, os.getpid()
            known = self._read
            if known is None or known.version != record.version:
                known = self._update(record, schema, known, fetched or {})
                self._read = known
            return schema.structure.build(
                [
                    place.memory.array(place.offset, leaf.shape, leaf.given)
                    for place, leaf in zip(known.places, schema.leaves, strict=True)
                ]
            )

    def state(self, record: ParameterRecord) -> Any:
        """Returns the publisher's state of a version, None if it has none.

        Raises:
            VersionGoneError: a part is no longer there.
            CorruptDataError: redisacc did not write it.
        """
        blob = record.manifest(self.schema()).state
        if blob is None:
            return None
        version, text = self._transport.call("HMGET", self._keys.record, "version", "state_structure")
        if version is None or version.decode(errors="replace") != record.version:
            raise VersionGoneError(self._keys.record)
        schema = parse_schema(self._keys, "state_structure", text)
        layout = schema.layout(ranges_text(range(len(schema.leaves))))
        if layout.nbytes != blob.nbytes:
            raise CorruptDataError(
                f"{self._keys.record}: state has {blob.nbytes} bytes, and its structure {layout.nbytes}"
            )
        self._check_lengths([blob])
        memory = Memory(blob.nbytes)
        self._fetch([(blob, memory.bytes)], {})
        self._check_booleans(schema, range(len(schema.leaves)), layout.offset_of, memory, blob.id)
        # The caller's own, so it may write to it.
        return schema.structure.build(
            [
                np.ndarray(leaf.shape, leaf.given, memory.bytes, offset)
                for leaf, offset in zip(schema.leaves, layout.offsets, strict=True)
            ]
        )

    def _update(
        self, record: ParameterRecord, schema: Schema, known: _Snapshot | None, fetched: Mapping[str, Any]
    ) -> _Snapshot:
        """Reads a version of which ``known`` is an earlier one, or maybe a later one, or none."""
        manifest = record.manifest(schema)
        # What was read last must stay as it is until something else has been read, whole.
        busy = [] if known is None else [memory for place in known.places for memory in (place.memory, place.spare)]
        if known is not None and known.step >= record.step:
            # Another thread has been faster. Rows lead to later versions, not back.
            known = None
        needed, since = self._needed(manifest, schema, known)
        full = [blob for blob in manifest.full if blob.id in needed]
        rows = [blob for blob in manifest.rows if any(since[leaf] < blob.step for leaf, _ in blob.counts)]
        stored = schema.stored(record.wire)
        sizes = [Blob(blob.id, stored.layout(blob.leaves).nbytes) for blob in full]
        sizes += [Blob(blob.id, blob.nbytes(stored)) for blob in rows]
        self._check_lengths(sizes)
        received: list[Memory] = []
        for size in sizes[: len(full)]:
            received.append(self._pool.get(size.nbytes, (*busy, *received)))
        changes = [np.empty(size.nbytes, np.uint8) for size in sizes[len(full) :]]
        self._fetch(list(zip(sizes, [*(m.bytes for m in received), *changes], strict=True)), fetched)
        memories = received
        if stored is not schema:
            memories = []
            for blob, memory in zip(full, received, strict=True):
                layout = schema.layout(blob.leaves)
                wide = self._pool.get(layout.nbytes, (*busy, *received, *memories))
                for leaf in needed[blob.id]:
                    start, narrow = layout.offset_of[leaf], stored.layout(blob.leaves).offset_of[leaf]
                    wide.bytes[start : start + schema.leaves[leaf].nbytes] = _widened(
                        memory.bytes[narrow : narrow + stored.leaves[leaf].nbytes],
                        stored.leaves[leaf],
                        schema.leaves[leaf],
                    )
                memories.append(wide)
        places: list[_Place | None] = [None] * len(schema.leaves) if known is None else [*known.places]
        for blob, memory in zip(full, memories, strict=True):
            offsets = schema.layout(blob.leaves).offset_of
            for leaf in needed[blob.id]:
                places[leaf] = _Place(memory, offsets[leaf])
            self._check_booleans(schema, needed[blob.id], offsets, memory, blob.id)
        patches: dict[int, list[_Rows]] = {}
        for change, data in zip(rows, changes, strict=True):
            for leaf, part in self._parsed(change, data, stored).items():
                if since[leaf] < change.step:
                    wide_rows = _widened(part.rows, stored.leaves[leaf], schema.leaves[leaf])
                    patches.setdefault(leaf, []).append(_Rows(part.indices, wide_rows))
        whole = [place for place in places if place is not None]
        assert len(whole) == len(places)
        for leaf, parts in patches.items():
            whole[leaf] = _patched(whole[leaf], schema.leaves[leaf].nbytes, parts)
        self._pool.keep(memories if stored is schema else [*memories, *received])
        return _Snapshot(record.version, record.step, tuple(whole))

    @staticmethod
    def _needed(
        manifest: Manifest, schema: Schema, known: _Snapshot | None
    ) -> tuple[dict[str, tuple[int, ...]], dict[int, int]]:
        """Returns which leaves are read from each full blob, and for each leaf, the step from which on rows count."""
        needed: dict[str, tuple[int, ...]] = {}
        since: dict[int, int] = {}
        for holder, leaves in manifest.shares(schema):
            # Rows are complete from the holder's own step on, and maybe from an earlier one on.
            if known is not None and known.step >= min(holder.step, max(holder.since, manifest.rows_since)):
                since.update(dict.fromkeys(leaves, known.step))
            elif leaves:
                needed[holder.id] = leaves
                since.update(dict.fromkeys(leaves, holder.step))
        return needed, since

    def _check_lengths(self, blobs: Sequence[Blob]) -> None:
        """Compares the record with the lengths on the server, so that a forged one allocates no memory."""
        if sum(blob.nbytes for blob in blobs) > TRUSTED_BYTES:
            wanted = [part for blob in blobs for part in blob.parts(self._keys)]
            lengths = self._transport.pipeline([("STRLEN", key) for key, _ in wanted])
            for (key, length), actual in zip(wanted, lengths, strict=True):
                _check_length(key, actual or -1, length)

    def _fetch(self, blobs: Sequence[tuple[Blob, Array]], fetched: Mapping[str, Any]) -> None:
        arrivals = _Arrivals(self._keys.homes)
        for blob, data in blobs:
            start = 0
            for number, (key, length) in enumerate(blob.parts(self._keys)):
                place = data[start : start + length]
                start += length
                there = fetched.get(key)
                if isinstance(there, bytes):
                    _check_length(key, len(there), length)
                    place[:] = np.frombuffer(there, np.uint8)
                else:
                    arrivals.expect(key, place, number)
        if arrivals.wanted():
            self._transport.fetch(arrivals)

    def _parsed(self, blob: RowsBlob, data: Array, schema: Schema) -> dict[int, _Rows]:
        """Returns the rows of each leaf in a rows blob."""
        found, start = {}, 0
        for leaf, count in blob.counts:
            middle = start + count * INDEX_BYTES
            end = middle + count * schema.leaves[leaf].row_bytes
            # A copy, because rows of single bytes leave the indices of the next leaf unaligned.
            indices = np.frombuffer(data[start:middle].tobytes(), _INDEX)
            if indices[0] < 0 or indices[-1] >= schema.leaves[leaf].shape[0] or not np.all(indices[1:] > indices[:-1]):
                raise CorruptDataError(
                    f"{self._keys.part(blob.id, 0)}: indices that are not ascending, or not below "
                    f"{schema.leaves[leaf].shape[0]}"
                )
            rows = data[middle:end].reshape(count, -1)
            if schema.leaves[leaf].dtype == "bool" and rows.size and rows.max() > 1:
                raise self._not_boolean(blob.id)
            found[leaf] = _Rows(indices, rows)
            start = end
        return found

    def _check_booleans(
        self, schema: Schema, leaves: Sequence[int], offsets: Mapping[int, int], memory: Memory, blob: str
    ) -> None:
        """Raises unless every boolean is 0 or 1: numpy's results for other bytes depend on what it does with them."""
        for leaf in schema.booleans.intersection(leaves):
            data = memory.bytes[offsets[leaf] : offsets[leaf] + schema.leaves[leaf].nbytes]
            if data.size and data.max() > 1:
                raise self._not_boolean(blob)

    def _not_boolean(self, blob: str) -> CorruptDataError:
        return CorruptDataError(f"{self._keys.part(blob, 0)}: a boolean that is neither 0 nor 1")


def _widened(data: Array, stored: Leaf, leaf: Leaf) -> Array:
    """Returns the bytes of elements as readers get them, given those in a blob; the same if they are not encoded."""
    return data if stored is leaf else data.view(stored.stored).astype(leaf.stored).view(np.uint8)


def _patched(place: _Place, nbytes: int, parts: list[_Rows]) -> _Place:
    """Returns where a leaf is after rows were written over it. What ``place`` shows stays as it is.

    Two pieces of memory take turns, so that in a loop in which the caller holds only the latest version, nothing but
    rows is written.
    """
    spare, lacking = place.spare, place.lacking
    if spare is None or not spare.is_idle():
        spare, lacking = Memory(nbytes), ()
        np.copyto(spare.bytes, place.memory.bytes[place.offset : place.offset + nbytes])
    for part in (*lacking, *parts):
        # A row as a single element is copied at once.
        row = np.dtype((np.void, part.rows.shape[1]))
        spare.bytes.view(row).put(part.indices, part.rows.reshape(-1).view(row))
    if place.offset or place.memory.bytes.nbytes != nbytes:
        # The memory is that of a blob with more leaves.
        return _Place(spare)
    return _Place(spare, 0, place.memory, parts)


def _check_length(key: str, actual: Any, expected: int) -> None:
    if actual == -1:
        raise VersionGoneError(key)
    if actual != expected:
        raise CorruptDataError(f"{key} has {actual} bytes, and the record says {expected}")


class _Arrival(NamedTuple):
    """A part that is on its way."""

    key: str
    place: memoryview
    lane: int


class _Arrivals:
    """Parts that are on their way.

    Args:
        homes: what the keys of each partition begin with; empty if there are none.
    """

    def __init__(self, homes: Sequence[str]) -> None:
        self.homes = homes
        # A reader uploads nothing meanwhile, so one connection to each node is as fast as several.
        self.lanes = len(homes) or 1
        self._awaited: deque[_Arrival] = deque()

    def expect(self, key: str, place: Array, number: int) -> None:
        """Fetches a key, that of the part with this number of a blob, to this place."""
        self._awaited.append(_Arrival(key, place.data, number % self.lanes))

    # Arrivals of fast_socket:

    def wanted(self) -> list[_Arrival]:
        """Returns the parts that have not arrived."""
        return list(self._awaited)

    def expected(self, part: _Arrival) -> memoryview:
        """Returns where a part goes."""
        return part.place

    def begin(self, part: _Arrival, length: int) -> memoryview:
        """Returns where a part goes, given its length in bytes."""
        _check_length(part.key, length, len(part.place))
        return part.place

    def missing(self, part: _Arrival) -> None:
        """Raises, because the version is gone with the part."""
        raise VersionGoneError(part.key)

    def finish(self, part: _Arrival) -> None:
        """Notes that a part has arrived."""
        self._awaited.remove(part)

    def more(self) -> list[_Arrival]:
        """Returns none: everything was wanted from the beginning."""
        return []
