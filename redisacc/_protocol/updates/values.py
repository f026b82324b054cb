"""The parts of a version that an update begins with, in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import numpy as np

from redisacc._arrays.validation import Array
from redisacc._format.buffered import PartMissingError
from redisacc._protocol.parts.fetch import STATED_BY, WholeParts, check_parts, differing
from redisacc._protocol.updates.model import PartValues, UpdateModel
from redisacc._protocol.updates.record import UpdateRecord, full_sorts
from redisacc._wire.transport import Transport


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

    def begin(self, version: str) -> None:
        """Turns to a version. What was computed of it is known already."""
        if version != self.version:
            self._parts = {number: values for number, (of, values) in self._next.items() if of == version}
            self._next = {}
            self.version = version

    def rename(self, before: str, after: str) -> None:
        """Notes that a version has been published again, under another id."""
        if self.version == before:
            self.version, self._next = after, {}

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

    def put(self, number: int, values: PartValues) -> None:
        """Notes a part of the version itself."""
        self._parts[number] = values

    def get(self, of: UpdateRecord, number: int) -> PartValues:
        """Returns a part of the version, and fetches it if it is not known.

        Raises:
            PartMissingError: it is not there.
            CorruptDataError: it has another length.
        """
        self.fetch(of, (number,))
        return self._parts[number]

    def missing(self, model: UpdateModel) -> list[int]:
        """Returns the numbers of the parts of the version that are not known."""
        return [number for number in range(len(model.parts)) if number not in self._parts]

    def whole(self, model: UpdateModel) -> dict[str, dict[int, Array]] | None:
        """Returns the dense leaves of the version for each sort of blob, or None if a part is not known."""
        if self.missing(model):
            return None
        every = [self._parts[number] for number in range(len(model.parts))]
        return {sort: model.unflatten([values[sort] for values in every]) for sort in full_sorts(model)}

    def fetch(self, of: UpdateRecord, numbers: Iterable[int]) -> None:
        """Fetches the parts that are not known.

        Args:
            of: the record of the version.
            numbers: the numbers of the parts.

        Raises:
            PartMissingError: a part is not there.
            CorruptDataError: a part has another length.
        """
        self.begin(of.record.version)
        missing = [number for number in numbers if number not in self._parts]
        if not missing:
            return
        keys, blobs = of.record.keys, of.blobs
        wanted = {(sort, number): keys.part(blobs[sort], number) for number in missing for sort in full_sorts(of.model)}
        check_parts(
            self._transport,
            [(key, of.model.lengths[number]) for (_, number), key in wanted.items()],
            STATED_BY,
        )
        self._fetch(of.model, wanted)

    def fetch_there(self, model: UpdateModel) -> None:
        """Fetches the parts that are not known, as far as they are there. No record need name the version.

        Args:
            model: the leaves and the optimizer.
        """
        keys, sorts = model.keys, full_sorts(model)
        parts = {
            number: [(keys.part(f"{self.version}-{sort}", number), model.lengths[number]) for sort in sorts]
            for number in self.missing(model)
        }
        gone = differing(self._transport, [part for of_number in parts.values() for part in of_number])
        there = [number for number, of_number in parts.items() if not any(key in gone for key, _ in of_number)]
        # One that expires now is looked for again.
        with contextlib.suppress(PartMissingError):
            self._fetch(model, {(sort, n): parts[n][at][0] for n in there for at, sort in enumerate(sorts)})

    def _fetch(self, model: UpdateModel, wanted: Mapping[tuple[str, int], str]) -> None:
        """Fetches parts: sort of the blob and number of the part → the key."""
        if not wanted:
            return
        found: dict[int, dict[str, Array]] = {number: {} for _, number in wanted}
        arrivals = WholeParts(model.keys.homes, STATED_BY, lanes=1)
        for (sort, number), key in wanted.items():
            memory = np.empty(model.lengths[number], np.uint8)
            found[number][sort] = memory
            arrivals.expect(key, number, memory)
        self._transport.fetch(arrivals)
        self._parts.update(found)
