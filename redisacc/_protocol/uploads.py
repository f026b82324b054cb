"""The gradients that a growing round will probably hold, in the order of their places."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from redisacc._data.validation import Array
from redisacc._format.buffered import BufferedGradient
from redisacc._format.gradient_digests import digest_of
from redisacc._format.keys import Keys
from redisacc._format.part_cut import Cut

# An upload that makes no progress for so many seconds no longer holds up those that come after it.
STALLED = 0.5


@dataclass(slots=True, eq=False)
class Upload:
    """A gradient, as far as its parts have arrived at the server.

    Attributes:
        gradient: the gradient.
        cut: what its dense parts hold; None: it cannot be added part by part.
        sparse_parts: the number of parts before the dense ones; 0 if it cannot be added part by part.
        there: for each part whether it has arrived.
        admitted: whether the gradient is in the round, so that its parts have their final names.
        moved_at: when the last part arrived, on ``time.monotonic()``'s clock.
        sparse: the bytes of its sparse sections, as far as they have been fetched.
        requested: for each sparse part whether it has been fetched or is on its way.
        left: how many sparse parts are still to be fetched.
    """

    gradient: BufferedGradient
    cut: Cut | None
    sparse_parts: int
    there: bytearray = field(init=False)
    admitted: bool = False
    moved_at: float = field(default_factory=time.monotonic)
    sparse: Array | None = None
    requested: bytearray = field(default_factory=bytearray)
    left: int = 0

    def __post_init__(self) -> None:
        self.there = bytearray(len(self.gradient.lengths))
        self.forget_sparse()

    def admit(self) -> None:
        """Notes that the round has the gradient."""
        self.admitted = True
        self.there[:] = b"\1" * len(self.there)

    def arrive(self, parts: Sequence[int]) -> list[int]:
        """Notes that the server has these parts. Returns those that are new."""
        self.moved_at = time.monotonic()
        new = [part for part in parts if not self.there[part]]
        for part in new:
            self.there[part] = True
        return new

    def key(self, keys: Keys, number: int) -> str:
        """Returns the key that a part has now."""
        name = keys.part if self.admitted else keys.staged
        return name(self.gradient.id, number)

    def forget_sparse(self) -> None:
        """Begins anew with the sparse sections."""
        self.sparse, self.requested, self.left = None, bytearray(self.sparse_parts), self.sparse_parts

    def memory_for_sparse(self) -> Array:
        """Returns the memory for the bytes of the sparse sections."""
        if self.sparse is None:
            self.sparse = np.empty(self.gradient.sparse_bytes, np.uint8)
        return self.sparse


class Uploads:
    """The uploads of a round, in the order of their places.

    Args:
        bets: how many gradients the round will probably hold. A compacted one counts as many as it is the sum of.

    Attributes:
        every: the uploads.
        num_admitted: how many of them are in the round.
    """

    def __init__(self, bets: int) -> None:
        self._bets = bets
        self.every: list[Upload] = []
        self.num_admitted = 0
        self._by_id: dict[str, Upload] = {}
        # Of ``expected`` and ``digest``; None: to be computed.
        self._expected: tuple[int | None, str] | None = None

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
        self._expected = None
        return position

    def remove(self, upload: Upload) -> int:
        """Removes an upload, and returns the position that it had."""
        position = self.every.index(upload)
        del self.every[position]
        del self._by_id[upload.gradient.id]
        self.num_admitted -= upload.admitted
        self._expected = None
        return position

    def admit(self, upload: Upload) -> bool:
        """Notes that the round has the gradient. Returns False if that was known."""
        if upload.admitted:
            return False
        upload.admit()
        self.num_admitted += 1
        return True

    def settle(self, uploads: Sequence[Upload]) -> int:
        """Replaces all uploads by these, which are the round. Returns how many of the first ones have stayed."""
        before = self.every
        self.every = list(uploads)
        self._by_id = {upload.gradient.id: upload for upload in uploads}
        for upload in uploads:
            upload.admit()
        self.num_admitted = len(uploads)
        self._expected = None
        agree = 0
        while agree < min(len(before), len(self.every)) and before[agree] is self.every[agree]:
            agree += 1
        return agree

    @property
    def expected(self) -> int | None:
        """How many uploads, from the first on, count for as many gradients as the bets say.

        None if not so many are known, or if the bets are 0.
        """
        return self._expectation[0]

    @property
    def digest(self) -> str:
        """What a sum of the expected uploads is stored under; "" if not so many are known."""
        return self._expectation[1]

    @property
    def _expectation(self) -> tuple[int | None, str]:
        if self._expected is None:
            self._expected = None, ""
            count = 0
            for position, upload in enumerate(self.every):
                if count >= self._bets:
                    break
                count += upload.gradient.number
                if count >= self._bets:
                    first = [upload.gradient for upload in self.every[: position + 1]]
                    self._expected = len(first), digest_of(first)
        return self._expected

    def stalled(self) -> Upload | None:
        """Returns an upload that stands still and holds up others, which have arrived further; None: there is none."""
        now = time.monotonic()
        expected = self.expected
        for position, upload in enumerate(self.every[:expected]):
            if upload.admitted or now - upload.moved_at < STALLED:
                continue
            mine = sum(upload.there)
            if any(sum(later.there) > mine for later in self.every[position + 1 :]):
                return upload
        return None
