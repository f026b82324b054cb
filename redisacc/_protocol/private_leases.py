"""Leases of private accumulators, which have no shared name and are removed with the handle that made them.

An owner that is killed cannot clean up. So every key of a private accumulator has an expiry, and a thread of the owner
extends it for as long as the owner lives.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass

from redisacc._format.attempts import part_keys
from redisacc._format.buffered import listed_part_keys
from redisacc._format.keys import Keys
from redisacc._protocol.attempt_scripts import listed_attempts
from redisacc._protocol.deletion import delete
from redisacc._protocol.round_reader import all_rounds
from redisacc._redis.hash_scan import scan
from redisacc._redis.transport import Transport
from redisacc.errors import RedisAccError

logger = logging.getLogger("redisacc")

# How long a private accumulator outlives its owner.
OWNER_LEASE_MS = 60_000


def new_name() -> str:
    """Returns a unique name."""
    return f"private-{secrets.token_hex(8)}"


# How long the release of an accumulator tries to reach the server, in seconds. Its lease does the rest, and a process
# that ends must not wait for a server that ended before.
RELEASE_TIMEOUT = 2.0

# How many times a lease is renewed before it would run out.
RENEWALS = 4


@dataclass
class _Owned:
    transport: Transport
    keys: Keys
    lease_ms: int
    # When to renew the lease next, on time.monotonic()'s clock.
    due: float = 0.0

    def plan(self) -> None:
        self.due = time.monotonic() + self.lease_ms / 1000 / RENEWALS


class Owner:
    """Keeps the private accumulators of this process alive, in one thread for all of them."""

    def __init__(self) -> None:
        self._start_anew()

    def _start_anew(self) -> None:
        self._lock = threading.Lock()
        self._owned: dict[str, _Owned] = {}
        self._wake = threading.Event()
        self._running = False

    def add(self, transport: Transport, keys: Keys, lease_ms: int) -> None:
        """Renews the lease of an accumulator from now on."""
        owned = _Owned(transport, keys, lease_ms)
        owned.plan()
        with self._lock:
            self._owned[keys.name] = owned
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="redisacc-leases", daemon=True).start()
        self._wake.set()

    def remove(self, keys: Keys) -> None:
        """Stops renewing its lease."""
        with self._lock:
            self._owned.pop(keys.name, None)
        self._wake.set()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._wake.clear()
                if not self._owned:
                    self._running = False
                    return
                owned = min(self._owned.values(), key=lambda owned: owned.due)
                pause = owned.due - time.monotonic()
            if pause > 0:
                self._wake.wait(pause)
                continue
            owned.plan()
            try:
                renew(owned.transport, owned.keys, owned.lease_ms)
            except Exception as error:  # noqa: BLE001 - no failure may end the leases of the others
                with self._lock:
                    if self._owned.get(owned.keys.name) is not owned:
                        continue
                logger.warning(
                    "cannot renew the lease of private accumulator %s: %s",
                    owned.keys.name,
                    error,
                    extra={"accumulator": owned.keys.name},
                )


def renew(transport: Transport, keys: Keys, lease_ms: int) -> None:
    """Extends the life of every key of the accumulator by another lease."""
    # If one server is silent, accumulators on other servers must not lose their leases.
    timeout = min(lease_ms / 1000 / RENEWALS, 2.0)
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
        delete(transport, keys, incarnation, timeout=RELEASE_TIMEOUT)
    except RedisAccError as error:
        logger.debug("private accumulator %s will be removed when its lease ends: %s", keys.name, error)


os.register_at_fork(after_in_child=owner._start_anew)
