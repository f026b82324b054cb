"""The version that an update begins with, in memory: its parts, and its tables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from redisacc._arrays.validation import Array
from redisacc._clock import clock, durations
from redisacc._format.buffered import PartMissingError
from redisacc._format.parameter_record import Manifest, kept_in, tables_of
from redisacc._format.update_order import Order, wanted
from redisacc._protocol.parameters.tables import fetch_tables
from redisacc._protocol.parts.fetch import STATED_BY, are_there, check_parts, fetch_parts, lacking
from redisacc._protocol.updates.model import PartValues, UpdateModel
from redisacc._protocol.updates.record import KnownVersion, UpdateRecord
from redisacc._protocol.updates.tables import (
    Arrays,
    NewRows,
    RowSum,
    TablesVersion,
    brought_tables,
    put_new,
    updated_tables,
)
from redisacc._protocol.waiting.wait import until
from redisacc._text import listed, shown
from redisacc._wire.transport import Hint, Transport
from redisacc.errors import DataLossError

# How often reducers are asked for parts that are lost, in seconds.
ASK_EVERY = 0.5
# How often the nodes are asked what is there, in seconds.
PAUSE = 0.05
# How many numbers of lost parts a message names.
MOST_NAMED = 10


class VersionValues:
    """The weights and the state of a version, as far as this process has them.

    Args:
        transport: the way to the nodes.

    Attributes:
        version: the id of the version; "" at first.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.version = ""
        self._parts: dict[int, PartValues] = {}
        # The parts of versions that this process has computed, by number: the version, and the values.
        self._next: dict[int, tuple[str, PartValues]] = {}
        # All tables; None means they are not known. Only a chief has them.
        self._tables: Arrays | None = None
        # What the last update that was computed changes in them: the id of its version, and the rows.
        self._next_rows: tuple[str, Mapping[int, NewRows]] = "", {}

    def begin(self, version: str) -> None:
        """Turns to a version. What was computed of it is known already."""
        if version == self.version:
            return
        self._parts = {number: values for number, (of, values) in self._next.items() if of == version}
        of, rows = self._next_rows
        if of != version:
            self._tables = None
        elif self._tables is not None:
            put_new(self._tables, rows)
        self.version, self._next, self._next_rows = version, {}, ("", {})

    def rename(self, before: KnownVersion, after: KnownVersion) -> None:
        """Notes that a version has been published again, so that what is in memory of it stays known."""
        if self.version == before.id:
            self.version, self._next, self._next_rows = after.id, {}, ("", {})
            if before.model.parts != after.model.parts:
                self._parts = {}

    def computed(self, number: int, version: str) -> PartValues | None:
        """Returns a part of a later version, if it was computed here last."""
        found = self._next.get(number)
        return found[1] if found is not None and found[0] == version else None

    def of(self, version: str) -> dict[int, PartValues]:
        """Returns the parts of a version that are known, by number: of this one, or of a later one."""
        if version == self.version:
            return dict(self._parts)
        return {number: values for number, (of, values) in self._next.items() if of == version}

    def keep(self, number: int, version: str, values: PartValues) -> None:
        """Keeps a part of a version that follows."""
        self._next[number] = version, values

    def get(self, of: UpdateRecord, number: int) -> PartValues:
        """Returns a part of the version, and fetches it if it is not known.

        Raises:
            PartMissingError: it is not there.
            CorruptDataError: it has another length.
        """
        self.fetch(of, (number,))
        return self._parts[number]

    def new_tables(self, before: UpdateRecord, sums: Mapping[int, RowSum], order: Order, version: str) -> TablesVersion:
        """Returns the blobs of the tables in a version that an order makes. Nothing is computed twice.

        Args:
            before: the version before.
            sums: the sum of the gradients of each table.
            order: the order.
            version: the id of the version.

        Raises:
            PartMissingError: a part of the version before is not there.
            CorruptDataError: redisacc did not write a blob of it.
        """
        model, arrays, manifest = before.model, self._tables_of(before), before.manifest
        if self._next_rows[0] != version:
            self._next_rows = version, updated_tables(model, arrays, sums, order)
        tables = tables_of(manifest)
        if model.keys.partitions:
            # What a failover has lost of a blob that stays for many versions would be lost for all of them. If one is
            # lost, all tables are brought whole.
            stays = [*tables.blobs(model.schema.stored(model.encoding)).values(), *kept_in(manifest.slots).values()]
            if not are_there(self._transport, model.keys, stays):
                tables = Manifest(())
        return brought_tables(model, version, before.step + 1, tables, arrays=arrays, rows=self._next_rows[1])

    def _tables_of(self, of: UpdateRecord) -> Arrays:
        """Returns the tables of a version, and fetches them if they are not known."""
        self.begin(of.id)
        if self._tables is None:
            model = of.model
            self._tables = fetch_tables(
                self._transport, of.record, model.schema, model.num_kept, weights=not model.is_rounded
            )
        return self._tables

    def gather(self, of: KnownVersion, check: Callable[[], object]) -> dict[str, list[Array]]:
        """Returns the leaves of a version for each sort of blob. Blocks until all parts of it are there.

        Reducers have no tables, so a chief without them can only read those of a version that is published.
        """
        self.begin(of.id)
        tables = self._tables if of.model.tables else {}
        with contextlib.suppress(PartMissingError):
            if tables is None and isinstance(of, UpdateRecord):
                tables = self._tables_of(of)
        if tables is None:
            raise DataLossError(
                f"parameters {shown(of.model.keys.name)}: the server has lost step {of.step}, and this process lacks "
                "the tables of its sparse leaves. Start the chief again: a checkpoint or a living worker may have them"
            )
        dense = self._dense(of, check)
        for place, leaves in enumerate(dense.values()):
            leaves.update({leaf: arrays[place] for leaf, arrays in tables.items()})
        return {sort: [leaves[leaf] for leaf in sorted(leaves)] for sort, leaves in dense.items()}

    def _dense(self, of: KnownVersion, check: Callable[[], object]) -> dict[str, dict[int, Array]]:
        """Returns the dense leaves of a version for each sort of blob. Blocks until all parts of it are there.

        A reducer has the parts that it updates in memory. If it hears that a version is wanted, it writes those again,
        under their names, with an expiry (``PartUpdater``). They are read from the nodes then, like those that were
        never lost.

        Args:
            of: the version.
            check: raises an error if this process is no longer the chief.

        Raises:
            DataLossError: some parts are on no node, and no process has written them again in time.
        """
        model, transport, asked_at = of.model, self._transport, 0.0

        def probe() -> bool | None:
            self._fetch_there(model)
            return None if self._missing(model) else True

        def check_and_ask() -> None:
            nonlocal asked_at
            check()
            if clock.now() >= asked_at + ASK_EVERY:
                asked_at = clock.now()
                transport.pipeline([Hint(("PUBLISH", model.keys.events, wanted(of.id)))])

        until(
            transport.waits,
            probe,
            every=PAUSE,
            check=check_and_ask,
            describe=lambda: (
                f"{model.keys.name}: still waiting for reducers to write {len(self._missing(model))} lost parts of "
                f"step {of.step} again"
            ),
            deadline=clock.now() + durations.gathering,
            name=model.keys.name,
        )
        if lost := self._missing(model):
            part = model.keys.part(f"{of.id}-{model.base}", lost[0])
            named = listed(lost, MOST_NAMED)
            raise DataLossError(
                f"parameters {shown(model.keys.name)}: the server has lost step {of.step}, and no living process has "
                f"part {named} of {len(model.parts)} of its weights and state, such as {part}. A chief can continue "
                "from a checkpoint, or with the weights of a living worker and a new state",
                part=part,
            )
        every = [self._parts[number] for number in range(len(model.parts))]
        return {sort: model.unflatten([values[sort] for values in every]) for sort in model.full_sorts}

    def _missing(self, model: UpdateModel) -> list[int]:
        """Returns the numbers of the parts of the version that are not known."""
        return [number for number in range(len(model.parts)) if number not in self._parts]

    def fetch(self, of: UpdateRecord, numbers: Iterable[int]) -> None:
        """Fetches the parts that are not known.

        Args:
            of: the record of the version.
            numbers: the numbers of the parts.

        Raises:
            PartMissingError: a part is not there.
            CorruptDataError: a part has another length.
        """
        self.begin(of.id)
        missing = [number for number in numbers if number not in self._parts]
        if missing:
            parts = [part for number in missing for part in self._keys(of.model, number)]
            check_parts(self._transport, parts, STATED_BY)
            self._fetch(of.model, missing)

    def _fetch_there(self, model: UpdateModel) -> None:
        """Fetches the parts that are not known, as far as they are there. No record need name the version."""
        missing = self._missing(model)
        gone = lacking(self._transport, {number: self._keys(model, number) for number in missing})
        there = [number for number in missing if number not in gone]
        # One that expires now is looked for again.
        with contextlib.suppress(PartMissingError):
            self._fetch(model, there)

    def _keys(self, model: UpdateModel, number: int) -> list[tuple[str, int]]:
        return model.keys_of(self.version, number, model.full_sorts)

    def _fetch(self, model: UpdateModel, numbers: Iterable[int]) -> None:
        found: dict[int, dict[str, Array]] = {}
        parts = []
        for number in numbers:
            found[number] = {sort: np.empty(model.lengths[number], np.uint8) for sort in model.full_sorts}
            for (key, _), memory in zip(self._keys(model, number), found[number].values(), strict=True):
                parts.append((key, number, memory))
        if found:
            fetch_parts(self._transport, model.keys, parts)
            self._parts.update(found)
