"""Brings a reader from its version of the parameters to a later one: the blobs it lacks, and the new version."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from redisacc._arrays.validation import Array
from redisacc._format.leaves import Leaf, Schema
from redisacc._format.parameter_record import INDEX_BYTES, Blob, FullBlob, Manifest, ParameterRecord, RowsBlob
from redisacc._protocol.parameters.memory import Memory, MemoryPool
from redisacc.errors import CorruptDataError

_INDEX = np.dtype("<i8")


class Place(NamedTuple):
    """Where the value of a leaf is.

    Attributes:
        memory: the memory.
        offset: where it begins, in bytes.
        spare: other memory of this leaf alone, which has the value of an earlier version.
        lacking: the rows, fetched, that the spare memory lacks.
    """

    memory: Memory
    offset: int = 0
    spare: Memory | None = None
    lacking: Sequence[Rows] = ()


@dataclass(frozen=True)
class Rows:
    """Changed rows of a leaf.

    Attributes:
        indices: which, ascending.
        rows: a row of bytes for each.
    """

    indices: Array
    rows: Array


@dataclass(frozen=True)
class Snapshot:
    """The version that was read last.

    Attributes:
        version: its id.
        step: its step.
        places: where the value of each leaf is.
    """

    version: str
    step: int
    places: tuple[Place, ...]


class Update:
    """Reads a version, given the one that was read last. Fetch ``blobs`` into ``allocate()``; then call ``snapshot()``.

    Args:
        record: the record of the version.
        schema: the schema of the leaves.
        known: the version read last, maybe a later one, because another thread was faster; None means nothing was read.
        pool: memory that was used before.

    Attributes:
        blobs: the blobs that have to be fetched.

    Raises:
        CorruptDataError: redisacc did not write the record.
    """

    def __init__(self, record: ParameterRecord, schema: Schema, known: Snapshot | None, pool: MemoryPool) -> None:
        self._record, self._schema, self._pool = record, schema, pool
        # The schema of the leaves in blobs.
        self._stored = stored = schema.stored(record.encoding)
        # The version read last must stay unchanged until another one has been read completely.
        self._busy: list[Memory | None] = []
        if known is not None:
            self._busy += [memory for place in known.places for memory in (place.memory, place.spare)]
        # Rows lead to later versions, not back.
        self._known = known if known is not None and known.step < record.step else None
        manifest = record.manifest(schema)
        self._leaves_of, self._since = _needed(manifest, schema, self._known)
        self._full = [blob for blob in manifest.full if blob.id in self._leaves_of]
        self._rows = [blob for blob in manifest.rows if any(self._since[leaf] < blob.step for leaf, _ in blob.counts)]
        self.blobs = [blob.blob(stored) for blob in self._full] + [blob.blob(stored) for blob in self._rows]
        # Memory for the flat blob, if parts of that were fetched to it already.
        self._given: Memory | None = None
        self._received: list[Memory] = []
        self._changes: list[Array] = []

    @property
    def flat(self) -> Blob | None:
        """The blob that is cut by elements, as an optimizer makes it, if it has to be fetched."""
        return self.blobs[0] if self.blobs and self.blobs[0].cut else None

    def use(self, memory: Memory) -> None:
        """Uses memory for the flat blob, to which parts of it were fetched already."""
        self._given = memory
        # It shows this version from now on, so it must not be the spare memory of the next one.
        self._busy.append(memory)

    def spare(self) -> Memory:
        """Returns memory for the flat blob of the next version, once this one is complete.

        Parts may still arrive there after it was given up, so nobody else gets it.
        """
        return self._pool.lend(self._memory(self.blobs[0].nbytes))

    def allocate(self) -> list[Array]:
        """Returns memory for each of the blobs."""
        number = len(self._full)
        given = [] if self._given is None else [self._given]
        self._received = [*given, *(self._memory(blob.nbytes) for blob in self.blobs[len(given) : number])]
        self._changes = [np.empty(blob.nbytes, np.uint8) for blob in self.blobs[number:]]
        return [*(memory.bytes for memory in self._received), *self._changes]

    def snapshot(self) -> Snapshot:
        """Returns the version, once the blobs have been fetched.

        Raises:
            CorruptDataError: redisacc did not write a blob.
        """
        decoded = self._decoded()
        places = self._places(decoded)
        for leaf, rows in self._changed_rows().items():
            places[leaf] = _patched(places[leaf], self._schema.leaves[leaf].nbytes, rows)
        self._pool.keep(decoded if decoded is self._received else [*decoded, *self._received])
        return Snapshot(self._record.version, self._record.step, tuple(places))

    def _memory(self, nbytes: int) -> Memory:
        memory = self._pool.get(nbytes, self._busy)
        self._busy.append(memory)
        return memory

    def _decoded(self) -> list[Memory]:
        """Returns the full blobs with the elements that readers get, which may be wider than those that travel."""
        if self._stored is self._schema:
            return self._received
        decoded = []
        for blob, received in zip(self._full, self._received, strict=True):
            wide, narrow = blob.layout(self._schema), blob.layout(self._stored)
            memory = self._memory(wide.nbytes)
            for leaf in self._leaves_of[blob.id]:
                given, stored = self._schema.leaves[leaf], self._stored.leaves[leaf]
                start, begin = wide.offset_of[leaf], narrow.offset_of[leaf]
                memory.bytes[start : start + given.nbytes] = _widened(
                    received.bytes[begin : begin + stored.nbytes], stored, given
                )
            decoded.append(memory)
        return decoded

    def _places(self, decoded: Sequence[Memory]) -> list[Place]:
        """Returns where each leaf is that was read whole, and where the other leaves are already."""
        places = {} if self._known is None else dict(enumerate(self._known.places))
        for blob, memory in zip(self._full, decoded, strict=True):
            offsets, leaves = blob.layout(self._schema).offset_of, self._leaves_of[blob.id]
            check_booleans(self._schema, leaves, offsets, memory.bytes, self._where(blob))
            places.update({leaf: Place(memory, offsets[leaf]) for leaf in leaves})
        return [places[leaf] for leaf in range(len(self._schema.leaves))]

    def _changed_rows(self) -> dict[int, list[Rows]]:
        """Returns for each leaf the rows that have changed since its value was whole, the oldest first."""
        found: dict[int, list[Rows]] = {}
        for blob, data in zip(self._rows, self._changes, strict=True):
            for leaf, rows in rows_in(blob, data, self._stored, self._where(blob)):
                if self._since[leaf] < blob.step:
                    wide = _widened(rows.rows, self._stored.leaves[leaf], self._schema.leaves[leaf])
                    found.setdefault(leaf, []).append(Rows(rows.indices, wide))
        return found

    def _where(self, blob: FullBlob | RowsBlob) -> str:
        return self._record.keys.part(blob.id, 0)


def _needed(
    manifest: Manifest, schema: Schema, known: Snapshot | None
) -> tuple[dict[str, tuple[int, ...]], dict[int, int]]:
    """Returns which leaves are read from each full blob, and for each leaf, after which step rows are read."""
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


def rows_in(blob: RowsBlob, data: Array, stored: Schema, where: str) -> Iterator[tuple[int, Rows]]:
    """Yields the leaves in a blob of rows, and their rows.

    Args:
        blob: the blob.
        data: its bytes: of each leaf, all indices, and then all rows.
        stored: the schema of the leaves in blobs.
        where: the key of its first part, for messages.

    Raises:
        CorruptDataError: redisacc did not write it.
    """
    for number, count in blob.counts:
        leaf = stored.leaves[number]
        # A copy, because rows of single bytes leave the indices of the next leaf unaligned.
        indices = np.frombuffer(data[: count * INDEX_BYTES].tobytes(), _INDEX)
        if indices[0] < 0 or indices[-1] >= leaf.shape[0] or not np.all(indices[1:] > indices[:-1]):
            raise CorruptDataError(f"{where}: indices that are not ascending, or not below {leaf.shape[0]}")
        end = count * (INDEX_BYTES + leaf.row_bytes)
        rows, data = data[count * INDEX_BYTES : end].reshape(count, -1), data[end:]
        if leaf.dtype == "bool":
            _check_boolean(rows, where)
        yield number, Rows(indices, rows)


def check_booleans(schema: Schema, leaves: Iterable[int], offsets: Mapping[int, int], data: Array, where: str) -> None:
    """Raises unless every boolean is 0 or 1, because numpy's operations disagree about other bytes.

    Args:
        schema: the schema of the leaves.
        leaves: the leaves to look at.
        offsets: where each of them begins, in bytes.
        data: the bytes of a blob.
        where: the key of its first part, for messages.

    Raises:
        CorruptDataError: one is something else.
    """
    for leaf in schema.booleans.intersection(leaves):
        _check_boolean(data[offsets[leaf] : offsets[leaf] + schema.leaves[leaf].nbytes], where)


def _check_boolean(data: Array, where: str) -> None:
    if data.size and data.max() > 1:
        raise CorruptDataError(f"{where}: a boolean that is neither 0 nor 1")


def _widened(data: Array, stored: Leaf, leaf: Leaf) -> Array:
    """Returns the bytes of elements as readers get them, given those in a blob; the same if they are not encoded."""
    return data if stored is leaf else data.view(stored.stored).astype(leaf.stored).view(np.uint8)


def _patched(place: Place, nbytes: int, changes: Sequence[Rows]) -> Place:
    """Returns where a leaf is after rows were written over it. What ``place`` shows stays as it is.

    Two pieces of memory take turns, so that in a loop in which the caller holds only the latest version, nothing but
    rows is written.
    """
    spare, lacking = place.spare, place.lacking
    if spare is None or not spare.is_idle():
        spare, lacking = Memory(nbytes), ()
        np.copyto(spare.bytes, place.memory.bytes[place.offset : place.offset + nbytes])
    for change in (*lacking, *changes):
        # A row as a single element is copied at once.
        row = np.dtype((np.void, change.rows.shape[1]))
        spare.bytes.view(row).put(change.indices, change.rows.reshape(-1).view(row))
    if place.offset or place.memory.bytes.nbytes != nbytes:
        # The memory holds a blob with more leaves.
        return Place(spare)
    return Place(spare, 0, place.memory, changes)
