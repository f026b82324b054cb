"""Adds up the sparse sections of the gradients of a round. Their parts may arrive in any order."""

from __future__ import annotations

from redisacc._data.sums import DenseSum, RoundSum
from redisacc._format.keys import Keys
from redisacc._protocol.sums.buffered_sections import add_sparse_sections
from redisacc._protocol.sums.expected_gradients import ExpectedGradients
from redisacc._protocol.sums.requested_parts import Part


class SparseParts:
    """The parts of the sparse sections, and how far these are added.

    Args:
        keys: the keys of the accumulator.
        round_sum: the sum of the round.
        uploads: the gradients that the round will probably hold.
        lanes: the number of lanes in which parts travel.
        most_waiting: how many bytes may wait in memory for earlier gradients.

    Attributes:
        added: how many leading gradients are in the sums.
        wanted: whether there are sparse sections at all.
    """

    def __init__(
        self, keys: Keys, round_sum: RoundSum, uploads: ExpectedGradients, *, lanes: int, most_waiting: int
    ) -> None:
        self.added = 0
        self._keys = keys
        self._lanes = lanes
        self._most_waiting = most_waiting
        self._sum = round_sum
        self._uploads = uploads
        self.wanted = {type(section) for section in round_sum.sections} != {DenseSum}

    def rewind(self, place: int) -> None:
        """Drops the sums if they contain gradients from this place on."""
        if self.added > place:
            if self.wanted:
                self.forget()
            else:
                self.added = place

    def forget(self) -> None:
        """Drops all sums, so that everything is fetched and added again."""
        self.added = 0
        for section in self._sum.sections:
            if not isinstance(section, DenseSum):
                section.clear()
        for upload in self._uploads.every:
            upload.forget_sparse()

    def next(self) -> Part | None:
        """Returns the part to request next; None: there is none, or no room."""
        waiting = 0
        for place in range(self.added, self._uploads.bound):
            upload = self._uploads.every[place]
            if upload.cut is None:
                break
            if not upload.left:
                waiting += upload.gradient.sparse_bytes
                continue
            if waiting > self._most_waiting:
                break
            start = 0
            for number in range(upload.sparse_parts):
                length = upload.gradient.lengths[number]
                if upload.there[number] and not upload.requested[number]:
                    upload.requested[number] = True
                    memory = upload.memory_for_sparse()[start : start + length]
                    lane = (number if self._keys.partitions else place + number) % self._lanes
                    key = self._keys.part(upload.gradient.id, number)
                    return Part(key, lane, upload, number, length, memory, admitted=upload.admitted)
                start += length
            waiting += upload.gradient.sparse_bytes
        return None

    def add(self) -> None:
        """Adds the sections that have been fetched, in the order of their gradients."""
        while self.added < self._uploads.bound:
            upload = self._uploads.every[self.added]
            if upload.cut is None or upload.left:
                break
            if upload.sparse is not None:
                add_sparse_sections(self._sum, upload.gradient, upload.sparse, self._keys.part(upload.gradient.id, 0))
                upload.sparse = None
            self.added += 1
