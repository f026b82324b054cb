"""Waits for enough gradients: subscribe, then look, then sleep, and look again after every event and every second."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable

from redisacc._events import hub_of
from redisacc._keys import Keys
from redisacc._link import Link
from redisacc._rounds import parse_workers, scan
from redisacc._scripts import Granted, Scripts, Waiting
from redisacc.errors import CancelledError, RedisAccError, ServerUnavailableError, TakeTimeoutError

logger = logging.getLogger("redisacc")

# A taker that doesn't look for this long is passed over, in milliseconds.
LEASE_MS = 3000
# It looks at least this often, in seconds.
LOOK_EVERY = 1.0
# A wait that lasts says so this often, in seconds.
LOG_EVERY = 60.0
# How long a look tries to reach the server before the wait says in the log that it can't, in seconds.
LOOK_PATIENCE = 5.0


def wait_for_round(
    *,
    link: Link,
    keys: Keys,
    scripts: Scripts,
    num_required: int,
    timeout: float | None,
    taker: str,
    label: str,
    closed: threading.Event,
    register: Callable[[threading.Event], Callable[[], None]],
) -> Granted:
    """Blocks until the round is granted.

    Args:
        closed: set when the handle is closed; the wait ends with CancelledError.
        register: gets the event that wakes the wait, and returns what takes it back.
    """
    token = secrets.token_hex(16)
    started = time.monotonic()
    deadline = math.inf if timeout is None else started + timeout
    wait = _Wait(link, keys, scripts, num_required, deadline, taker, label, token)
    take_back = register(wait.wake)
    try:
        granted = wait.look()
        if granted is None and deadline > time.monotonic():
            with hub_of(link).listen(keys.events, wait.on_event):
                granted = wait.until_granted(closed)
    except BaseException:
        # Ctrl-C included: the next in the queue must not wait for our lease to run out.
        wait.leave_quietly()
        raise
    finally:
        take_back()
    if granted is None:
        granted = wait.leave()
    if granted is None:
        raise wait.timed_out(time.monotonic() - started)
    return granted


class _Wait:
    def __init__(
        self,
        link: Link,
        keys: Keys,
        scripts: Scripts,
        num_required: int,
        deadline: float,
        taker: str,
        label: str,
        token: str,
    ) -> None:
        self.wake = threading.Event()
        self._link = link
        self._keys = keys
        self._scripts = scripts
        self._num_required = num_required
        self._deadline = deadline
        self._taker = taker
        self._label = label
        self._token = token
        self._seen: Waiting | None = None
        self._unreachable: ServerUnavailableError | None = None

    def on_event(self, event: str | None) -> None:
        """Runs on the hub's thread. Most events say that the time hasn't come; those wake nobody."""
        if event is not None and event.startswith(("applied ", "stale ", "waiting ")):
            for word in event.split(" ", 4):
                if word.startswith("count=") and word[6:].isdigit() and int(word[6:20]) < self._num_required:
                    return
        self.wake.set()

    def until_granted(self, closed: threading.Event) -> Granted | None:
        """Looks until the round is granted, or the deadline has passed (None)."""
        next_log = time.monotonic() + LOG_EVERY
        while True:
            self.wake.clear()
            if closed.is_set():
                raise CancelledError(f"{self._label}: the handle was closed while a take waited")
            granted = self.look()
            now = time.monotonic()
            if granted is not None or now >= self._deadline:
                return granted
            if now >= next_log:
                next_log = now + LOG_EVERY
                logger.warning("%s", self._state("still waits"))
            self.wake.wait(min(LOOK_EVERY, self._deadline - now))

    def look(self) -> Granted | None:
        """Asks for the round once. An unreachable server is said in the log, and waited for."""
        try:
            reply = self._scripts.take(
                token=self._token,
                num_required=self._num_required,
                lease_ms=LEASE_MS,
                taker=self._taker,
                patience=self._patience(),
            )
        except ServerUnavailableError as error:
            if self._unreachable is None:
                if self._seen is None and self._deadline == math.inf:
                    raise
                logger.warning("%s: lost the server while a take waits, and goes on trying: %s", self._label, error)
            self._unreachable = error
            return None
        if self._unreachable is not None:
            logger.warning("%s: the server is back", self._label)
            self._unreachable = None
        if isinstance(reply, Granted):
            return reply
        self._seen = reply
        return None

    def _patience(self) -> float:
        # The last look of a take whose time is up still gets a moment for its round trip.
        return min(LOOK_PATIENCE, max(self._deadline - time.monotonic(), 0.5))

    def leave(self) -> Granted | None:
        """Leaves the queue; a round that was granted meanwhile is delivered."""
        if self._unreachable is not None:
            # Nobody to tell; the lease runs out.
            return None
        return self._scripts.leave(token=self._token, patience=LOOK_PATIENCE)

    def leave_quietly(self) -> None:
        """Leaves the queue because of an error, which is what the caller has to hear of."""
        try:
            granted = self._scripts.leave(token=self._token, patience=1.0)
        except RedisAccError as error:
            logger.debug("%s: could not leave the queue: %s", self._label, error)
            return
        if granted is not None:
            logger.warning(
                "%s: the round of step %d, with %d gradients, was granted when the take was interrupted; recover() "
                "gets it",
                self._label,
                granted.global_step,
                granted.num_accumulated,
            )

    def timed_out(self, seconds: float) -> TakeTimeoutError:
        """The error that says what was waited for."""
        workers: dict[str, int] = {}
        if self._unreachable is None:
            try:
                workers = parse_workers(scan(self._link, self._keys.current.workers), self._keys.current.workers)
            except RedisAccError as error:
                logger.debug("%s: %s", self._label, error)
        error = TakeTimeoutError(
            self._state(f"timed out after {seconds:.3g} s", workers),
            num_required=self._num_required,
            num_accumulated=self._seen.num_accumulated if self._seen else 0,
            workers=workers,
        )
        error.__cause__ = self._unreachable
        return error

    def _state(self, what: str, workers: dict[str, int] | None = None) -> str:
        seen = self._seen
        text = f"{self._label}: a take of {self._num_required} {what}"
        if seen is None:
            return f"{text}: the server did not say how many gradients there are"
        text += f": {seen.num_accumulated} of {self._num_required} gradients had come at step {seen.global_step}"
        if workers:
            text += ", from " + ", ".join(f"{name} ({number})" for name, number in workers.items())
        if seen.ahead:
            text += f"; {seen.ahead} takers stand before it"
        if self._unreachable is not None:
            text += "; the server can't be reached now"
        return text
