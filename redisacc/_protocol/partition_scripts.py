"""Crosses into Lua for gradients whose parts lie in partitions: one typed function for each script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from redisacc._format import buffered as buffered_format
from redisacc._format.keys import Keys
from redisacc._format.weights import weight_text
from redisacc._protocol.replication import check_replicated
from redisacc._protocol.scripts import Counted, Full, Request, Scripts
from redisacc._redis.fast_socket import Argument
from redisacc._redis.script_loader import load
from redisacc._redis.transport import TIMEOUT, Transport
from redisacc._text import shown
from redisacc.errors import CorruptDataError

_MEMBER = re.compile(rb"([0-9a-z-]{1,64}) ([0-9]{1,7})")


@dataclass(frozen=True, slots=True)
class StoredAttempt:
    """An attempt to store a gradient, as the leader lists it.

    Attributes:
        id: names the parts: "SESSION-SEQUENCE-PLACE".
        parts: how many there are.
    """

    id: str
    parts: int

    def __str__(self) -> str:
        return f"{self.id} {self.parts}"

    @classmethod
    def parse(cls, key: str, member: object) -> StoredAttempt:
        """Returns the attempt that a member of the ``attempts`` set describes.

        Raises:
            CorruptDataError: redisacc did not write it.
        """
        match = _MEMBER.fullmatch(member) if isinstance(member, bytes) else None
        if match is None:
            raise CorruptDataError(f"{key} lists {shown(member)}, which is not an attempt that redisacc wrote")
        return cls(match[1].decode(), int(match[2]))


def listed_attempts(transport: Transport, keys: Keys, *, timeout: float = TIMEOUT) -> list[StoredAttempt]:
    """Returns the attempts that the leader lists: those under way, and those whose parts are to be removed.

    A gradient that was counted is not among them.

    Raises:
        CorruptDataError: redisacc did not write one of them.
    """
    # There are few: one for each upload that is under way, and those that nobody has swept yet.
    members = transport.call("ZRANGE", keys.attempts, 0, -1, timeout=timeout)
    return [StoredAttempt.parse(keys.attempts, member) for member in members]


@dataclass(frozen=True, slots=True)
class Registered:
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
        attempts: those of them that have parts.
        nbytes: how many bytes these have in the partitions.
        summed_weight: the weight that the gradient of the request has in the sum.
    """

    ids: tuple[str, ...] = ()
    attempts: tuple[StoredAttempt, ...] = ()
    nbytes: int = 0
    summed_weight: float = 1.0


class PartitionScripts(Scripts):
    """Runs the scripts that concern partitions. The errors are those of ``Scripts``."""

    def register(
        self,
        request: Request,
        *,
        gradient: str,
        parts: int,
        nbytes: int,
        lease_ms: int,
        announced: bytes = b"",
        replaced: Replaced = Replaced(),
    ) -> Registered | Counted | Full | Literal["changed"]:
        """Registers an attempt to store a gradient, before the first of its parts is written.

        Args:
            request: who sends it, and what every gradient carries.
            gradient: id of the gradient.
            parts: how many parts it has.
            nbytes: how many bytes they have together.
            lease_ms: how long the attempt may take, in milliseconds.
            announced: header of the gradient, if takers and reducers are told of it; else empty.
            replaced: the gradients whose sum is part of this one.

        Returns:
            `Registered`; or the outcome if the request is over; or, with nothing changed, `Full`, or "changed" if a
            gradient that this one replaces is gone.

        Raises:
            InvalidArgumentError: the round holds gradients of another shape.
        """
        keys, args = self._attempt(request, gradient, parts, nbytes, replaced)
        reply = self._transport.run(
            *load("register").bind(keys=keys, args={**args, "lease_ms": lease_ms, "announced": announced.hex()})
        )
        match reply:
            case [b"registered", place]:
                return Registered(str(self._number(place, "places")))
        return self._decided(request, reply)

    def commit(
        self,
        request: Request,
        *,
        gradient: str,
        place: str,
        header: bytes,
        parts: int,
        nbytes: int,
        replaced: Replaced = Replaced(),
    ) -> Counted | Full | Literal["changed", "expired"]:
        """Counts a gradient all of whose parts have been written.

        Args:
            request: who sends it, and what every gradient carries.
            gradient: id of the gradient.
            place: what ``register`` gave it.
            header: header of the gradient.
            parts: how many parts it has.
            nbytes: how many bytes they have together.
            replaced: the gradients whose sum is part of this one.

        Returns:
            The outcome. Otherwise, nothing but the attempt has ended: `Full`; "changed" if a gradient that this one
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
                    "trace": request.trace,
                    "place": place,
                    "header": header,
                    "ahead_bytes": buffered_format.ANNOUNCED_BYTES,
                    "replaced_attempts": [str(attempt) for attempt in replaced.attempts],
                },
            ),
            after=self._replicate,
        )
        if reply == [b"expired"]:
            return "expired"
        return self._decided(request, reply, replicas)

    def _attempt(
        self, request: Request, gradient: str, parts: int, nbytes: int, replaced: Replaced
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
            "parts": parts,
            "bytes": nbytes,
            "replaced_bytes": replaced.nbytes,
            "replaced": replaced.ids,
        }

    def sweep(
        self, *, limit: int, abandoned: Sequence[StoredAttempt] = (), removed: Sequence[StoredAttempt] = ()
    ) -> list[StoredAttempt]:
        """Gives up attempts whose lease is over.

        Args:
            limit: how many attempts to return at most.
            abandoned: attempts that are given up as well, by their own writer.
            removed: attempts whose parts have been removed, so that they are forgotten.

        Returns:
            Attempts whose parts are to be removed.

        Raises:
            NotReplicatedError: too few replicas know that these attempts are over. If one of them took over now, it
                would count on their parts.
        """
        reply, replicas = self._transport.run_and_read(
            *load("sweep").bind(
                keys={"attempts": self._keys.attempts},
                args={
                    "limit": limit,
                    "confirm": int(self.min_replicas > 0),
                    "abandoned": list(map(str, abandoned)),
                    "removed": list(map(str, removed)),
                },
            ),
            after=self._replicate,
        )
        match reply:
            case [b"due", *due]:
                if due and self.min_replicas:
                    check_replicated(
                        self._keys.name,
                        f"{len(due)} attempt(s) to store gradients ended",
                        replicas=self._confirmed(replicas),
                        min_replicas=self.min_replicas,
                    )
                return [StoredAttempt.parse(self._keys.attempts, member) for member in due]
        self._refuse(reply)

    def _decided(
        self, request: Request, reply: list[bytes], replicas: Sequence[object] = ()
    ) -> Counted | Full | Literal["changed"]:
        match reply:
            case [b"changed"]:
                return "changed"
            case [b"full", buffered, limit, weight]:
                return self._full(buffered, limit, weight)
        return self._counted(reply, request.round_shape, replicas)
