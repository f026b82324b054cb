"""The reducer: a process beside the server that adds up large gradients while they are being uploaded."""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial

from redisacc._data import validation
from redisacc._format.keys import Keys
from redisacc._format.staging import UploadBegun
from redisacc._handles.base import host_and_process
from redisacc._protocol.lifetime import Closing
from redisacc._protocol.reduction import Reduction, heard_in
from redisacc._redis.connect import connect
from redisacc._redis.pubsub import pubsub_of
from redisacc.errors import InvalidArgumentError, ServerUnavailableError

__all__ = ["Reducer"]

logger = logging.getLogger("redisacc")

# How many accumulators a reducer works on at a time, unless the caller says otherwise.
MAX_ACCUMULATORS = 16
# While others have work, an accumulator is worked on for about this long, in seconds.
TURN = 0.02
# The longest pause of the worker, in seconds.
LONGEST_PAUSE = 1.0

_WAKE = re.compile(r"redisacc:\{([^{}]+)\}:wake")


class Reducer(Closing):
    """Adds up large gradients beside the server while workers upload them, so that a taker fetches only their sum.

    It only saves time. It changes no accumulator and keeps no state: if it is killed, takers do its work. Results are
    the same, bit for bit. Several reducers may run for the same accumulators; one of them works on each, and the others
    stand by.

    It works on an accumulator while gradients of at least 512 KiB are announced there whose dense arrays have, for as
    many gradients as the next take requires, more than 1.25 times the bytes of their sum. Its memory is that of one sum
    for each of these accumulators, and a few MiB. In Redis, it stores at most two sums for each, which expire after 60
    seconds.

    Example:
        >>> with redisacc.Reducer("model*", redis="unix:///run/redis.sock") as reducer:  # doctest: +SKIP
        ...     reducer.run()

    Args:
        pattern: the names of the accumulators, as a glob of the server: ``*``, ``?``, ``[ab]``.
        redis: a client of redis-py or valkey-py, a URL, or None, as for ``ConditionalAccumulator``.
        max_accumulators: how many accumulators it works on at the same time, at least 1. Others get no reducer until
            one of these has been idle for 10 seconds.

    Raises:
        InvalidArgumentError: an argument is invalid, or the client is one of a Redis Cluster, which reducers do not
            support yet.
    """

    def __init__(self, pattern: str = "*", *, redis: object = None, max_accumulators: int = MAX_ACCUMULATORS) -> None:
        self._pattern = validation.text(pattern, "pattern", max_bytes=512)
        self._most = validation.integer(max_accumulators, "max_accumulators", low=1)
        self._transport = connect(redis)
        if self._transport.cluster is not None:
            raise InvalidArgumentError("a reducer does not support Redis Cluster: pass a client of a single server")
        self._holder = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._reductions: dict[str, Reduction] = {}
        self._alarm = self._transport.waits.alarm()
        self._closed = threading.Event()
        self._running = threading.Lock()
        self._outage = False

    def __repr__(self) -> str:
        return f"Reducer({self._pattern!r}, server={self._transport.address})"

    def run(self) -> None:
        """Blocks, and works until ``close`` is called from another thread, or a signal raises.

        While the server cannot be reached, it logs a warning and keeps trying.

        Raises:
            InvalidArgumentError: it is already running in another thread.
        """
        if not self._running.acquire(blocking=False):
            raise InvalidArgumentError("this reducer is already running")
        try:
            wake = Keys(self._pattern).wake
            with pubsub_of(self._transport, wake).listen_to_pattern(wake, self._hear):
                self._work()
        finally:
            for reduction in self._reductions.values():
                reduction.release()
            self._reductions.clear()
            self._running.release()

    def close(self) -> None:
        """Ends ``run``. Closing twice does nothing."""
        self._closed.set()
        self._alarm.set()

    def _hear(self, channel: str, text: str | None) -> None:
        """Handles a message, in the thread that listens."""
        if text is None:
            with self._lock:
                for reduction in self._reductions.values():
                    reduction.hear(None)
            self._alarm.set()
            return
        match = _WAKE.fullmatch(channel)
        if match is None:
            return
        with self._lock:
            known = self._reductions.get(match[1])
            if known is None:
                if len(self._reductions) >= self._most or not isinstance(heard_in(text), UploadBegun):
                    # Only large gradients are announced before they are complete.
                    return
                known = Reduction(
                    self._transport, Keys(match[1]), holder=self._holder, who=host_and_process(os.getpid())
                )
                self._reductions[match[1]] = known
        if known.hear(text):
            self._alarm.set()

    def _work(self) -> None:
        while not self._closed.is_set():
            self._alarm.clear()
            with self._lock:
                reductions = list(self._reductions.items())
            now = time.monotonic()
            pause = LONGEST_PAUSE
            if not reductions:
                # Nothing else would notice that the server cannot be reached, or refuses this user.
                self._attempt(lambda: self._transport.call("TIME", timeout=LONGEST_PAUSE))
            for name, reduction in reductions:
                if reduction.is_idle:
                    with self._lock:
                        del self._reductions[name]
                    reduction.release()
                    continue
                has_work = reduction.has_work or reduction.due <= now
                if has_work and not self._attempt(partial(reduction.work, self._interrupts(reduction))):
                    reduction.due = time.monotonic() + LONGEST_PAUSE
                    continue
                pause = min(pause, reduction.due - time.monotonic())
            if not any(reduction.has_work for _, reduction in reductions):
                self._alarm.wait(pause)

    def _attempt(self, work: Callable[[], object]) -> bool:
        """Does something with the server. Returns False, and logs it once, if it cannot be reached."""
        try:
            work()
        except ServerUnavailableError as error:
            if not self._outage:
                logger.warning("the reducer cannot reach the server, and keeps trying: %s", error)
            self._outage = True
            return False
        if self._outage:
            self._outage = False
            logger.warning("the server is back")
        return True

    def _interrupts(self, working: Reduction) -> Callable[[], bool]:
        """Returns the function that says whether ``working`` has to stop, because others have work."""
        until = time.monotonic() + TURN

        def interrupted() -> bool:
            if self._closed.is_set():
                return True
            if time.monotonic() < until:
                return False
            with self._lock:
                return any(other.has_work for other in self._reductions.values() if other is not working)

        return interrupted
