"""Buffers gradients in partitions: their parts are on several nodes, and one script at the leader counts them.

1. The leader registers the attempt. A stale gradient, or one for which there is no room, is refused here. A large one
   is announced, so that takers and reducers add its parts up while they arrive.
2. Each node stores its parts, under names that no other attempt has, and confirms that they are there for good.
3. The leader counts the gradient, unless a sweeper has given up the attempt meanwhile.

docs/explanations/partitions.md explains why a crash at any moment loses nothing, counts nothing twice and leaks no
keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redisacc._data.gradient import Gradient
from redisacc._format import buffered as buffered_format
from redisacc._format.attempts import StoredAttempt
from redisacc._format.buffered import BufferedGradient
from redisacc._format.keys import Keys
from redisacc._format.staging import ANNOUNCED_HEADER, parts_arrived
from redisacc._format.weights import weight_text
from redisacc._protocol.parts.sweep import given_up_on_error, remove_parts_quietly, sweep_quietly
from redisacc._protocol.parts.write import write_parts
from redisacc._protocol.scripts import Reply, Scripts
from redisacc._protocol.sessions import GradientRequest
from redisacc._redis.sockets.fast_socket import Pieces
from redisacc._redis.transport import Hint, Transport

# How long an attempt may take, in milliseconds; and the bytes for each further millisecond. After that, anybody may
# give it up, and its writer has to begin a new one.
ATTEMPT_MS = 60_000
BYTES_PER_MS = 128


class PartitionWriter:
    """Buffers gradients of one accumulator in its partitions.

    Args:
        transport: the way to the nodes.
        keys: the keys of the accumulator, with its partitions.
        scripts: its scripts.
        min_replicas: how many replicas of each node have to confirm the parts; 0: none.
        lease_ms: how long a private accumulator outlives its owner, in milliseconds; 0 for a shared one.

    Attributes:
        scripts, min_replicas, lease_ms: as above.
    """

    def __init__(self, transport: Transport, keys: Keys, scripts: Scripts, *, min_replicas: int, lease_ms: int) -> None:
        self._transport = transport
        self._keys = keys
        self.scripts = scripts
        self.lease_ms = lease_ms
        self.min_replicas = min_replicas

    def send(
        self,
        gradient: Gradient,
        request: GradientRequest,
        gradient_id: str,
        replaced: Sequence[BufferedGradient] = (),
        *,
        summed_weight: float = 1.0,
        announced_bytes: int,
    ) -> Reply:
        """Makes one attempt to buffer a gradient.

        Args:
            gradient: the gradient, which is not inline.
            request: the request that applies it.
            gradient_id: its id.
            replaced: the buffered gradients whose sum is part of it, the oldest first.
            summed_weight: the weight that the gradient of the request has in that sum.
            announced_bytes: a gradient of at least so many is announced before its parts.

        Returns:
            The reply of ``commit``, or of ``register`` if that refuses. Its outcome is "unwritten" if the attempt was
            given up by somebody else, so that a new one is needed, or "unconfirmed" if the gradient replaces others,
            and too few replicas have its parts.
        """
        of = buffered_format.pack_for_partitions(self._keys, gradient)
        nbytes = sum(of.lengths)
        announced = nbytes >= announced_bytes and not replaced and len(of.header) <= ANNOUNCED_HEADER
        what: dict[str, Any] = {"parts": len(of.parts), "nbytes": nbytes, "replaced": replaced}
        registered = self.register(
            request, gradient_id, announced=of.header if announced else b"", summed_weight=summed_weight, **what
        )
        if registered.outcome != "registered":
            return registered
        attempt = StoredAttempt(f"{gradient_id}-{registered.place}", len(of.parts))
        with given_up_on_error(self._transport, self._keys, [attempt], min_replicas=self.min_replicas):
            replicas = write_parts(
                self._transport,
                self._keys,
                {attempt.id: of.parts},
                min_replicas=self.min_replicas,
                lease_ms=self.lease_ms,
                hints=self._messages(attempt.id, of.parts) if announced else None,
            )
            if replicas is None:
                # If the attempt was swept and forgotten before all parts were written, only we know the rest.
                remove_parts_quietly(self._transport, self._keys, [attempt])
                self._sweep([attempt])
                return Reply(outcome="unwritten")
            if replaced and any(number < self.min_replicas for number in replicas):
                # Replicas may have confirmed the gradients that it would replace, and their senders know that.
                self._sweep([attempt])
                return Reply(outcome="unconfirmed")
            return self.commit(
                request,
                gradient_id,
                place=registered.place,
                header=of.header,
                replicas=replicas,
                ahead_bytes=announced_bytes,
                summed_weight=summed_weight,
                **what,
            )

    def register(
        self,
        request: GradientRequest,
        gradient: str,
        *,
        parts: int,
        nbytes: int,
        announced: bytes = b"",
        holds_ms: int = 0,
        replaced: Sequence[BufferedGradient] = (),
        summed_weight: float = 1.0,
    ) -> Reply:
        """Registers an attempt to store a gradient, before the first of its parts is written.

        Args:
            request: the request that applies it.
            gradient: its id.
            parts: how many parts it has.
            nbytes: how many bytes they have together.
            announced: its header, if takers and reducers are told of it; else empty.
            holds_ms: for how long it keeps its place although nothing arrives, in milliseconds; 0: as usual.
            replaced: the buffered gradients whose sum is part of it.
            summed_weight: the weight that the gradient of the request has in that sum.
        """
        return self.scripts.register(
            **self._attempt(request, gradient, parts, nbytes=nbytes, replaced=replaced, summed_weight=summed_weight),
            lease_ms=lease_of(nbytes),
            announced=announced.hex(),
            holds_ms=holds_ms,
        )

    @staticmethod
    def _attempt(
        request: GradientRequest,
        gradient: str,
        parts: int,
        *,
        nbytes: int,
        replaced: Sequence[BufferedGradient],
        summed_weight: float,
    ) -> dict[str, Any]:
        """Returns the arguments that ``register`` and ``commit`` have in common."""
        return {
            **request.arguments(),
            "summed_weight": weight_text(summed_weight) if replaced else "",
            "gradient": gradient,
            "order": request.order,
            "parts": parts,
            "bytes": nbytes,
            "replaced_bytes": sum(held.nbytes for held in replaced if not held.inline),
            "replaced": [held.id for held in replaced],
        }

    def commit(
        self,
        request: GradientRequest,
        gradient: str,
        *,
        place: str,
        header: bytes,
        parts: int,
        nbytes: int,
        replicas: Sequence[int],
        ahead_bytes: int,
        replaced: Sequence[BufferedGradient] = (),
        summed_weight: float = 1.0,
    ) -> Reply:
        """Counts a gradient whose parts are all written.

        Args:
            request: the request that applies it.
            gradient: its id.
            place: the place that its attempt was registered with.
            header: its header.
            parts: how many parts it has.
            nbytes: how many bytes they have together.
            replicas: how many replicas have confirmed them, of each node that was asked.
            ahead_bytes: from how many bytes on it wakes a waiting taker to fetch it ahead.
            replaced: the gradients whose sum is part of it.
            summed_weight: the weight that the gradient of the request has in that sum.

        Returns:
            As ``send``.
        """
        lost = self._transport.lost
        attempt = StoredAttempt(f"{gradient}-{place}", parts)
        reply = self.scripts.commit(
            **self._attempt(request, gradient, parts, nbytes=nbytes, replaced=replaced, summed_weight=summed_weight),
            notes=request.notes,
            place=place,
            header=header,
            ahead_bytes=ahead_bytes,
            replaced_attempts=[str(StoredAttempt(held.id, len(held.lengths))) for held in replaced if not held.inline],
            replicated=True,
        )
        reply.replicas = min([reply.replicas, *replicas])
        is_counted = reply.outcome == "applied"
        if is_counted and not replaced:
            return reply
        if not is_counted and (reply.outcome == "expired" or self._transport.lost == lost):
            # No copy of the commit has counted it, or ever will. A sweeper may have missed parts that were written
            # after it had looked.
            remove_parts_quietly(self._transport, self._keys, [attempt])
        if reply.outcome == "expired":
            return Reply(outcome="unwritten")
        self._sweep()
        return reply

    def _messages(self, attempt: str, parts: Sequence[memoryview | Pieces]) -> dict[int, Hint]:
        """Returns the messages by which nodes tell of parts that have arrived: the number of a part → its message."""
        step = len(self._keys.partitions)
        messages = {}
        for position in range(step):
            unannounced = 0
            numbers = range(position, len(parts), step)
            for count, number in enumerate(numbers, start=1):
                unannounced += parts[number].nbytes
                if unannounced >= buffered_format.message_bytes() or count == len(numbers):
                    text = parts_arrived(attempt, count, position)
                    messages[number] = Hint(("PUBLISH", self._keys.wake_of(position), text))
                    unannounced = 0
        return messages

    def _sweep(self, abandoned: Sequence[StoredAttempt] = ()) -> None:
        sweep_quietly(self._transport, self._keys, abandoned, min_replicas=self.min_replicas)


def lease_of(nbytes: int) -> int:
    """Returns how long an attempt to write that many bytes may take, in milliseconds."""
    return ATTEMPT_MS + nbytes // BYTES_PER_MS
