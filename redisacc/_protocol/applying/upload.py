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
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from redisacc._clock import clock
from redisacc._data.validation import Array
from redisacc._format.attempts import StoredAttempt
from redisacc._format.buffered import PART_MS
from redisacc._format.keys import Keys
from redisacc._format.staging import ANNOUNCED_HEADER, parts_arrived, upload_begun
from redisacc._format.upload_layout import UploadLayout
from redisacc._format.weights import weight_text
from redisacc._protocol.applying.partition_writer import PartitionWriter, lease_of
from redisacc._protocol.parts.staging import buffer, staging
from redisacc._protocol.parts.sweep import given_up_on_error, remove_parts_quietly, sweep_quietly
from redisacc._protocol.parts.write import write_parts
from redisacc._protocol.scripts import COUNTED, Reply, Scripts
from redisacc._protocol.sessions import GradientRequest
from redisacc._redis import forks
from redisacc._redis.sockets.fast_socket import Command, Pieces
from redisacc._redis.transport import LIMITS, Hint, Transport
from redisacc.errors import RedisAccError

logger = logging.getLogger("redisacc")

# How often the lease is renewed, and whether the step has passed is looked up, in seconds.
RENEWAL = 0.5
# For how long an upload keeps its place in takers and reducers after its last sign of life, in milliseconds.
HOLDS_MS = 10_000
# The expiry of parts in one slot is renewed this often, in seconds.
EXTENSION = PART_MS / 4000
# About how many bytes are sent together: enough for all nodes to receive some.
BATCH_BYTES = 16 * 2**20
# How long ``abandon`` waits for what is on its way, in seconds. After that, the background removes the parts.
ENDING = 2.0


class Upload(ABC):
    """An upload under way. Any thread may put leaves.

    Attributes:
        request: the request that will commit it.
        layout: the parts of the gradient.
    """

    def __init__(
        self,
        transport: Transport,
        keys: Keys,
        scripts: Scripts,
        layout: UploadLayout,
        request: GradientRequest,
        *,
        ahead_bytes: int,
    ) -> None:
        self.request = request
        self._ahead_bytes = ahead_bytes
        self.layout = layout
        self._transport = transport
        self._keys = keys
        self._scripts = scripts
        self._name = f"{request.session.id}-{request.sequence}-{secrets.token_hex(4)}"
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
        self._alarm = transport.waits.alarm()
        self._ended = transport.waits.event()
        self._limits = LIMITS.get()
        try:
            transport.waits.start(self._run, "redisacc-upload")
        except RuntimeError:
            # There is no thread left.
            self._has_failed = True
            self._ended.set()

    @property
    def is_announced(self) -> bool:
        """Whether takers and reducers are told of it."""
        return len(self.layout.header) <= ANNOUNCED_HEADER

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
        """Counts the gradient whose parts are all written. None: the whole gradient has to be sent."""
        if self.is_over:
            return self._ask()
        if self._has_failed:
            return None
        counted = self._commit()
        self._has_failed = counted is None
        return counted

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
                self._remove()
            self._ended.set()

    @property
    def _is_to_end(self) -> bool:
        return self._is_abandoned or self._has_failed or self.is_over

    def _work(self) -> None:
        if not self._is_to_end:
            self._begin()
        renewed = clock.now()
        while not self._is_to_end:
            if clock.now() - renewed >= RENEWAL:
                renewed = clock.now()
                self._note(self._renew())
                continue
            batch = self._next()
            if batch:
                self._write(batch)
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

    def _part(self, number: int) -> memoryview | Pieces:
        return self.layout.part(number, self._leaves)

    def _note(self, state: str) -> None:
        """Notes what the server has said about the upload."""
        if state == "over":
            self.is_over = True
        elif state == "expired":
            self._has_failed = True

    @abstractmethod
    def _begin(self) -> None:
        """Registers the upload, and announces it."""

    @abstractmethod
    def _write(self, batch: Sequence[int]) -> None:
        """Writes parts, and tells of them."""

    @abstractmethod
    def _renew(self) -> str:
        """Renews the lease, and returns what the server says."""

    @abstractmethod
    def _commit(self) -> Reply | None:
        """Counts the gradient. None: something is missing."""

    @abstractmethod
    def _ask(self) -> Reply | None:
        """Returns the outcome of a gradient that is dropped. None: it would be accepted."""

    def _renewed(
        self,
        message: str,
        *,
        attempt: str = "",
        lease_ms: int = 0,
        written: Sequence[int] | None = None,
        before: Sequence[Command] = (),
    ) -> str:
        """Renews the lease of the attempt, or the expiry of what is written; tells takers; returns the outcome."""
        request = self.request
        reply = self._scripts.renew_upload(
            worker=request.worker,
            local_step=request.local_step,
            once=request.once,
            attempt=attempt,
            lease_ms=lease_ms,
            expiry_ms=PART_MS,
            message=message,
            place=[] if written is None else [self._keys.place(self._name)],
            parts=[self._keys.part(self._name, part) for part in written or ()],
            before=before,
        )
        return reply.outcome

    @abstractmethod
    def _remove(self) -> None:
        """Removes what was written. Raises nothing: what is left expires, or is swept."""


class StagedUpload(Upload):
    """An upload to the accumulator's slot: parts have an expiry, which the script that counts removes."""

    _extended = 0.0

    def _begin(self) -> None:
        self._extended = clock.now()
        before = []
        if self.is_announced:
            header = self.layout.header
            before = [staging(self._scripts, self.request, gradient=self._name, header=header, holds_ms=HOLDS_MS)]
        self._note(self._renewed(parts_arrived(self._name, 0), before=before))

    def _write(self, batch: Sequence[int]) -> None:
        commands: list[Command] = []
        for number in batch:
            key = self._keys.part(self._name, number)
            commands.append(("SET", key, self._part(number), "NX", "PX", PART_MS))
            if self.is_announced:
                commands.append(Hint(("PUBLISH", self._keys.wake, parts_arrived(self._name, 1, None, number))))
        self._transport.pipeline(commands)

    def _renew(self) -> str:
        is_due = clock.now() - self._extended >= EXTENSION
        if is_due:
            self._extended = clock.now()
        return self._renewed(parts_arrived(self._name, 0), written=self._written if is_due else None)

    def _commit(self) -> Reply | None:
        return self._buffer(self.layout.header)

    def _ask(self) -> Reply | None:
        return self._buffer(b"")

    def _buffer(self, header: bytes) -> Reply | None:
        before = []
        if header and self.is_announced and self.request.weight != 1:
            # It was announced with a weight of 1.
            before = [staging(self._scripts, self.request, gradient=self._name, header=header)]
        # If it fails, the parts may have been counted all the same. Those that are not expire.
        reply = buffer(
            self._scripts,
            self._keys,
            self.request,
            gradient=self._name,
            header=header,
            data=b"",
            lengths=self.layout.lengths,
            ahead_bytes=self._ahead_bytes,
            before=before,
        )
        return reply if reply.outcome in COUNTED else None

    def _remove(self) -> None:
        keys = [self._keys.place(self._name), *self._keys.parts(self._name, len(self.layout.lengths))]
        try:
            self._transport.pipeline([("UNLINK", key) for key in keys])
        except RedisAccError as error:
            logger.debug("%s: parts are left to expire: %s", self._keys.name, error)


class PartitionedUpload(Upload):
    """An upload to partitions: an attempt that the leader lists under a lease."""

    def __init__(self, *of: Any, ahead_bytes: int, writer: PartitionWriter) -> None:
        self._writer = writer
        self._replicas: list[int] = []
        self._place: str | None = None
        super().__init__(*of, ahead_bytes=ahead_bytes)

    @property
    def _attempt(self) -> StoredAttempt:
        return StoredAttempt(f"{self._name}-{self._place}", len(self.layout.lengths))

    def _begin(self) -> None:
        registered = self._register(announced=self.layout.header if self.is_announced else b"")
        if registered.outcome == "registered":
            self._place = registered.place
        elif registered.outcome in COUNTED:
            self.is_over = True
        else:
            self._has_failed = True

    def _register(self, *, announced: bytes = b"") -> Reply:
        return self._writer.register(
            self.request,
            self._name,
            parts=len(self.layout.lengths),
            nbytes=self.layout.nbytes,
            announced=announced,
            holds_ms=HOLDS_MS,
        )

    def _ask(self) -> Reply | None:
        # An attempt that this begins has no parts, and ends with its lease.
        registered = self._register()
        return registered if registered.outcome in COUNTED else None

    def _write(self, batch: Sequence[int]) -> None:
        attempt, step = self._attempt.id, len(self._keys.partitions)
        parts: dict[int, memoryview | Pieces] = {number: self._part(number) for number in batch}
        hints = {}
        if self.is_announced:
            for number in parts:
                first, position = divmod(number, step)
                text = parts_arrived(attempt, 1, position, first)
                hints[number] = Hint(("PUBLISH", self._keys.wake_of(position), text))
        replicas = write_parts(
            self._transport,
            self._keys,
            {attempt: parts},
            min_replicas=self._writer.min_replicas,
            lease_ms=self._writer.lease_ms,
            hints=hints,
        )
        if replicas is None:
            self._has_failed = True
        else:
            self._replicas += replicas

    def _renew(self) -> str:
        message = parts_arrived(self._attempt.id, 0, 0)
        return self._renewed(message, attempt=str(self._attempt), lease_ms=lease_of(self.layout.nbytes))

    def _commit(self) -> Reply | None:
        assert self._place is not None
        request, layout = self.request, self.layout
        with given_up_on_error(self._transport, self._keys, [self._attempt], min_replicas=self._writer.min_replicas):
            if self.is_announced and request.weight != 1:
                # It was announced with a weight of 1.
                weight, place = weight_text(request.weight), request.order or self._place
                text = upload_begun(
                    self._attempt.id, place, weight=weight, round_shape="[]", header=layout.header, lease_ms=HOLDS_MS
                )
                self._transport.pipeline([Hint(("PUBLISH", self._keys.wake, text))])
            reply = self._writer.commit(
                request,
                self._name,
                place=self._place,
                header=layout.header,
                parts=len(layout.lengths),
                nbytes=layout.nbytes,
                replicas=self._replicas,
                ahead_bytes=self._ahead_bytes,
            )
        return reply if reply.outcome in COUNTED else None

    def _remove(self) -> None:
        if self._place is not None:
            sweep_quietly(self._transport, self._keys, [self._attempt], min_replicas=self._writer.min_replicas)
            # A sweeper may have forgotten it before the last parts were written.
            remove_parts_quietly(self._transport, self._keys, [self._attempt])
