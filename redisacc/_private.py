"""Private accumulators: without a shared name, gone with the handle that made them.

Where the owner could not clean up (it was killed), every key of the accumulator has an expiry, which a thread of the
owner moves on as long as the owner lives.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass

from redisacc._deletion import delete
from redisacc._keys import Keys
from redisacc._link import Link
from redisacc._parked import number_of_parts
from redisacc._rounds import all_rounds, scan
from redisacc.errors import RedisAccError

logger = logging.getLogger("redisacc")

# How long a private accumulator outlives its owner.
LEASE_MS = 60_000


def new_name() -> str:
    """A name that nobody else has."""
    return f"private-{secrets.token_hex(8)}"


# How long letting go of one tries to reach the server, in seconds: its lease does the rest, and a process that ends
# must not wait for a server that has ended before it.
RELEASE_PATIENCE = 2.0

# A lease is renewed this many times before it would run out.
RENEWALS = 4


@dataclass
class _Owned:
    link: Link
    keys: Keys
    lease_ms: int
    # When to renew the lease next, on time.monotonic()'s clock.
    due: float = 0.0

    def plan(self) -> None:
        self.due = time.monotonic() + self.lease_ms / 1000 / RENEWALS


class Owner:
    """Keeps private accumulators of this process alive, in one thread for all of them."""

    def __init__(self) -> None:
        self._start_anew()

    def _start_anew(self) -> None:
        self._lock = threading.Lock()
        self._owned: dict[str, _Owned] = {}
        self._wake = threading.Event()
        self._running = False

    def add(self, link: Link, keys: Keys, lease_ms: int) -> None:
        """From now on renews the leases of that accumulator's keys."""
        owned = _Owned(link, keys, lease_ms)
        owned.plan()
        with self._lock:
            self._owned[keys.name] = owned
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="redisacc-leases", daemon=True).start()
        self._wake.set()

    def remove(self, keys: Keys) -> None:
        """Stops doing so."""
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
                renew(owned.link, owned.keys, owned.lease_ms)
            except Exception as error:  # noqa: BLE001 - whatever befalls one must not end the leases of the others
                with self._lock:
                    if self._owned.get(owned.keys.name) is not owned:
                        continue
                logger.warning(
                    "can't renew the lease of private accumulator %s: %s",
                    owned.keys.name,
                    error,
                    extra={"accumulator": owned.keys.name},
                )


def renew(link: Link, keys: Keys, lease_ms: int) -> None:
    """Lets every key of the accumulator live for another lease."""
    # One server that is silent must not cost the accumulators on another their leases.
    patience = min(lease_ms / 1000 / RENEWALS, 2.0)
    fixed = [keys.record, keys.clients, keys.taken]
    rounds = all_rounds(link, keys, patience=patience)
    for of in rounds:
        fixed += [of.sums, of.parked, of.small, of.workers]
    link.pipeline([("PEXPIRE", key, lease_ms) for key in fixed], patience=patience)
    for of in rounds:
        for gradient, entry in scan(link, of.parked, patience=patience).items():
            parts = [keys.part(gradient.decode(errors="replace"), k) for k in range(number_of_parts(entry) or 0)]
            if parts:
                link.pipeline([("PEXPIRE", key, lease_ms) for key in parts], patience=patience)


owner = Owner()


def release(link: Link, keys: Keys, incarnation: str, pid: int) -> None:
    """Deletes a private accumulator when its handle goes, unless this is a child of the process that owns it."""
    if os.getpid() != pid:
        return
    owner.remove(keys)
    try:
        delete(link, keys, incarnation, patience=RELEASE_PATIENCE)
    except RedisAccError as error:
        logger.debug("private accumulator %s goes after its lease: %s", keys.name, error)


os.register_at_fork(after_in_child=owner._start_anew)
