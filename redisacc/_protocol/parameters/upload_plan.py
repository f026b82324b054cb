"""Plans the upload of a version of parameters, and its manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from redisacc._arrays.validation import Array
from redisacc._format.leaves import Schema, packed, packed_rows
from redisacc._format.parameter_record import INDEX_BYTES, Blob, FullBlob, Manifest, RowsBlob, full_blob

# The largest number of rows blobs in a manifest, which every reader of a version reads.
MAX_ROWS_BLOBS = 256
# How many rows blobs one version drops at most, so that the script that publishes it stays short.
DROPPED_ROWS_BLOBS = 16

# How many bytes, and how many blobs, of earlier versions are kept for readers that are slower than the publisher. The
# version before the current one is kept in any case. All of them expire after a minute.
RETIRED_BYTES = 32 * 2**20
RETIRED_BLOBS = 32

# How many mean gradients are kept at most, and how many of them one version drops at most.
MOST_LOGGED = 5000
DROPPED_BLOBS = 16


class Change(NamedTuple):
    """The blobs of a version, and those of earlier versions that it keeps, retires or removes.

    Attributes:
        manifest: the manifest of the version.
        retired: blobs of the version before that it does without.
        removed: blobs of still earlier versions. They are removed at once, even if a client is still reading them.
    """

    manifest: Manifest
    retired: Sequence[Blob]
    removed: Sequence[Blob]


def plan_leaves(
    schema: Schema,
    version: str,
    step: int,
    *,
    leaves: Iterable[int],
    before: Manifest,
    changed: Mapping[int, Array],
) -> tuple[Manifest, dict[int, Array]]:
    """Plans the upload of some leaves of a version.

    Args:
        schema: the schema of the leaves in blobs.
        version: the id of the version.
        step: its step.
        leaves: the leaves.
        before: the blobs of these leaves in the version before; none for the first one.
        changed: leaf → the indices of the rows that differ from the version before, ascending. Leaves that are not
            among them are uploaded whole.

    Returns:
        The blobs of these leaves; and for each leaf whose rows are uploaded, their indices.
    """
    # Most of the rows of a leaf, with their indices, are more than the whole leaf.
    changed = {leaf: rows for leaf, rows in sorted(changed.items()) if not len(rows) or _are_few(schema, leaf, rows)}
    rows = {leaf: indices for leaf, indices in changed.items() if len(indices)}
    listed = list(before.rows)
    if rows:
        listed.append(RowsBlob(f"{version}-rows", step, tuple([(leaf, len(rows[leaf])) for leaf in rows])))
    full, moved, since = _holders(schema, before, set(changed), listed)
    if moved:
        full.append(full_blob(version, "base", step, since, moved))
    whole = [leaf for leaf in leaves if leaf not in changed]
    if whole:
        full.append(full_blob(version, "full", step, step, whole))
    listed, rows_since = _window(schema, listed, before.rows_since, full, set(changed))
    if not listed or listed[-1].step != step:
        # The rows of this very version have been dropped: a new full blob has them, and nothing would list theirs.
        rows = {}
    return Manifest(tuple(full), tuple(listed), rows_since), rows


def brought_leaves(
    schema: Schema,
    version: str,
    manifest: Manifest,
    whole: Sequence[Array] | Mapping[int, Array],
    rows: Mapping[int, tuple[Array, Array]],
) -> dict[Blob, Sequence[memoryview]]:
    """Returns the bytes of the blobs of leaves that a version brings.

    Args:
        schema: the schema of the leaves in blobs.
        version: the id of the version.
        manifest: its blobs.
        whole: the leaves, by their numbers, that it brings whole.
        rows: leaf → the indices of the rows that it brings, and the rows; in ascending order.
    """
    found: dict[Blob, Sequence[memoryview]] = {
        blob.blob(schema): packed(schema, whole, blob.layout(schema)) for blob in manifest.full_of(version)
    }
    if rows:
        found[manifest.rows[-1].blob(schema)] = packed_rows(schema, [(leaf, *of) for leaf, of in rows.items()])
    return found


def retire(manifest: Manifest, schema: Schema, before: Manifest, stored_before: Schema) -> Change:
    """Retires the blobs that a version does without, so that slow readers of the version before can still read these.

    Args:
        manifest: the manifest of the version.
        schema: the schema of the leaves in its blobs.
        before: the manifest of the version before; it lists those of still earlier versions that were retired.
        stored_before: the schema of the leaves in the blobs of that version.
    """
    still = manifest.blobs(schema)
    retired = [blob for blob in before.blobs(stored_before).values() if blob.id not in still]
    kept, removed = [*before.retired], []
    size = sum(blob.nbytes for blob in (*kept, *retired))
    while kept and (size > RETIRED_BYTES or len(kept) + len(retired) > RETIRED_BLOBS):
        size -= kept[0].nbytes
        removed.append(kept.pop(0))
    return Change(replace(manifest, retired=(*kept, *retired)), retired, removed)


def retire_of_log(manifest: Manifest, before: Manifest, schema: Schema, step: int, snapshot: int | None) -> Change:
    """Keeps versions whose values are the mean gradients of their steps, for those who replay them.

    Args:
        manifest: the manifest of the next version.
        before: the manifest of the version before. Its log has a blob of each version before that one.
        schema: the schema of the leaves in blobs.
        step: the step of the version before.
        snapshot: the step of the last snapshot, from which nobody replays that step or earlier ones; None means
            unknown.

    Returns:
        The manifest lists the log. Others go at once.
    """
    blobs = before.blobs(schema).values()
    kept = [*before.retired, *[blob for blob in blobs if blob.id.endswith("-flat")]]
    others = [blob for blob in blobs if blob not in kept]
    spare = 0 if snapshot is None else max(snapshot - (step - len(before.retired)) + 1, 0)
    spare = min(max(spare, len(kept) - MOST_LOGGED), DROPPED_BLOBS, len(kept))
    gone = [*others, *kept[:spare]]
    return Change(replace(manifest, retired=tuple(kept[spare:])), gone, gone)


def _are_few(schema: Schema, leaf: int, rows: Array) -> bool:
    return len(rows) * (INDEX_BYTES + schema.leaves[leaf].row_bytes) < schema.leaves[leaf].nbytes


def _holders(
    schema: Schema, before: Manifest, changed: set[int], listed: Sequence[RowsBlob]
) -> tuple[list[FullBlob], list[int], int]:
    """Decides which full blobs contain the leaves that changed only in some rows.

    Returns:
        The full blobs that remain; the leaves that get a new one; and the step since which readers don't need that.
    """
    kept: list[FullBlob] = []
    moved: list[int] = []
    since = -(2**63)
    for blob, held in before.shares(schema):
        leaves = [leaf for leaf in held if leaf in changed]
        if not leaves:
            continue
        needed = sum(schema.leaves[leaf].nbytes for leaf in leaves)
        later = [rows for rows in listed if rows.step > blob.step]
        # A reader without a version reads the whole blob and all rows since, so neither may hold much stale data.
        stale = blob.layout(schema).nbytes - needed
        if (
            stale > needed
            or len(later) > MAX_ROWS_BLOBS // 2
            or sum(rows.nbytes(schema) for rows in later) > needed // 2
        ):
            moved += leaves
            since = max(since, blob.since)
        else:
            kept.append(blob)
    return kept, sorted(moved), since


def _window(
    schema: Schema, listed: list[RowsBlob], since: int, full: Sequence[FullBlob], changed: set[int]
) -> tuple[list[RowsBlob], int]:
    """Drops rows blobs that only readers of an old version need.

    Returns:
        The rows blobs that remain, and the step since which they are complete.
    """
    based = [blob for blob in full if changed.intersection(schema.layout(blob.leaves).leaves)]
    needed_from = min((blob.step for blob in based), default=2**63)
    limit = sum(schema.leaves[leaf].nbytes for leaf in changed) // 2
    size = sum(rows.nbytes(schema) for rows in listed)
    dropped = 0
    while (
        dropped < min(len(listed), DROPPED_ROWS_BLOBS)
        and listed[dropped].step <= needed_from
        and (len(listed) - dropped > MAX_ROWS_BLOBS or size > limit)
    ):
        size -= listed[dropped].nbytes(schema)
        since = max(since, listed[dropped].step)
        dropped += 1
    return listed[dropped:], since
