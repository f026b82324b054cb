"""Private accumulators: without a shared name, gone with the handle that made them.

Where the owner could not clean up (it was killed), every key of the accumulator has an expiry, which a thread of the
owner moves on as long as the owner lives.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading

from redisacc._deletion import delete
from redisacc._keys import Keys
from redisacc._link import Link
from redisacc._parked import number_of_parts
from redisacc._rounds import scan
from redisacc.errors import RedisAccError

logger = logging.getLogger("redisacc")

# How long a private accumulator outlives its owner.
LEASE_MS = 60_000


def new_name() -> str:
    """A name that nobody else has."""
    return f"private-{secrets.token_hex(8)}"


class Owner:
    """Keeps private accumulators of this process alive, in one thread for all of them."""

    def __init__(self) -> None:
        self._start_anew()

    def _start_anew(self) -> None:
        self._lock = threading.Lock()
        self._owned: dict[str, tuple[Link, Keys, int]] = {}
        self._wake = threading.Event()
        self._running = False

    def add(self, link: Link, keys: Keys, lease_ms: int) -> None:
        """From now on renews the leases of that accumulator's keys."""
        with self._lock:
            self._owned[keys.name] = (link, keys, lease_ms)
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
                owned = list(self._owned.values())
                if not owned:
                    self._running = False
                    return
                self._wake.clear()
            for link, keys, lease_ms in owned:
                try:
                    renew(link, keys, lease_ms)
                except Exception as error:  # noqa: BLE001 - whatever befalls one must not end the leases of the others
                    logger.warning("can't renew the lease of private accumulator %s: %s", keys.name, error)
            self._wake.wait(min(lease_ms for _, _, lease_ms in owned) / 4000)


def renew(link: Link, keys: Keys, lease_ms: int) -> None:
    """Lets every key of the accumulator live for another lease."""
    fixed = [keys.record, keys.clients, keys.taken]
    rounds = [
        keys.current,
        *(keys.taken_round(token.decode(errors="replace")) for token in scan(link, keys.taken)),
    ]
    for of in rounds:
        fixed += [of.sums, of.parked, of.workers]
    link.pipeline([("PEXPIRE", key, lease_ms) for key in fixed], patience=lease_ms / 2000)
    for of in rounds:
        for gradient, entry in scan(link, of.parked).items():
            parts = [keys.part(gradient.decode(errors="replace"), k) for k in range(number_of_parts(entry) or 0)]
            if parts:
                link.pipeline([("PEXPIRE", key, lease_ms) for key in parts], patience=lease_ms / 2000)


owner = Owner()


def release(link: Link, keys: Keys, incarnation: str, pid: int) -> None:
    """Deletes a private accumulator when its handle goes, unless this is a child of the process that owns it."""
    if os.getpid() != pid:
        return
    owner.remove(keys)
    try:
        delete(link, keys, incarnation)
    except RedisAccError as error:
        logger.debug("private accumulator %s goes after its lease: %s", keys.name, error)


os.register_at_fork(after_in_child=owner._start_anew)
