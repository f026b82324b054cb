"""The times of an accumulator's rounds, as its events tell them.

Times are taken on this machine when the event is heard, by ``clock.now()``. A message may be lost, and
then everything whose beginning was not heard is left out rather than guessed.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from dataclasses import dataclass, field

from redisacc._monitoring.histogram import BYTES, SECONDS, STEPS, Histogram
from redisacc._protocol.lifecycle.events import Event

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


@dataclass(frozen=True)
class RoundTimes:
    """When what happened in a round that was taken, in seconds of ``clock.now()``; None: it was not heard.

    Attributes:
        step: the step that the take closed.
        num_accumulated: how many gradients the round had.
        nbytes: how many bytes these had; None if not all of them were heard.
        taker: the name of the taker.
        began: when workers could begin: when the parameters that followed from the round before were published, or
            else, when that round was taken.
        first: when its first gradient was counted.
        last: when its last gradient was counted.
        taken: when the round was taken.
        published: when the next parameters of the same name were published.
    """

    step: int
    num_accumulated: int
    nbytes: int | None
    taker: str
    began: float | None
    first: float | None
    last: float | None
    taken: float
    published: float | None = None


@dataclass(frozen=True)
class Figures:
    """What is known of the rounds of an accumulator at one moment.

    Attributes:
        rounds: the latest rounds that were taken, the newest last.
        began: when workers could begin with the round that is filling now; None if that was not heard.
        first: when its first gradient was counted; None if there is none, or that was not heard.
        last: when its latest gradient was counted.
        worker_seconds: worker's name → how long it took for its latest gradient, from the moment that it could begin.
        bytes_per_second: the bytes of gradients that were accepted, averaged over the last five seconds.
        round_seconds: from one take to the next.
        gathering_seconds: from the first gradient of a round to the last one.
        wait_seconds: how long takes waited, from the moment that they joined the queue; 0 if they did not need to.
        staleness: of each accepted gradient, if ``staleness`` allows any.
        round_bytes: the bytes of the gradients of a round.
    """

    rounds: tuple[RoundTimes, ...]
    began: float | None
    first: float | None
    last: float | None
    worker_seconds: dict[str, float]
    bytes_per_second: float
    round_seconds: Histogram
    gathering_seconds: Histogram
    wait_seconds: Histogram
    staleness: Histogram
    round_bytes: Histogram


@dataclass
class _Filling:
    """The round that is filling: what was heard of it so far. ``heard`` counts its gradients."""

    began: float | None = None
    first: float | None = None
    last: float | None = None
    heard: int = 0
    nbytes: int = 0


@dataclass
class RoundHistory:
    """The latest rounds of one accumulator. One thread at a time may use it."""

    _rounds: deque[RoundTimes] = field(default_factory=lambda: deque(maxlen=ROUNDS))
    _filling: _Filling = field(default_factory=_Filling)
    # Taker's name → when it joined the queue.
    _waiting: dict[str, float] = field(default_factory=dict)
    # Worker's name → how many seconds it took for its latest gradient.
    _worker_seconds: dict[str, float] = field(default_factory=dict)
    # Whether a taker may be waiting whose beginning was not heard.
    _unsure: bool = True
    # When the latest round was taken, if nothing was missed since.
    _taken: float | None = None
    # (whole second, bytes accepted in it), the oldest first.
    _received: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW + 1))
    _round_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    _gathering_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    _wait_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    _staleness: Histogram = field(default_factory=lambda: Histogram(STEPS))
    _round_bytes: Histogram = field(default_factory=lambda: Histogram(BYTES))

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
                self._filling, self._unsure, self._taken = _Filling(), True, None
                self._waiting.clear()

    def hear_published(self, at: float) -> None:
        """Notes that parameters of the same name were published."""
        if self._rounds and self._rounds[-1].published is None:
            self._rounds[-1] = dataclasses.replace(self._rounds[-1], published=at)
            if self._filling.first is None:
                self._filling.began = at

    def _hear_applied(self, event: Event, at: float) -> None:
        filling = self._filling
        if event.num_accumulated == 1:
            self._filling = filling = _Filling(filling.began, at)
        filling.heard += 1
        filling.last = at
        nbytes = _number(event.details.get("bytes"), MOST_BYTES)
        if nbytes is not None:
            filling.nbytes += nbytes
            second = math.floor(at)
            if self._received and self._received[-1][0] == second:
                nbytes += self._received.pop()[1]
            self._received.append((second, nbytes))
        if (staleness := _number(event.details.get("staleness"), STEPS[-1])) is not None:
            self._staleness.add(staleness)
        if event.who is not None and filling.began is not None and not staleness:
            # The one that was heard last is the last one, and the one that was not heard for longest goes.
            self._worker_seconds.pop(event.who, None)
            self._worker_seconds[event.who] = at - filling.began
            if len(self._worker_seconds) > WORKERS:
                del self._worker_seconds[next(iter(self._worker_seconds))]

    def _hear_taken(self, event: Event, at: float) -> None:
        filling, number = self._filling, _number(event.details.get("taken"), 10**15)
        taker = event.who or ""
        joined = self._waiting.pop(taker, None)
        if joined is not None or not self._unsure:
            self._wait_seconds.add(at - joined if joined is not None else 0.0)
        self._unsure = False
        if event.global_step is not None and number is not None:
            whole = filling.heard == number
            if whole:
                self._round_bytes.add(filling.nbytes)
            if self._taken is not None:
                self._round_seconds.add(at - self._taken)
            if whole and filling.first is not None and filling.last is not None:
                self._gathering_seconds.add(filling.last - filling.first)
            self._rounds.append(
                RoundTimes(
                    step=event.global_step - 1,
                    num_accumulated=number,
                    nbytes=filling.nbytes if whole else None,
                    taker=taker,
                    began=filling.began,
                    first=filling.first,
                    last=filling.last,
                    taken=at,
                )
            )
        self._taken = at
        self._filling = _Filling(began=at)

    def figures(self, now: float) -> Figures:
        """Returns what is known at a moment."""
        recent = sum(nbytes for second, nbytes in self._received if now - WINDOW <= second)
        return Figures(
            rounds=tuple(self._rounds),
            began=self._filling.began,
            first=self._filling.first,
            last=self._filling.last,
            worker_seconds=dict(self._worker_seconds),
            bytes_per_second=recent / WINDOW,
            round_seconds=self._round_seconds.copy(),
            gathering_seconds=self._gathering_seconds.copy(),
            wait_seconds=self._wait_seconds.copy(),
            staleness=self._staleness.copy(),
            round_bytes=self._round_bytes.copy(),
        )


def _number(text: str | None, most: int) -> int | None:
    """Returns the number that a field of an event holds; None if it holds none from 0 to ``most``."""
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= 16):
        return None
    return int(text) if int(text) <= most else None
