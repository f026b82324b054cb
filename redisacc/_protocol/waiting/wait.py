"""A call that waits: for a round, for a version of parameters, for a step."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import ClassVar, Generic, Required, TypedDict, TypeVar

from redisacc._clock import clock, durations, running_time
from redisacc._protocol.waiting.lifetime import Lifetime
from redisacc._wire.pubsub import pubsub_of
from redisacc._wire.transport import LIMITS, Transport, limited
from redisacc._wire.waits import Alarm, Waits
from redisacc.errors import CancelledError, NotFoundError, RedisAccError, ServerUnavailableError


class WaitLog:
    """When a wait is logged: soon for the first time, because that shows a mistake, and then less often.

    Attributes:
        due: the time of the next message, on the caller's clock.
    """

    def __init__(self, now: float) -> None:
        self._pause = durations.report
        self.due = now + durations.report

    def is_due(self, now: float) -> bool:
        """Returns whether it is time for a message. If so, the next one is due later."""
        if now < self.due:
            return False
        self._pause = min(2 * self._pause, durations.report_pause)
        self.due = now + self._pause
        return True


logger = logging.getLogger("redisacc")

# The result of a wait.
Found = TypeVar("Found")


def until(
    waits: Waits,
    probe: Callable[[], Found | None],
    *,
    every: float,
    check: Callable[[], object] | None = None,
    describe: Callable[[], str] | None = None,
    deadline: float = math.inf,
    name: str = "",
) -> Found | None:
    """Asks again and again until there is something, and returns it; None means the deadline has passed before.

    Args:
        waits: how to pause.
        probe: asks once. It returns None if there is nothing yet.
        every: how long to pause, in seconds.
        check: called before each pause. It raises if it is no use to wait.
        describe: says what is waited for, for a message after some seconds, and then less and less often.
        deadline: when to stop, by ``clock.now()``.
        name: the name of the accumulator or the parameters, for handlers of log records.
    """
    log = WaitLog(clock.now())
    while True:
        found = probe()
        now = clock.now()
        if found is not None or now >= deadline:
            return found
        if check is not None:
            check()
        if describe is not None and log.is_due(now):
            logger.warning("%s", describe(), extra={"accumulator": name})
        waits.sleep(min(every, deadline - now))


class WaitOptions(TypedDict, total=False):
    """What a caller says of a wait. The keys are arguments of ``Wait``."""

    deadline: Required[float]
    label: Required[str]
    describe: Callable[[], str | None] | None
    cancel: Callable[[], bool] | None


class Wait(ABC, Generic[Found]):
    """Polls; if that finds nothing, listens, and polls again after every message that matters and once a second.

    Messages are only hints. The wait ends when it has found something, when its deadline has passed, when the handle is
    closed or when the caller cancels it. It continues through an outage of the server, and logs when one begins and
    ends. A wait that lasts is logged as well.

    A subclass defines the poll, the channels and the wording of messages. Whatever only a longer wait needs is made
    after the first poll has found nothing, because it mostly finds something.

    Args:
        transport: the way to the server.
        lifetime: the lifetime of the handle. The wait ends with CancelledError when the handle is closed.
        channel: the channel on which messages come.
        name: the name of the accumulator or the parameters in Redis.
        deadline: when to stop waiting, by ``clock.now()``; infinity: never.
        label: the name in log records and errors.
        cancel: cancels the wait if it returns True; it is asked after every poll that was answered. None means nothing
            does.
        describe: returns a further clause for messages about the wait, or ""; None means another process says it, and
            this one is silent.

    Attributes:
        transport, lifetime, channel, name, deadline, label, cancel, describe: as given.
        answered: whether the server has answered.
        outage: why the server could not be reached when it was last asked; None if it answered.
        alarm: wakes the wait.
    """

    # A clause about the call for log messages, as in "lost the server while a take was waiting".
    doing: ClassVar[str]
    # Whether a wait without a deadline may begin while the server is away. If not, the first poll raises.
    begins_without_server: ClassVar[bool] = False

    answered = False
    outage: ServerUnavailableError | None = None
    alarm: Alarm
    _outage_began = 0.0
    # Set by the thread that listens.
    _poll_now = False

    def __init__(
        self,
        transport: Transport,
        lifetime: Lifetime,
        channel: str,
        *,
        name: str,
        deadline: float,
        label: str,
        cancel: Callable[[], bool] | None = None,
        describe: Callable[[], str | None] | None = None,
    ) -> None:
        self.transport = transport
        self.lifetime = lifetime
        self.channel = channel
        self.name = name
        self.deadline = deadline
        self.label = label
        self.cancel = cancel
        self.describe = describe

    @abstractmethod
    def poll(self, timeout: float) -> Found | None:
        """Asks the server once. Returns None if there is nothing yet.

        Args:
            timeout: how long to try, in seconds.
        """

    @abstractmethod
    def on_event(self, event: str | None) -> None:
        """Handles a message, in the thread that listens: calls ``poll_soon`` if there may be something.

        Args:
            event: the message; None means messages may have been missed.
        """

    @abstractmethod
    def progress(self) -> str:
        """Describes the wait in messages about a long one. "": there is to be none."""

    @abstractmethod
    def timed_out(self, seconds: float) -> RedisAccError:
        """Returns the error of a wait that has found nothing.

        Args:
            seconds: how long it has waited.
        """

    @property
    def fields(self) -> dict[str, object]:
        """Fields of log records, for handlers that format them."""
        return {"accumulator": self.name}

    @property
    def call_timeout(self) -> float:
        """How long a call tries to reach the server, in seconds, so that the wait ends soon after its deadline."""
        return min(durations.poll, max(self.deadline - clock.now(), durations.last_poll))

    @property
    def poll_interval(self) -> float:
        """How long to wait for a message before the next poll, in seconds."""
        return durations.poll_every

    def listen_elsewhere(self, listening: ExitStack) -> None:
        """Listens to other channels as well, until ``listening`` ends."""

    def knows_nothing_new(self) -> bool:
        """Returns whether no message has come since an earlier wait has seen that there is nothing for this one."""
        return False

    def work(self) -> bool:
        """Works between two polls. Returns False if there was nothing to do."""
        return False

    def leave(self) -> Found | None:
        """Ends the wait after its deadline. Returns what turned up at the last moment."""
        return None

    def abandon(self) -> None:
        """Ends the wait because of an error, and raises none of its own: the caller has to see the first one."""

    def run(self) -> Found:
        """Blocks until there is something, and returns it."""
        started = clock.now()
        try:
            found = None
            # A new subscription costs more than a poll. One that an earlier wait of this handle has left costs less.
            if (
                self.deadline <= started
                or self.channel not in self.lifetime.channels
                or not pubsub_of(self.transport, self.channel).heard(self.channel)
            ):
                found = self._poll()
            if found is None and self.deadline > clock.now():
                found = self._until_found(started)
        except BaseException as error:
            # Ctrl-C included.
            self.abandon()
            if isinstance(error, NotFoundError) and self.lifetime.closed:
                # A private accumulator is deleted with its handle, perhaps before the wait notices that it was closed.
                raise self._closed() from None
            raise
        if found is None:
            with limited(durations.poll):
                found = self.leave()
        if found is None:
            raise self.timed_out(clock.now() - started) from self.outage
        return found

    def poll_soon(self) -> None:
        """Lets the wait poll at once. Any thread may call this."""
        self._poll_now = True
        self.alarm.set()

    def described(self, text: str) -> str:
        """Adds to a message that the server is away, or the clause of ``describe``. Returns "" if that is None."""
        if self.outage is not None:
            return f"{text}; the server cannot be reached"
        more = self.describe() if self.describe is not None else ""
        if more is None:
            return ""
        return f"{text}; {more}" if more else text

    def _until_found(self, started: float) -> Found | None:
        """Listens and polls until there is something and returns it, or returns None once the deadline has passed."""
        self.alarm = self.transport.waits.alarm()
        with ExitStack() as listening:
            listening.callback(self.lifetime.register(self.alarm))
            self.lifetime.channels.add(self.channel)
            listening.enter_context(pubsub_of(self.transport, self.channel).listen(self.channel, self.on_event))
            self.listen_elsewhere(listening)
            log = WaitLog(started)
            # Events between the first poll and the subscription were not heard, so the next poll is due at once.
            next_poll = clock.now() + self.poll_interval if self.knows_nothing_new() else 0.0
            while True:
                self.alarm.clear()
                if self.lifetime.closed:
                    raise self._closed()
                now = clock.now()
                if self._poll_now or now >= next_poll or now >= self.deadline:
                    self._poll_now = False
                    found = self._poll()
                    now = clock.now()
                    next_poll = now + self.poll_interval
                    if found is not None or now >= self.deadline:
                        return found
                if log.is_due(now) and (text := self.progress()):
                    logger.warning("%s", text, extra=self.fields)
                if not self.work():
                    self.alarm.wait(min(next_poll, self.deadline, log.due) - now)

    def _poll(self) -> Found | None:
        """Polls once. Logs a warning and returns None if the server cannot be reached."""
        try:
            # As call_timeout, without a call.
            found = self.poll(min(durations.poll, max(self.deadline - clock.now(), durations.last_poll)))
        except ServerUnavailableError as error:
            begins = self.outage is None and not self.answered
            if begins and self.deadline == math.inf and not self.begins_without_server:
                raise
            self._note_outage(error)
            return None
        self.answered = True
        if self.outage is not None:
            logger.warning("%s: the server is back", self.label, extra=self.fields)
            self.outage = None
        if found is None and self.cancel is not None and self.cancel():
            raise CancelledError(f"{self.label}: canceled while {self.doing}")
        return found

    def _note_outage(self, error: ServerUnavailableError) -> None:
        """Notes that the server did not answer.

        Raises:
            ServerUnavailableError: this error, if the outage has lasted for as long as ``LIMITS`` allows.
        """
        if self.outage is None:
            self._outage_began = running_time()
        if running_time() - self._outage_began >= LIMITS.get().outage:
            raise error
        if self.outage is None:
            logger.warning(
                "%s: lost the server while %s; trying until it is back: %s",
                self.label,
                self.doing,
                error,
                extra=self.fields,
            )
        self.outage = error

    def _closed(self) -> CancelledError:
        return CancelledError(f"{self.label}: the handle was closed while {self.doing}")
