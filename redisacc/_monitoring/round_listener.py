"""Listens to the events of many accumulators, and keeps the history of the rounds of each."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Sequence

from redisacc._clock import clock
from redisacc._format.keys import PREFIX, Keys, ParameterKeys
from redisacc._monitoring.round_history import Figures, RoundHistory
from redisacc._protocol.lifecycle.events import Event
from redisacc._redis import forks
from redisacc._redis.pubsub import pubsub_of
from redisacc._redis.transport import Transport

# Maximum number of accumulators whose rounds are remembered. Anybody who may publish can make names up.
MOST = 5000
# Maximum number of accumulators that are listened to in a cluster from version 7 on. It has no patterns of channels, so
# each slot takes a connection and a thread.
MOST_IN_A_CLUSTER = 64

_CHANNEL = re.compile(re.escape(PREFIX) + r"\{([^{}]+)\}(:parameters)?:events", re.DOTALL)


class RoundListener:
    """The histories of the rounds of accumulators. Close it with ``close()``. Threads may share it.

    Args:
        transport: the way to the server.
        patterns: globs of names to listen to. A user whose access rules are for a pattern has to listen to that one.
        names: names to listen to.
    """

    def __init__(self, transport: Transport, patterns: Sequence[str], names: Sequence[str]) -> None:
        self._transport = transport
        self._lock = forks.lock()
        self._histories: dict[str, RoundHistory] = {}
        self._stack = contextlib.ExitStack()
        # Name → what ends the subscriptions to its channels.
        self._subscribed: dict[str, contextlib.ExitStack] = {}
        self._by_name = transport.has_sharded_channels()
        if not self._by_name:
            for pattern in patterns:
                for channel in (Keys(pattern).events, ParameterKeys(pattern).events):
                    pubsub = pubsub_of(transport, channel)
                    self._stack.enter_context(pubsub.listen_to_pattern(channel, self._hear))
            for name in names:
                self._subscribe(name)

    def follow(self, names: Collection[str]) -> None:
        """Forgets the histories of all other names. In a cluster, listens to these, up to ``MOST_IN_A_CLUSTER``."""
        with self._lock:
            for name in self._histories.keys() - set(names):
                del self._histories[name]
        if self._by_name:
            for name in [name for name in self._subscribed if name not in names]:
                self._subscribed.pop(name).close()
            for name in names:
                if name not in self._subscribed and len(self._subscribed) < MOST_IN_A_CLUSTER:
                    self._subscribe(name)

    def figures(self, name: str) -> Figures:
        """Returns what is known of the rounds of an accumulator."""
        with self._lock:
            history = self._histories.get(name) or RoundHistory()
            return history.figures(clock.now())

    def close(self) -> None:
        """Stops listening. Closing twice does nothing."""
        self._stack.close()
        while self._subscribed:
            self._subscribed.popitem()[1].close()

    def _subscribe(self, name: str) -> None:
        stack = self._subscribed[name] = contextlib.ExitStack()
        for channel in (Keys(name).events, ParameterKeys(name).events):

            def hear(text: str | None, channel: str = channel) -> None:
                self._hear(channel, text)

            stack.enter_context(pubsub_of(self._transport, channel).listen(channel, hear))

    def _hear(self, channel: str, text: str | None) -> None:
        """Handles a message, in the thread that listens."""
        at = clock.now()
        with self._lock:
            if text is None and not channel:
                # Messages of a pattern may have been missed, and so of everybody.
                for history in self._histories.values():
                    history.hear(Event.parse(None), at)
                return
            match = _CHANNEL.fullmatch(channel)
            if match is None:
                return
            name, of_parameters = match.groups()
            known = self._histories.get(name)
            if text is None:
                if known is not None:
                    known.hear(Event.parse(None), at)
                return
            if known is None:
                if len(self._histories) >= MOST:
                    # Most are of accumulators that are gone. Those in use are heard of again at once.
                    self._histories.clear()
                known = self._histories[name] = RoundHistory()
            if of_parameters is None:
                known.hear(Event.parse(text), at)
            elif text.startswith("published "):
                known.hear_published(at)
