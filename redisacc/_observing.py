"""The events of an accumulator, for people and programs that watch it: one typed object for each line."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from redisacc._events import Wake, hub_of
from redisacc._keys import Keys
from redisacc._link import Link
from redisacc.errors import RedisAccError, ServerUnavailableError, StepTimeoutError

logger = logging.getLogger("redisacc")

# Who waits for a step looks at least this often, and how long a look tries to reach the server, in seconds.
LOOK_EVERY = 1.0
LOOK_PATIENCE = 5.0
# How long a reader of events tries to learn whether the accumulator is still there, each time, in seconds: as long as
# it may wait for events, within these bounds.
STANDS_PATIENCE = 0.2, 1.0
# How long what an accumulator that is gone did last may still be under way to its readers, in seconds.
GRACE = 1.0

# So many events wait for a reader who is slow; beyond, the oldest go, and "missed" says so.
KEPT = 10_000

_FIELD = re.compile(r"(\w+)=([\w-]{1,64})(?: |$)")
_NAME = re.compile(r"(worker|taker)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Event:
    """One change of an accumulator, as the server announced it.

    Attributes:
        kind: "applied", "stale", "waiting" (a taker joined the queue), "left" (one gave up), "taken", "recovered",
            "set" or "lowered" (the step was set), "deleted"; or "missed": the connection was lost and is back, or the
            reader was slow, so events may be missing here.
        global_step: the step after it; None where the event doesn't say.
        num_accumulated: gradients in the round after it; None likewise.
        who: the worker's or the taker's name; None likewise.
        details: what else it says, as text: ``local_step`` of a stale gradient, ``num_required`` of one who waits,
            ``taken`` (how many gradients a round had), ``parked`` (id of a gradient that is held whole).
    """

    kind: str
    global_step: int | None
    num_accumulated: int | None
    who: str | None
    details: dict[str, str]

    @classmethod
    def parse(cls, text: str | None) -> Event:
        """The event behind a line; None stands for a gap. What isn't redisacc's is of kind "unknown"."""
        if text is None:
            return cls("missed", None, None, None, {})
        kind, _, rest = text.partition(" ")
        if not (kind.isascii() and kind.isalpha() and len(kind) <= 16):
            return cls("unknown", None, None, None, {"text": text})
        fields: dict[str, str] = {}
        who = None
        while rest:
            # A name comes last and may have spaces.
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


class Events:
    """An iterator over the events of one accumulator, from the moment that it was made.

    ``close()`` it, or use it in a ``with`` block; it also closes itself when it ends or is no longer referred to.

    Args:
        incarnation: which accumulator of that name; once it is no longer there, the last event is "deleted", whether
            or not the server's word of it came through.
        timeout: ends after so many seconds without an event; None: never.
        closed: set when its handle is closed, which ends it too.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        incarnation: str,
        *,
        timeout: float | None = None,
        closed: threading.Event | None = None,
        register: Callable[[Wake], Callable[[], None]] | None = None,
    ) -> None:
        self._link = link
        self._keys = keys
        self._incarnation = incarnation.encode()
        self._timeout = timeout
        self._closed = closed or threading.Event()
        self._over = False
        # Whether it may have been deleted unheard: before the subscription stood, or in a gap.
        self._unsure = True
        # When it is over for one that was deleted unheard, on time.monotonic()'s clock.
        self._over_at = math.inf
        self._wake = wake = Wake()
        self._heard: deque[str | None] = deque()
        heard = self._heard

        # Must not refer to self: the hub holds it, and would keep us alive.
        def listener(text: str | None) -> None:
            if len(heard) >= KEPT:
                heard.clear()
                heard.append(None)
            heard.append(text)
            wake.set()

        stack = contextlib.ExitStack()
        if register is not None:
            stack.callback(register(wake))
        stack.enter_context(hub_of(link).listen(keys.events, listener))
        self._stop = weakref.finalize(self, stack.close)
        # The first thing that a new subscription says is that what came before it was missed.
        if heard and heard[0] is None:
            heard.popleft()
        # Now, not at the first next(): what is deleted from here on is heard, and what it did before comes first.
        self._look(math.inf if timeout is None else timeout)

    def __repr__(self) -> str:
        return f"Events({self._keys.name!r} at {self._link.address}{', ended' if self._over else ''})"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        if self._over:
            raise StopIteration
        deadline = math.inf if self._timeout is None else time.monotonic() + self._timeout
        while not self._heard:
            self._wake.clear()
            if self._unsure and not self._closed.is_set():
                self._look(deadline - time.monotonic())
            if self._heard:
                break
            now = time.monotonic()
            if self._closed.is_set() or not self._stop.alive or now >= deadline:
                self.close()
                raise StopIteration
            if now >= self._over_at:
                self._heard.append("deleted")
                break
            # Not without end: Ctrl-C must get through on every platform.
            self._wake.wait(min(deadline - now, self._over_at - now, 1.0))
        event = Event.parse(self._heard.popleft())
        if event.kind == "deleted":
            self.close()
        elif event.kind == "missed":
            self._unsure = True
        return event

    def _look(self, seconds: float) -> None:
        """Sees whether the accumulator is still there, in about that time."""
        least, most = STANDS_PATIENCE
        patience = min(max(seconds, least), most)
        try:
            incarnation = self._link.call("HGET", self._keys.record, "incarnation", patience=patience)
        except RedisAccError as error:
            # Events are hints, and so is this. The next look is a second later.
            logger.debug("events of %s: %s", self._keys.name, error)
            return
        self._unsure = False
        if incarnation != self._incarnation:
            self._over_at = time.monotonic() + GRACE

    def wait_for_move(self, seconds: float) -> None:
        """Blocks until an event comes that may mean another step, or may have been missed, or so many seconds."""
        give_up = time.monotonic() + seconds
        while (left := give_up - time.monotonic()) > 0:
            self._wake.clear()
            while self._heard:
                text = self._heard.popleft()
                if text is None or not text.startswith(("applied ", "stale ", "waiting ", "left")):
                    return
            if self._closed.is_set():
                return
            self._wake.wait(left)

    def close(self) -> None:
        """Stops listening. Closing twice does nothing."""
        self._over = True
        self._stop()
        self._wake.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def wait_for_step(
    read: Callable[[float], int],
    events: Callable[[], Events],
    *,
    wanted: int,
    deadline: float,
    label: str,
    name: str,
    check_open: Callable[[], None],
) -> int:
    """Blocks until the global step is at least ``wanted``.

    Args:
        read: reads the step; gets for how many seconds to try.
        events: begins to listen.
        label, name: how log records call the accumulator, and its name in Redis.
        deadline: on ``time.monotonic()``'s clock; infinity: never.
        check_open: raises CancelledError once the handle is closed.

    Returns:
        The step, which may be higher.
    """
    step: int | None = None
    unreachable: ServerUnavailableError | None = None
    # Looked at first without listening: mostly the step has come, or the caller is sure of it.
    listening: Events | None = None
    try:
        while True:
            check_open()
            try:
                step = read(min(LOOK_PATIENCE, max(deadline - time.monotonic(), 0.5)))
                if unreachable is not None:
                    logger.warning("%s: the server is back", label, extra={"accumulator": name})
                    unreachable = None
            except ServerUnavailableError as error:
                if unreachable is None:
                    if step is None and deadline == math.inf:
                        raise
                    logger.warning(
                        "%s: lost the server while waiting for a step, and goes on trying: %s",
                        label,
                        error,
                        extra={"accumulator": name},
                    )
                unreachable = error
            if unreachable is None and step is not None and step >= wanted:
                return step
            left = deadline - time.monotonic()
            if left <= 0:
                raise StepTimeoutError(
                    f"{label}: step {wanted} was not reached in time: it is "
                    + ("unknown" if step is None else str(step)),
                    wanted=wanted,
                    global_step=step,
                ) from unreachable
            if listening is None:
                listening = events()
                # What came between the look and the subscription was announced to nobody.
                continue
            listening.wait_for_move(min(left, LOOK_EVERY))
    finally:
        if listening is not None:
            listening.close()
