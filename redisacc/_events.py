"""Listens to the events of accumulators: one pub/sub connection a process (for each server), read by one thread.

An event is a hint, never a fact: who waits looks again after every one of them, after every reconnect, and once a
second anyway, so a lost message costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from redisacc._link import Link
from redisacc._wire import wire_of

logger = logging.getLogger("redisacc")

# How long a broken connection rests before it is tried again, in seconds.
RECONNECT_PAUSE = 0.2
# How long a subscription waits for the server's word that it stands; without it, looking once a second is left.
CONFIRM_TIMEOUT = 1.0
# How long a subscription outlives its last listener, in seconds: in a training loop the next take comes soon, and a
# connection, a thread and a subscription of its own would cost it more than all else that it does.
LINGER = 5.0
# How often it is seen whether anybody still listens, in seconds.
LOOK_AROUND = 1.0

# Gets the text of an event, or None when events may have been missed.
Listener = Callable[[str | None], None]

# The last three: how redis-py stumbles when another thread closes the client under it.
_BROKEN = (RedisError, OSError, TypeError, ValueError, AttributeError)


class Wake:
    """Wakes one thread that waits. As ``threading.Event``, but for one waiter, and without its six calls in Python."""

    def __init__(self) -> None:
        # Held, unless somebody has woken.
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wakes who waits, or who waits next."""
        # Released already: by another who has woken.
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def clear(self) -> None:
        """Nobody has woken."""
        self._lock.acquire(blocking=False)

    def wait(self, timeout: float) -> None:
        """Until somebody has woken, once, or for that many seconds."""
        self._lock.acquire(timeout=max(timeout, 0.0))


@dataclass
class _Channel:
    listeners: list[Listener] = field(default_factory=list)
    # Set while the subscription stands.
    confirmed: threading.Event = field(default_factory=threading.Event)
    # When the last listener left.
    idle_since: float = math.inf


class Hub:
    """The pub/sub connection to one server. Its thread runs while anybody listens, and a little longer."""

    def __init__(self, link: Link) -> None:
        # The hub must not keep alive what it is looked up by. Who listens holds the link.
        self._link = weakref.ref(link)
        # Guards all that follows.
        self._lock = threading.Lock()
        self._channels: dict[str, _Channel] = {}
        self._connection: Any = None
        self._running = False

    def hears(self, channel: str) -> bool:
        """Whether a subscription stands already, from a listener that has just left."""
        with self._lock:
            found = self._channels.get(channel)
            return found is not None and found.confirmed.is_set()

    @contextlib.contextmanager
    def listen(self, channel: str, listener: Listener) -> Iterator[None]:
        """Calls ``listener`` for every event of a channel, on the hub's thread, from now until the block ends.

        Entered, the subscription stands on the server (or the server doesn't answer, which the caller will notice).
        """
        with self._lock:
            known = self._channels.get(channel)
            if known is None:
                known = self._channels[channel] = _Channel()
                self._tell("SUBSCRIBE", channel)
            known.listeners.append(listener)
            known.idle_since = math.inf
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="redisacc-events", daemon=True).start()
        try:
            known.confirmed.wait(CONFIRM_TIMEOUT)
            yield
        finally:
            with self._lock:
                known.listeners.remove(listener)
                if not known.listeners:
                    known.idle_since = time.monotonic()

    def _tell(self, *command: str) -> None:
        # Called with the lock held. Where the connection is broken, the thread that reads notices and subscribes anew.
        if self._connection is not None:
            with contextlib.suppress(*_BROKEN):
                self._connection.send_command(*command, check_health=False)

    def _run(self) -> None:
        linger = LINGER
        while not self._done(linger) and (link := self._link()) is not None:
            try:
                with link.subscriber() as connection:
                    linger = LINGER
                    wire = wire_of(connection, LOOK_AROUND)
                    try:
                        self._subscribe(connection)
                        # Not after every message: whom it wakes can only go on when this thread rests again.
                        next_look = time.monotonic() + LOOK_AROUND
                        while True:
                            for message in wire.hear():
                                self._hand_out(message)
                            now = time.monotonic()
                            if now >= next_look:
                                if self._done(linger):
                                    return
                                next_look = now + LOOK_AROUND
                    finally:
                        with self._lock:
                            if self._connection is connection:
                                self._connection = None
            except _BROKEN as error:
                logger.debug("no events of %s: %s", link.address, error)
                # Nobody misses what nobody listens to.
                linger = 0.0
                threading.Event().wait(RECONNECT_PAUSE)

    def _done(self, linger: float) -> bool:
        """Lets go of channels that were left long ago. True when none remain: then this thread has to end."""
        with self._lock:
            left = time.monotonic() - linger
            for name in [name for name, channel in self._channels.items() if channel.idle_since < left]:
                del self._channels[name]
                self._tell("UNSUBSCRIBE", name)
            if self._channels:
                return False
            self._running = False
            self._connection = None
            return True

    def _subscribe(self, connection: Any) -> None:
        with self._lock:
            for channel in self._channels.values():
                channel.confirmed.clear()
            if self._channels:
                connection.send_command("SUBSCRIBE", *self._channels, check_health=False)
            self._connection = connection

    def _hand_out(self, message: object) -> None:
        match message:
            case [b"message", bytes(channel), bytes(text)]:
                self._call_listeners(channel.decode(), text[:1024].decode(errors="replace"))
            case [b"subscribe", bytes(channel), _]:
                with self._lock:
                    known = self._channels.get(channel.decode())
                # Events before this moment went to nobody. Said before who began to listen goes on, who drops it.
                self._call_listeners(channel.decode(), None)
                if known is not None:
                    known.confirmed.set()

    def _call_listeners(self, channel: str, event: str | None) -> None:
        with self._lock:
            listeners = list(self._channels[channel].listeners) if channel in self._channels else []
        for listener in listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("a listener to %s failed", channel)


_hubs: weakref.WeakKeyDictionary[Link, Hub] = weakref.WeakKeyDictionary()
_hubs_lock = threading.Lock()


def hub_of(link: Link) -> Hub:
    """The hub of a link, the same for everybody in the process."""
    with _hubs_lock:
        hub = _hubs.get(link)
        if hub is None:
            hub = _hubs[link] = Hub(link)
        return hub


def _after_fork_in_child() -> None:
    # The thread stayed with the parent, and so does the connection.
    global _hubs, _hubs_lock
    _hubs, _hubs_lock = weakref.WeakKeyDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
