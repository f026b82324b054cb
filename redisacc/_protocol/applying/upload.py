"""Uploads that begin before their gradient is complete: each part leaves as soon as all of its leaves are there.

In the background, the upload is registered, parts are written, and the lease is renewed, so the caller computes
meanwhile. Nothing of that counts a gradient, and whatever fails there only ends the upload: the request that commits it
then sends the whole gradient, as any other apply does. So exactly one script decides, under the session and sequence
number of one request.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence

from redisacc._arrays.validation import Array
from redisacc._clock import clock
from redisacc._format.buffered import PART_MS
from redisacc._format.upload_layout import UploadLayout
from redisacc._protocol.applying.attempts import PartitionAttempt, SlotAttempt, Way
from redisacc._protocol.scripts import COUNTED, Reply
from redisacc._protocol.sessions import GradientRequest
from redisacc._wire import forks
from redisacc._wire.transport import LIMITS
from redisacc.errors import RedisAccError

logger = logging.getLogger("redisacc")

# How often the lease is renewed, and whether the step has passed is looked up, in seconds.
RENEWAL = 0.5
# The expiry of parts in one slot is renewed this often, in seconds.
EXTENSION = PART_MS / 4000
# About how many bytes are sent together: enough for all nodes to receive some.
BATCH_BYTES = 16 * 2**20
# How long ``abandon`` waits for what is on its way, in seconds. After that, the background removes the parts.
ENDING = 2.0


class Upload:
    """An upload under way. Any thread may put leaves.

    Attributes:
        request: the request that will commit it.
        layout: the parts of the gradient.
    """

    def __init__(self, way: Way, layout: UploadLayout, request: GradientRequest) -> None:
        self.request, self.layout = request, layout
        self._keys = way.keys
        kind: type[SlotAttempt | PartitionAttempt] = PartitionAttempt if way.keys.partitions else SlotAttempt
        name = f"{request.session.id}-{request.sequence}-{secrets.token_hex(4)}"
        self._attempt: SlotAttempt | PartitionAttempt = kind(way, request, name, layout.header, layout.lengths)
        # When the expiry of the parts was renewed.
        self._extended = clock.now()
        self._pid = os.getpid()
        self._leaves: dict[int, Array] = {}
        self._missing = [len(leaves) for leaves in layout.leaves_of]
        # For each leaf, in how many parts it is that have not been written. The last one frees a converted copy.
        self._unsent = list(map(len, layout.parts_of))
        # Guards what ``put`` changes.
        self._lock = forks.lock()
        self._ready: list[int] = []
        self._written: list[int] = []
        # Whether the gradient would be dropped; whether the upload has failed, so that all has to be sent again.
        self.is_over = self._has_failed = False
        self._is_abandoned = self._is_complete = False
        self._alarm = way.transport.waits.alarm()
        self._ended = way.transport.waits.event()
        self._limits = LIMITS.get()
        try:
            way.transport.waits.start(self._run, "redisacc-upload")
        except RuntimeError:
            # There is no thread left.
            self._has_failed = True
            self._ended.set()

    def put(self, leaf: int, elements: Array) -> None:
        """Adds the elements of a leaf, as a vector, which must not be written to. Sends nothing itself."""
        with self._lock:
            self._leaves[leaf] = elements
            for part in self.layout.parts_of[leaf]:
                self._missing[part] -= 1
                if not self._missing[part]:
                    self._ready.append(part)
        self._alarm.set()

    def complete(self) -> None:
        """Waits until all parts are written, or the upload has failed. All leaves have been put."""
        self._is_complete = True
        self._wait(None)

    def abandon(self) -> None:
        """Ends the upload, and removes its parts. Raises nothing."""
        self._is_abandoned = True
        self._wait(ENDING)

    def _wait(self, seconds: float | None) -> None:
        if self._pid != os.getpid():
            # The background is the parent's.
            self._has_failed = True
            return
        self._alarm.set()
        give_up = None if seconds is None else clock.now() + seconds
        while not self._ended.is_set() and (give_up is None or clock.now() < give_up):
            self._ended.wait(RENEWAL)

    def close(self) -> None:
        """Ends the background, soon. What it has written stays if it had ended before."""
        self._is_abandoned = True
        self._alarm.set()

    def commit(self) -> Reply | None:
        """Counts the gradient whose parts are all written. None means the whole gradient has to be sent."""
        if self._has_failed and not self.is_over:
            return None
        reply = self._attempt.ask() if self.is_over else self._attempt.commit()
        if reply.outcome in COUNTED:
            return reply
        if not self.is_over:
            self._has_failed = True
        return None

    def _run(self) -> None:
        LIMITS.set(self._limits)
        try:
            self._work()
        except RedisAccError as error:
            logger.debug("%s: an upload ended early: %s", self._keys.name, error)
            self._has_failed = True
        except BaseException:
            self._has_failed = True
            raise
        finally:
            if self._has_failed or self.is_over or self._is_abandoned:
                self._attempt.remove()
            self._ended.set()

    @property
    def _is_to_end(self) -> bool:
        return self._is_abandoned or self._has_failed or self.is_over

    def _work(self) -> None:
        if not self._is_to_end:
            self._note(self._attempt.begin())
        renewed = clock.now()
        while not self._is_to_end:
            if clock.now() - renewed >= RENEWAL:
                renewed = clock.now()
                is_due = renewed - self._extended >= EXTENSION
                self._extended = renewed if is_due else self._extended
                self._note(self._attempt.renew(self._written if is_due else None))
                continue
            batch = self._next()
            if batch:
                if not self._attempt.write({number: self.layout.part(number, self._leaves) for number in batch}):
                    self._has_failed = True
                self._written += batch
                self._free(batch)
            elif self._is_complete:
                return
            else:
                self._alarm.wait(max(renewed + RENEWAL - clock.now(), 0.0))

    def _next(self) -> list[int]:
        """Returns parts that are to be written together."""
        batch: list[int] = []
        nbytes = 0
        with self._lock:
            while self._ready and nbytes < BATCH_BYTES:
                batch.append(self._ready.pop(0))
                nbytes += self.layout.lengths[batch[-1]]
        return sorted(batch)

    def _free(self, batch: Sequence[int]) -> None:
        for part in batch:
            for leaf in self.layout.leaves_of[part]:
                self._unsent[leaf] -= 1
                if not self._unsent[leaf]:
                    del self._leaves[leaf]

    def _note(self, state: str) -> None:
        """Notes what the server has said about the upload."""
        if state == "over":
            self.is_over = True
        elif state == "expired":
            self._has_failed = True
