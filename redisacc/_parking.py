"""Parks a gradient: stages its parts, has it taken in, and makes room where the parked ones have reached their limit.

Room is made by folding: the client fetches the oldest parked gradients, adds them and its own up in numpy, and parks
the sum in their place. The script swaps it in only if all that it replaces are still there, so nothing is lost and
nothing counted twice whoever else is at work. Adding takes the server no time.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from redisacc import _parked
from redisacc._arguments import shape_text
from redisacc._dtypes import DType
from redisacc._fetching import add_parked
from redisacc._keys import Keys
from redisacc._link import Link
from redisacc._parked import Gradient, Parked, PartMissing
from redisacc._rounds import scan
from redisacc._scripts import Counted, Full, Request, Scripts
from redisacc.errors import AccumulatorFullError, CorruptDataError, ServerError

logger = logging.getLogger("redisacc")

# What the parked gradients of a round may take together, unless an accumulator says otherwise.
PARKED_LIMIT = 256 * 2**20

# Gradients of more bytes than this first ask whether they would be taken: a round trip is little beside the time
# to upload them for nothing.
ASK_BYTES = 4 * 2**20

# What is folded at once: so many gradients, for the script that removes them must be short, and so many bytes, for
# they pass through this process.
FOLD_GRADIENTS = 64
FOLD_BYTES = 128 * 2**20

# For how long one client may fold while others wait, in milliseconds; and how long they pause between tries, in
# seconds. One that dies while it folds costs the others this long and nothing else.
FOLDING_MS = 5000
FOLDING_PAUSE = 0.01

# How long a gradient is tried again, in seconds, because its parts were lost or others filled the room first.
PATIENCE = 30.0


Reply = Counted | Full | Literal["welcome", "changed", "unstaged"]


class Parking:
    """Parks gradients of one accumulator.

    Args:
        total: makes what adds up gradients of a round shape (``DenseTotal`` or ``SparseTotal``).
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        scripts: Scripts,
        *,
        dtype: DType,
        sparse: bool,
        total: Callable[[tuple[int, ...]], Any],
    ) -> None:
        self._link = link
        self._keys = keys
        self._scripts = scripts
        self._dtype = dtype
        self._sparse = sparse
        self._total = total

    def park(self, gradient: Gradient, request: Request) -> Counted:
        """Parks a gradient.

        Raises:
            AccumulatorFullError: there is no room for it, and none can be made.
        """
        give_up = time.monotonic() + PATIENCE
        ask_first = gradient.nbytes > ASK_BYTES
        while True:
            reply = self._send(gradient, request, ask=ask_first)
            if reply == "welcome":
                reply = self._send(gradient, request)
            if isinstance(reply, Full):
                ask_first = True
                reply = self._make_room(gradient, request, reply)
            if isinstance(reply, Counted):
                return reply
            if time.monotonic() >= give_up:
                if isinstance(reply, Full):
                    raise self._full(gradient, reply, f"others filled what was freed for {PATIENCE:.0f} s")
                raise ServerError(
                    f"a gradient for {self._keys.name!r} could not be parked in {PATIENCE:.0f} s: its staged parts "
                    "were lost every time"
                )

    def _send(
        self, gradient: Gradient, request: Request, *, replaced: Sequence[Parked] = (), ask: bool = False
    ) -> Reply:
        # The same id when the request is sent again, so that the same keys are written. But a sum has one of its own:
        # a late copy of what was staged before must not get into its place.
        name = f"{request.client.id}-{request.sequence}"
        if replaced:
            name += f"-{secrets.token_hex(4)}"
        staged = _parked.stage(self._keys, name, gradient)
        # A small one costs no more than the question.
        ask = ask and not staged.data
        return self._scripts.park(
            request,
            gradient=name,
            header=b"" if ask else staged.header,
            data=staged.data,
            lengths=staged.lengths,
            stage=() if ask else staged.commands,
            replaced=[parked.id for parked in replaced] if replaced else (),
            replaced_parts=[key for parked in replaced for key in _parked.part_keys(self._keys, parked)],
        )

    def _make_room(self, gradient: Gradient, request: Request, full: Full) -> Reply:
        """Folds, or lets the one who is at it go on."""
        token = secrets.token_hex(8)
        if self._link.call("SET", self._keys.folding, token, "NX", "PX", FOLDING_MS) is None and not self._folds(token):
            time.sleep(FOLDING_PAUSE)
            return full
        try:
            return self._fold(gradient, request)
        except PartMissing:
            return full
        finally:
            if self._folds(token):
                self._link.call("UNLINK", self._keys.folding)

    def _folds(self, token: str) -> bool:
        """Whether it is this one's turn. Its SET may have been sent twice, and the second copy have found the first."""
        reply: object = self._link.call("GET", self._keys.folding)
        return reply == token.encode()

    def _full(self, gradient: Gradient, full: Full, why: str) -> AccumulatorFullError:
        return AccumulatorFullError(
            f"a gradient of {gradient.nbytes} bytes has no room in {self._keys.name!r}: its parked gradients have "
            f"{full.parked_bytes} of {full.parked_limit} bytes, and {why}. Take the round, or create the accumulator "
            "with a larger parked_limit"
        )

    def _fold(self, gradient: Gradient, request: Request) -> Reply:
        """Parks the sum of the oldest parked gradients and this one in their place.

        Raises:
            AccumulatorFullError: the sum has no room either.
        """
        shape = request.round_shape
        entries = scan(self._link, self._keys.current.parked)
        try:
            parked = _parked.parse(self._keys, entries, dtype=self._dtype, sparse=self._sparse, round_shape=shape)
        except CorruptDataError:
            if self._link.call("HGET", self._keys.record, "round_shape") == shape_text(shape).encode():
                raise
            # Gradients of another shape: the round was taken meanwhile, and this is the next one.
            return "changed"
        seen = sum(held.nbytes for held in parked)
        reply = self._swap(gradient, request, _cheapest(parked))
        if isinstance(reply, Full) and reply.parked_bytes == seen:
            reply = self._swap(gradient, request, parked[:FOLD_GRADIENTS])
        # Where others took the round or parked meanwhile, this says nothing of what folding can do: try again.
        if isinstance(reply, Full) and reply.parked_bytes == seen:
            raise self._full(gradient, reply, "adding some of them up does not help")
        return reply

    def _swap(self, gradient: Gradient, request: Request, chosen: Sequence[Parked]) -> Reply:
        total = self._total(request.round_shape)
        add_parked(self._link, self._keys, self._keys.current, chosen, total=total)
        total.add(gradient)
        logger.debug("%s: folds %d parked gradients", self._keys.name, len(chosen))
        reply = self._send(total.sum() if chosen else gradient, request, replaced=chosen)
        if isinstance(reply, Counted):
            _parked.remove_large(self._link, self._keys, chosen)
        return reply


def _cheapest(parked: Sequence[Parked]) -> Sequence[Parked]:
    """The most gradients next to each other that are folded at once, the oldest of equally many.

    A large sum at the front is left alone: moving it again for each gradient that comes would free nothing.
    """
    best, size, first = parked[:1], 0, 0
    for last, candidate in enumerate(parked):
        size += candidate.nbytes
        while size > FOLD_BYTES or last - first >= FOLD_GRADIENTS:
            size -= parked[first].nbytes
            first += 1
        if last + 1 - first > len(best):
            best = parked[first : last + 1]
    return best
