"""Leases of private accumulators, which have no shared name and are removed with the handle that made them.

An owner that is killed cannot clean up. Therefore, every key of a private accumulator has an expiry, which a thread of
the owner extends as long as the owner lives.
"""

from __future__ import annotations

import logging
import os
import secrets

from redisacc._clock import durations
from redisacc._format.attempts import part_keys
from redisacc._format.buffered import listed_part_keys
from redisacc._format.keys import Keys
from redisacc._protocol.leases.renewals import interval_of, renewals_over
from redisacc._protocol.lifecycle.deletion import delete
from redisacc._protocol.parts.sweep import listed_attempts
from redisacc._protocol.rounds.round_reader import all_rounds
from redisacc._redis.scans import scan
from redisacc._redis.transport import Transport
from redisacc.errors import RedisAccError

logger = logging.getLogger("redisacc")

# How long a private accumulator outlives its owner.
OWNER_LEASE_MS = 60_000


def new_name() -> str:
    """Returns a unique name."""
    return f"private-{secrets.token_hex(8)}"


class _PrivateLease:
    """The lease of a private accumulator, which its owner renews."""

    def __init__(self, transport: Transport, keys: Keys, lease_ms: int) -> None:
        self._transport = transport
        self._keys = keys
        self._lease_ms = lease_ms
        self._renewals = renewals_over(transport)
        self.is_over = False

    @property
    def interval(self) -> float:
        return interval_of(self._lease_ms / 1000)

    def renew(self) -> None:
        try:
            renew(self._transport, self._keys, self._lease_ms)
        except Exception as error:  # noqa: BLE001 - no failure may end the leases of the others
            if not self.is_over:
                logger.warning(
                    "cannot renew the lease of private accumulator %s: %s",
                    self._keys.name,
                    error,
                    extra={"accumulator": self._keys.name},
                )

    def begin(self) -> None:
        self._renewals.add(self)

    def end(self) -> None:
        self.is_over = True
        self._renewals.drop_ended()


class Owner:
    """Keeps the private accumulators of this process alive."""

    def __init__(self) -> None:
        self.forget_all()

    def forget_all(self) -> None:
        """Begins without accumulators, in a forked child: they belong to its parent."""
        self._leases: dict[str, _PrivateLease] = {}

    def add(self, transport: Transport, keys: Keys, lease_ms: int) -> None:
        """Renews the lease of an accumulator from now on."""
        # Noted first, so that remove() ends it wherever an interrupt arrives.
        lease = self._leases[keys.name] = _PrivateLease(transport, keys, lease_ms)
        lease.begin()

    def remove(self, keys: Keys) -> None:
        """Stops renewing its lease. A finalizer may call this in any thread."""
        if (lease := self._leases.pop(keys.name, None)) is not None:
            lease.end()


def renew(transport: Transport, keys: Keys, lease_ms: int) -> None:
    """Extends the life of every key of the accumulator by another lease."""
    # If the server is silent, the leases of other accumulators on it must not run out meanwhile.
    timeout = min(interval_of(lease_ms / 1000), 2.0)
    fixed = [keys.record, keys.sessions, keys.taken, keys.recovered, keys.attempts]
    rounds = all_rounds(transport, keys, timeout=timeout)
    for of in rounds:
        fixed += of.hashes
    transport.pipeline([("PEXPIRE", key, lease_ms) for key in fixed], timeout=timeout)
    for of in rounds:
        for field, entry in scan(transport, of.buffered, timeout=timeout).items():
            parts = listed_part_keys(keys, field, entry)
            if parts:
                transport.pipeline([("PEXPIRE", key, lease_ms) for key in parts], timeout=timeout)
    if keys.partitions:
        for parts in part_keys(keys, listed_attempts(transport, keys, timeout=timeout)):
            transport.pipeline([("PEXPIRE", key, lease_ms) for key in parts], timeout=timeout)


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
