"""Crosses into Lua for reducers, as ``scripts`` does for accumulators: one typed function for each script."""

from __future__ import annotations

from redisacc._format.keys import Keys
from redisacc._protocol.scripts.replies import corrupt
from redisacc._redis.script_loader import load
from redisacc._redis.transport import Transport
from redisacc._text import printable

# How long a call tries to reach the server, in seconds. A reducer tries again by itself.
TIMEOUT = 3.0


class ReducerScripts:
    """Runs the scripts on the lease of the reducer of one accumulator, or of one of its partitions.

    Every function raises the errors of `Transport.run`, and CorruptDataError if a reply makes no sense.

    Args:
        transport: the server.
        keys: the keys of the accumulator.
        position: the position of the partition; None: there are no partitions.
    """

    def __init__(self, transport: Transport, keys: Keys, position: int | None) -> None:
        self._transport = transport
        self._key = keys.reducer(position)

    def hold_reducer(self, *, holder: str, who: str, stored: int, late: int, sums: str, lease_ms: int) -> str | None:
        """Takes or extends the lease.

        Args:
            holder: the random id of the reducer.
            who: a name of the reducer, for people.
            stored: the number of rounds whose whole sum it stored in time.
            late: the number of rounds that were over before it had stored their sum.
            sums: the sums that it keeps, as ``sums_text`` writes them.
            lease_ms: how long the lease lasts unless it is extended, in milliseconds.

        Returns:
            None if the holder has the lease now; otherwise the printable name of the other holder.
        """
        reply = self._transport.run(
            *load("hold_reducer").bind(
                keys={"reducer": self._key},
                args={
                    "holder": holder,
                    "who": who,
                    "stored": stored,
                    "late": late,
                    "sums": sums,
                    "lease_ms": lease_ms,
                },
            ),
            timeout=TIMEOUT,
        )
        match reply:
            case [b"held"]:
                return None
            case [b"taken", other]:
                return printable(other)
        raise corrupt(self._key, reply)

    def release_reducer(self, *, holder: str) -> bool:
        """Gives the lease back. Returns whether the holder had it."""
        reply = self._transport.run(
            *load("release_reducer").bind(keys={"reducer": self._key}, args={"holder": holder}),
            timeout=TIMEOUT,
        )
        match reply:
            case [b"released"]:
                return True
            case [b"unknown"]:
                return False
        raise corrupt(self._key, reply)
