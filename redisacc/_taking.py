"""Waits for enough gradients: subscribe, then look, then sleep, and look again after every event and every second."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from redisacc._clients import Client
from redisacc._events import Wake, hub_of
from redisacc._info import AccumulatorInfo, read_info
from redisacc._keys import Keys
from redisacc._link import Link
from redisacc._parked import PartMissing
from redisacc._rounds import Reader, read_commands
from redisacc._scripts import ForgottenError, Granted, Scripts, Take, Waiting
from redisacc._wire import Command
from redisacc.errors import (
    AccumulatorNotFoundError,
    CancelledError,
    RedisAccError,
    ServerUnavailableError,
    StaleSequenceError,
    TakeTimeoutError,
)

logger = logging.getLogger("redisacc")

# A taker that doesn't look for this long is passed over, in milliseconds.
LEASE_MS = 3000
# It looks at least this often, in seconds.
LOOK_EVERY = 1.0
# So many of the workers that are missing are named.
NAMED = 10
# A wait that lasts says so this often, in seconds.
LOG_EVERY = 60.0
# How long a look tries to reach the server before the wait says in the log that it can't, in seconds.
LOOK_PATIENCE = 5.0
# The last look of a take whose time is up still gets that long for its round trip, in seconds.
LAST_LOOK = 0.5
# So many announced gradients are fetched ahead before the taker looks up again.
AHEAD = 256


def wait_for_round(
    wait: Wait, *, closed: threading.Event, register: Callable[[Wake], Callable[[], None]]
) -> tuple[Granted, list[Any]]:
    """Blocks until the round is granted.

    Args:
        wait: who waits for what.
        closed: set when the handle is closed; the wait ends with CancelledError.
        register: gets what wakes the wait, and returns what takes it back.

    Returns:
        The round, the replies to ``read_commands`` for it, and last the number of rounds granted so far.
    """
    started = time.monotonic()
    take_back = register(wait.wake)
    try:
        hub = hub_of(wait.link)
        granted = None
        if wait.deadline <= started or not hub.hears(wait.keys.wake):
            # Mostly the gradients have come already, and nobody has to listen.
            granted = wait.look()
        if granted is None and wait.deadline > time.monotonic():
            with hub.listen(wait.keys.wake, wait.on_event):
                granted = wait.until_granted(closed)
    except BaseException as error:
        # Ctrl-C included: the next in the queue must not wait for our lease to run out.
        wait.leave_quietly()
        if isinstance(error, AccumulatorNotFoundError) and closed.is_set():
            # A private accumulator goes with its handle, and may be gone before the wait notices why.
            raise wait.cancelled() from None
        raise
    finally:
        take_back()
    if granted is None:
        granted = wait.leave()
    if granted is None:
        raise wait.timed_out(time.monotonic() - started)
    return granted


# What a listener heard: the id of a gradient that was parked, or that the round is over, or that it missed something.
_OVER, _MISSED = object(), object()


@dataclass
class Wait:
    """A take that waits.

    Attributes:
        client: nobody else's while it waits.
        num_required: granted when that many gradients have come.
        deadline: when to give up, on ``time.monotonic()``'s clock; infinity: never.
        taker: name of who waits.
        label: how log records and errors call the accumulator.
        reader: adds the round up, and begins with that while the round still grows.
    """

    link: Link
    keys: Keys
    scripts: Scripts
    client: Client
    num_required: int
    deadline: float
    taker: str
    label: str
    reader: Reader
    wake: Wake = field(default_factory=Wake)
    _sequence: int = field(init=False)
    _token: str = field(init=False)
    _take: Take = field(init=False)
    _lost: int = field(init=False)
    _seen: Waiting | None = None
    _unreachable: ServerUnavailableError | None = None
    # Filled on the hub's thread.
    _heard: deque[object] = field(default_factory=deque)
    _look_now: bool = True

    def __post_init__(self) -> None:
        self._lost = self.link.lost
        self._begin()

    def _begin(self) -> None:
        self._sequence = self.client.next()
        self._token = f"{self.client.id}-{self._sequence}"
        self._take = self.scripts.take(
            token=self._token,
            client=self.client,
            sequence=self._sequence,
            num_required=self.num_required,
            lease_ms=LEASE_MS,
            taker=self.taker,
            read=self._read_commands(),
        )

    def on_event(self, event: str | None) -> None:
        """Runs on the hub's thread. Most events say that the time hasn't come; those wake nobody."""
        words = dict(word.partition("=")[::2] for word in event.split(" ", 4)) if event is not None else {}
        parked = words.get("parked")
        if event is None:
            self._heard.append(_MISSED)
        elif "taken" in words:
            self._heard.append(_OVER)
        elif parked == "*":
            self._heard.append(_MISSED)
        elif parked:
            self._heard.append(parked[:64])
        if words.keys() & {"applied", "stale", "waiting"}:
            count = words.get("count", "")
            if count.isdigit() and int(count[:16]) < self.num_required:
                if parked:
                    self.wake.set()
                return
        self._look_now = True
        self.wake.set()

    def until_granted(self, closed: threading.Event) -> tuple[Granted, list[Any]] | None:
        """Looks until the round is granted, or the deadline has passed (None)."""
        next_log = time.monotonic() + LOG_EVERY
        next_look = 0.0
        while True:
            self.wake.clear()
            if closed.is_set():
                raise self.cancelled()
            now = time.monotonic()
            if self._look_now or now >= next_look or now >= self.deadline:
                self._look_now = False
                granted = self.look()
                now = time.monotonic()
                next_look = now + LOOK_EVERY
                if granted is not None or now >= self.deadline:
                    return granted
            if now >= next_log:
                next_log = now + LOG_EVERY
                logger.warning("%s", self._state("still waits", self._info()), extra=self._fields)
            if self._look_ahead():
                continue
            self.wake.wait(min(next_look, self.deadline, next_log) - now)

    def _look_ahead(self) -> bool:
        """Adds some of what was parked, if this taker is the next. False if there is nothing to do."""
        if self._seen is None or self._seen.ahead or self._unreachable is not None:
            self._heard.clear()
            self._heard.append(_MISSED)
            return False
        ids: list[str] = []
        missed = False
        while self._heard and len(ids) < AHEAD:
            heard = self._heard.popleft()
            if heard is _OVER:
                self.reader.forget()
                ids, missed = [], False
            elif heard is _MISSED:
                missed = True
            else:
                ids.append(str(heard))
        if not ids and not missed:
            return False
        try:
            self.reader.look_ahead(None if missed else ids)
        except (RedisAccError, PartMissing) as error:
            # Whatever is wrong shows when the round is read; this was only to save time.
            logger.debug("%s: could not look ahead: %s", self.label, error)
            self.reader.forget()
            self._heard.append(_MISSED)
            return False
        return True

    def look(self) -> tuple[Granted, list[Any]] | None:
        """Asks for the round once. An unreachable server is said in the log, and waited for."""
        try:
            reply, pieces = self._ask()
        except ServerUnavailableError as error:
            if self._unreachable is None:
                if self._seen is None and self.deadline == math.inf:
                    raise
                logger.warning(
                    "%s: lost the server while a take waits, and goes on trying: %s",
                    self.label,
                    error,
                    extra=self._fields,
                )
            self._unreachable = error
            return None
        if self._unreachable is not None:
            logger.warning("%s: the server is back", self.label, extra=self._fields)
            self._unreachable = None
        if isinstance(reply, Granted):
            self.client.learn(self._sequence)
            return reply, pieces
        self._seen = reply
        return None

    @property
    def _fields(self) -> dict[str, object]:
        """Of log records, for handlers that format them."""
        fields: dict[str, object] = {"accumulator": self.keys.name, "num_required": self.num_required}
        if self._seen is not None:
            fields |= {"global_step": self._seen.global_step, "num_accumulated": self._seen.num_accumulated}
        return fields

    def _ask(self) -> tuple[Granted | Waiting, list[Any]]:
        while True:
            try:
                return self._take(patience=self._patience())
            except ForgottenError as error:
                self.client.begin_anew(error.now_ms)
                self._begin()
            except StaleSequenceError:
                # It was granted, the reply was lost, and before this copy came somebody else recovered the round.
                self._begin()

    def _read_commands(self) -> list[Command]:
        return [*read_commands(self.keys.taken_round(self._token)), ("HGET", self.keys.record, "takes")]

    def _patience(self) -> float:
        return min(LOOK_PATIENCE, max(self.deadline - time.monotonic(), LAST_LOOK))

    def leave(self) -> tuple[Granted, list[Any]] | None:
        """Leaves the queue; a round that was granted meanwhile is delivered."""
        if self._unreachable is not None:
            # Nobody to tell; the lease runs out.
            return None
        granted = self._leave(LOOK_PATIENCE)
        if granted is None:
            return None
        return granted, self.link.pipeline(self._read_commands())

    def _leave(self, patience: float) -> Granted | None:
        if self.link.lost != self._lost:
            # A copy may be on its way still: it must not be granted a round when nobody waits for it any more.
            with contextlib.suppress(ForgottenError):
                self.scripts.settle(client=self.client, sequence=self._sequence, worker=self.taker, patience=patience)
        return self.scripts.leave(token=self._token, patience=patience)

    def leave_quietly(self) -> None:
        """Leaves the queue because of an error, which is what the caller has to hear of."""
        try:
            granted = self._leave(1.0)
        except RedisAccError as error:
            logger.debug("%s: could not leave the queue: %s", self.label, error)
            return
        if granted is not None:
            logger.warning(
                "%s: the round of step %d, with %d gradients, was granted when the take was interrupted; recover() "
                "gets it",
                self.label,
                granted.global_step,
                granted.num_accumulated,
                extra={
                    "accumulator": self.keys.name,
                    "global_step": granted.global_step,
                    "num_accumulated": granted.num_accumulated,
                    "token": granted.token,
                },
            )

    def cancelled(self) -> CancelledError:
        """The error that says that the handle was closed."""
        return CancelledError(f"{self.label}: the handle was closed while a take waited")

    def timed_out(self, seconds: float) -> TakeTimeoutError:
        """The error that says what was waited for."""
        info = self._info()
        error = TakeTimeoutError(
            self._state(f"timed out after {seconds:.3g} s", info),
            num_required=self.num_required,
            num_accumulated=self._seen.num_accumulated if self._seen else 0,
            workers=info.workers if info else {},
            missing=[worker.name for worker in info.missing] if info else (),
        )
        error.__cause__ = self._unreachable
        return error

    def _info(self) -> AccumulatorInfo | None:
        """Who has come and who has not, if that can be read."""
        if self._unreachable is not None:
            return None
        try:
            return read_info(self.link, self.keys)
        except RedisAccError as failure:
            logger.debug("%s: %s", self.label, failure)
            return None

    def _state(self, what: str, info: AccumulatorInfo | None) -> str:
        seen = self._seen
        text = f"{self.label}: a take of {self.num_required} {what}"
        if seen is None:
            return f"{text}: the server did not say how many gradients there are"
        text += f": {seen.num_accumulated} of {self.num_required} gradients had come at step {seen.global_step}"
        if info is not None and info.workers:
            text += ", from " + ", ".join(f"{name} ({number})" for name, number in info.workers.items())
        if info is not None and info.missing:
            named = [
                f"{worker.name} (seen {(info.read_at - worker.seen_at).total_seconds():.0f} s ago)"
                for worker in info.missing[:NAMED]
            ]
            more = [f"{len(info.missing) - NAMED} more"] if len(info.missing) > NAMED else []
            text += "; missing: " + ", ".join(named + more)
        if seen.ahead:
            text += f"; {seen.ahead} takers stand before it"
        if self._unreachable is not None:
            text += "; the server can't be reached now"
        return text
