"""Crosses into Lua for the list of attempts, which accumulators and parameters with partitions have."""

from __future__ import annotations

from collections.abc import Sequence

from redisacc._format.attempts import MOST_PARTS, StoredAttempt
from redisacc._format.keys import PartitionedKeys
from redisacc._protocol.scripts.replication import check_replicated, confirmed, wait_commands
from redisacc._protocol.scripts.replies import corrupt
from redisacc._redis.script_loader import load
from redisacc._redis.transport import TIMEOUT, Transport


class AttemptScripts:
    """Runs the script on the attempts of one accumulator, or of the parameters of one name.

    It raises the errors of `Transport.run`, and CorruptDataError if the list holds what redisacc never writes.

    Args:
        transport: the way to the leader.
        keys: the keys of the accumulator, or of the parameters.
        min_replicas: how many replicas of the leader must confirm that attempts are over; 0 asks none.
    """

    def __init__(self, transport: Transport, keys: PartitionedKeys, *, min_replicas: int = 0) -> None:
        self._transport = transport
        self._keys = keys
        self._min_replicas = min_replicas

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
                    "most_parts": MOST_PARTS,
                    "confirm": int(self._min_replicas > 0),
                    "abandoned": list(map(str, abandoned)),
                    "removed": list(map(str, removed)),
                },
            ),
            after=wait_commands(self._min_replicas),
        )
        match reply:
            case [b"due", *due]:
                if due:
                    check_replicated(
                        self._keys.name,
                        f"{len(due)} attempt(s) ended",
                        replicas=confirmed(self._keys.attempts, replicas),
                        min_replicas=self._min_replicas,
                    )
                return [StoredAttempt.parse(self._keys.attempts, member) for member in due]
        raise corrupt(self._keys.attempts, reply)


def listed_attempts(transport: Transport, keys: PartitionedKeys, *, timeout: float = TIMEOUT) -> list[StoredAttempt]:
    """Returns the attempts that the leader lists: those under way, and those whose parts are to be removed.

    A gradient that was counted is not among them, nor is a blob of the version that is published.

    Raises:
        CorruptDataError: redisacc did not write one of them.
    """
    # There are few: one for each upload that is under way, and those that nobody has swept yet.
    members = transport.call("ZRANGE", keys.attempts, 0, -1, timeout=timeout)
    return [StoredAttempt.parse(keys.attempts, member) for member in members]
