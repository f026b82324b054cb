"""The times of accumulators' rounds, as their events tell them.

Times are taken on this machine when the event is heard, by ``clock.now()``. A message may be lost, and
then everything whose beginning was not heard is left out rather than guessed.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import dataclasses
import math
import re
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from redisacc._clock import clock
from redisacc._format.keys import PREFIX, Keys, ParameterKeys
from redisacc._protocol.lifecycle.events import Event
from redisacc._wire import forks
from redisacc._wire.pubsub import pubsub_of
from redisacc._wire.transport import Transport

# Upper bounds of durations, in seconds; of sizes, in bytes: 1 KiB to 16 GiB, each four times the one before; and of a
# number of steps.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
BYTES = tuple(4**power for power in range(5, 18))
STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# What is counted in a histogram: name → the text that explains it to Prometheus, and the bounds.
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "round_seconds": ("Time from one take to the next.", SECONDS),
    "gathering_seconds": ("Time from the first gradient of a round to the last one.", SECONDS),
    # 0 if it did not need to wait.
    "take_wait_seconds": ("Time that a take waited in the queue.", SECONDS),
    "staleness_steps": ("Steps by which accepted gradients were late, if staleness allows any.", STEPS),
    "round_bytes": ("Bytes of the gradients of a round.", BYTES),
}
# The number of rounds that are remembered.
ROUNDS = 40
# The number of waiting takers whose beginning is remembered.
TAKERS = 100
# The number of workers whose times are remembered.
WORKERS = 1000
# Seconds over which the rate of bytes is averaged.
WINDOW = 5
# A gradient of more bytes than this is not believed: no server can hold it.
MOST_BYTES = 2**53
# Maximum number of accumulators whose rounds are remembered. Anybody who may publish can make names up.
MOST = 5000
# Maximum number of accumulators that are listened to in a cluster from version 7 on. It has no patterns of channels, so
# each slot takes a connection and a thread.
MOST_IN_A_CLUSTER = 64

_CHANNEL = re.compile(re.escape(PREFIX) + r"\{([^{}]+)\}(:parameters)?:events", re.DOTALL)


@dataclass
class Histogram:
    """How many values were at most as large as each of some bounds.

    Attributes:
        bounds: the bounds, ascending. A value counts under the first bound that is greater than or equal to it.
        counts: the number of values under each bound, and last, of those above all of them.
        total: the sum of all values.
    """

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass
class RoundTimes:
    """What was heard of a round, with times in seconds of ``clock.now()``; None means it was not heard, or not yet.

    Attributes:
        began: when workers could begin: when the parameters that followed from the round before were published, or
            else, when that round was taken.
        first: when its first gradient was counted.
        last: when its last gradient was counted.
        taken: when the round was taken.
        published: when the next parameters of the same name were published.
        num_accumulated: how many gradients the round had; before it is taken, how many were heard.
        nbytes: how many bytes these had; None if the round was taken, and not all of them were heard.
        step: the step that the take closed.
        taker: the name of the taker.
    """

    began: float | None = None
    first: float | None = None
    last: float | None = None
    taken: float | None = None
    published: float | None = None
    num_accumulated: int = 0
    nbytes: int | None = 0
    step: int = 0
    taker: str = ""


@dataclass
class RoundHistory:
    """The latest rounds of one accumulator. One thread at a time may use it.

    Attributes:
        rounds: the latest rounds that were taken, the newest last.
        filling: the round that is filling now.
        worker_seconds: worker's name → how long it took for its latest gradient, from the moment that it could begin.
        histograms: a histogram for each name in ``HISTOGRAMS``.
    """

    rounds: deque[RoundTimes] = field(default_factory=lambda: deque(maxlen=ROUNDS))
    filling: RoundTimes = field(default_factory=RoundTimes)
    worker_seconds: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
    )
    # Taker's name → when it joined the queue.
    _waiting: dict[str, float] = field(default_factory=dict)
    # Whether a taker may be waiting whose beginning was not heard.
    _unsure: bool = True
    # When the latest round was taken, if nothing was missed since.
    _taken: float | None = None
    # (whole second, bytes accepted in it), the oldest first.
    _received: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW + 1))

    def copy(self) -> RoundHistory:
        """Returns what is known now, which another thread may read."""
        return dataclasses.replace(
            self,
            rounds=self.rounds.copy(),
            filling=copy.copy(self.filling),
            worker_seconds=dict(self.worker_seconds),
            histograms=copy.deepcopy(self.histograms),
            _received=self._received.copy(),
        )

    def bytes_per_second(self, now: float) -> float:
        """Returns the bytes of gradients that were accepted, averaged over the last five seconds."""
        return sum(nbytes for second, nbytes in self._received if now - WINDOW <= second) / WINDOW

    def hear(self, event: Event, at: float) -> None:
        """Notes an event that was heard at a moment."""
        match event.kind:
            case "applied":
                self._hear_applied(event, at)
            case "waiting" if event.who is not None and len(self._waiting) < TAKERS:
                self._waiting[event.who] = at
            case "left":
                # The event does not say who. The others are left out of the histogram, too.
                self._waiting.clear()
            case "taken":
                self._hear_taken(event, at)
            case "missed":
                self.filling, self._unsure, self._taken = RoundTimes(), True, None
                self._waiting.clear()

    def hear_published(self, at: float) -> None:
        """Notes that parameters of the same name were published."""
        if self.rounds and self.rounds[-1].published is None:
            # Another thread may be reading a copy of the list.
            self.rounds[-1] = dataclasses.replace(self.rounds[-1], published=at)
            if self.filling.first is None:
                self.filling.began = at

    def _hear_applied(self, event: Event, at: float) -> None:
        filling = self.filling
        if event.num_accumulated == 1:
            self.filling = filling = RoundTimes(filling.began, at)
        filling.num_accumulated += 1
        filling.last = at
        nbytes = _number(event.details.get("bytes"), MOST_BYTES)
        if nbytes is not None:
            filling.nbytes = (filling.nbytes or 0) + nbytes
            second = math.floor(at)
            if self._received and self._received[-1][0] == second:
                nbytes += self._received.pop()[1]
            self._received.append((second, nbytes))
        if (staleness := _number(event.details.get("staleness"), STEPS[-1])) is not None:
            self.histograms["staleness_steps"].add(staleness)
        if event.who is not None and filling.began is not None and not staleness:
            # The one that was heard last is the last one, and the one that was not heard for longest goes.
            self.worker_seconds.pop(event.who, None)
            self.worker_seconds[event.who] = at - filling.began
            if len(self.worker_seconds) > WORKERS:
                del self.worker_seconds[next(iter(self.worker_seconds))]

    def _hear_taken(self, event: Event, at: float) -> None:
        taken, number = self.filling, _number(event.details.get("taken"), 10**15)
        taken.taker, taken.taken = event.who or "", at
        joined = self._waiting.pop(taken.taker, None)
        if joined is not None or not self._unsure:
            self.histograms["take_wait_seconds"].add(at - joined if joined is not None else 0.0)
        self._unsure = False
        if event.global_step is not None and number is not None:
            if self._taken is not None:
                self.histograms["round_seconds"].add(at - self._taken)
            if taken.num_accumulated != number:
                taken.nbytes = None
            else:
                self.histograms["round_bytes"].add(taken.nbytes or 0)
                if taken.first is not None and taken.last is not None:
                    self.histograms["gathering_seconds"].add(taken.last - taken.first)
            taken.step, taken.num_accumulated = event.global_step - 1, number
            self.rounds.append(taken)
        self._taken = at
        self.filling = RoundTimes(began=at)


def _number(text: str | None, most: int) -> int | None:
    """Returns the number that a field of an event holds; None if it holds none from 0 to ``most``."""
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= 16):
        return None
    return int(text) if int(text) <= most else None


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

    def history(self, name: str) -> RoundHistory:
        """Returns what is known now of the rounds of an accumulator."""
        with self._lock:
            return (self._histories.get(name) or RoundHistory()).copy()

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
