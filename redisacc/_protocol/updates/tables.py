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
from redisacc._format.leaves import packed, packed_rows
from redisacc._format.parameter_record import Blob, FullBlob, Manifest, array_bytes, kept_blobs, tables_of
from redisacc._format.update_order import Order
from redisacc._protocol.parameters.tables import fetch_tables
from redisacc._protocol.parameters.upload_plan import LeavesPlan, plan_leaves
from redisacc._protocol.updates.model import FLAT, UpdateModel
from redisacc._protocol.updates.record import UpdateRecord
from redisacc._wire.transport import Transport
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


class Tables:
    """The weights and the state of all tables of a version, in memory.

    Args:
        transport: the way to the nodes.

    Attributes:
        version: the id of the version; "" at first.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.version = ""
        self._arrays: Arrays | None = None
        # What the last update that was computed changes: the id of its version, and the rows.
        self._next: tuple[str, Mapping[int, NewRows]] = "", {}

    def begin(self, version: str) -> None:
        """Turns to a version. What was computed of it is known already."""
        if version == self.version:
            return
        of, rows = self._next
        if of != version:
            self._arrays = None
        elif self._arrays is not None:
            for leaf, changed in rows.items():
                for array, new in zip(self._arrays[leaf], changed.arrays, strict=True):
                    put_rows(array, changed.indices, new)
        self.version, self._next = version, ("", {})

    def rename(self, before: str, after: str) -> None:
        """Notes that a version has been published again, under another id."""
        if self.version == before:
            self.version, self._next = after, ("", {})

    def whole(self, version: str) -> Arrays | None:
        """Returns the tables of a version, or None if they are not known."""
        return self._arrays if version == self.version else None

    def of(self, record: UpdateRecord) -> Arrays:
        """Returns the tables of a version, and fetches them if they are not known.

        Raises:
            PartMissingError: a part is not there.
            CorruptDataError: redisacc did not write a blob.
        """
        self.begin(record.record.version)
        if self._arrays is None:
            model = record.model
            self._arrays = fetch_tables(
                self._transport, record.record, model.schema, model.num_kept, weights=not model.is_rounded
            )
        return self._arrays

    def updated(self, record: UpdateRecord, sums: Mapping[int, RowSum], order: Order, version: str) -> None:
        """Computes the rows of a version that an order makes, which ``version`` returns then.

        Args:
            record: the version before.
            sums: the sum of the gradients of each table.
            order: the order.
            version: the id of the version.
        """
        arrays, model = self.of(record), record.model
        if self._next[0] == version:
            return
        groups, _ = model.optimizer.groups(model.schema.structure.paths)
        scalars = order.scalars
        found = {}
        for leaf, (indices, values, divisor) in sums.items():
            weights, *state = arrays[leaf]
            group = scalars[groups[leaf]]
            new = updated_rows(
                model.optimizer, weights, indices, values, state, scalars=group, divisor=divisor, clip=order.clip
            )
            found[leaf] = NewRows(indices, new)
        self._next = version, found

    def brought(self, record: UpdateRecord, step: int, *, has_losses: bool) -> TablesVersion:
        """Returns the blobs of the version that was computed last.

        Args:
            record: the version before.
            step: the step of the version.
            has_losses: whether a blob of the version before is lost, so that all tables are brought whole.
        """
        assert self._arrays is not None
        (version, rows), model = self._next, record.model
        before = Manifest(()) if has_losses else tables_of(record.manifest)
        changed = {} if has_losses else {leaf: new.indices for leaf, new in rows.items()}
        stored = model.schema.stored(model.encoding)
        planned = plan_leaves(stored, version, step, leaves=model.tables, before=before, changed=changed)
        whole: dict[int, Sequence[Array]] = {}
        for blob in planned.uploaded:
            for leaf in stored.layout(blob.leaves).leaves:
                whole[leaf] = [array.copy() for array in self._arrays[leaf]]
                if leaf in rows:
                    for array, new in zip(whole[leaf], rows[leaf].arrays, strict=True):
                        put_rows(array, rows[leaf].indices, new)
        return _laid_out(model, planned, whole, rows)


def whole_tables(model: UpdateModel, version: str, step: int, arrays: Arrays) -> TablesVersion:
    """Returns the blobs of a version that brings all tables whole.

    Args:
        model: the leaves and the optimizer.
        version: the id of the version.
        step: its step.
        arrays: the tables.
    """
    stored = model.schema.stored(model.encoding)
    planned = plan_leaves(stored, version, step, leaves=model.tables, before=Manifest(()), changed={})
    return _laid_out(model, planned, arrays, {})


def _laid_out(model: UpdateModel, planned: LeavesPlan, whole: Arrays, rows: Mapping[int, NewRows]) -> TablesVersion:
    """Returns the blobs of the tables in a version.

    Args:
        model: the leaves and the optimizer.
        planned: which blobs there are.
        whole: the tables that it brings whole.
        rows: the rows of others that change.
    """
    schema, stored = model.schema, model.schema.stored(model.encoding)
    tables = Manifest(planned.full, planned.listed, planned.rows_since)
    kept = kept_blobs(schema, tables, model.num_kept)
    pieces: dict[Blob, Sequence[memoryview]] = {}

    def bring(blob: Blob, weights: Sequence[memoryview], of_state: Sequence[memoryview]) -> None:
        pieces[blob] = weights
        if blob.id in kept:
            pieces[kept[blob.id]] = of_state

    for full in planned.uploaded:
        layout = stored.layout(full.leaves)
        weights = packed(stored, {leaf: whole[leaf][0] for leaf in layout.leaves}, layout)
        of_state: list[memoryview] = []
        for place in _kept_places(model):
            exact = schema.layout(full.leaves)
            of_state += packed(schema, {leaf: whole[leaf][place] for leaf in exact.leaves}, exact)
            if padding := array_bytes(schema, full) - exact.nbytes:
                of_state.append(memoryview(bytes(padding)))
        bring(Blob(full.id, layout.nbytes), weights, of_state)
    if planned.rows:
        changed = [(leaf, rows[leaf]) for leaf in planned.rows]
        weights = packed_rows(stored, [(leaf, new.indices, new.arrays[0]) for leaf, new in changed])
        of_state = [
            schema.leaves[leaf].bytes_of(new.arrays[place]).data
            for place in _kept_places(model)
            for leaf, new in changed
        ]
        bring(Blob(planned.listed[-1].id, planned.listed[-1].nbytes(stored)), weights, of_state)
    return TablesVersion(tables, tuple(kept.values()), pieces)


def _kept_places(model: UpdateModel) -> range:
    """Returns which arrays of a table workers do not read: its state, and its weights if theirs are rounded."""
    number = len(model.full_sorts)
    return range(number - model.num_kept, number)


def blobs_of(model: UpdateModel, version: str, tables: TablesVersion | None) -> list[Blob]:
    """Returns the blobs that a version brings. The one that is cut by elements and that workers read comes first.

    Args:
        model: the leaves and the optimizer.
        version: the id of the version.
        tables: the blobs of its tables; None means there are no tables.
    """
    dense = [
        Blob(f"{version}-{sort}", model.sent_nbytes if sort == FLAT else model.nbytes, lengths, len(lengths))
        for sort, lengths in model.sorts.items()
    ]
    return dense if tables is None else [*dense, *tables.pieces]


def manifest_of(model: UpdateModel, version: str, step: int, tables: TablesVersion | None) -> Manifest:
    """Returns the blobs that a version has, those of earlier ones included that its tables keep.

    Args:
        model: the leaves and the optimizer.
        version: the id of the version.
        step: its step.
        tables: the blobs of its tables; None means there are no tables.
    """
    sent, *slots = blobs_of(model, version, None)
    full = FullBlob(sent.id, step, step, model.dense, model.part_bytes, sent.cut)
    if tables is None:
        return Manifest((full,), slots=tuple(slots))
    return replace(tables.weights, full=(full, *tables.weights.full), slots=(*slots, *tables.kept))
