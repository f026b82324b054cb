"""A process that does not run for longer than any lease, in the middle of a call, as far as anybody can tell.

Clocks of this process jump, leases and expiries on the server run out, and others clean up meanwhile. That takes no
time, so a test may try it at every place of a call.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from redisacc._admin.garbage import find_garbage, remove_garbage
from redisacc._clock import clock
from redisacc._redis.connect import connect
from redisacc._redis.faults import BrokenError
from redisacc._redis.sockets.fast_socket import SocketConnection

# Longer than any lease and any expiry of something small, and than anything is tried for; in seconds.
SECONDS = 150

# What has become of the connection whose exchange was to come when the process was stopped:
# - well: nothing.
# - half sent: the server had half of the commands already, and gets the others now.
# - broken before: it broke, and the server has got nothing.
# - broken after: the server has executed everything, but the connection broke before it could reply.
WAYS = ("well", "half sent", "broken before", "broken after")


class Suspension:
    """Suspends this process at one exchange with the server.

    Args:
        monkeypatch: of the test.
        client: a client of the server.
        others: what else other processes do meanwhile.

    Attributes:
        happened: whether the call had so many exchanges.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, client: redis.Redis, others: Callable[[], object] = lambda: None
    ) -> None:
        self.happened = False
        self._client = client
        self._transport = connect(client)
        self._others = others
        self._ahead = 0.0
        self._left: int | None = None
        self._way = ""
        self._lock = threading.Lock()
        real, now = time.monotonic, clock.now
        monkeypatch.setattr(time, "monotonic", lambda: real() + self._ahead)
        monkeypatch.setattr(clock, "now", lambda: now() + self._ahead)
        # Listeners outlive the test, and for them time would go back.
        monkeypatch.setattr("redisacc._redis.pubsub.clock", SimpleNamespace(now=real))
        exchange, fetch = SocketConnection.exchange, SocketConnection.fetch

        def exchange_suspended(connection: Any, commands: Any, deadline: float) -> list[Any]:
            def half() -> None:
                done.extend(exchange(connection, commands[: len(commands) // 2], deadline))

            done: list[Any] = []
            self._pass(half, lambda: exchange(connection, commands, deadline))
            return done + exchange(connection, commands[len(done) :] if done else commands, deadline)

        def fetch_suspended(connection: Any, arrivals: Any, deadline: float) -> None:
            self._pass(lambda: None, lambda: None)
            fetch(connection, arrivals, deadline)

        monkeypatch.setattr(SocketConnection, "exchange", exchange_suspended)
        monkeypatch.setattr(SocketConnection, "fetch", fetch_suspended)

    @contextlib.contextmanager
    def at(self, number: int, way: str) -> Iterator[None]:
        """Suspends the process before the exchange of the block with that number, from 0 on."""
        self._left, self._way, self.happened = number, way, False
        try:
            yield
        finally:
            self._left = None

    def _pass(self, half: Callable[[], object], whole: Callable[[], object]) -> None:
        with self._lock:
            if self._left is None:
                return
            self._left -= 1
            if self._left >= 0:
                return
            self._left, self.happened = None, True
        if self._way == "half sent":
            half()
        elif self._way == "broken after":
            whole()
        self.suspend()
        if self._way.startswith("broken"):
            raise BrokenError("the connection broke while the process was suspended")

    def suspend(self) -> None:
        """Suspends the process now."""
        self._ahead += SECONDS
        age(self._client, SECONDS)
        for leftover in find_garbage(self._transport):
            remove_garbage(self._transport, leftover)
        self._others()


def age(client: redis.Redis, seconds: float) -> None:
    """Lets all expiries and leases on a server run out that end within this time."""
    ms = int(seconds * 1000)
    for key in list(client.scan_iter(count=1000)):
        left = client.pttl(key)
        if left > ms:
            client.pexpire(key, left - ms)
        elif left >= 0:
            client.unlink(key)
        elif key.endswith(b":attempts"):
            for member, end in client.zrange(key, 0, -1, withscores=True):
                client.zadd(key, {member: min(end, max(end - ms, 1))})
        if key.endswith((b":takers", b":crew")):
            for field, entry in client.hgetall(key).items():
                words: Sequence[bytes] = entry.split(b" ")
                client.hset(key, field, b" ".join([words[0], b"%d" % (int(words[1]) - ms), *words[2:]]))
