"""Buffers gradients: in attempts, until one is counted, or until there is no room for it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from redisacc._arrays.gradient import Gradient
from redisacc._clock import durations, running_time
from redisacc._format import buffered as buffered_format
from redisacc._format.buffered import BufferedGradient
from redisacc._protocol.applying.attempts import PartitionAttempt, SlotAttempt, Way
from redisacc._protocol.applying.compaction import Compactor, no_room
from redisacc._protocol.scripts import COUNTED, Reply
from redisacc._protocol.sessions import GradientRequest
from redisacc._text import shown
from redisacc.errors import ServerError

# For a gradient of more bytes than this, the server is asked first whether it would accept it: a round trip takes less
# time than an upload for nothing.
ASK_BYTES = 4 * 2**20


NOT_COMPACTED = (
    "with order='worker' they are not compacted, because that would change the order in which gradients are added: the "
    "limit has to have room for a gradient of each worker"
)


class GradientWriter:
    """Buffers the gradients of one accumulator for one handle."""

    def __init__(self, way: Way) -> None:
        self._way, self._keys = way, way.keys
        self._compactor = Compactor(way)

    def buffer(self, gradient: Gradient, request: GradientRequest) -> Reply:
        """Buffers a gradient.

        Raises:
            AccumulatorFullError: the buffer limit is reached, and compacting frees too little, or would change the
                order in which gradients are added.
        """
        deadline = running_time() + durations.call
        ask_first = gradient.nbytes > ASK_BYTES
        while True:
            reply = self._send(gradient, request, ask=ask_first)
            if reply.outcome in COUNTED:
                return reply
            if reply.outcome == "would_accept":
                reply = self._send(gradient, request)
            if reply.outcome == "full":
                if self._way.spec.order == "worker":
                    raise no_room(self._keys, gradient, reply, NOT_COMPACTED)
                ask_first = True
                reply = self._compactor.make_room(gradient, request, reply, self._send)
            if reply.outcome in COUNTED:
                return reply
            if running_time() >= deadline:
                if reply.outcome == "full":
                    why = f"for {durations.call:.0f} s, other workers filled the space that compacting freed"
                    raise no_room(self._keys, gradient, reply, why)
                raise ServerError(
                    f"a gradient for {shown(self._keys.name)} could not be buffered in {durations.call:.0f} s: its "
                    "parts disappeared every time"
                )

    def _send(
        self,
        gradient: Gradient,
        request: GradientRequest,
        replaced: Sequence[BufferedGradient] = (),
        summed_weight: float = 1.0,
        *,
        ask: bool = False,
    ) -> Reply:
        # A request that is sent again has the same id, so that it writes the same keys. A sum has an id of its own, so
        # that parts that were written before are not taken for its own. So has every attempt in partitions: after a
        # failover, the leader may reuse the number for another attempt, while a sweeper is still removing the parts of
        # this one.
        name = f"{request.session.id}-{request.sequence}"
        in_partitions = bool(self._keys.partitions) and gradient.nbytes > self._way.inline_bytes
        if in_partitions or replaced:
            name += f"-{secrets.token_hex(4)}"
        packed = buffered_format.pack(self._keys, gradient, self._way.inline_bytes)
        attempt = (PartitionAttempt if in_partitions else SlotAttempt)(
            self._way,
            request,
            name,
            packed.header,
            packed.lengths,
            data=packed.data,
            replaced=replaced,
            summed_weight=summed_weight,
        )
        announced = gradient.nbytes >= self._way.announced_bytes and not replaced
        return attempt.send(packed.parts, announced=announced, asks=ask)
