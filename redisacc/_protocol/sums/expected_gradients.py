"""The gradients that a growing round will probably hold, in the order of their places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from redisacc._clock import clock
from redisacc._data.sums import RoundSum
from redisacc._data.validation import Array
from redisacc._format.buffered import BufferedGradient, digest_of
from redisacc._format.part_cut import Cut

# An upload that makes no progress for this many seconds no longer holds up later ones.
STALLED = 0.5


class Upload:
    """A gradient, and which of its parts have arrived at the server.

    Args:
        gradient: see below.
        cut: see below.
        sparse_parts: see below.
        lease: see below.

    Attributes:
        gradient: the gradient.
        cut: the elements in each of its dense parts; None: it cannot be added part by part.
        sparse_parts: the number of parts before the dense ones; 0 if it cannot be added part by part.
        there: for each part, whether it has arrived.
        admitted: whether the gradient is in the round, so that its parts have their final names.
        moved_at: when the last part, or sign of life, arrived, by ``clock.now()``.
        lease: for how many seconds after that it may hold up later ones; 0: for STALLED seconds.
        sparse: the bytes of its sparse sections, as far as they have been fetched.
        requested: for each sparse part, whether it has been fetched or is on its way.
        left: how many sparse parts are still to be fetched.
    """

    __slots__ = (
        "admitted", "cut", "gradient", "lease", "left", "moved_at", "requested", "sparse", "sparse_parts", "there"
    )  # fmt: skip

    def __init__(self, gradient: BufferedGradient, cut: Cut | None, sparse_parts: int, lease: float = 0.0) -> None:
        self.gradient = gradient
        self.cut = cut
        self.sparse_parts = sparse_parts
        self.there = bytearray(len(gradient.lengths))
        self.admitted = False
        self.moved_at = clock.now()
        self.lease = lease
        self.sparse: Array | None = None
        self.requested = bytearray(sparse_parts)
        self.left = sparse_parts

    def admit(self) -> None:
        """Notes that the round has the gradient."""
        self.admitted = True
        self.there[:] = b"\1" * len(self.there)

    def arrive(self, parts: Sequence[int]) -> list[int]:
        """Notes that the server has these parts. Returns those that are new."""
        self.moved_at = clock.now()
        new = [part for part in parts if not self.there[part]]
        for part in new:
            self.there[part] = True
        return new

    def forget_sparse(self) -> None:
        """Drops the bytes of the sparse sections, so that they are fetched again."""
        self.sparse, self.requested, self.left = None, bytearray(self.sparse_parts), self.sparse_parts

    def memory_for_sparse(self) -> Array:
        """Returns the memory for the bytes of the sparse sections."""
        if self.sparse is None:
            self.sparse = np.empty(self.gradient.sparse_bytes, np.uint8)
        return self.sparse


class ExpectedGradients:
    """The uploads of a round, in the order of their places.

    Args:
        num_expected: how many gradients the round will probably hold. A compacted one counts as all the gradients in
            it.
        by_worker: whether their places are the numbers of their workers, which probably are the lowest ones. Then a
            gradient may become known long after others that it precedes.

    Attributes:
        every: the uploads.
        num_admitted: how many of them are in the round.
        bound: how many of them, from the first on, may be added now.
        holds_early: whether gradients are held, also admitted ones, while a gradient that precedes them may be missing.
    """

    def __init__(self, num_expected: int, *, by_worker: bool = False) -> None:
        self._num_expected = num_expected
        self.holds_early = by_worker
        self.every: list[Upload] = []
        self.num_admitted = 0
        self.bound = 0
        self._by_id: dict[str, Upload] = {}
        # None: to be computed.
        self._expected: tuple[int | None] | None = None
        self._digest: str | None = None

    def find(self, gradient: str) -> Upload | None:
        """Returns the upload of the gradient with this id, or None if it is not known."""
        return self._by_id.get(gradient)

    def insert(self, upload: Upload) -> int:
        """Inserts an upload that is not admitted, and returns its position."""
        position = len(self.every)
        while position and self.every[position - 1].gradient.order > upload.gradient.order:
            position -= 1
        self.every.insert(position, upload)
        self._by_id[upload.gradient.id] = upload
        self._expected = self._digest = None
        return position

    def rival(self, gradient: BufferedGradient) -> Upload | None:
        """Returns the upload of another gradient of the same worker. The round will hold only one of the two."""
        for upload in self.every:
            if upload.gradient.order == gradient.order and upload.gradient.id != gradient.id:
                return upload
        return None

    def remove(self, upload: Upload) -> int:
        """Removes an upload, and returns the position that it had."""
        position = self.every.index(upload)
        del self.every[position]
        del self._by_id[upload.gradient.id]
        self.num_admitted -= upload.admitted
        self._expected = self._digest = None
        return position

    def admit(self, upload: Upload) -> bool:
        """Notes that the round has the gradient. Returns False if that was known."""
        if upload.admitted:
            return False
        upload.admit()
        self.num_admitted += 1
        return True

    def late(self) -> list[Upload]:
        """Returns the uploads that would come too late for a full round, and hold up others."""
        if not self.is_full:
            return []
        last = max([place for place, upload in enumerate(self.every) if upload.admitted], default=0)
        # By worker, those after the last one are expected no longer, either.
        among = self.every if self.holds_early else self.every[:last]
        return [upload for upload in among if not upload.admitted]

    def settle(self, uploads: Sequence[Upload]) -> int:
        """Replaces all uploads by the gradients of the round. Returns how many leading uploads are unchanged."""
        before = self.every
        self.every = list(uploads)
        # None of them is early any more.
        self.holds_early = False
        self._by_id = {upload.gradient.id: upload for upload in uploads}
        for upload in uploads:
            upload.admit()
        self.num_admitted = len(uploads)
        self._expected = self._digest = None
        agree = 0
        while agree < min(len(before), len(self.every)) and before[agree] is self.every[agree]:
            agree += 1
        return agree

    @property
    def expected(self) -> int | None:
        """The number of leading uploads that together hold as many gradients as the round probably will.

        None if fewer are known, or if the size of the round is unknown.
        """
        if self._expected is None:
            count = place = 0
            while count < self._num_expected and place < len(self.every):
                count += self.every[place].gradient.number
                place += 1
            self._expected = (place if count >= self._num_expected > 0 else None,)
        return self._expected[0]

    @property
    def leading(self) -> int:
        """The number of leading uploads that may be added before as many as expected are known.

        By worker, these are the numbers from 0 on without a gap. Whatever follows a gap is held until it is filled, or
        until as many as expected are known without it.
        """
        if not self._num_expected:
            return 0
        if not self.holds_early:
            return len(self.every)
        number = 0
        while number < len(self.every) and self.every[number].gradient.order == number:
            number += 1
        return number

    @property
    def is_full(self) -> bool:
        """Whether the round has as many gradients as it probably will."""
        return self.num_admitted >= self._num_expected > 0

    @property
    def digest(self) -> str:
        """The digest under which the sum of the expected uploads is stored; "" if fewer are known."""
        if self._digest is None:
            expected = self.expected
            self._digest = "" if expected is None else digest_of([upload.gradient for upload in self.every[:expected]])
        return self._digest

    @property
    def counted(self) -> tuple[int, float | None]:
        """How many gradients the expected uploads hold, and the sum of their weights; None if all are 1."""
        total = counted([upload.gradient for upload in self.every[: self.expected]])
        return total.number, total.weight

    def stalled(self) -> Upload | None:
        """Returns a stalled upload that holds up later ones with more parts; None: there is none."""
        if self.holds_early and len(self.every) <= self._num_expected:
            # Without it, later ones would be held as well.
            return None
        now = clock.now()
        expected = self.expected
        for position, upload in enumerate(self.every[:expected]):
            if upload.admitted or now - upload.moved_at < (upload.lease or STALLED):
                continue
            mine = sum(upload.there)
            if any(sum(later.there) > mine for later in self.every[position + 1 :]):
                return upload
        return None


def counted(gradients: Iterable[BufferedGradient]) -> RoundSum:
    """Returns a sum without sections, which has the number of gradients and, added in this order, their weights."""
    total = RoundSum([], "")
    for gradient in gradients:
        total.count(gradient.number, gradient.weight, gradient.factor)
    return total
