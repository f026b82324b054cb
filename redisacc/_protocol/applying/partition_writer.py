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
from typing import Any, Literal

from redisacc._data.gradient import Gradient
from redisacc._format import buffered as buffered_format
from redisacc._format.attempts import StoredAttempt
from redisacc._format.buffered import BufferedGradient
from redisacc._format.keys import Keys
from redisacc._format.staging import ANNOUNCED_HEADER, parts_arrived
from redisacc._protocol.parts.sweep import given_up_on_error, remove_parts_quietly, sweep_quietly
from redisacc._protocol.parts.write import write_parts
from redisacc._protocol.scripts.applying import Full
from redisacc._protocol.scripts.partitions import NOTHING_REPLACED, PartitionScripts, RegisteredGradient, Replaced
from redisacc._protocol.scripts.requests import Counted, GradientRequest
from redisacc._redis.sockets.fast_socket import Pieces
from redisacc._redis.transport import Hint, Transport

# How long an attempt may take, in milliseconds; and the bytes for each further millisecond. After that, anybody may
# give it up, and its writer has to begin a new one.
ATTEMPT_MS = 60_000
BYTES_PER_MS = 128

Reply = Counted | Full | Literal["changed", "unstaged", "unconfirmed"]


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

    def __init__(
        self, transport: Transport, keys: Keys, scripts: PartitionScripts, *, min_replicas: int, lease_ms: int
    ) -> None:
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
        summed_weight: float = 1.0,
    ) -> Reply:
        """Makes one attempt to buffer a gradient.

        Args:
            gradient: the gradient, which is not inline.
            request: the request that applies it.
            gradient_id: its id.
            replaced: the buffered gradients whose sum is part of it, the oldest first.
            summed_weight: the weight that the gradient of the request has in that sum.

        Returns:
            The outcome; or, with nothing changed, `Full`, "changed" if a gradient that it replaces is gone, "unstaged"
            if the attempt was given up by somebody else, so that a new one is needed, or "unconfirmed" if it replaces
            gradients, and too few replicas have its parts.
        """
        of = buffered_format.pack_for_partitions(self._keys, gradient)
        nbytes = sum(of.lengths)
        what: dict[str, Any] = {
            "gradient": gradient_id,
            "parts": len(of.parts),
            "nbytes": nbytes,
            "replaced": _replaced(replaced, summed_weight),
        }
        announced = nbytes >= self.scripts.announced_bytes and not replaced and len(of.header) <= ANNOUNCED_HEADER
        registered = self.scripts.register(
            request, **what, lease_ms=lease_of(nbytes), announced=of.header if announced else b""
        )
        if not isinstance(registered, RegisteredGradient):
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
                return "unstaged"
            if replaced and any(number < self.min_replicas for number in replicas):
                # Replicas may have confirmed the gradients that it would replace, and their senders know that.
                self._sweep([attempt])
                return "unconfirmed"
            return self.commit(request, **what, place=registered.place, header=of.header, replicas=replicas)

    def commit(
        self,
        request: GradientRequest,
        *,
        gradient: str,
        place: str,
        header: bytes,
        parts: int,
        nbytes: int,
        replicas: Sequence[int],
        replaced: Replaced = NOTHING_REPLACED,
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
            replaced: the gradients whose sum is part of it.

        Returns:
            As ``send``.
        """
        lost = self._transport.lost
        attempt = StoredAttempt(f"{gradient}-{place}", parts)
        reply = self.scripts.commit(
            request, gradient=gradient, place=place, header=header, parts=parts, nbytes=nbytes, replaced=replaced
        )
        is_counted = isinstance(reply, Counted) and reply.outcome == "applied"
        if isinstance(reply, Counted):
            reply.replicas = min([reply.replicas, *replicas])
            if is_counted and not replaced.ids:
                return reply
        if not is_counted and (reply == "expired" or self._transport.lost == lost):
            # No copy of the commit has counted it, or ever will. A sweeper may have missed parts that were written
            # after it had looked.
            remove_parts_quietly(self._transport, self._keys, [attempt])
        if reply == "expired":
            return "unstaged"
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


def _replaced(gradients: Sequence[BufferedGradient], summed_weight: float) -> Replaced:
    in_parts = [gradient for gradient in gradients if not gradient.inline]
    return Replaced(
        tuple(gradient.id for gradient in gradients),
        tuple(StoredAttempt(gradient.id, len(gradient.lengths)) for gradient in in_parts),
        sum(gradient.nbytes for gradient in in_parts),
        summed_weight,
    )
