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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar

from redisacc._data.validation import INT64_MAX
from redisacc._format.attempts import StoredAttempt
from redisacc._format.element_cut import ElementCut
from redisacc._format.keys import ParameterKeys
from redisacc._format.leaves import Flat, Layout, Schema, ranges_text
from redisacc._format.part_cut import part_lengths
from redisacc._format.partitions import parse_partitions
from redisacc._text import shown
from redisacc.errors import CorruptDataError, RedisAccError
from redisacc.optim import Optimizer, from_config

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

# The longest description of an optimiser, in bytes.
LONGEST_OPTIMIZER = 2**20

# How elements of float32 may be stored. A record without this field stores them as they are.
ENCODINGS = ("float32", "bfloat16")

# The key, in a publisher's state, of parameters of float32 as they are, in the order of the leaves, if readers get
# rounded ones. The publisher's own state has the key "state" beside it.
EXACT = "redisacc:float32"

# The key, in the state of an optimiser, of how many updates it has seen. The others are its slots.
UPDATES = "updates"

# The bytes of an index of a row.
INDEX_BYTES = 8

# In partitions, the id of a version ends with the number of the attempt to publish it.
_BLOB = re.compile(r"[0-9a-f]{16}(?:-[0-9]{1,15})?-[a-z_]{1,24}")
_STEP = re.compile(r"-?[0-9]{1,19}")
_COUNT = re.compile(r"([0-9]{1,6})=([0-9]{1,15})")
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


def flat_cut(flat: Flat, part_bytes: int, partitions: int) -> ElementCut:
    """Returns how a flat blob is cut into parts.

    Args:
        flat: its leaves.
        part_bytes: the bytes of float32 in each part but the last.
        partitions: among how many partitions the parts are spread; 0 or 1: all are in one slot.
    """
    return ElementCut(flat.sections, part_bytes, runts=partitions > 1)


@lru_cache(maxsize=16)
def flat_lengths(flat: Flat, part_bytes: int, partitions: int) -> tuple[int, ...]:
    """Returns the length of each part of a flat blob. The arguments are those of ``flat_cut``."""
    lengths = flat_cut(flat, part_bytes, partitions).lengths(flat.offsets, [part.dtype for part in flat.sections])
    return tuple(lengths) or (1,)


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


@dataclass(frozen=True)
class Manifest:
    """The blobs of a version.

    Attributes:
        full: the blobs of whole leaves; the last one that has a leaf counts.
        rows: the blobs of rows, the oldest first.
        rows_since: versions with lower steps than this may have had rows blobs that are no longer listed.
        state: the blob of the publisher's state, if it has one.
        slots: the blobs of an optimiser's state, each laid out and cut like the flat blob; and "exact", the leaves
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

    def blobs(self, schema: Schema) -> dict[str, Blob]:
        """Returns all blobs that the version consists of, by id, without the retired ones.

        Args:
            schema: the schema of the leaves in blobs.
        """
        found = [Blob(blob.id, blob.layout(schema).nbytes, blob.cut, len(blob.cut)) for blob in self.full]
        found += [Blob(blob.id, blob.nbytes(schema)) for blob in self.rows]
        if self.state is not None:
            found.append(self.state)
        return {blob.id: blob for blob in (*found, *self.slots)}

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

    Readers poll it, so it lacks the retired blobs, which only publishers and deletions need.

    Attributes:
        keys: the keys of the parameters, with their partitions.
        incarnation: a random id that the parameters got with their first version.
        version: a random id of the version.
        step: its step.
        finished: whether it is the last one, as far as its publisher has said.
        encoding: how its elements of float32 are stored, one of ENCODINGS.
    """

    FIELDS = (
        *("format", "incarnation", "version", "step", "full", "rows", "rows_since", "state", "finished", "encoding"),
        *("partitions", "slots"),
    )
    # Fields that may be absent, and what that means.
    _DEFAULTS: ClassVar = {"finished": b"0", "encoding": b"float32", "partitions": b"", "slots": b""}

    def __init__(self, keys: ParameterKeys, reply: Sequence[bytes]) -> None:
        texts = []
        for name, given in zip(self.FIELDS, reply, strict=True):
            value = self._DEFAULTS.get(name) if given is None else given
            # The server has sent it all by now; this keeps it from being copied and searched.
            if not isinstance(value, bytes) or len(value) > 2**22 or not value.isascii():
                raise self._foreign(keys, name, value)
            texts.append(value.decode())
        found, self.incarnation, self.version, step, self._full, self._rows, since, self._state, *texts = texts
        finished, self.encoding, partitions, self._slots = texts
        self.finished = finished == "1"
        if found != FORMAT:
            raise CorruptDataError(
                f"parameters {shown(keys.name)} have format {shown(found)} of the data model, but this version of "
                f"redisacc reads format {FORMAT!r}: delete them with the version that published them"
            )
        if self.encoding not in ENCODINGS:
            raise CorruptDataError(
                f"parameters {shown(keys.name)} are stored with the encoding {shown(self.encoding)}, but this version "
                f"of redisacc reads {' and '.join(ENCODINGS)}: read them with the version that published them"
            )
        self.keys = self._keys = with_partitions_text(keys, partitions)
        for name, text in (("incarnation", self.incarnation), ("version", self.version)):
            if not 0 < len(text) <= 64:
                raise self._foreign(keys, name, text)
        self.step = self._step("step", step)
        self._since = since

    @classmethod
    def command(cls, keys: ParameterKeys) -> tuple[str, ...]:
        """Returns the command that reads it."""
        return ("HMGET", keys.record, *cls.FIELDS)

    @classmethod
    def parse(cls, keys: ParameterKeys, reply: object) -> ParameterRecord | None:
        """Returns the record from the reply to ``command``, or None if there is none, or none of a version yet.

        Raises:
            CorruptDataError: redisacc did not write it, or another version of it did.
        """
        if not isinstance(reply, list) or len(reply) != len(cls.FIELDS):
            raise CorruptDataError(f"{keys.record}: HMGET must reply {len(cls.FIELDS)} values, not {shown(reply)}")
        found = dict(zip(cls.FIELDS, reply, strict=True))
        if found["version"] is None and found["partitions"] is not None and found["step"] is None:
            # An attempt to publish the first version is under way, or was given up.
            return None
        return None if reply == [None] * len(reply) else cls(keys, reply)

    def manifest(self, schema: Schema) -> Manifest:
        """Returns the blobs of the version.

        Raises:
            CorruptDataError: redisacc did not write the record.
        """
        full = tuple([self._full_blob(text, schema) for text in self._entries("full", self._full)])
        rows = tuple([self._rows_blob(text, schema) for text in self._entries("rows", self._rows)])
        if any(earlier.step >= later.step for earlier, later in pairwise(rows)):
            raise self._foreign(self._keys, "rows", self._rows)
        state = [self._blob("state", text) for text in self._entries("state", self._state)]
        if len(state) > 1:
            raise self._foreign(self._keys, "state", self._state)
        manifest = Manifest(
            full=full,
            rows=rows,
            rows_since=self._step("rows_since", self._since),
            state=state[0] if state else None,
            slots=self._slot_blobs(full, schema) if self._slots else (),
        )
        if sum([len(leaves) for _, leaves in manifest.shares(schema)]) != len(schema.leaves):
            raise self._foreign(self._keys, "full", self._full)
        return manifest

    def _slot_blobs(self, full: tuple[FullBlob, ...], schema: Schema) -> tuple[Blob, ...]:
        """Returns the blobs of the optimiser's state."""
        found = [self._blob("slots", text) for text in self._entries("slots", self._slots)]
        if not full or not full[0].part_bytes:
            raise self._foreign(self._keys, "slots", self._slots)
        flat = schema.flat(full[0].leaves)
        cut = flat_lengths(flat, full[0].part_bytes, len(self.keys.partitions))
        for place, blob in enumerate(found):
            if blob.number:
                if blob.nbytes != flat.layout.nbytes or blob.number != len(cut):
                    raise self._foreign(self._keys, "slots", self._slots)
                found[place] = replace(blob, cut=cut)
            elif "-kept_" not in blob.id:
                raise self._foreign(self._keys, "slots", self._slots)
        return tuple(found)

    def retired(self, text: object) -> tuple[Blob, ...]:
        """Returns the blobs in the field ``retired``.

        Raises:
            CorruptDataError: redisacc did not write it.
        """
        if not isinstance(text, bytes) or len(text) > 2**22 or not text.isascii():
            raise self._foreign(self._keys, "retired", text)
        return tuple([self._blob("retired", entry) for entry in self._entries("retired", text.decode())])

    def _entries(self, name: str, text: str) -> list[str]:
        entries = text.split(" ") if text else []
        if len(entries) > _MAX_ENTRIES:
            raise self._foreign(self._keys, name, text)
        return entries

    def _full_blob(self, text: str, schema: Schema) -> FullBlob:
        match text.split(":"):
            case [blob, step, since, leaves, *size] if _BLOB.fullmatch(blob) and len(size) < 2:
                part_bytes = self._part_bytes(size[0], schema) if size else 0
                partitions = len(self.keys.partitions)
                try:
                    stored = schema.stored(self.encoding)
                    cut = flat_lengths(stored.flat(leaves), part_bytes, partitions) if part_bytes else ()
                    found = FullBlob(blob, self._step("full", step), self._step("full", since), leaves, part_bytes, cut)
                    layout = found.layout(schema)
                except ValueError:
                    raise self._foreign(self._keys, "full", text) from None
                # Only a flat blob may have no leaves, if no gradient is dense.
                if (
                    (leaves or part_bytes)
                    and layout.nbytes <= MAX_BLOB_BYTES
                    and found.since <= found.step <= self.step
                ):
                    return found
        raise self._foreign(self._keys, "full", text)

    def _part_bytes(self, text: str, schema: Schema) -> int:
        """Returns the bytes of float32 in each part of a flat blob."""
        if text.isascii() and text.isdigit() and len(text) <= 12:
            size = int(text)
            if size and schema.nbytes // size <= MOST_FLAT_PARTS:
                return size
        raise self._foreign(self._keys, "full", text)

    def _rows_blob(self, text: str, schema: Schema) -> RowsBlob:
        match text.split(":"):
            case [blob, step, counts] if _BLOB.fullmatch(blob):
                pairs = tuple([self._count(pair, schema) for pair in counts.split(",")])
                ascending = all(a[0] < b[0] for a, b in pairwise(pairs))
                found = RowsBlob(blob, self._step("rows", step), pairs)
                if ascending and found.step <= self.step and found.nbytes(schema) <= MAX_BLOB_BYTES:
                    return found
        raise self._foreign(self._keys, "rows", text)

    def _count(self, text: str, schema: Schema) -> tuple[int, int]:
        match = _COUNT.fullmatch(text)
        if match is not None:
            leaf, count = int(match[1]), int(match[2])
            # Rows are listed once each, so there are at most as many as the leaf has.
            if leaf < len(schema.leaves):
                of = schema.leaves[leaf]
                if of.shape and of.row_bytes and 0 < count <= of.shape[0]:
                    return leaf, count
        raise self._foreign(self._keys, "rows", text)

    def _blob(self, name: str, text: str) -> Blob:
        blob, _, rest = text.partition(":")
        length, _, number = rest.partition(":")
        if _BLOB.fullmatch(blob) and length.isdigit() and len(length) <= 15 and 0 < int(length) <= MAX_BLOB_BYTES:
            if rest == length:
                return Blob(blob, int(length))
            if number.isdigit() and len(number) <= 6 and 0 < int(number) <= MOST_FLAT_PARTS:
                return Blob(blob, int(length), number=int(number))
        raise self._foreign(self._keys, name, text)

    def _step(self, name: str, text: str) -> int:
        if _STEP.fullmatch(text) is None or not -INT64_MAX - 1 <= int(text) <= INT64_MAX:
            raise self._foreign(self._keys, name, text)
        return int(text)

    @staticmethod
    def _foreign(keys: ParameterKeys, name: str, value: object) -> CorruptDataError:
        return CorruptDataError(f"{keys.record}: {name} holds {shown(value)}, which redisacc did not write")


def announcement(step: int, blobs: Sequence[Blob]) -> str:
    """Returns the event that tells waiting readers of a version, and which blobs it has brought."""
    return f"published step={step} blobs={','.join(blob.text for blob in blobs)}"


def announced(keys: ParameterKeys, event: str, limit: int) -> list[str]:
    """Returns the keys of the blobs that an event lists, or none if they have more than ``limit`` bytes together."""
    found: list[str] = []
    for text in event.partition(" blobs=")[2].split(","):
        blob, _, length = text.partition(":")
        if not (_BLOB.fullmatch(blob) and length.isdigit() and len(length) <= 15) or len(found) == 4:
            return []
        limit -= int(length)
        found.append(keys.part(blob, 0))
    return found if limit >= 0 else []


def full_blob(version: str, sort: str, step: int, since: int, leaves: Sequence[int]) -> FullBlob:
    """Returns the full blob of some leaves, in ascending order, that a version brings."""
    return FullBlob(f"{version}-{sort}", step, since, ranges_text(leaves))


def with_partitions_text(keys: ParameterKeys, text: str) -> ParameterKeys:
    """Returns the keys of parameters whose record says this of their partitions.

    Raises:
        CorruptDataError: redisacc did not write it.
    """
    try:
        partitions = parse_partitions(text)
    except ValueError:
        raise CorruptDataError(f"{keys.record}: partitions holds {shown(text)}, which redisacc did not write") from None
    return keys if partitions == keys.partitions else ParameterKeys(keys.name, partitions)


def parse_schema(keys: ParameterKeys, name: str, text: object) -> Schema:
    """Returns the schema in a field of the record.

    Raises:
        CorruptDataError: redisacc did not write it.
    """
    if isinstance(text, bytes):
        try:
            return Schema.parse(text.decode())
        except ValueError as error:
            raise CorruptDataError(
                f"{keys.record}: {name} holds {shown(text)}, which redisacc did not write: {shown(str(error))}"
            ) from None
    raise CorruptDataError(f"{keys.record}: {name} holds {shown(text)}, which redisacc did not write")


def parse_optimizer(keys: ParameterKeys, text: object) -> Optimizer:
    """Returns the optimiser in the field ``optimizer`` of the record, without its schedule.

    Raises:
        CorruptDataError: redisacc did not write it.
    """
    try:
        if not isinstance(text, bytes) or len(text) > LONGEST_OPTIMIZER:
            raise ValueError(f"it must be at most {LONGEST_OPTIMIZER} bytes of JSON")
        return from_config(json.loads(text))
    except (ValueError, RecursionError, RedisAccError) as error:
        raise CorruptDataError(
            f"{keys.record}: optimizer holds {shown(text)}, which redisacc did not write: {shown(str(error))}"
        ) from None


def parse_count(keys: ParameterKeys, name: str, text: object) -> int:
    """Returns the number in a field of the record that counts something: up to 15 digits.

    Raises:
        CorruptDataError: redisacc did not write it.
    """
    if isinstance(text, bytes) and text.isdigit() and len(text) <= 15:
        return int(text)
    raise CorruptDataError(f"{keys.record}: {name} holds {shown(text)}, which redisacc did not write")
