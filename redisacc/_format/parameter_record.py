"""The record of parameters: the plain-text hash that describes the version that is published.

The values of a version are in blobs. Each blob is stored in parts, as strings that never change. There are four
sorts of blobs:

- a *full* blob holds some leaves, whole, one after the other;
- a *flat* blob does so with all leaves whose gradients are dense, in the order and the parts in which gradients have
  them, so that a reducer can update a part of them with a part of the gradient;
- a *rows* blob holds the rows that changed from the version before, of leaves with few such rows;
- a *state* blob holds the leaves of the publisher's state.

The value of a leaf is its value in the last full blob that has it, with the rows of all later versions written over it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

from redisacc._arrays.metrics import parse_kept
from redisacc._format.attempts import StoredAttempt
from redisacc._format.keys import ParameterKeys, parse_partitions
from redisacc._format.leaves import ALIGNMENT, Flat, Layout, Schema, ranges_text
from redisacc._format.part_cut import ElementCut, part_lengths
from redisacc._format.stored_text import foreign, matched, of_ascii, parse_int64, parsed
from redisacc._text import shown
from redisacc.errors import CorruptDataError, RedisAccError
from redisacc.optim import Optimizer, from_config

# A blob, as a field of the record lists it.
Entry = TypeVar("Entry")

# The version of this part of the data model, in every record.
FORMAT = "1"

# A blob has at most this many parts, so that the script that publishes it stays short. Parts of large blobs are larger.
# No script touches the parts in partitions, so there may be more of them there.
MAX_PARTS = 16

# A blob of at most this many bytes is a single part in partitions as well: smaller pieces would cost more requests than
# the other nodes save.
SINGLE_PART_BYTES = 64 * 1024

# The most parts of a blob that is cut by elements.
MOST_FLAT_PARTS = 100_000

# A string of Redis may have 512 MiB.
MAX_BLOB_BYTES = MAX_PARTS * 512 * 2**20

# The longest description of an optimizer, in bytes.
LONGEST_OPTIMIZER = 2**20

# How elements of float32 may be stored. A record without this field stores them as they are.
ENCODINGS = ("float32", "bfloat16")

# The key, in a publisher's state, of parameters of float32 as they are, in the order of the leaves, if readers get
# rounded ones. The publisher's own state has the key "state" beside it.
EXACT = "redisacc:float32"

# The key, in the state that is published with a snapshot, of the incarnation of its training, as bytes. It is empty in
# one that `redisacc restore` has published: the next training of its name continues with it.
TRAINING = "redisacc:training"

# The key, in the state of an optimizer, of how many updates it has seen. The others are its slots.
UPDATES = "updates"

# The bytes of an index of a row.
INDEX_BYTES = 8

# In partitions, the id of a version ends with the number of the attempt to publish it.
_ID = r"([0-9a-f]{16}(?:-[0-9]{1,15})?-[a-z_]{1,24})"
_FULL = re.compile(_ID + r":(-?[0-9]{1,19}):(-?[0-9]{1,19}):([0-9,-]*)(?::([0-9]{1,12}))?")
_ROWS = re.compile(_ID + r":(-?[0-9]{1,19}):([0-9=,]+)")
_SIZED = re.compile(_ID + r":([0-9]{1,15})(?::([0-9]{1,6}))?")
# No list has more entries than this: a publisher keeps at most some 500.
_MAX_ENTRIES = 10_000

# The server's allocator has blocks of 2 MiB and then of 2.5 MiB, so 64 bytes are left for the string's header and its
# final zero.
PART_BYTES = 2 * 2**20 - 64


def part_size(nbytes: int, partitions: int = 0) -> int:
    """Returns the bytes of each part of a blob but the last, which may differ.

    Args:
        nbytes: the length of the blob in bytes.
        partitions: among how many partitions the parts are spread, which get equally many; 0: none.
    """
    if not partitions:
        return max(PART_BYTES, -(-nbytes // MAX_PARTS))
    if nbytes <= SINGLE_PART_BYTES:
        return max(nbytes, 1)
    return -(-nbytes // (partitions * -(-nbytes // (partitions * PART_BYTES))))


def blob_lengths(nbytes: int, partitions: int = 0) -> list[int]:
    """Returns the bytes of each part of a blob. The arguments are the same as for ``part_size``."""
    # Parts in partitions have equal lengths already.
    return part_lengths(nbytes, part_size(nbytes, partitions), runts=partitions > 0)


@lru_cache(maxsize=16)
def flat_cut(flat: Flat, part_bytes: int, partitions: int) -> ElementCut:
    """Returns how a flat blob is cut into parts.

    Args:
        flat: its leaves.
        part_bytes: the bytes of float32 in each part but the last.
        partitions: among how many partitions the parts are spread; 0 or 1: all are in one slot.
    """
    return ElementCut(flat.sections, part_bytes, runts=partitions > 1)


def flat_lengths(flat: Flat, part_bytes: int, partitions: int) -> tuple[int, ...]:
    """Returns the length of each part of a flat blob. The arguments are those of ``flat_cut``."""
    return flat_cut(flat, part_bytes, partitions).lengths or (1,)


@dataclass(frozen=True)
class Blob:
    """A blob that is no longer, or never was, of use to readers of the tree.

    Attributes:
        id: the id of the version that brought it, and its sort.
        nbytes: its length in bytes.
        cut: the length of each part, if it is cut by elements; empty if it is cut by bytes, or was retired.
        number: the number of its parts, if it is cut by elements.
    """

    id: str
    nbytes: int
    cut: tuple[int, ...] = ()
    number: int = 0

    def lengths(self, partitions: int) -> Sequence[int]:
        """Returns the length of each part. Those of a blob that is cut by elements are known until it is retired."""
        assert self.cut or not self.number
        return self.cut or blob_lengths(self.nbytes, partitions)

    def parts(self, keys: ParameterKeys) -> list[tuple[str, int]]:
        """Returns the key of each of its parts, and how many bytes that has."""
        lengths = self.lengths(len(keys.partitions))
        return [(keys.part(self.id, number), length) for number, length in enumerate(lengths)]

    def _number(self, keys: ParameterKeys) -> int:
        return self.number or len(blob_lengths(self.nbytes, len(keys.partitions)))

    def keys(self, keys: ParameterKeys) -> list[str]:
        """Returns the keys of its parts."""
        return [keys.part(self.id, number) for number in range(self._number(keys))]

    def attempt(self, keys: ParameterKeys) -> StoredAttempt:
        """Returns how the leader lists it while its parts are being written to partitions, or are to be removed."""
        return StoredAttempt(self.id, self._number(keys))

    @property
    def text(self) -> str:
        """Returns how the record lists it."""
        return f"{self.id}:{self.nbytes}:{self.number}" if self.number else f"{self.id}:{self.nbytes}"


@dataclass(frozen=True)
class FullBlob:
    """A blob of whole leaves.

    Attributes:
        id: the id of the version that brought it, and its sort.
        step: the step of that version.
        since: readers who hold a version with this step or a later one need not read it: rows blobs have everything
            that changed in its leaves from then on.
        leaves: the leaves in it, as ``ranges_text`` writes them.
        part_bytes: if it is a flat blob, the bytes of float32 in each part but the last; else 0.
        cut: if it is a flat blob, the length of each part.
    """

    id: str
    step: int
    since: int
    leaves: str
    part_bytes: int = 0
    cut: tuple[int, ...] = ()

    def layout(self, schema: Schema) -> Layout:
        """Returns the places of its leaves.

        Args:
            schema: the schema of the leaves, as they are stored.
        """
        return schema.flat(self.leaves).layout if self.part_bytes else schema.layout(self.leaves)

    def blob(self, schema: Schema) -> Blob:
        """Returns how it is stored. Takes the schema as ``layout`` does."""
        return Blob(self.id, self.layout(schema).nbytes, self.cut, len(self.cut))

    @property
    def text(self) -> str:
        """Returns how the record lists it."""
        listed = f"{self.id}:{self.step}:{self.since}:{self.leaves}"
        return f"{listed}:{self.part_bytes}" if self.part_bytes else listed


@dataclass(frozen=True)
class RowsBlob:
    """A blob of changed rows. For each leaf, it has the indices of the rows, and then the rows.

    Attributes:
        id: the id of the version that brought it, and its sort.
        step: the step of that version.
        counts: (number of a leaf, number of its rows), ascending.
    """

    id: str
    step: int
    counts: tuple[tuple[int, int], ...]

    @property
    def text(self) -> str:
        """Returns how the record lists it."""
        return f"{self.id}:{self.step}:{','.join(f'{leaf}={count}' for leaf, count in self.counts)}"

    def nbytes(self, schema: Schema) -> int:
        """Returns its length in bytes."""
        return sum(count * (INDEX_BYTES + schema.leaves[leaf].row_bytes) for leaf, count in self.counts)

    def blob(self, schema: Schema) -> Blob:
        """Returns how it is stored."""
        return Blob(self.id, self.nbytes(schema))


@dataclass(frozen=True)
class Manifest:
    """The blobs of a version.

    Attributes:
        full: the blobs of whole leaves; the last one that has a leaf counts.
        rows: the blobs of rows, the oldest first.
        rows_since: versions with lower steps than this may have had rows blobs that are no longer listed.
        state: the blob of the publisher's state, if it has one.
        slots: the blobs of an optimizer's state, each laid out and cut like the flat blob; and "exact", the leaves
            themselves, if those in the flat blob are rounded. For each other full or rows blob, one with the same of
            its leaves or rows (``kept_sort``).
        retired: blobs of earlier versions, which slow readers may still be reading; the oldest first.
    """

    full: tuple[FullBlob, ...]
    rows: tuple[RowsBlob, ...] = ()
    rows_since: int = -(2**63)
    state: Blob | None = None
    slots: tuple[Blob, ...] = ()
    retired: tuple[Blob, ...] = ()

    @property
    def log(self) -> tuple[Blob, ...]:
        """If versions are mean gradients, the blobs of earlier ones, one for each step, up to the one before this."""
        # In the form in which a program publishes, these are versions of any steps.
        return self.retired if self.full[0].part_bytes else ()

    def blobs(self, schema: Schema) -> dict[str, Blob]:
        """Returns all blobs that the version consists of, by id, without the retired ones.

        Args:
            schema: the schema of the leaves in blobs.
        """
        found = [blob.blob(schema) for blob in self.full] + [blob.blob(schema) for blob in self.rows]
        if self.state is not None:
            found.append(self.state)
        return {blob.id: blob for blob in (*found, *self.slots)}

    def full_of(self, version: str) -> list[FullBlob]:
        """Returns the full blobs that the version with this id brings itself."""
        return [blob for blob in self.full if blob.id.startswith(f"{version}-")]

    def shares(self, schema: Schema) -> list[tuple[FullBlob, tuple[int, ...]]]:
        """Returns each full blob, and the leaves that it holds and no later one does."""
        shares = schema.shares(tuple([blob.leaves for blob in self.full]))
        return list(zip(self.full, shares, strict=True))

    def fields(self) -> list[str]:
        """Returns the fields of the record that list the blobs, each followed by its value."""
        return [
            *("full", " ".join(blob.text for blob in self.full)),
            *("rows", " ".join(blob.text for blob in self.rows)),
            *("rows_since", str(self.rows_since)),
            *("state", "" if self.state is None else self.state.text),
            *("slots", " ".join(blob.text for blob in self.slots)),
            *("retired", " ".join(blob.text for blob in self.retired)),
        ]


class ParameterRecord:
    """Which version is published, and where its values are. It is checked as it is used.

    Readers poll it, so it lacks fields that only few need, such as the retired blobs, unless these are asked for.

    Attributes:
        keys: the keys of the parameters, with their partitions.
        incarnation: a random id that the parameters got with their first version.
        version: a random id of the version.
        step: its step.
        finished: whether it is the last one, as far as its publisher has said.
        encoding: how its elements of float32 are stored, one of ENCODINGS.
        kept: what the program keeps, as text; "": nothing.
        found: what the server replied, by the names of fields.
    """

    # The fields, and what their absence means. None means all records have them.
    FIELDS: ClassVar[Mapping[str, bytes | None]] = {
        **dict.fromkeys(("format", "incarnation", "version", "step", "full", "rows", "rows_since", "state")),
        "finished": b"0",
        "encoding": b"float32",
        "partitions": b"",
        "slots": b"",
        "kept": b"",
    }

    def __init__(self, keys: ParameterKeys, found: Mapping[str, Any]) -> None:
        self.found = found
        texts = {
            name: parsed(keys.record, name, absent if found[name] is None else found[name], _text)
            for name, absent in self.FIELDS.items()
        }
        if texts["format"] != FORMAT:
            raise CorruptDataError(
                f"parameters {shown(keys.name)} have format {shown(texts['format'])} of the data model, but this "
                f"version of redisacc reads format {FORMAT!r}: delete them with the version that published them"
            )
        self.encoding = texts["encoding"]
        if self.encoding not in ENCODINGS:
            raise CorruptDataError(
                f"parameters {shown(keys.name)} are stored with the encoding {shown(self.encoding)}, but this version "
                f"of redisacc reads {' and '.join(ENCODINGS)}: read them with the version that published them"
            )
        self.keys = with_partitions_text(keys, texts["partitions"])
        self.incarnation = parsed(keys.record, "incarnation", texts["incarnation"], _id)
        self.version = parsed(keys.record, "version", texts["version"], _id)
        self.step = parsed(keys.record, "step", texts["step"], parse_int64)
        self.finished = texts["finished"] == "1"
        self.kept = texts["kept"]
        parsed(keys.record, "kept", self.kept, parse_kept)
        self._texts = texts

    @classmethod
    def command(cls, keys: ParameterKeys, *more: str) -> tuple[str, ...]:
        """Returns the command that reads it, with further fields."""
        return ("HMGET", keys.record, *cls.FIELDS, *more)

    @classmethod
    def parse(cls, keys: ParameterKeys, reply: object, *more: str) -> ParameterRecord | None:
        """Returns the record from the reply to ``command``, or None if there is none, or none of a version yet.

        Raises:
            CorruptDataError: redisacc did not write it, or another version of it did.
        """
        names = (*cls.FIELDS, *more)
        if not isinstance(reply, list) or len(reply) != len(names):
            raise CorruptDataError(f"{keys.record}: HMGET must reply {len(names)} values, not {shown(reply)}")
        found = dict(zip(names, reply, strict=True))
        if found["version"] is None and found["partitions"] is not None and found["step"] is None:
            # An attempt to publish the first version is under way, or was given up.
            return None
        return cls(keys, found) if any(found[name] is not None for name in cls.FIELDS) else None

    def read(self, name: str, parse: Callable[..., Entry], *more: object) -> Entry:
        """Returns what a parser makes of a further field.

        Raises:
            CorruptDataError: redisacc did not write it.
        """
        return parsed(self.keys.record, name, self.found[name], parse, *more)

    def schema(self, name: str = "structure") -> Schema:
        """Returns the schema in a further field.

        Raises:
            CorruptDataError: redisacc did not write it.
        """
        return parse_schema(self.keys, name, self.found[name])

    def stored(self, schema: Schema) -> list[Blob]:
        """Returns all blobs that the record lists, if ``retired`` was read: also those of earlier versions."""
        manifest = self.manifest(schema)
        return [*manifest.blobs(schema.stored(self.encoding)).values(), *manifest.retired]

    def manifest(self, schema: Schema) -> Manifest:
        """Returns the blobs of the version.

        Raises:
            CorruptDataError: redisacc did not write the record.
        """
        full = self._listed("full", self._full, schema)
        manifest = Manifest(
            full=full,
            rows=self._listed("rows", self._rows, schema),
            rows_since=parsed(self.keys.record, "rows_since", self._texts["rows_since"], parse_int64),
            state=next(iter(self._listed("state", _sized, most=1)), None),
            slots=self._listed("slots", self._slot, full, schema),
            retired=self.retired(self.found["retired"]) if "retired" in self.found else (),
        )
        if any(earlier.step >= later.step for earlier, later in pairwise(manifest.rows)):
            raise foreign(self.keys.record, "rows", self._texts["rows"])
        if sum([len(leaves) for _, leaves in manifest.shares(schema)]) != len(schema.leaves):
            raise foreign(self.keys.record, "full", self._texts["full"])
        return manifest

    def _listed(
        self, name: str, parse: Callable[..., Entry], *more: object, most: int = _MAX_ENTRIES
    ) -> tuple[Entry, ...]:
        return parsed(self.keys.record, name, self._texts[name], _each, parse, more, most)

    def retired(self, text: object) -> tuple[Blob, ...]:
        """Returns the blobs in the field ``retired``.

        Raises:
            CorruptDataError: redisacc did not write it.
        """
        return parsed(self.keys.record, "retired", text, lambda text: _each(_text(text), _sized))

    def _slot(self, text: str, full: tuple[FullBlob, ...], schema: Schema) -> Blob:
        """Returns a blob of the optimizer's state."""
        blob = _sized(text)
        part_bytes = full[0].part_bytes if full else 0
        if not part_bytes or not (blob.number or "-kept_" in blob.id):
            raise ValueError(text)
        if not blob.number:
            return blob
        flat = schema.flat(full[0].leaves)
        cut = flat_lengths(flat, part_bytes, len(self.keys.partitions))
        if blob.nbytes != flat.layout.nbytes or blob.number != len(cut):
            raise ValueError(text)
        return replace(blob, cut=cut)

    def _full(self, text: str, schema: Schema) -> FullBlob:
        blob, step, since, leaves, size = matched(_FULL, text).groups()
        part_bytes, stored = int(size or 0), schema.stored(self.encoding)
        if size is not None and (not part_bytes or schema.nbytes // part_bytes > MOST_FLAT_PARTS):
            raise ValueError(text)
        cut = flat_lengths(stored.flat(leaves), part_bytes, len(self.keys.partitions)) if part_bytes else ()
        found = FullBlob(blob, parse_int64(step), parse_int64(since), leaves, part_bytes, cut)
        # Only a flat blob may have no leaves, if no gradient is dense.
        has_leaves = bool(leaves or part_bytes)
        is_small = found.layout(stored).nbytes <= MAX_BLOB_BYTES
        if not (has_leaves and is_small and found.since <= found.step <= self.step):
            raise ValueError(text)
        return found

    def _rows(self, text: str, schema: Schema) -> RowsBlob:
        blob, step, counts = matched(_ROWS, text).groups()
        listed = [pair.partition("=") for pair in counts.split(",")]
        pairs = tuple([(int(leaf), int(count)) for leaf, _, count in listed])
        for leaf, count in pairs:
            of = schema.leaves[leaf] if leaf < len(schema.leaves) else None
            # Rows are listed once each, so there are at most as many as the leaf has.
            if of is None or not of.shape or not of.row_bytes or not 0 < count <= of.shape[0]:
                raise ValueError(text)
        found = RowsBlob(blob, parse_int64(step), pairs)
        ascending = all(a[0] < b[0] for a, b in pairwise(pairs))
        if not (ascending and found.step <= self.step and found.nbytes(schema) <= MAX_BLOB_BYTES):
            raise ValueError(text)
        return found


def _text(text: Any) -> str:
    # The server has sent it all by now; this keeps it from being copied and searched.
    if not isinstance(text, bytes) or len(text) > 2**22:
        raise ValueError(text)
    return of_ascii(text)


def _id(text: str) -> str:
    if not 0 < len(text) <= 64:
        raise ValueError(text)
    return text


def _each(
    text: str, parse: Callable[..., Entry], more: Sequence[object] = (), most: int = _MAX_ENTRIES
) -> tuple[Entry, ...]:
    entries = text.split(" ") if text else []
    if len(entries) > most:
        raise ValueError("too many entries")
    return tuple([parse(entry, *more) for entry in entries])


# A version lists those of many versions before it.
@lru_cache(maxsize=1024)
def _sized(text: str) -> Blob:
    blob, length, number = matched(_SIZED, text).groups()
    if not 0 < int(length) <= MAX_BLOB_BYTES or not (number is None or 0 < int(number) <= MOST_FLAT_PARTS):
        raise ValueError(text)
    return Blob(blob, int(length), number=int(number or 0))


def announcement(step: int, blobs: Sequence[Blob]) -> str:
    """Returns the event that tells waiting readers of a version, and which blobs it has brought."""
    return f"published step={step} blobs={','.join(blob.text for blob in blobs)}"


def announced(keys: ParameterKeys, event: str, limit: int) -> list[str]:
    """Returns the keys of the blobs that an event lists, or none if they have more than ``limit`` bytes together."""
    try:
        blobs = _each(event.partition(" blobs=")[2].replace(",", " "), _sized, most=4)
    except ValueError:
        return []
    return [keys.part(blob.id, 0) for blob in blobs] if sum(blob.nbytes for blob in blobs) <= limit else []


def full_blob(version: str, sort: str, step: int, since: int, leaves: Sequence[int]) -> FullBlob:
    """Returns the full blob of some leaves, in ascending order, that a version brings."""
    return FullBlob(f"{version}-{sort}", step, since, ranges_text(leaves))


def with_partitions_text(keys: ParameterKeys, text: bytes | str) -> ParameterKeys:
    """Returns the keys of parameters whose record says this of their partitions.

    Raises:
        CorruptDataError: redisacc did not write it.
    """
    partitions = parsed(keys.record, "partitions", text, parse_partitions)
    return keys if partitions == keys.partitions else ParameterKeys(keys.name, partitions)


def parse_schema(keys: ParameterKeys, name: str, text: Any) -> Schema:
    """Returns the schema in a field of the record.

    Raises:
        CorruptDataError: redisacc did not write it.
    """
    try:
        return Schema.parse(text.decode())
    except (ValueError, AttributeError) as error:
        raise foreign(keys.record, name, text, error) from None


def parse_optimizer(keys: ParameterKeys, text: object) -> Optimizer:
    """Returns the optimizer in the field ``optimizer`` of the record, without its schedule.

    Raises:
        CorruptDataError: redisacc did not write it.
    """
    try:
        if not isinstance(text, bytes) or len(text) > LONGEST_OPTIMIZER:
            raise ValueError(f"it must be at most {LONGEST_OPTIMIZER} bytes of JSON")
        return from_config(json.loads(text))
    except (ValueError, RecursionError, RedisAccError) as error:
        raise foreign(keys.record, "optimizer", text, error) from None


# The state of tables: leaves whose gradients are rows, so that an optimizer keeps their state lazily.
#
# For each blob with weights of tables, full or of rows, there is a *kept* blob with the state of the same leaves or
# rows, as far as it takes more than the weights to continue from there. It has one array for each flat blob of state,
# in their order. In that of a full blob, each array has the layout of the full blob, and begins at a multiple of
# ALIGNMENT. In that of a rows blob, each array has the rows of all leaves, one after the other.


def tables_of(manifest: Manifest) -> Manifest:
    """Returns the blobs with weights of tables in a version that an optimizer has made."""
    full = tuple([blob for blob in manifest.full if not blob.part_bytes])
    return Manifest(full, manifest.rows, manifest.rows_since)


def kept_blobs(schema: Schema, tables: Manifest, number: int) -> dict[str, Blob]:
    """Returns the kept blob of each blob of tables that needs one, by the id of the latter.

    Args:
        schema: the schema of the leaves.
        tables: the blobs with their weights.
        number: how many arrays of state there are.
    """
    if not number:
        return {}
    found = {blob.id: Blob(_kept_id(blob.id), number * array_bytes(schema, blob)) for blob in tables.full}
    whole_at = {leaf: blob.step for blob, leaves in tables.shares(schema) for leaf in leaves}
    for blob in tables.rows:
        # The others are for readers of old versions, who read no state.
        if is_needed(blob, whole_at):
            found[blob.id] = Blob(_kept_id(blob.id), number * rows_bytes(schema, blob.counts))
    return found


def check_kept(keys: ParameterKeys, schema: Schema, manifest: Manifest, number: int) -> dict[str, Blob]:
    """Returns the kept blobs of a version, as ``kept_blobs`` does.

    Raises:
        CorruptDataError: the record lists others.
    """
    expected = kept_blobs(schema, tables_of(manifest), number)
    if {blob.id: blob for blob in expected.values()} != kept_in(manifest.slots):
        raise CorruptDataError(f"{keys.record}: slots does not list the state of exactly the tables that there are")
    return expected


def is_needed(blob: RowsBlob, whole_at: dict[int, int]) -> bool:
    """Returns whether a rows blob is later than a leaf in it was whole, given the steps of that."""
    return any(whole_at.get(leaf, blob.step) < blob.step for leaf, _ in blob.counts)


def array_bytes(schema: Schema, blob: FullBlob) -> int:
    """Returns the bytes of an array in the kept blob of a full blob."""
    return -(-schema.layout(blob.leaves).nbytes // ALIGNMENT) * ALIGNMENT


def rows_bytes(schema: Schema, counts: Iterable[tuple[int, int]]) -> int:
    """Returns the bytes of rows, given pairs of the number of a leaf and the number of its rows."""
    return sum([count * schema.leaves[leaf].row_bytes for leaf, count in counts])


def kept_in(slots: Sequence[Blob]) -> dict[str, Blob]:
    """Returns the kept blobs among an optimizer's blobs, by id."""
    return {blob.id: blob for blob in slots if not blob.number}


def _kept_id(blob: str) -> str:
    version, _, sort = blob.rpartition("-")
    return f"{version}-kept_{sort}"
