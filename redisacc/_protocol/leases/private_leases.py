"""Leases of private accumulators, which have no shared name and are removed with the handle that made them.

An owner that is killed cannot clean up. Therefore, every key of a private accumulator has an expiry, which a thread of
the owner extends as long as the owner lives.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

from redisacc._clock import durations
from redisacc._format.attempts import part_keys
from redisacc._format.buffered import listed_part_keys
from redisacc._format.keys import Keys
from redisacc._protocol.leases.renewals import interval_of, renewals_over
from redisacc._protocol.lifecycle.deletion import delete
from redisacc._protocol.parts.sweep import listed_attempts
from redisacc._protocol.rounds.round_reader import all_rounds
from redisacc._wire.scans import scan
from redisacc._wire.transport import Transport, limited
from redisacc.errors import RedisAccError

logger = logging.getLogger("redisacc")

# How long a private accumulator outlives its owner.
OWNER_LEASE_MS = 60_000
# How long a call that renews it tries to reach the server, in seconds.
SILENCE = 2.0


@dataclass(eq=False)
class PrivateLease:
    """The lease of a private accumulator, which its owner, this process, renews from ``begin`` on.

    Attributes:
        transport: the way to the server.
        keys: the keys of the accumulator.
        incarnation: which accumulator of that name.
        lease_ms: how long it lasts, in milliseconds.
        is_over: whether it is renewed no longer.
    """

    transport: Transport
    keys: Keys
    incarnation: str
    lease_ms: int
    is_over: bool = False

    def __post_init__(self) -> None:
        self._pid = os.getpid()
        self._renewals = renewals_over(self.transport)

    def begin(self) -> None:
        """Renews it from now on."""
        self._renewals.add(self)

    def end(self) -> None:
        """Stops renewing it. A finalizer may call this in any thread."""
        self.is_over = True
        self._renewals.drop_ended()

    def release(self) -> None:
        """Deletes the accumulator when its handle is closed, unless this process is a child of its owner."""
        if os.getpid() != self._pid:
            return
        self.end()
        try:
            with limited(durations.release):
                delete(self.transport, self.keys, self.incarnation)
        except RedisAccError as error:
            logger.debug("private accumulator %s will be removed when its lease ends: %s", self.keys.name, error)

    @property
    def interval(self) -> float:
        """Seconds between two renewals."""
        return interval_of(self.lease_ms / 1000)

    def renew(self) -> None:
        """Extends the life of every key of the accumulator, and raises nothing."""
        try:
            # If the server is silent, the leases of other accumulators on it must not run out meanwhile.
            with limited(SILENCE):
                for keys in self._every_key():
                    self.transport.pipeline([("PEXPIRE", key, self.lease_ms) for key in keys])
        except Exception as error:  # noqa: BLE001 - no failure may end the leases of the others
            if not self.is_over:
                logger.warning(
                    "cannot renew the lease of private accumulator %s: %s",
                    self.keys.name,
                    error,
                    extra={"accumulator": self.keys.name},
                )

    def _every_key(self) -> Iterator[list[str]]:
        """Yields the keys of the accumulator, as many at once as one pipeline extends."""
        transport, keys = self.transport, self.keys
        fixed = [keys.record, keys.sessions, keys.taken, keys.recovered, keys.attempts]
        rounds = all_rounds(transport, keys)
        for of in rounds:
            fixed += of.hashes
        yield fixed
        for of in rounds:
            for field, entry in scan(transport, of.buffered).items():
                if parts := listed_part_keys(keys, field, entry):
                    yield parts
        if keys.partitions:
            yield from part_keys(keys, listed_attempts(transport, keys))
