"""The state of tables: leaves whose gradients are rows, so that an optimiser keeps their state lazily.

For each blob with weights of tables, full or of rows, there is a *kept* blob with the state of the same leaves or rows,
as far as it takes more than the weights to continue from there. It has one array for each flat blob of state, in their
order. In that of a full blob, each array has the layout of the full blob, and begins at a multiple of ALIGNMENT. In
that of a rows blob, each array has the rows of all leaves, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from redisacc._format.keys import ParameterKeys
from redisacc._format.leaves import ALIGNMENT, Schema
from redisacc._format.parameter_record import Blob, FullBlob, Manifest, RowsBlob
from redisacc.errors import CorruptDataError


def tables_of(manifest: Manifest) -> Manifest:
    """Returns the blobs with weights of tables in a version that an optimiser has made."""
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
    """Returns the kept blobs among an optimiser's blobs, by id."""
    return {blob.id: blob for blob in slots if not blob.number}


def _kept_id(blob: str) -> str:
    version, _, sort = blob.rpartition("-")
    return f"{version}-kept_{sort}"
