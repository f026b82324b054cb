"""Deletes an accumulator, and removes keys that belong to nothing."""

from __future__ import annotations

from collections.abc import Mapping

from redisacc._protocol.scripts.base import AccumulatorScripts
from redisacc._protocol.scripts.deletion import Deletion, run_delete
from redisacc._redis.script_loader import load
from redisacc._redis.transport import TIMEOUT


class DeleteScripts(AccumulatorScripts):
    """Runs the scripts that remove keys. Raises the errors of ``RequestScripts``."""

    def delete(self, *, finish: bool, timeout: float = TIMEOUT) -> Deletion:
        """Closes the accumulator for everybody, or removes it once it is closed.

        Args:
            finish: whether to remove the accumulator instead of closing it.
            timeout: how long to try to reach the server, in seconds.
        """
        keys, current = self._keys, self._keys.current
        others = [current.sums, current.buffered, current.inline, current.workers, keys.sessions, keys.queue]
        others += [keys.takers, keys.taken, keys.recovered, keys.compacting, keys.attempts, keys.crew, *keys.reducers]
        return run_delete(
            self._transport,
            keys.record,
            others,
            incarnation=self.incarnation,
            finish=finish,
            wakes=True,
            timeout=timeout,
        )

    def remove_orphans(self, *, owners: Mapping[str, str]) -> int:
        """Removes keys that have no owner. The caller ensures that no taken round uses these parts.

        Args:
            owners: key to remove → the owner that would mean it is in use, as the header of the script lists it.

        Returns:
            The number of keys that were removed; 0 if the accumulator is no longer as it was found.
        """
        keys = self._keys
        reply = self._transport.run(
            *load("remove_orphans").bind(
                keys={
                    "record": keys.record,
                    "taken": keys.taken,
                    "buffered": keys.current.buffered,
                    "garbage": list(owners),
                },
                args={"incarnation": self.incarnation, "owners": list(owners.values())},
            )
        )
        match reply:
            case [b"removed", number]:
                return self._number(number, "remove_orphans")
            case [b"changed"]:
                return 0
        self._refuse(reply)
