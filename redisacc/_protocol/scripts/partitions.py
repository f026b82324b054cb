"""Crosses into Lua for gradients whose parts are in partitions: one typed function for each script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from redisacc._format.attempts import StoredAttempt
from redisacc._format.weights import weight_text
from redisacc._protocol.scripts.accumulators import Scripts
from redisacc._protocol.scripts.applying import Full
from redisacc._protocol.scripts.requests import Counted, GradientRequest
from redisacc._redis.script_loader import load
from redisacc._redis.sockets.fast_socket import Argument


@dataclass(frozen=True, slots=True)
class RegisteredGradient:
    """An attempt may begin.

    Attributes:
        place: the place of the gradient, which also numbers the attempt.
    """

    place: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """The buffered gradients that a sum replaces.

    Attributes:
        ids: their ids, the oldest first.
        attempts: the attempts of the gradients that have parts.
        nbytes: how many bytes these parts have in the partitions.
        summed_weight: the weight that the gradient of the request has in the sum.
    """

    ids: tuple[str, ...] = ()
    attempts: tuple[StoredAttempt, ...] = ()
    nbytes: int = 0
    summed_weight: float = 1.0


NOTHING_REPLACED = Replaced()


class PartitionScripts(Scripts):
    """Runs the scripts that concern partitions. Raises the errors of ``Scripts``."""

    def register(
        self,
        request: GradientRequest,
        *,
        gradient: str,
        parts: int,
        nbytes: int,
        lease_ms: int,
        announced: bytes = b"",
        holds_ms: int = 0,
        replaced: Replaced = NOTHING_REPLACED,
    ) -> RegisteredGradient | Counted | Full | Literal["changed"]:
        """Registers an attempt to store a gradient, before the first of its parts is written.

        Args:
            request: its sender, and the fields common to all gradients.
            gradient: id of the gradient.
            parts: how many parts it has.
            nbytes: how many bytes they have together.
            lease_ms: how long the attempt may take, in milliseconds.
            announced: header of the gradient, if takers and reducers are told of it; else empty.
            holds_ms: for how long it keeps its place although nothing arrives, in milliseconds; 0: as usual.
            replaced: the gradients whose sum is part of this one.

        Returns:
            `RegisteredGradient`; or the outcome if the request is over; or, with nothing changed, `Full`, or "changed"
            if a gradient that this one replaces is gone.

        Raises:
            InvalidArgumentError: the round holds gradients of another shape.
        """
        keys, args = self._attempt(request, gradient, parts, nbytes, replaced)
        reply = self._transport.run(
            *load("register").bind(
                keys=keys,
                args={**args, "lease_ms": lease_ms, "announced": announced.hex(), "holds_ms": holds_ms},
            )
        )
        match reply:
            case [b"registered", place]:
                return RegisteredGradient(str(self._number(place, "places")))
        return self._decided(request, reply)

    def commit(
        self,
        request: GradientRequest,
        *,
        gradient: str,
        place: str,
        header: bytes,
        parts: int,
        nbytes: int,
        replaced: Replaced = NOTHING_REPLACED,
    ) -> Counted | Full | Literal["changed", "expired"]:
        """Counts a gradient after all its parts have been written.

        Args:
            request: its sender, and the fields common to all gradients.
            gradient: id of the gradient.
            place: the place that ``register`` gave it.
            header: header of the gradient.
            parts: how many parts it has.
            nbytes: how many bytes they have together.
            replaced: the gradients whose sum is part of this one.

        Returns:
            The outcome. Or, if only the attempt has ended: `Full`; "changed" if a gradient that this one
            replaces is gone; "expired" if a sweeper gave the attempt up, so that parts may be gone.

        Raises:
            InvalidArgumentError: the round holds gradients of another shape.
        """
        keys, args = self._attempt(request, gradient, parts, nbytes, replaced)
        reply, replicas = self._transport.run_and_read(
            *load("commit").bind(
                keys=keys,
                args={
                    **args,
                    "notes": request.notes,
                    "place": place,
                    "header": header,
                    "ahead_bytes": self.announced_bytes,
                    "replaced_attempts": [str(attempt) for attempt in replaced.attempts],
                },
            ),
            after=self._replicate,
        )
        if reply == [b"expired"]:
            return "expired"
        return self._decided(request, reply, replicas)

    def _attempt(
        self, request: GradientRequest, gradient: str, parts: int, nbytes: int, replaced: Replaced
    ) -> tuple[dict[str, str], dict[str, Argument | Sequence[Argument]]]:
        """Returns the keys and the arguments that `register` and `commit` have in common."""
        keys, current = self._keys, self._keys.current
        return {
            "record": keys.record,
            "buffered": current.buffered,
            "inline": current.inline,
            "workers": current.workers,
            "sessions": keys.sessions,
            "attempts": keys.attempts,
        }, {
            **self._of(request),
            "summed_weight": weight_text(replaced.summed_weight) if replaced.ids else "",
            "gradient": gradient,
            "order": request.order,
            "parts": parts,
            "bytes": nbytes,
            "replaced_bytes": replaced.nbytes,
            "replaced": replaced.ids,
        }

    def _decided(
        self, request: GradientRequest, reply: list[bytes], replicas: Sequence[object] = ()
    ) -> Counted | Full | Literal["changed"]:
        match reply:
            case [b"changed"]:
                return "changed"
            case [b"full", buffered, limit, weight]:
                return self._full(buffered, limit, weight)
        return self._counted(reply, request.round_shape, replicas)
