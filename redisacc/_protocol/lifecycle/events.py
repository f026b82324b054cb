"""The events of an accumulator, as typed objects, for people and programs that watch it."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Self

from redisacc._clock import clock, durations
from redisacc._format.keys import Keys
from redisacc._protocol.waiting.lifetime import Closing, Lifetime
from redisacc._text import shown
from redisacc._wire.pubsub import pubsub_of
from redisacc._wire.transport import Transport, limited
from redisacc.errors import RedisAccError

logger = logging.getLogger("redisacc")

# Shortest and longest timeout of a check whether the accumulator still exists, in seconds.
EXISTS_TIMEOUT = 0.2, 1.0

# Maximum number of events that wait for a slow reader. Beyond it they are dropped, and "missed" says so.
KEPT = 10_000

_FIELD = re.compile(r"(\w+)=([\w.+-]{1,64})(?: |$)")
_NAME = re.compile(r"(worker|taker)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Event:
    """One change of an accumulator, as the server announced it.

    Example:
        >>> import redisacc
        >>> acc = redisacc.ConditionalAccumulator("float32", [2], worker="ann")
        >>> with acc.events(timeout=10) as events:
        ...     result = acc.apply_grad([1.0, 2.0])
        ...     event = next(events)
        >>> event.kind, event.num_accumulated, event.who
        ('applied', 1, 'ann')

    Attributes:
        kind: "applied", "stale", "repeated" (the round had a gradient of this worker), "waiting" (a taker joined the
            queue), "left" (a taker left it), "taken", "recovered", "set" or "lowered" (the step was set), "quorum"
            (the quorum was changed), "deleted"; or "missed": events may be missing here, because the connection was
            lost and restored, or because the reader was slow.
        global_step: the step after the event; None if the event does not say.
        num_accumulated: the number of gradients in the round after it; None if the event does not say.
        who: the name of the worker or taker; None if the event does not say.
        details: everything else, as text: ``local_step`` of a gradient that was dropped, ``num_required`` of a taker
            that waits, ``taken`` (how many gradients a round had), the quorum after a change, and of a gradient that
            was applied, ``bytes`` (its size), ``staleness`` (if late ones count), ``weight`` (if it is not 1),
            ``buffered`` (its id, if it was buffered).
    """

    kind: str
    global_step: int | None
    num_accumulated: int | None
    who: str | None
    details: dict[str, str]

    @classmethod
    def parse(cls, text: str | None) -> Event:
        """Returns the event that a line describes.

        Args:
            text: the line; None means a gap. A line that redisacc did not write gives an event of kind "unknown".
        """
        if text is None:
            return cls("missed", None, None, None, {})
        kind, _, rest = text.partition(" ")
        if not (kind.isascii() and kind.isalpha() and len(kind) <= 16):
            return cls("unknown", None, None, None, {"text": text})
        fields: dict[str, str] = {}
        who = None
        while rest:
            # The name is the last field, because it may contain spaces.
            if (name := _NAME.fullmatch(rest)) is not None:
                who = name[2]
                break
            if (field := _FIELD.match(rest)) is None:
                return cls("unknown", None, None, None, {"text": text})
            fields[field[1]] = field[2]
            rest = rest[field.end() :]
        return cls(kind, _number(fields.pop("step", None)), _number(fields.pop("count", None)), who, fields)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"-?[0-9]{1,19}", text) else None


class Events(Closing):
    """An iterator over the events of one accumulator, from the moment that the iterator was made.

    Close it with ``close()``, or use it in a ``with`` block. It also closes itself when it ends, or when nothing refers
    to it. ``accumulator.events()`` makes one.

    Example:
        >>> import redisacc
        >>> acc = redisacc.ConditionalAccumulator("float32", [2])
        >>> with acc.events(timeout=10) as events:
        ...     result = acc.apply_grad([1.0, 2.0])
        ...     acc.delete()
        ...     [event.kind for event in events]
        ['applied', 'deleted']

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        incarnation: which accumulator of that name. Once it is deleted, the last event is "deleted", even if the
            server's message about it was lost.
        timeout: the iterator ends after this many seconds without an event; None means never.
        lifetime: of a handle. The iterator ends when the handle is closed; None means it belongs to no handle.
        owner: the handle. The iterator keeps it alive, because a private accumulator is deleted with its handle.
    """

    def __init__(
        self,
        transport: Transport,
        keys: Keys,
        incarnation: str,
        *,
        timeout: float | None = None,
        lifetime: Lifetime | None = None,
        owner: object = None,
    ) -> None:
        self._transport = transport
        self._keys = keys
        self._incarnation = incarnation.encode()
        self._timeout = timeout
        self._lifetime = lifetime or Lifetime(keys.name)
        self._owner = owner
        self._over = False
        # Whether the accumulator may have been deleted without a message: before the subscription, or in a gap.
        self._unsure = True
        # When the iterator ends if the accumulator was deleted without a message, by clock.now().
        self._over_at = math.inf
        self._alarm = alarm = transport.waits.alarm()
        self._heard: deque[str | None] = deque()
        heard = self._heard

        # Must not refer to self: the listening thread holds it, and would keep the iterator alive.
        def listener(text: str | None) -> None:
            if len(heard) >= KEPT:
                heard.clear()
                heard.append(None)
            heard.append(text)
            alarm.set()

        with contextlib.ExitStack() as stack:
            stack.callback(self._lifetime.register(alarm))
            stack.enter_context(pubsub_of(transport, keys.events).listen(keys.events, listener))
            self._stop = weakref.finalize(self, stack.pop_all().close)
        # A new subscription first reports that everything before it was missed.
        if heard and heard[0] is None:
            heard.popleft()
        # Checked now, not at the first next(): a deletion from here on is announced, after the events that precede it.
        self._check_exists(math.inf if timeout is None else timeout)

    def __repr__(self) -> str:
        return f"Events({shown(self._keys.name)} at {self._transport.address}{', ended' if self._over else ''})"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        if self._over:
            raise StopIteration
        deadline = math.inf if self._timeout is None else clock.now() + self._timeout
        while not self._heard:
            self._alarm.clear()
            if self._unsure and not self._lifetime.closed:
                self._check_exists(deadline - clock.now())
            if self._heard:
                break
            now = clock.now()
            if self._lifetime.closed or not self._stop.alive or now >= deadline:
                self.close()
                raise StopIteration
            if now >= self._over_at:
                self._heard.append("deleted")
                break
            # At most a second, so that Ctrl-C gets through on every platform.
            self._alarm.wait(min(deadline - now, self._over_at - now, 1.0))
        try:
            event = Event.parse(self._heard.popleft())
        except BaseException:
            # An interrupt: the event may be gone.
            self._heard.appendleft(None)
            raise
        if event.kind == "deleted":
            self.close()
        elif event.kind == "missed":
            self._unsure = True
        return event

    def _check_exists(self, seconds: float) -> None:
        """Checks whether the accumulator still exists, for about ``seconds``."""
        least, most = EXISTS_TIMEOUT
        try:
            with limited(min(max(seconds, least), most)):
                incarnation = self._transport.call("HGET", self._keys.record, "incarnation")
        except RedisAccError as error:
            # Events are hints, and so is this check. The next one follows a second later.
            logger.debug("events of %s: %s", self._keys.name, error)
            return
        self._unsure = False
        if incarnation != self._incarnation:
            self._over_at = clock.now() + durations.last_events

    def close(self) -> None:
        """Stops listening. Closing twice does nothing."""
        self._over = True
        self._stop()
        self._alarm.set()
