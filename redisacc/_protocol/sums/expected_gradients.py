"""The gradients that a growing round will probably hold, in the order of their places.

What is expected, held, skipped or ignored before the round is granted is decided here, and nothing is added up. Before
the grant, it is a guess; ``settle`` replaces it by the gradients of the round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from redisacc._arrays.sums import RoundSum
from redisacc._arrays.validation import Array
from redisacc._clock import clock
from redisacc._format.buffered import BufferedGradient, digest_of
from redisacc._format.part_cut import Cut

# An upload that makes no progress for this many seconds no longer holds up later ones.
STALLED = 0.5


class SparseBytes:
    """The bytes of the sparse sections of a gradient that are being fetched.

    Attributes:
        memory: the bytes.
        requested: for each sparse part, whether it has been fetched or is on its way.
        left: how many sparse parts are still to be fetched.
    """

    __slots__ = ("left", "memory", "requested")

    def __init__(self, upload: Upload) -> None:
        self.memory: Array = np.empty(upload.gradient.sparse_bytes, np.uint8)
        self.requested = bytearray(upload.sparse_parts)
        self.left = upload.sparse_parts


class Upload:
    """A gradient, and which of its parts have arrived at the server. Two descriptions of a gradient are two uploads.

    Args:
        gradient: see below.
        cut: see below.
        sparse_parts: see below.
        lease: see below.

    Attributes:
        gradient: the gradient.
        cut: the elements in each of its dense parts; None means it cannot be added part by part.
        sparse_parts: the number of parts before the dense ones; 0 if it cannot be added part by part.
        there: for each part, whether it has arrived.
        admitted: whether the gradient is in the round, so that its parts have their final names.
        moved_at: when the last part, or sign of life, arrived, by ``clock.now()``.
        lease: for how many seconds after that it may hold up later ones; 0: for STALLED seconds.
        sparse: the bytes of its sparse sections until they are added; None means none of them was requested.
    """

    __slots__ = ("admitted", "cut", "gradient", "lease", "moved_at", "sparse", "sparse_parts", "there")

    def __init__(self, gradient: BufferedGradient, cut: Cut | None, sparse_parts: int, lease: float = 0.0) -> None:
        self.gradient = gradient
        self.cut = cut
        self.sparse_parts = sparse_parts
        self.there = bytearray(len(gradient.lengths))
        self.admitted = False
        self.moved_at = clock.now()
        self.lease = lease
        self.sparse: SparseBytes | None = None

    def is_of(self, gradient: BufferedGradient) -> bool:
        """Returns whether this describes a gradient with the same id in the same way: its place, bytes and weight."""
        mine = self.gradient
        return (mine.order, mine.factor, mine.header_digest) == (
            gradient.order, gradient.factor, gradient.header_digest
        )  # fmt: skip

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


@dataclass(eq=False)
class ExpectedGradients:
    """The uploads of a round, in the order of their places.

    Attributes:
        num_expected: how many gradients the round will probably hold; 0 if unknown. A compacted one counts as all the
            gradients in it.
        holds_early: whether gradients are held, also admitted ones, while a gradient that precedes them may be missing.
            By worker, places are the numbers of workers, which probably are the lowest ones. A gradient may become
            known long after others that it precedes.
        holds_all: whether no more gradients are added than are expected, even if they are in the round.
        every: the uploads.
        expected: how many of them, from the first on, together hold as many gradients as the round probably will; None
            if fewer are known, or if the size of the round is unknown.
        bound: how many of them, from the first on, may be added now.
        ignored: whether there is nothing to add before the round is known.
    """

    num_expected: int
    holds_early: bool
    holds_all: bool
    ignored: bool
    every: list[Upload] = field(default_factory=list)
    expected: int | None = None
    bound: int = 0
    _by_id: dict[str, Upload] = field(default_factory=dict)
    _num_admitted: int = 0
    _digest: str | None = None

    def find(self, gradient: str) -> Upload | None:
        """Returns the upload of the gradient with this id, or None if it is not known."""
        return self._by_id.get(gradient)

    def makes_way_for(self, gradient: BufferedGradient, *, admitted: bool) -> bool:
        """Removes another upload of the same worker. Returns False if this one is not expected in the round."""
        if not self.holds_early:
            return True
        # The round will hold only one of the two: a worker that was started again uploads its gradient again.
        rivals = [one for one in self.every if one.gradient.order == gradient.order and one.gradient.id != gradient.id]
        if not admitted and (self._is_full or any(rival.admitted for rival in rivals)):
            return False
        self._remove(rivals)
        return True

    def insert(self, upload: Upload) -> None:
        """Inserts an upload that is not admitted, in place of another one of the same gradient."""
        known = self._by_id.get(upload.gradient.id)
        if known is not None:
            self._remove([known])
        position = len(self.every)
        while position and self.every[position - 1].gradient.order > upload.gradient.order:
            position -= 1
        self.every.insert(position, upload)
        self._by_id[upload.gradient.id] = upload
        self._digest = None
        self._change()

    def admit(self, upload: Upload) -> None:
        """Notes that the round has the gradient. If it is full, those that would come too late are removed."""
        if upload.admitted:
            return
        upload.admit()
        self._num_admitted += 1
        if self._is_full:
            last = max([place for place, one in enumerate(self.every) if one.admitted])
            # By worker, those after the last one are expected no longer, either.
            among = self.every if self.holds_early else self.every[:last]
            self._remove([late for late in among if not late.admitted])
        self._change()

    def keep_admitted(self, gradients: Collection[str]) -> None:
        """Removes gradients that were admitted and are not among these: they were compacted."""
        self._remove([one for one in self.every if one.admitted and one.gradient.id not in gradients])

    def drop_stalled(self) -> bool:
        """Removes a stalled upload that holds up later ones with more parts. Returns False if there is none."""
        if self.holds_early and len(self.every) <= self.num_expected:
            # Without it, later ones would be held as well.
            return False
        now = clock.now()
        for position, upload in enumerate(self.every[: self.expected]):
            if upload.admitted or now - upload.moved_at < (upload.lease or STALLED):
                continue
            mine = sum(upload.there)
            if any(sum(later.there) > mine for later in self.every[position + 1 :]):
                self._remove([upload])
                return True
        return False

    def settle(self, uploads: Sequence[Upload]) -> None:
        """Replaces all uploads by the gradients of the round."""
        self.every = list(uploads)
        # None of them is early any more.
        self.holds_early = False
        self._by_id = {upload.gradient.id: upload for upload in uploads}
        for upload in uploads:
            upload.admit()
        self._num_admitted = len(uploads)
        self._digest = None
        self._change()

    @property
    def digest(self) -> str:
        """The digest under which the sum of the expected uploads is stored; "" if fewer are known."""
        if self._digest is None:
            first = self.every[: self.expected]
            self._digest = "" if self.expected is None else digest_of([upload.gradient for upload in first])
        return self._digest

    @property
    def counted(self) -> tuple[int, float | None]:
        """How many gradients the expected uploads hold, and the sum of their weights; None if all are 1."""
        total = counted([upload.gradient for upload in self.every[: self.expected]])
        return total.number, total.weight

    @property
    def _is_full(self) -> bool:
        """Whether the round has as many gradients as it probably will."""
        return self._num_admitted >= self.num_expected > 0

    def _remove(self, uploads: Sequence[Upload]) -> None:
        if not uploads:
            return
        for upload in uploads:
            self.every.remove(upload)
            del self._by_id[upload.gradient.id]
            self._num_admitted -= upload.admitted
        self._digest = None
        self._change()

    def _change(self) -> None:
        """Computes how many leading gradients are expected, and how many may be added."""
        count = place = 0
        while count < self.num_expected and place < len(self.every):
            count += self.every[place].gradient.number
            place += 1
        self.expected = place if count >= self.num_expected > 0 else None
        first = self._leading() if self.expected is None else self.expected
        if self.ignored:
            self.bound = 0
        elif self.holds_all or (self.expected is None and self.holds_early):
            self.bound = first
        else:
            self.bound = min(max(first, self._num_admitted), len(self.every))

    def _leading(self) -> int:
        """Returns how many leading uploads may be added before as many as expected are known.

        By worker, these are the numbers from 0 on without a gap. Whatever follows a gap is held until it is filled, or
        until as many as expected are known without it.
        """
        if not self.num_expected:
            return 0
        if not self.holds_early:
            return len(self.every)
        number = 0
        while number < len(self.every) and self.every[number].gradient.order == number:
            number += 1
        return number


def counted(gradients: Iterable[BufferedGradient]) -> RoundSum:
    """Returns a sum without sections, which has the number of gradients and, added in this order, their weights."""
    total = RoundSum([], "")
    for gradient in gradients:
        total.count(gradient.number, gradient.weight, gradient.factor)
    return total
