"""Tables: leaves whose gradients are rows. A version brings the rows that its update has changed, and their state.

The weights of tables are in the blobs of any other version of parameters: full blobs, which stay for many versions, and
the rows that have changed since then. So a worker that has the version before fetches only rows. For each of these
blobs, there is one with the state of the same leaves or rows, which workers do not fetch.

The chief updates tables itself. Rows that occur are a small part of a table, and it adds them up and updates them in
less time than it would take to tell reducers of them: see docs/internals/partitions.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from redisacc._arrays.sums import put_rows
from redisacc._arrays.validation import Array
from redisacc._format.leaves import packed
from redisacc._format.parameter_record import Blob, FullBlob, Manifest, array_bytes, kept_blobs
from redisacc._format.update_order import Order
from redisacc._protocol.parameters.upload_plan import brought_leaves, plan_leaves
from redisacc._protocol.updates.model import UpdateModel
from redisacc.optim.kernel import sum_of_squares, updated_rows


class RowSum(NamedTuple):
    """The sum of the gradients of a table.

    Attributes:
        indices: the rows that occur, ascending.
        values: their sums.
        divisor: what the mean divides them by: one number, or one for each row.
    """

    indices: Array
    values: Array
    divisor: float | Array

    @property
    def squares(self) -> float:
        """The sum of the squares of the mean."""
        return sum_of_squares(self.values, self.divisor)


class NewRows(NamedTuple):
    """The rows of a table that an update changes.

    Attributes:
        indices: which, ascending.
        arrays: the rows for each sort in ``UpdateModel.full_sorts``.
    """

    indices: Array
    arrays: Sequence[Array]


# Number of a table → its arrays, for each sort in ``UpdateModel.full_sorts``: the weights come first.
Arrays = Mapping[int, Sequence[Array]]


@dataclass(frozen=True)
class TablesVersion:
    """The blobs of the tables in a version.

    Attributes:
        weights: the blobs with weights.
        kept: those with state.
        pieces: the blobs that it brings, and their bytes.
    """

    weights: Manifest
    kept: tuple[Blob, ...]
    pieces: Mapping[Blob, Sequence[memoryview]]


# That of a model without tables.
NO_TABLES = TablesVersion(Manifest(()), (), {})


def updated_tables(
    model: UpdateModel, arrays: Arrays, sums: Mapping[int, RowSum], order: Order
) -> Mapping[int, NewRows]:
    """Returns the rows that an order changes.

    Args:
        model: the leaves and the optimizer.
        arrays: the tables of the version before.
        sums: the sum of the gradients of each table.
        order: the order.
    """
    groups, _ = model.optimizer.groups(model.schema.structure.paths)
    found = {}
    for leaf, (indices, values, divisor) in sums.items():
        weights, *state = arrays[leaf]
        group = order.scalars[groups[leaf]]
        new = updated_rows(
            model.optimizer, weights, indices, values, state, scalars=group, divisor=divisor, clip=order.clip
        )
        found[leaf] = NewRows(indices, new)
    return found


def put_new(arrays: Arrays, rows: Mapping[int, NewRows]) -> None:
    """Writes rows that an update has changed to the tables of the version before."""
    for leaf, changed in rows.items():
        if leaf in arrays:
            for array, new in zip(arrays[leaf], changed.arrays, strict=True):
                put_rows(array, changed.indices, new)


def brought_tables(
    model: UpdateModel, version: str, step: int, before: Manifest, *, arrays: Arrays, rows: Mapping[int, NewRows]
) -> TablesVersion:
    """Returns the blobs of the tables in a version.

    Args:
        model: the leaves and the optimizer.
        version: the id of the version.
        step: its step.
        before: the blobs of the tables in the version before; none if all tables are brought whole.
        arrays: the tables of that version.
        rows: the rows that change.
    """
    schema, stored = model.schema, model.schema.stored(model.encoding)
    changed = {leaf: new.indices for leaf, new in rows.items()} if before.full else {}
    tables, listed = plan_leaves(stored, version, step, leaves=model.tables, before=before, changed=changed)
    whole: dict[int, Sequence[Array]] = {
        leaf: [array.copy() for array in arrays[leaf]] if leaf in rows else arrays[leaf]
        for full in tables.full_of(version)
        for leaf in stored.layout(full.leaves).leaves
    }
    put_new(whole, rows)
    pieces = brought_leaves(
        stored,
        version,
        tables,
        {leaf: of[0] for leaf, of in whole.items()},
        {leaf: (rows[leaf].indices, rows[leaf].arrays[0]) for leaf in listed},
    )
    kept = kept_blobs(schema, tables, model.num_kept)
    # The arrays that workers do not read: the state, and the weights if theirs are rounded.
    number = len(model.full_sorts)
    places = range(number - model.num_kept, number)
    for full in tables.full_of(version):
        layout, of_state = schema.layout(full.leaves), list[memoryview]()
        padding = array_bytes(schema, full) - layout.nbytes
        for place in places:
            of_state += packed(schema, {leaf: of[place] for leaf, of in whole.items()}, layout)
            of_state += [memoryview(bytes(padding))] * bool(padding)
        if full.id in kept:
            pieces[kept[full.id]] = of_state
    if listed and (of_rows := tables.rows[-1].id) in kept:
        pieces[kept[of_rows]] = [
            schema.leaves[leaf].bytes_of(rows[leaf].arrays[place]).data for place in places for leaf in listed
        ]
    return TablesVersion(tables, tuple(kept.values()), pieces)


def manifest_of(model: UpdateModel, version: str, step: int, tables: TablesVersion) -> Manifest:
    """Returns the blobs that a version has, those of earlier ones included that its tables keep.

    Args:
        model: the leaves and the optimizer.
        version: the id of the version.
        step: its step.
        tables: the blobs of its tables.
    """
    sent, *slots = model.blobs(version)
    full = FullBlob(sent.id, step, step, model.dense, model.part_bytes, sent.cut)
    return replace(tables.weights, full=(full, *tables.weights.full), slots=(*slots, *tables.kept))
