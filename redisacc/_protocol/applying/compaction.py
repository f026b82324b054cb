"""Compacts the buffered gradients of a round that have reached their limit.

A client fetches some of the buffered gradients, adds them and its own in numpy, and stores the sum in their place. The
script swaps the sum in only if everything that it replaces is still there. So nothing is lost or counted twice,
whatever other processes do, and the server spends no time on additions.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from redisacc._arrays.gradient import Gradient
from redisacc._arrays.validation import shape_text
from redisacc._format import buffered as buffered_format
from redisacc._format.buffered import BufferedGradient, PartMissingError
from redisacc._format.keys import Keys
from redisacc._protocol.applying.attempts import Way
from redisacc._protocol.parts.inline import InlineReader
from redisacc._protocol.rounds.granted_rounds import PARTS_PER_CALL, free_dropped
from redisacc._protocol.scripts import Reply
from redisacc._protocol.sessions import GradientRequest
from redisacc._protocol.sums.cells import SumOptions
from redisacc._protocol.sums.part_sums import PartSums
from redisacc._telemetry.operation import Operation
from redisacc._text import shown
from redisacc._wire.scans import scan
from redisacc.errors import AccumulatorFullError, CorruptDataError

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


# Sends a gradient, given the request, the buffered gradients that it replaces, and the weight that the gradient of the
# request has in it.
Send = Callable[[Gradient, GradientRequest, Sequence[BufferedGradient], float], Reply]


class Compactor:
    """Compacts the buffered gradients of one accumulator."""

    def __init__(self, way: Way) -> None:
        self._transport, self._keys, self._spec, self._telemetry = way.transport, way.keys, way.spec, way.telemetry

    def make_room(self, gradient: Gradient, request: GradientRequest, full: Reply, send: Send) -> Reply:
        """Compacts, or pauses while another client does.

        Args:
            gradient: the gradient that exceeds the limit.
            request: the request that applies it.
            full: the server's reply to it.
            send: sends a gradient in the name of the request, in place of some buffered ones.

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
            with self._telemetry.observe("compact", request.worker) as operation:
                return self._compact(gradient, request, full, send, operation)
        except PartMissingError as error:
            if self._is_lost(error):
                why = f"compacting needs {error.args[0]}, which is lost, as the next take will report"
                raise no_room(self._keys, gradient, full, why) from None
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

    def _compact(
        self, gradient: Gradient, request: GradientRequest, full: Reply, send: Send, operation: Operation
    ) -> Reply:
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
            reply = self._swap(gradient, request, send, chosen, full.weight)
            if reply.outcome == "unconfirmed":
                raise no_room(self._keys, gradient, full, "replicas do not confirm a sum of them in time")
            if reply.outcome == "swapped":
                # Only this proves that nobody needs them. Any other gradient of the request that counts, or is
                # dropped, leaves them where they are: in this round, or in one that was taken meanwhile.
                operation.note_compacted(len(chosen))
                free_dropped(self._transport, self._keys, chosen)
                reply.outcome = "applied"
            # If others took the round or buffered gradients meanwhile, this does not show what compacting can do.
            if reply.outcome != "full" or reply.buffered_bytes != seen:
                return reply
            full = reply
        raise no_room(self._keys, gradient, full, "compacting does not help")

    def _swap(
        self,
        gradient: Gradient,
        request: GradientRequest,
        send: Send,
        chosen: Sequence[BufferedGradient],
        weight: float,
    ) -> Reply:
        round_sum = self._spec.empty_sum(request.round_shape, where=self._keys.current.sums)
        inline = InlineReader(self._transport, self._keys.current, chosen)
        PartSums(self._transport, round_sum, SumOptions(self._keys)).complete(chosen, inline)
        # The server admits the sum only if the gradient still has this weight: it depends on the staleness.
        round_sum.add(replace(gradient, factor=weight))
        logger.debug("%s: compacting %d buffered gradients", self._keys.name, len(chosen))
        return send(round_sum.sum() if chosen else gradient, request, chosen, weight)


def no_room(keys: Keys, gradient: Gradient, full: Reply, why: str) -> AccumulatorFullError:
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
