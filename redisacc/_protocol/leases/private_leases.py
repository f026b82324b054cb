"""Leases of private accumulators, which have no shared name and are removed with the handle that made them.

An owner that is killed cannot clean up. Therefore, every key of a private accumulator has an expiry, which a thread of
the owner extends as long as the owner lives.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from redisacc._clock import durations
from redisacc._format.attempts import part_keys
from redisacc._format.buffered import listed_part_keys
from redisacc._format.keys import Keys
from redisacc._protocol.leases.renewals import Renewals, interval_of, renewals_over
from redisacc._protocol.lifecycle.deletion import delete
from redisacc._protocol.parts.sweep import listed_attempts
from redisacc._protocol.rounds.round_reader import all_rounds
from redisacc._wire.scans import scan
from redisacc._wire.transport import Transport
from redisacc.errors import RedisAccError

logger = logging.getLogger("redisacc")

# How long a private accumulator outlives its owner.
OWNER_LEASE_MS = 60_000


def new_name() -> str:
    """Returns a unique name."""
    return f"private-{secrets.token_hex(8)}"


@dataclass(eq=False)
class PrivateLease:
    """The lease of a private accumulator, which its owner renews.

    Attributes:
        transport: the way to the server.
        keys: the keys of the accumulator.
        lease_ms: how long it lasts, in milliseconds.
        renewals: what renews it.
        is_over: whether it is renewed no longer.
    """

    transport: Transport
    keys: Keys
    lease_ms: int
    renewals: Renewals
    is_over: bool = False

    @property
    def interval(self) -> float:
        """Seconds between two renewals."""
        return interval_of(self.lease_ms / 1000)

    def renew(self) -> None:
        """Extends the life of every key of the accumulator, and raises nothing."""
        try:
            for keys in self._every_key():
                self.transport.pipeline([("PEXPIRE", key, self.lease_ms) for key in keys], timeout=self._timeout)
        except Exception as error:  # noqa: BLE001 - no failure may end the leases of the others
            if not self.is_over:
                logger.warning(
                    "cannot renew the lease of private accumulator %s: %s",
                    self.keys.name,
                    error,
                    extra={"accumulator": self.keys.name},
                )

    @property
    def _timeout(self) -> float:
        # If the server is silent, the leases of other accumulators on it must not run out meanwhile.
        return min(self.interval, 2.0)

    def _every_key(self) -> Iterator[list[str]]:
        """Yields the keys of the accumulator, as many at once as one pipeline extends."""
        transport, keys, timeout = self.transport, self.keys, self._timeout
        fixed = [keys.record, keys.sessions, keys.taken, keys.recovered, keys.attempts]
        rounds = all_rounds(transport, keys, timeout=timeout)
        for of in rounds:
            fixed += of.hashes
        yield fixed
        for of in rounds:
            for field, entry in scan(transport, of.buffered, timeout=timeout).items():
                if parts := listed_part_keys(keys, field, entry):
                    yield parts
        if keys.partitions:
            yield from part_keys(keys, listed_attempts(transport, keys, timeout=timeout))


class Owner:
    """Keeps the private accumulators of this process alive."""

    def __init__(self) -> None:
        self.forget_all()

    def forget_all(self) -> None:
        """Begins without accumulators, in a forked child: they belong to its parent."""
        self._leases: dict[str, PrivateLease] = {}

    def add(self, transport: Transport, keys: Keys, lease_ms: int) -> None:
        """Renews the lease of an accumulator from now on."""
        # Noted first, so that remove() ends it wherever an interrupt arrives.
        lease = self._leases[keys.name] = PrivateLease(transport, keys, lease_ms, renewals_over(transport))
        lease.renewals.add(lease)

    def remove(self, keys: Keys) -> None:
        """Stops renewing its lease. A finalizer may call this in any thread."""
        if (lease := self._leases.pop(keys.name, None)) is not None:
            lease.is_over = True
            lease.renewals.drop_ended()


owner = Owner()


def release(transport: Transport, keys: Keys, incarnation: str, pid: int) -> None:
    """Deletes a private accumulator when its handle is closed, unless this process is a child of its owner."""
    if os.getpid() != pid:
        return
    owner.remove(keys)
    try:
        delete(transport, keys, incarnation, timeout=durations.release)
    except RedisAccError as error:
        logger.debug("private accumulator %s will be removed when its lease ends: %s", keys.name, error)


os.register_at_fork(after_in_child=owner.forget_all)
