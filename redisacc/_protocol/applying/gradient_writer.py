"""Buffers gradients: in attempts, until one is counted, or until there is no room for it.

If a round's buffered gradients have reached their limit, a client compacts: it fetches some of them, adds them and its
own in numpy, and stores the sum in their place. The script swaps the sum in only if everything that it replaces is
still there. So nothing is lost or counted twice, whatever other processes do, and the server spends no time on
additions.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import replace

from redisacc._arrays.gradient import Gradient
from redisacc._arrays.validation import shape_text
from redisacc._clock import durations, running_time
from redisacc._format import buffered as buffered_format
from redisacc._format.buffered import BufferedGradient, PartMissingError
from redisacc._format.keys import Keys
from redisacc._protocol.applying.attempts import PartitionAttempt, SlotAttempt, Way
from redisacc._protocol.parts.inline import InlineReader
from redisacc._protocol.rounds.granted_rounds import PARTS_PER_CALL, free_dropped
from redisacc._protocol.scripts import COUNTED, Reply
from redisacc._protocol.sessions import GradientRequest
from redisacc._protocol.sums.cells import SumOptions
from redisacc._protocol.sums.part_sums import PartSums
from redisacc._telemetry.operation import Operation
from redisacc._text import shown
from redisacc._wire.scans import scan
from redisacc.errors import AccumulatorFullError, CorruptDataError, ServerError

logger = logging.getLogger("redisacc")

# Maximum number of gradients that are compacted at once, and of their parts, so that the script that removes them stays
# short; and of their bytes, which pass through this process.
COMPACT_GRADIENTS = 64
COMPACT_PARTS = PARTS_PER_CALL
COMPACT_BYTES = 128 * 2**20

# How long one client may compact while others wait, in milliseconds; and how long these pause between tries, in
# seconds. If a client dies while it compacts, the others lose this time and nothing else.
COMPACTING_MS = 5000
COMPACTING_PAUSE = 0.01

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
        self._way, self._keys, self._transport, self._spec = way, way.keys, way.transport, way.spec

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
                if self._spec.order == "worker":
                    raise _no_room(self._keys, gradient, reply, NOT_COMPACTED)
                ask_first = True
                reply = self._make_room(gradient, request, reply)
            if reply.outcome in COUNTED:
                return reply
            if running_time() >= deadline:
                if reply.outcome == "full":
                    why = f"for {durations.call:.0f} s, other workers filled the space that compacting freed"
                    raise _no_room(self._keys, gradient, reply, why)
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

    def _make_room(self, gradient: Gradient, request: GradientRequest, full: Reply) -> Reply:
        """Compacts, or pauses while another client does.

        Args:
            gradient: the gradient that exceeds the limit.
            request: the request that applies it.
            full: the server's reply to it.

        Returns:
            The server's reply to the sum; or ``full`` if another client is compacting, so that the caller tries again.

        Raises:
            AccumulatorFullError: the sum exceeds the limit, too, or replicas do not confirm it.
        """
        token = secrets.token_hex(8)
        if self._transport.call(
            "SET", self._keys.compacting, token, "NX", "PX", COMPACTING_MS
        ) is None and not self._is_compacting(token):
            self._transport.waits.sleep(COMPACTING_PAUSE)
            return full
        try:
            with self._way.observe("compact", request.worker) as operation:
                return self._compact(gradient, request, full, operation)
        except PartMissingError as error:
            if self._is_lost(error):
                why = f"compacting needs {error.args[0]}, which is lost, as the next take will report"
                raise _no_room(self._keys, gradient, full, why) from None
            return full
        finally:
            if self._is_compacting(token):
                self._transport.call("UNLINK", self._keys.compacting)

    def _is_lost(self, missing: PartMissingError) -> bool:
        """Returns whether a part is gone although its gradient is still buffered: a node has lost it in a failover."""
        if not self._keys.partitions:
            return False
        return self._transport.call("HGET", self._keys.current.buffered, missing.gradient) is not None

    def _is_compacting(self, token: str) -> bool:
        """Returns whether this client compacts. Its SET may have been sent twice, so the key may be its own."""
        reply: object = self._transport.call("GET", self._keys.compacting)
        return reply == token.encode()

    def _compact(self, gradient: Gradient, request: GradientRequest, full: Reply, operation: Operation) -> Reply:
        """Replaces some buffered gradients by their sum with the new one.

        Raises:
            AccumulatorFullError: the sum exceeds the limit, too, or replicas do not confirm it.
        """
        shape = request.round_shape
        entries = scan(self._transport, self._keys.current.buffered)
        try:
            buffered = buffered_format.parse(self._keys, entries, self._spec, shape)
        except CorruptDataError:
            if self._transport.call("HGET", self._keys.record, "round_shape") == shape_text(shape).encode():
                raise
            # The gradients have another shape: the round was taken meanwhile, and these belong to the next one.
            return Reply(outcome="changed")
        seen = sum(held.nbytes for held in buffered)
        choices = [_cheapest(buffered)]
        for more in (_oldest(buffered), buffered[:COMPACT_GRADIENTS]):
            if more not in choices:
                choices.append(more)
        for chosen in choices:
            reply = self._swap(gradient, request, chosen, full.weight)
            if reply.outcome == "unconfirmed":
                raise _no_room(self._keys, gradient, full, "replicas do not confirm a sum of them in time")
            if reply.outcome == "swapped":
                # Only this proves that nobody needs them. Any other gradient of the request that counts, or is
                # dropped, leaves them where they are: in this round, or in one that was taken meanwhile.
                operation.note("messaging.batch.message_count", len(chosen))
                free_dropped(self._transport, self._keys, chosen)
                reply.outcome = "applied"
            # If others took the round or buffered gradients meanwhile, this does not show what compacting can do.
            if reply.outcome != "full" or reply.buffered_bytes != seen:
                return reply
            full = reply
        raise _no_room(self._keys, gradient, full, "compacting does not help")

    def _swap(
        self,
        gradient: Gradient,
        request: GradientRequest,
        chosen: Sequence[BufferedGradient],
        weight: float,
    ) -> Reply:
        round_sum = self._spec.empty_sum(request.round_shape, where=self._keys.current.sums)
        inline = InlineReader(self._transport, self._keys.current, chosen)
        PartSums(self._transport, round_sum, SumOptions(self._keys)).complete(chosen, inline)
        # The server admits the sum only if the gradient still has this weight: it depends on the staleness.
        round_sum.add(replace(gradient, factor=weight))
        logger.debug("%s: compacting %d buffered gradients", self._keys.name, len(chosen))
        return self._send(round_sum.sum() if chosen else gradient, request, chosen, weight)


def _no_room(keys: Keys, gradient: Gradient, full: Reply, why: str) -> AccumulatorFullError:
    """Returns the error that says why a gradient cannot be buffered."""
    return AccumulatorFullError(
        f"there is no room for a gradient of {gradient.nbytes} bytes in {shown(keys.name)}: its buffered "
        f"gradients use {full.buffered_bytes} of {full.buffer_limit} bytes, and {why}. Take the round, or create "
        "the accumulator with a larger limits.buffer"
    )


def _cheapest(buffered: Sequence[BufferedGradient]) -> Sequence[BufferedGradient]:
    """Returns the longest run of adjacent gradients that may be compacted at once, and of equally long ones the oldest.

    A large sum at the front is left alone: moving it again for each new gradient would free nothing.
    """
    best, size, parts, first = buffered[:1], 0, 0, 0
    for last, candidate in enumerate(buffered):
        size += candidate.nbytes
        parts += len(candidate.lengths)
        while size > COMPACT_BYTES or parts > COMPACT_PARTS or last - first >= COMPACT_GRADIENTS:
            size -= buffered[first].nbytes
            parts -= len(buffered[first].lengths)
            first += 1
        if last + 1 - first > len(best):
            best = buffered[first : last + 1]
    return best


def _oldest(buffered: Sequence[BufferedGradient]) -> Sequence[BufferedGradient]:
    """Returns the oldest gradients: a large sum at the front, and as many of the next as may be compacted at once."""
    size = parts = 0
    for number, candidate in enumerate(buffered[:COMPACT_GRADIENTS]):
        size += candidate.nbytes
        parts += len(candidate.lengths)
        if number > 1 and (size > COMPACT_BYTES or parts > COMPACT_PARTS):
            return buffered[:number]
    return buffered[:COMPACT_GRADIENTS]
