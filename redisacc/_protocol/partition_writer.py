"""Buffers gradients in partitions: their parts lie on several nodes, and one script at the leader counts them.

1. The leader registers the attempt. A stale gradient, or one for which there is no room, is refused here. A large one
   is announced, so that takers and reducers add its parts up while they arrive.
2. Each node stores its parts, under names that no other attempt has, and confirms that they are there for good.
3. The leader counts the gradient, if nobody has given the attempt up meanwhile.

docs/design/partitions.md says why nothing is lost, counted twice or left behind, whoever dies at whichever moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal

from redisacc._data.gradient import Gradient
from redisacc._format import buffered as buffered_format
from redisacc._format.buffered import (
    MESSAGE_BYTES,
    STAGING_MS,
    BufferedGradient,
    PartitionedGradient,
    partitioned,
)
from redisacc._format.keys import Keys
from redisacc._format.staging import ANNOUNCED_HEADER, parts_arrived
from redisacc._protocol.partition_scripts import PartitionScripts, Registered, Replaced, StoredAttempt
from redisacc._protocol.partition_sweep import remove_parts, sweep_quietly
from redisacc._protocol.scripts import REPLICATION_TIMEOUT_MS, Counted, Full, Request
from redisacc._redis.fast_socket import Command
from redisacc._redis.transport import Hint, Transport
from redisacc._text import shown
from redisacc.errors import AccumulatorNotFoundError, CorruptDataError, RedisAccError, ServerUnavailableError

# How long an attempt may take, in milliseconds; and the bytes for each further millisecond. After that, anybody may
# give it up, and its writer has to begin a new one.
ATTEMPT_MS = 60_000
BYTES_PER_MS = 128

# The commands whose reply is the length of a part.
_MEASURES = ("STRLEN", "APPEND")

Reply = Counted | Full | Literal["changed", "unstaged", "unconfirmed"]


class PartitionWriter:
    """Buffers gradients of one accumulator in its partitions.

    Args:
        transport: the way to the nodes.
        keys: the keys of the accumulator, with its partitions.
        scripts: its scripts.
        min_replicas: how many replicas of each node have to confirm the parts; 0: none.
        lease_ms: how long a private accumulator outlives its owner, in milliseconds; 0 for a shared one.
    """

    def __init__(
        self, transport: Transport, keys: Keys, scripts: PartitionScripts, *, min_replicas: int, lease_ms: int
    ) -> None:
        self._transport = transport
        self._keys = keys
        self._scripts = scripts
        self._lease_ms = lease_ms
        self._min_replicas = min_replicas
        self._replicate: list[Command] = [("WAIT", min_replicas, REPLICATION_TIMEOUT_MS)] if min_replicas else []

    def send(
        self,
        gradient: Gradient,
        request: Request,
        gradient_id: str,
        replaced: Sequence[BufferedGradient] = (),
        summed_weight: float = 1.0,
    ) -> Reply:
        """Makes one attempt to buffer a gradient.

        Args:
            gradient: the gradient, of more than INLINE_BYTES.
            request: the request that applies it.
            gradient_id: its id.
            replaced: the buffered gradients whose sum is part of it, the oldest first.
            summed_weight: the weight that the gradient of the request has in that sum.

        Returns:
            The outcome; or, with nothing changed, `Full`, "changed" if a gradient that it replaces is gone, "unstaged"
            if the attempt was given up by somebody else, so that a new one is needed, or "unconfirmed" if it replaces
            gradients, and too few replicas have its parts.
        """
        of = partitioned(self._keys, gradient)
        what: dict[str, Any] = {
            "gradient": gradient_id,
            "parts": len(of.parts),
            "nbytes": of.nbytes,
            "replaced": _replaced(replaced, summed_weight),
        }
        announced = of.nbytes >= buffered_format.ANNOUNCED_BYTES and not replaced and len(of.header) <= ANNOUNCED_HEADER
        registered = self._scripts.register(
            request,
            **what,
            lease_ms=ATTEMPT_MS + of.nbytes // BYTES_PER_MS,
            announced=of.header if announced else b"",
        )
        if not isinstance(registered, Registered):
            return registered
        attempt = StoredAttempt(f"{gradient_id}-{registered.place}", len(of.parts))
        try:
            replicas = self._write(attempt.id, of, announced=announced)
            if replicas is None:
                sweep_quietly(self._transport, self._keys, self._scripts, [attempt])
                return "unstaged"
            if replaced and any(number < self._min_replicas for number in replicas):
                # Replicas may have confirmed what it would replace, and others were told so.
                sweep_quietly(self._transport, self._keys, self._scripts, [attempt])
                return "unconfirmed"
            reply = self._scripts.commit(request, **what, place=registered.place, header=of.header)
        except AccumulatorNotFoundError:
            # Nobody counts it any more, and nobody else knows of its parts.
            self._remove(attempt)
            raise
        except ServerUnavailableError:
            # The commit may still arrive: only the end of the lease may give the attempt up.
            raise
        except RedisAccError:
            sweep_quietly(self._transport, self._keys, self._scripts, [attempt])
            raise
        if isinstance(reply, Counted):
            reply.replicas = min([reply.replicas, *replicas])
            if reply.outcome == "applied" and not replaced:
                return reply
        elif reply == "expired":
            # A sweeper may have missed parts that were written after it had looked.
            self._remove(attempt)
            return "unstaged"
        sweep_quietly(self._transport, self._keys, self._scripts)
        return reply

    def _write(self, attempt: str, of: PartitionedGradient, *, announced: bool) -> list[int] | None:
        """Writes the parts, on all nodes at once.

        Args:
            attempt: the id of the attempt.
            of: the gradient.
            announced: whether the nodes tell takers and reducers of the parts that have arrived.

        Returns:
            How many replicas of each node have them, if they were asked; None if a part is not there.
        """
        # A gradient may have fewer parts than there are partitions.
        positions = range(min(len(self._keys.partitions), len(of.parts)))
        batches = [self._commands(attempt, of, position, announced=announced) for position in positions]
        found = self._transport.scatter([[*batch, *self._replicate] for batch in batches])
        replicas: list[int] = []
        for position, batch, replies in zip(positions, batches, found, strict=True):
            if self._replicate:
                confirmed = replies.pop()
                if not isinstance(confirmed, int):
                    where = self._keys.partition(position)
                    raise CorruptDataError(f"{where}: WAIT replied {shown(confirmed)}, not a number of replicas")
                replicas.append(confirmed)
            # The length proves that the part is there. It is looked up after the expiry was removed, so it will stay.
            lengths = [reply for command, reply in zip(batch, replies, strict=True) if command[0] in _MEASURES]
            if lengths != [part.nbytes for part in of.parts[position :: len(self._keys.partitions)]]:
                return None
        return replicas

    def _commands(self, attempt: str, of: PartitionedGradient, position: int, *, announced: bool) -> list[Command]:
        """Returns the commands that write the parts of the partition at a position."""
        step = len(self._keys.partitions)
        commands: list[Command] = []
        unannounced = 0
        for count, number in enumerate(range(position, len(of.parts), step), start=1):
            key, part = self._keys.part(attempt, number), of.parts[number]
            # If a connection breaks, this is sent again, and a copy of it may arrive at any time, also after the
            # gradient was counted. NX: it must not give an expiry to a part that is there.
            commands += [("SET", key, part, "NX", "PX", STAGING_MS), self._lasting(key), self._measure(key)]
            unannounced += part.nbytes
            if announced and (unannounced >= MESSAGE_BYTES or number + step >= len(of.parts)):
                text = parts_arrived(attempt, count, position)
                commands.append(Hint(("PUBLISH", self._keys.wake_of(position), text)))
                unannounced = 0
        return commands

    def _remove(self, attempt: StoredAttempt) -> None:
        """Removes the parts of an attempt that the leader does not know any more. What fails here, `gc` removes."""
        with contextlib.suppress(RedisAccError):
            remove_parts(self._transport, self._keys, [attempt])

    def _measure(self, key: str) -> Command:
        """Returns the command that replies with the length of a part, 0 if it is not there.

        With replicas to wait for, it is a write that changes nothing: Valkey's WAIT asks for what its own connection
        wrote last. When a batch is sent again, SET and PERSIST find their work done and write nothing, so WAIT would
        count replicas that lack the parts. APPEND always writes.
        """
        return ("APPEND", key, b"") if self._replicate else ("STRLEN", key)

    def _lasting(self, key: str) -> Command:
        """Returns the command by which a part gets the expiry that it has while its gradient counts: mostly none."""
        return ("PEXPIRE", key, self._lease_ms) if self._lease_ms else ("PERSIST", key)


def _replaced(gradients: Sequence[BufferedGradient], summed_weight: float) -> Replaced:
    in_parts = [gradient for gradient in gradients if not gradient.inline]
    return Replaced(
        tuple(gradient.id for gradient in gradients),
        tuple(StoredAttempt(gradient.id, len(gradient.lengths)) for gradient in in_parts),
        sum(gradient.nbytes for gradient in in_parts),
        summed_weight,
    )
