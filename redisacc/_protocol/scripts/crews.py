"""Crosses into Lua for crews, as ``scripts`` does for accumulators: one typed function for each script."""

from __future__ import annotations

from dataclasses import dataclass

from redisacc._format.keys import Keys, ParameterKeys
from redisacc._protocol.scripts.replies import corrupt
from redisacc._redis.script_loader import load
from redisacc._redis.transport import TIMEOUT, Transport
from redisacc._text import printable, shown
from redisacc.errors import NotFoundError


@dataclass(frozen=True)
class HeldByOther:
    """A lease that another process holds.

    Attributes:
        left: seconds until it expires, unless it is extended.
        process: the identity of its process, as far as it can be trusted.
        who: a printable name of the holder, for people.
    """

    left: float
    process: str
    who: str


class CrewScripts:
    """Runs the scripts on the crew of one name.

    Every function raises the errors of `Transport.run`, and CorruptDataError if an entry or a reply holds what redisacc
    never writes.

    Args:
        transport: the server.
        keys: the keys of the name.
    """

    def __init__(self, transport: Transport, keys: Keys) -> None:
        self._transport = transport
        self._keys = keys

    def hold_lease(
        self,
        *,
        place: str,
        holder: str,
        process: str,
        who: str,
        lease_ms: int,
        dead: str = "",
        renews: bool = False,
        extends: bool = False,
        timeout: float = TIMEOUT,
    ) -> HeldByOther | None:
        """Takes or extends a lease.

        Args:
            place: "chief", or "worker" and a number.
            holder: the random id of the holder, without spaces.
            process: the identity of its process, without spaces.
            who: a name of the holder, for people.
            lease_ms: how long the lease lasts unless it is extended, in milliseconds.
            dead: the identity of a dead process, whose lease is taken as if it had expired; "": no process.
            renews: whether the holder takes it only in an accumulator: it succeeds another one, or had it before.
            extends: whether it only extends a lease that is there.
            timeout: how long to try to reach the server, in seconds.

        Returns:
            None if the holder has the lease now; otherwise the other holder.

        Raises:
            NotFoundError: there is no such lease, and it ``extends``; or it ``renews``, and there is no
                accumulator either.
        """
        reply = self._transport.run(
            *load("hold_lease").bind(
                keys={"record": self._keys.record, "crew": self._keys.crew},
                args={
                    "place": place,
                    "holder": holder,
                    "process": process,
                    "who": who,
                    "lease_ms": lease_ms,
                    "dead": dead,
                    "renews": int(renews),
                    "extends": int(extends),
                },
            ),
            timeout=timeout,
        )
        match reply:
            case [b"held"]:
                return None
            case [b"taken", left, its_process, other] if left.isdigit() and len(left) <= 15:
                return HeldByOther(int(left) / 1000, its_process.decode("ascii", "replace"), printable(other))
            case [b"missing"]:
                raise NotFoundError(f"{shown(self._keys.name)} was deleted, and its leases with it")
        raise corrupt(self._keys.crew, reply)

    def release_lease(self, *, place: str, holder: str, process: str, timeout: float = TIMEOUT) -> bool:
        """Gives a lease back, with what its process has claimed to have of a training that the server has lost.

        Args:
            place: "chief", or "worker" and a number.
            holder: the random id of the holder.
            process: the identity of its process.
            timeout: how long to try to reach the server, in seconds.

        Returns:
            Whether the holder had it.
        """
        reply = self._transport.run(
            *load("release_lease").bind(
                keys={"crew": self._keys.crew, "claims": ParameterKeys(self._keys.name).claims},
                args={"place": place, "holder": holder, "process": process},
            ),
            timeout=timeout,
        )
        match reply:
            case [b"released"]:
                return True
            case [b"unknown"]:
                return False
        raise corrupt(self._keys.crew, reply)
