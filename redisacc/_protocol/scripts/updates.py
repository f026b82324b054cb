"""Crosses into Lua for updates, which an optimiser makes of rounds: one typed function for each script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from redisacc._format.attempts import StoredAttempt
from redisacc._format.keys import Keys, ParameterKeys
from redisacc._protocol.scripts.parameters import Follows, ParameterScripts, Refusal
from redisacc._redis.script_loader import load
from redisacc._redis.sockets.fast_socket import Command
from redisacc._redis.transport import Transport


@dataclass(frozen=True)
class Renumbered:
    """An attempt needs another number, so that its version gets another id.

    Attributes:
        number: the number that is free.
    """

    number: int


@dataclass(frozen=True)
class EndedRound:
    """What the commit of an update removes from the accumulator.

    Attributes:
        token: the id of the take that was granted the round.
        parts: keys of the parts of its gradients, in the slot of the record.
        attempts: its gradients in partitions.
        more: whether there are further parts, which ``acknowledge`` removes.
    """

    token: str
    parts: Sequence[str] = ()
    attempts: Sequence[StoredAttempt] = ()
    more: bool = False


class UpdateScripts(ParameterScripts):
    """Runs the scripts on the parameters and the accumulator of one training.

    Args:
        transport: the server.
        keys: the keys of the parameters.
        gradients: the keys of the accumulator of the same name.
    """

    def __init__(self, transport: Transport, keys: ParameterKeys, gradients: Keys) -> None:
        super().__init__(transport, keys)
        self._gradients = gradients

    def register_update(
        self,
        follows: Follows,
        *,
        version: str,
        number: int,
        order: str,
        lease_ms: int,
        blobs: Sequence[StoredAttempt],
    ) -> Literal["registered", "published"] | Renumbered | Refusal:
        """Registers an update in partitions, and tells updaters of it.

        Args:
            follows: which version it is.
            version: its id, which ends with the number.
            number: the number of the attempt: one more than those before it.
            order: the message to updaters.
            lease_ms: how long the attempt may take, in milliseconds.
            blobs: the blobs of the version.

        Returns:
            "registered"; "published" if the version is visible already; or, with nothing changed, `Renumbered`, or why
            there can be no such version.

        Raises:
            NotFoundError: the parameters were deleted.
        """
        reply = self._transport.run(
            *load("register_update").bind(
                keys=self._leader_keys(),
                args={
                    **self._of(follows, version),
                    "number": number,
                    "order": order,
                    "lease_ms": lease_ms,
                    "blobs": list(map(str, blobs)),
                },
            )
        )
        match reply:
            case [b"registered"]:
                return "registered"
            case [b"published"]:
                return "published"
            case [b"renumbered", free] if free.isdigit() and len(free) <= 15:
                return Renumbered(int(free))
        return self._refused(reply)

    def commit_update(
        self,
        follows: Follows,
        ended: EndedRound,
        *,
        version: str,
        event: str,
        fields: Sequence[str],
        past: str = "",
        parts: Mapping[str, int] = {},
        unused: Sequence[str] = (),
        registered: bool = False,
        blobs: Sequence[StoredAttempt] = (),
        retired: Sequence[StoredAttempt] = (),
        removed: Sequence[StoredAttempt] = (),
        before: Sequence[Command] = (),
        after: Sequence[Command] = (),
    ) -> Literal["published", "expired", "unknown"] | Refusal:
        """Publishes the version that an optimiser has made of a round, and removes the round.

        Args:
            follows: which version it is.
            ended: the round.
            version: as for ``publish``, like what follows.
            event: see there.
            fields: see there.
            past: see there.
            parts: see there.
            unused: see there.
            registered: whether ``register_update`` has begun it, and its parts are in partitions.
            blobs: see there.
            retired: see there.
            removed: see there.
            before: see there.
            after: see there.

        Returns:
            "published"; or, with nothing changed: "unknown" if there is no such round, because another chief has
            recovered it; or as ``publish``.

        Raises:
            NotFoundError: the parameters were deleted.
        """
        of_round = self._gradients.taken_round(ended.token)
        reply, _ = self._transport.run_and_read(
            *load("commit_update").bind(
                keys={
                    **self._leader_keys(),
                    "taken": self._gradients.taken,
                    "taken_sums": of_round.sums,
                    "taken_buffered": of_round.buffered,
                    "taken_inline": of_round.inline,
                    "taken_workers": of_round.workers,
                    "round_attempts": self._gradients.attempts,
                    "history": self._history(past),
                    "parts": list(parts),
                    "unused": unused,
                    "round_parts": ended.parts,
                },
                args={
                    **self._of(follows, version),
                    "registered": int(registered),
                    "event": event,
                    "token": ended.token,
                    "more": int(ended.more),
                    "past": past,
                    "lengths": list(parts.values()),
                    "blobs": list(map(str, blobs)),
                    "retired": list(map(str, retired)),
                    "removed": list(map(str, removed)),
                    "fields": fields,
                    "round_removed": list(map(str, ended.attempts)),
                },
            ),
            before=before,
            after=after,
        )
        match reply:
            case [b"published"]:
                return "published"
            case [b"expired"]:
                return "expired"
            case [b"unknown"]:
                return "unknown"
        return self._refused(reply)
