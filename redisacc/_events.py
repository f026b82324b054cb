"""Listens to the events of accumulators: one pub/sub connection a process (for each server), read by one thread.

An event is a hint, never a fact: who waits looks again after every one of them, after every reconnect, and once a
second anyway, so a lost message costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from redis.exceptions import RedisError

from redisacc._link import Link

logger = logging.getLogger("redisacc")

# How long a broken connection rests before it is tried again, in seconds.
RECONNECT_PAUSE = 0.2
# How long a subscription waits for the server's word that it stands; without it, looking once a second is left.
CONFIRM_TIMEOUT = 1.0
# How long the connection outlives its last listener, at most, in seconds: the next take comes soon.
LINGER = 1.0

# Gets the text of an event, or None when events may have been missed.
Listener = Callable[[str | None], None]

# The last three: how redis-py stumbles when another thread closes the client under it.
_BROKEN = (RedisError, OSError, TypeError, ValueError, AttributeError)


class Hub:
    """The pub/sub connection to one server. Its thread runs while anybody listens."""

    def __init__(self, link: Link) -> None:
        # The hub must not keep alive what it is looked up by. Who listens holds the link.
        self._link = weakref.ref(link)
        # Guards all that follows.
        self._lock = threading.Lock()
        self._listeners: dict[str, list[Listener]] = {}
        self._confirmed: dict[str, threading.Event] = {}
        self._connection: Any = None
        self._running = False

    @contextlib.contextmanager
    def listen(self, channel: str, listener: Listener) -> Iterator[None]:
        """Calls ``listener`` for every event of a channel, on the hub's thread, from now until the block ends.

        Entered, the subscription stands on the server (or the server doesn't answer, which the caller will notice).
        """
        with self._lock:
            self._listeners.setdefault(channel, []).append(listener)
            if channel not in self._confirmed:
                self._confirmed[channel] = threading.Event()
                self._tell("SUBSCRIBE", channel)
            confirmed = self._confirmed[channel]
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="redisacc-events", daemon=True).start()
        try:
            confirmed.wait(CONFIRM_TIMEOUT)
            yield
        finally:
            with self._lock:
                self._listeners[channel].remove(listener)
                if not self._listeners[channel]:
                    del self._listeners[channel], self._confirmed[channel]
                    self._tell("UNSUBSCRIBE", channel)

    def _tell(self, *command: str) -> None:
        # Called with the lock held. Where the connection is broken, the thread that reads notices and subscribes anew.
        if self._connection is not None:
            with contextlib.suppress(*_BROKEN):
                self._connection.send_command(*command, check_health=False)

    def _run(self) -> None:
        while not self._idle() and (link := self._link()) is not None:
            try:
                with link.subscriber() as connection:
                    try:
                        self._subscribe(connection)
                        while not self._idle():
                            if connection.can_read(timeout=LINGER):
                                self._hand_out(_message(connection))
                    finally:
                        with self._lock:
                            if self._connection is connection:
                                self._connection = None
            except _BROKEN as error:
                logger.debug("no events of %s: %s", link.address, error)
                threading.Event().wait(RECONNECT_PAUSE)

    def _idle(self) -> bool:
        """Whether nobody listens. Then this thread has to end: the next listener starts another."""
        with self._lock:
            if self._listeners:
                return False
            self._running = False
            self._connection = None
            return True

    def _subscribe(self, connection: Any) -> None:
        with self._lock:
            for confirmed in self._confirmed.values():
                confirmed.clear()
            if self._listeners:
                connection.send_command("SUBSCRIBE", *self._listeners, check_health=False)
            self._connection = connection

    def _hand_out(self, message: object) -> None:
        match message:
            case [b"message", bytes(channel), bytes(text)]:
                self._call_listeners(channel.decode(), text[:1024].decode(errors="replace"))
            case [b"subscribe", bytes(channel), _]:
                with self._lock:
                    confirmed = self._confirmed.get(channel.decode())
                if confirmed is not None:
                    confirmed.set()
                # Events before this moment went to nobody.
                self._call_listeners(channel.decode(), None)

    def _call_listeners(self, channel: str, event: str | None) -> None:
        with self._lock:
            listeners = list(self._listeners.get(channel, ()))
        for listener in listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("a listener to %s failed", channel)


def _message(connection: Any) -> object:
    # Under RESP3 messages are pushes, which redis-py hands only to who asks for them.
    return connection.read_response(disable_decoding=True, push_request=True)


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
