"""Adds gradients to a round: in place, or buffered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from redisacc._data.validation import shape_text
from redisacc._format.buffered import STAGING_MS
from redisacc._format.in_place import PackedRows
from redisacc._format.keys import Keys
from redisacc._format.weights import weight_text
from redisacc._protocol.scripts.requests import Counted, GradientRequest, RequestScripts
from redisacc._redis.script_loader import load
from redisacc._redis.sockets.fast_socket import Command
from redisacc._redis.transport import Hint


@dataclass(frozen=True)
class Full:
    """The gradient would exceed the limit of the buffered gradients. Nothing was changed.

    Attributes:
        buffered_bytes: the size of the buffered gradients.
        buffer_limit: the limit.
        weight: the weight with which the gradient would be admitted now.
    """

    buffered_bytes: int
    buffer_limit: int
    weight: float = 1.0


class ApplyScripts(RequestScripts):
    """Runs the scripts that add a gradient. Raises the errors of ``RequestScripts``."""

    def bind(self, keys: Keys, incarnation: str, inline_bytes: int | None = None) -> None:
        super().bind(keys, incarnation, inline_bytes)
        current = keys.current
        self._apply_keys = {
            "record": keys.record,
            "sums": current.sums,
            "workers": current.workers,
            "sessions": keys.sessions,
        }

    def apply(self, request: GradientRequest, packed: Sequence[PackedRows]) -> Counted | None:
        """Adds a gradient in place.

        Args:
            request: its sender, and the fields common to all gradients.
            packed: the sections of the gradient.

        Returns:
            The outcome; None if a sum would lose digits, so that the gradient has to be buffered.

        Raises:
            InvalidArgumentError: the round holds gradients of another shape.
        """
        args = self._of(request)
        args["notes"] = request.notes
        reply, replicas = self._transport.run_and_read(
            *load("apply").bind(
                keys=self._apply_keys,
                args={**args, "sections": tuple(chain.from_iterable(packed))},
            ),
            after=self._replicate,
        )
        if reply[0] == b"inexact":
            return None
        return self._counted(reply, request.round_shape, replicas)

    def buffer(
        self,
        request: GradientRequest,
        *,
        gradient: str,
        header: bytes,
        data: bytes,
        lengths: Sequence[int],
        stage: Sequence[Command],
        announced: bool = False,
        replaced: Sequence[str] = (),
        replaced_parts: Sequence[str] = (),
        summed_weight: float = 1.0,
    ) -> Counted | Full | Literal["would_accept", "changed", "unstaged"]:
        """Buffers a gradient in the round.

        Args:
            request: its sender, and the fields common to all gradients.
            gradient: id of the gradient.
            header: header of the gradient; empty to ask only whether it would be accepted.
            data: all bytes of an inline gradient; empty if it has parts.
            lengths: bytes of each part.
            stage: commands that stage the parts, sent before the script in the same round trip.
            announced: whether the gradient is announced before its parts, and gets a place in the order then.
            replaced: ids of the buffered gradients whose sum is part of this one, the oldest first.
            replaced_parts: keys of their parts.
            summed_weight: the weight that the gradient of this request has in the sum that replaces them.

        Returns:
            The outcome; or, with nothing changed: `Full`; "would_accept" if the header is empty and the gradient would
            be accepted; "changed" if a gradient that this one replaces is gone, or ``summed_weight`` is not the weight
            with which the gradient would be admitted; "unstaged" if a part wasn't there when
            the script ran, so that the request has to be sent again.

        Raises:
            InvalidArgumentError: the round holds gradients of another shape.
        """
        keys, current = self._keys, self._keys.current
        if announced:
            stage = [self.stage(request, gradient=gradient, header=header), *stage]
        reply, replicas = self._transport.run_and_read(
            *load("buffer").bind(
                keys={
                    "record": keys.record,
                    "buffered": current.buffered,
                    "inline": current.inline,
                    "workers": current.workers,
                    "sessions": keys.sessions,
                    "staged": keys.staged_parts(gradient, len(lengths)),
                    "parts": keys.parts(gradient, len(lengths)),
                    "place": [keys.place(gradient)] if lengths and not replaced else (),
                    "replaced_parts": replaced_parts,
                },
                args={
                    **self._of(request),
                    "notes": request.notes,
                    "summed_weight": weight_text(summed_weight) if replaced else "",
                    "gradient": gradient,
                    "order": request.order,
                    "header": header,
                    "data": data,
                    "ahead_bytes": str(self.announced_bytes),
                    "lengths": tuple(map(str, lengths)),
                    "replaced": replaced,
                },
            ),
            before=stage,
            after=self._replicate if header else (),
        )
        match reply:
            case [b"would_accept"]:
                return "would_accept"
            case [b"changed"]:
                return "changed"
            case [b"unstaged", _]:
                return "unstaged"
            case [b"full", buffered, limit, weight]:
                return self._full(buffered, limit, weight)
        return self._counted(reply, request.round_shape, replicas)

    def renew_upload(
        self,
        request: GradientRequest,
        *,
        attempt: str = "",
        lease_ms: int = 0,
        staged: Sequence[str] = (),
        message: str,
        before: Sequence[Command] = (),
    ) -> Literal["renewed", "over", "expired"]:
        """Renews the lease of an upload that is under way.

        Args:
            request: its sender, and the fields common to all gradients.
            attempt: the attempt, as the leader lists it, if its parts are in partitions.
            lease_ms: how long it may take from now on, in milliseconds.
            staged: otherwise, the keys whose expiry begins again.
            message: tells takers and reducers that the upload continues.
            before: commands that are sent before the script in the same round trip.

        Returns:
            "over" if its gradient would be dropped; "expired" if the attempt was given up, so that parts may be gone.
        """
        keys = self._keys
        reply = self._transport.run(
            *load("renew_upload").bind(
                keys={
                    "record": keys.record,
                    "workers": keys.current.workers,
                    "attempts": keys.attempts,
                    "staged": staged,
                },
                args={
                    "incarnation": self.incarnation,
                    "worker": request.worker,
                    "local_step": str(request.local_step),
                    "once": "1" if request.once else "0",
                    "attempt": attempt,
                    "lease_ms": lease_ms,
                    "expiry_ms": str(STAGING_MS),
                    "message": message,
                },
            ),
            before=before,
        )
        match reply:
            case [b"renewed"]:
                return "renewed"
            case [b"over"]:
                return "over"
            case [b"expired"]:
                return "expired"
        self._refuse(reply)

    def stage(self, request: GradientRequest, *, gradient: str, header: bytes, holds_ms: int = 0) -> Hint:
        """Returns the call of the script that announces a gradient. Its reply is not needed.

        Args:
            request: its sender, and the fields common to all gradients.
            gradient: id of the gradient.
            header: header of the gradient.
            holds_ms: for how long it keeps its place although nothing arrives, in milliseconds; 0: as usual.
        """
        keys = self._keys
        return Hint.running(
            *load("stage").bind(
                keys={
                    "record": keys.record,
                    "buffered": keys.current.buffered,
                    "workers": keys.current.workers,
                    "place": keys.place(gradient),
                },
                args={
                    "incarnation": self.incarnation,
                    "worker": request.worker,
                    "local_step": str(request.local_step),
                    "once": "1" if request.once else "0",
                    "round_shape": shape_text(request.round_shape),
                    "weight": "1" if request.weight == 1 else weight_text(request.weight),
                    "gradient": gradient,
                    "order": request.order,
                    "header": header.hex(),
                    "holds_ms": holds_ms,
                    "expiry_ms": str(STAGING_MS),
                },
            )
        )

    def _full(self, buffered: bytes, limit: bytes, weight: bytes) -> Full:
        return Full(self._number(buffered, "buffered_bytes"), self._number(limit, "buffer_limit"), self._weight(weight))
