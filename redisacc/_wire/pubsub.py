"""Pub/sub: one connection per process and server, read by one thread or task. In a cluster, one for each slot.

The channels of an accumulator are in its slot, and from version 7 on, messages go only to the node that owns the slot
(SSUBSCRIBE). If the slot moves, that node ends the subscription, or its connection breaks. In both cases the thread
connects to the owner, subscribes again, and lets all listeners check at once.

A message is a hint, never a fact: a waiting take polls after every message, after every reconnect, and once a second
anyway, so a lost message costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from redisacc._clock import clock, durations
from redisacc._wire import forks
from redisacc._wire.clients import STUMBLES
from redisacc._wire.faults import FAULTS, ReplyError, SlotMovedError
from redisacc._wire.sockets import Connection
from redisacc._wire.transport import Transport
from redisacc._wire.waits import Event
from redisacc.errors import ServerError

logger = logging.getLogger("redisacc")

# How long to pause before a broken connection is opened again, in seconds.
RECONNECT_PAUSE = 0.2
# The same if the server's access rules refuse a channel.
REFUSED_PAUSE = 5.0
# How long a subscription outlives its last listener, in seconds: in a training loop the next take follows soon, and a
# new connection, thread and subscription would cost it more than everything else that it does.
LINGER = 5.0
# How often the thread checks whether there are still listeners, in seconds.
IDLE_CHECK_INTERVAL = 1.0

# How many bytes of a message are handed out. The longest ones announce gradients of trees.
LONGEST_MESSAGE = 32 * 1024

# Gets the text of a message, or None if messages may have been missed.
Listener = Callable[[str | None], None]
# Gets the channel, too; "" if messages may have been missed.
PatternListener = Callable[[str, str | None], None]

# The commands that subscribe, and those that end it.
_ENDS = {"SUBSCRIBE": "UNSUBSCRIBE", "PSUBSCRIBE": "PUNSUBSCRIBE"}

_BROKEN = (*FAULTS, *STUMBLES)


@dataclass
class _Subscription:
    """A channel, or a pattern of channels, that is subscribed to."""

    # Set while the server confirms the subscription.
    confirmed: Event
    listeners: list[PatternListener] = field(default_factory=list)
    # How many messages have come, or may have been missed.
    heard: int = 0
    # When the last listener left.
    idle_since: float = math.inf


class PubSub:
    """A pub/sub connection to one server. Its thread or task runs while it has listeners, and for some seconds after.

    Args:
        transport: the way to the server, or to the cluster.
        place: the slot of the channels; None means any node will do.

    Attributes:
        refusal: why the server's access rules refuse a channel; "" if they do not.
    """

    def __init__(self, transport: Transport, place: int | None) -> None:
        self.refusal = ""
        self._place = place
        # Weak, because the transport is the key by which this object is found. Listeners hold the transport.
        self._transport = weakref.ref(transport)
        self._waits = transport.waits
        # Guards everything below.
        self._lock = forks.lock()
        # By the command that subscribes, and the channel or pattern.
        self._subscriptions: dict[tuple[str, str], _Subscription] = {}
        self._connection: Connection | None = None
        self._running = False
        # The prefix of the commands and messages of channels: "S" if channels belong to slots.
        self._prefix = ""

    def heard(self, channel: str) -> int:
        """Returns a number that grows with each message of a channel; 0 if it is not subscribed to at the moment."""
        with self._lock:
            found = self._subscriptions.get(("SUBSCRIBE", channel))
            return found.heard if found is not None and found.confirmed.is_set() else 0

    @contextlib.contextmanager
    def listen(self, channel: str, listener: Listener, *, confirmed: bool = True) -> Iterator[None]:
        """Calls ``listener`` for every message of a channel, in the listening thread, until the block ends.

        Args:
            channel: the channel.
            listener: gets the messages.
            confirmed: whether the block begins when the server has confirmed the subscription; or when it does not
                answer, which the caller will notice. Otherwise, it begins at once, and messages may be missed.
        """
        with self._listen("SUBSCRIBE", channel, lambda _, text: listener(text), confirmed=confirmed):
            yield

    @contextlib.contextmanager
    def listen_to_pattern(self, pattern: str, listener: PatternListener) -> Iterator[None]:
        """Does the same for all channels that match a glob pattern of the server."""
        with self._listen("PSUBSCRIBE", pattern, listener, confirmed=True):
            yield

    @contextlib.contextmanager
    def _listen(self, command: str, name: str, listener: PatternListener, *, confirmed: bool) -> Iterator[None]:
        with self._lock:
            known = self._subscriptions.get((command, name))
            if known is None:
                known = self._subscriptions[command, name] = _Subscription(self._waits.event())
                self._tell(self._sent(command), name)
            if not self._running:
                try:
                    self._waits.start(self._run, "redisacc-events")
                except BaseException:
                    # No thread can be started. The next listener tries again.
                    if not known.listeners:
                        del self._subscriptions[command, name]
                    raise
                self._running = True
            known.listeners.append(listener)
            known.idle_since = math.inf
        try:
            if confirmed:
                known.confirmed.wait(durations.confirmation)
            yield
        finally:
            with self._lock:
                known.listeners.remove(listener)
                if not known.listeners:
                    known.idle_since = clock.now()

    def _tell(self, *command: str) -> None:
        # Called with the lock held. If the connection is broken, the thread that reads notices and subscribes again.
        if self._connection is not None:
            with contextlib.suppress(*_BROKEN):
                self._connection.tell(*command)

    def _run(self) -> None:
        try:
            self._hear()
        except BaseException:
            # The task was cancelled. The next listener starts another one.
            with self._lock:
                self._running = False
            raise

    def _hear(self) -> None:
        linger = LINGER
        while not self._done(linger) and (transport := self._transport()) is not None:
            try:
                prefix = "S" if transport.has_sharded_channels() else ""
                with transport.subscriber(self._place, IDLE_CHECK_INTERVAL) as connection:
                    linger = LINGER
                    try:
                        self._subscribe(connection, prefix)
                        # Not after every message: the threads that it wakes can run only when this one pauses.
                        next_look = clock.now() + IDLE_CHECK_INTERVAL
                        while True:
                            for message in connection.hear():
                                self._hand_out(message)
                            now = clock.now()
                            if now >= next_look:
                                if self._done(linger):
                                    return
                                next_look = now + IDLE_CHECK_INTERVAL
                    finally:
                        with self._lock:
                            if self._connection is connection:
                                self._connection = None
            except (*_BROKEN, ServerError) as error:
                logger.debug("no messages from %s: %s", transport.address, error)
                # A channel without listeners need not be subscribed to again.
                linger = 0.0
                if isinstance(error, SlotMovedError):
                    continue
                refused = isinstance(error, ReplyError) and error.code == "NOPERM"
                self.refusal = str(error) if refused else ""
                self._waits.sleep(REFUSED_PAUSE if refused else RECONNECT_PAUSE)

    def _done(self, linger: float) -> bool:
        """Unsubscribes from channels that were left long ago. Returns True if none remains: the thread has to end."""
        with self._lock:
            left = clock.now() - linger
            for key in [key for key, known in self._subscriptions.items() if known.idle_since < left]:
                del self._subscriptions[key]
                command, name = key
                self._tell(self._sent(_ENDS[command]), name)
            if self._subscriptions:
                return False
            self._running = False
            self._connection = None
            return True

    def _sent(self, command: str) -> str:
        """Returns a command as this server needs it. There are no patterns of channels that belong to slots."""
        return self._prefix + command if command in ("SUBSCRIBE", "UNSUBSCRIBE") else command

    def _subscribe(self, connection: Connection, prefix: str) -> None:
        with self._lock:
            self._prefix = prefix
            for known in self._subscriptions.values():
                known.confirmed.clear()
            for command in _ENDS:
                names = [name for asked, name in self._subscriptions if asked == command]
                if names:
                    connection.tell(self._sent(command), *names)
            self._connection = connection

    def _hand_out(self, message: object) -> None:
        match message:
            case [b"message" | b"smessage", bytes(channel), bytes(text)]:
                self._call_listeners(("SUBSCRIBE", _text(channel)), _text(channel), _text(text[:LONGEST_MESSAGE]))
            case [b"pmessage", bytes(pattern), bytes(channel), bytes(text)]:
                self._call_listeners(("PSUBSCRIBE", _text(pattern)), _text(channel), _text(text[:LONGEST_MESSAGE]))
            case [b"sunsubscribe", bytes(channel), _]:
                with self._lock:
                    wanted = ("SUBSCRIBE", _text(channel)) in self._subscriptions
                if wanted:
                    raise SlotMovedError("the slot of the channel has moved to another node")
            case [b"subscribe" | b"ssubscribe" | b"psubscribe" as command, bytes(name), _]:
                key = "PSUBSCRIBE" if command == b"psubscribe" else "SUBSCRIBE", _text(name)
                with self._lock:
                    known = self._subscriptions.get(key)
                # Messages before this moment were missed. Listeners get this before their block begins, and drop it.
                self._call_listeners(key, "", None)
                if known is not None:
                    known.confirmed.set()
                    self.refusal = ""

    def _call_listeners(self, key: tuple[str, str], channel: str, event: str | None) -> None:
        with self._lock:
            known = self._subscriptions.get(key)
            if known is None:
                return
            known.heard += 1
            listeners = list(known.listeners)
        for listener in listeners:
            try:
                listener(channel, event)
            except Exception:
                logger.exception("a listener to %s failed", key[1])


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


_pubsubs: weakref.WeakKeyDictionary[Transport, dict[int | None, PubSub]] = weakref.WeakKeyDictionary()
_pubsubs_lock = forks.lock()


def pubsub_of(transport: Transport, channel: str) -> PubSub:
    """Returns the pub/sub connection for a channel, the same for the whole process and for channels of one slot."""
    return _pubsub_at(transport, transport.place_of(channel))


def pubsub_everywhere(transport: Transport) -> PubSub:
    """Returns the pub/sub connection for messages that belong to no slot, which every node of a cluster passes on."""
    return _pubsub_at(transport, None)


def _pubsub_at(transport: Transport, place: int | None) -> PubSub:
    with _pubsubs_lock:
        of_transport = _pubsubs.setdefault(transport, {})
        pubsub = of_transport.get(place)
        if pubsub is None:
            pubsub = of_transport[place] = PubSub(transport, place)
        return pubsub


def _after_fork_in_child() -> None:
    # The thread and the connection stay with the parent.
    global _pubsubs  # noqa: PLW0603
    _pubsubs = weakref.WeakKeyDictionary()


os.register_at_fork(after_in_child=_after_fork_in_child)
