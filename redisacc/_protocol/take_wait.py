"""A take that waits for enough gradients: it subscribes, polls, sleeps, and polls again after every event or second."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from redisacc._format.buffered import PartMissingError
from redisacc._format.keys import Keys
from redisacc._format.staging import PartsArrived, SumStored, parse_message
from redisacc._format.worker_states import WorkersByState
from redisacc._protocol.contributors import Contributors, read_contributors, states_text
from redisacc._protocol.growing_round import MOST_HEARD, Heard, Interruption
from redisacc._protocol.lifetime import Lifetime
from redisacc._protocol.outage_log import OutageLog
from redisacc._protocol.polling import LAST_POLL_TIMEOUT, POLL_INTERVAL, POLL_TIMEOUT
from redisacc._protocol.requirement import Requirement
from redisacc._protocol.round_reader import RoundReader, read_commands
from redisacc._protocol.scripts import ForgottenError, GoneBack, Granted, Queued, Scripts, Take
from redisacc._protocol.sessions import Session
from redisacc._protocol.wait_log import WaitLog
from redisacc._redis.fast_socket import Command
from redisacc._redis.pubsub import pubsub_of
from redisacc._redis.transport import Transport
from redisacc._redis.waits import Alarm
from redisacc.errors import (
    AccumulatorNotFoundError,
    CancelledError,
    NotPermittedError,
    RedisAccError,
    ServerUnavailableError,
    StaleSequenceError,
    TakeTimeoutError,
)

logger = logging.getLogger("redisacc")

# A taker that has not polled for this long is passed over, in milliseconds.
TAKER_LEASE_MS = 3000
# How long a call for a reducer tries to reach the server, in seconds.
CALL_TIMEOUT = 1.0
# With more partitions than this, a take listens to none of them, because each takes a thread and a connection. It then
# begins to add gradients up when they are counted, and asks for the sums of reducers when its round is granted.
MOST_CHANNELS = 128
# Maximum number of workers of each state in an error's attribute.
LISTED = 100


def wait_for_round(pending: TakeWait, lifetime: Lifetime) -> tuple[Granted, list[Any]]:
    """Blocks until the round is granted.

    Args:
        pending: the take.
        lifetime: of the handle. The wait ends with CancelledError when the handle is closed.

    Returns:
        The round; and the replies to ``read_commands`` for it, followed by the number of rounds granted so far.
    """
    started = time.monotonic()
    unregister = lifetime.register(pending.alarm)
    try:
        pubsub = pubsub_of(pending.transport, pending.keys.wake)
        granted = None
        if pending.deadline <= started or not pubsub.hears(pending.keys.wake):
            # In most cases enough gradients are there already, and there is nothing to listen for.
            granted = pending.poll()
        if granted is None and pending.deadline > time.monotonic():
            with contextlib.ExitStack() as listening:
                listening.enter_context(pubsub.listen(pending.keys.wake, pending.on_event))
                pending.listen_to_partitions(listening)
                granted = pending.until_granted(lifetime)
    except BaseException as error:
        # Ctrl-C included: the next taker in the queue must not wait until this one's lease has run out.
        pending.leave_quietly()
        if isinstance(error, AccumulatorNotFoundError) and lifetime.closed:
            # A private accumulator is deleted with its handle, perhaps before the wait notices that it was closed.
            raise pending.cancelled() from None
        raise
    finally:
        unregister()
    if granted is None:
        try:
            granted = pending.leave()
        except RedisAccError:
            raise
        except BaseException:
            # It may still be in the queue.
            pending.leave_quietly()
            raise
    if granted is None:
        raise pending.timed_out(time.monotonic() - started)
    return granted


@dataclass(slots=True)
class History:
    """A handle's knowledge of an accumulator's past. If the record knows less, the data has gone back.

    Attributes:
        takes: the most rounds that it has granted.
        losses: how often it was noticed that it had gone back. The first handle that notices raises this number in the
            record, by which those notice that know of nothing later.
    """

    takes: int = 0
    losses: int = 0

    def note(self, takes: object) -> bool:
        """Notes how many rounds the record says were granted. Returns False if redisacc has not written that."""
        if not (isinstance(takes, bytes) and takes.isdigit() and len(takes) <= 15):
            return False
        self.takes = max(self.takes, int(takes))
        return True


@dataclass
class TakeWait:
    """A take that waits.

    Attributes:
        transport: the way to the server.
        keys: the keys of the accumulator.
        scripts: its scripts.
        session: used only by this take while it waits.
        required: how many gradients the take waits for. None: as many as the settings of the accumulator say.
        min_weight: what the sum of their weights must be at least; 0: any sum will do.
        deadline: when to stop waiting, on ``time.monotonic()``'s clock; infinity: never.
        taker: the name of the taker.
        label: the accumulator's name in log records and errors.
        reader: adds the round up, and begins with it while it is still growing.
        history: what the handle knows of the accumulator's past.
        describe: returns what else a message about the wait says, "" for nothing.
        cancel: cancels the wait if it returns True; it is asked after every poll that was answered. None: nothing does.
        alarm: wakes the wait.
        loss: how it turned out that the accumulator has gone back to older data; None: it has not.
    """

    transport: Transport
    keys: Keys
    scripts: Scripts
    session: Session
    required: Requirement | None
    min_weight: float
    deadline: float
    taker: str
    label: str
    reader: RoundReader
    history: History
    describe: Callable[[], str] | None = None
    cancel: Callable[[], bool] | None = None
    alarm: Alarm = field(init=False)
    loss: str | None = None
    _sequence: int = field(init=False)
    _token: str = field(init=False)
    _take: Take = field(init=False)
    _takes: int = field(init=False)
    _lost: int = field(init=False)
    _seen: Queued | None = None
    _outage: OutageLog = field(init=False)
    # Filled by the thread that listens.
    _heard: deque[Heard] = field(default_factory=deque)
    # Whether the last look ahead was broken off to poll.
    _broke_off: bool = False
    _poll_now: bool = True

    def __post_init__(self) -> None:
        self.alarm = self.transport.waits.alarm()
        self._lost = self.transport.lost
        self._outage = OutageLog(self.label, "a take was waiting")
        self._begin()

    def _begin(self) -> None:
        self._sequence = self.session.next()
        self._token = f"{self.session.id}-{self._sequence}"
        self._prepare()

    def _prepare(self) -> None:
        self._takes = self.history.takes
        self._take = self.scripts.take(
            token=self._token,
            session=self.session,
            sequence=self._sequence,
            num_required=self.required.num_required if self.required else None,
            min_weight=self.min_weight,
            up_to=self.required.up_to if self.required else None,
            grace_ms=self.required.grace_ms if self.required else 0,
            lease_ms=TAKER_LEASE_MS,
            taker=self.taker,
            takes=self._takes,
            losses=self.history.losses,
            read=self._read_commands(),
        )

    def listen_to_partitions(self, listening: contextlib.ExitStack) -> None:
        """Listens to what the nodes of the partitions tell, until ``listening`` ends. Without it, all takes longer."""
        positions = range(len(self.keys.partitions))
        if len(positions) > MOST_CHANNELS:
            return
        try:
            for channel in map(self.keys.wake_of, positions):
                # A node that does not answer must not keep the take from polling.
                heard = pubsub_of(self.transport, channel).listen(channel, self.on_arrival, confirmed=False)
                listening.enter_context(heard)
        except RuntimeError as error:
            logger.debug("%s: there is no thread left to listen: %s", self.label, error)

    @property
    def num_required(self) -> int:
        """How many gradients the take required when the server answered last; 0 if only the server knows."""
        required = self.required or (self._seen.required if self._seen else None)
        return required.num_required if required else 0

    def on_event(self, event: str | None) -> None:
        """Handles a message, in the thread that listens.

        It wakes the wait only if it may complete the round, or if there is something to fetch ahead.
        """
        message = None if event is None else parse_message(event)
        if message is not None:
            self._note(message)
            self.alarm.set()
            return
        words = dict(word.partition("=")[::2] for word in event.split(" ", 4)) if event is not None else {}
        buffered = words.get("buffered")
        if event is None:
            self._note(Interruption.MISSED)
        elif "taken" in words:
            self._note(Interruption.OVER)
        elif buffered == "*":
            self._note(Interruption.MISSED)
        elif buffered:
            self._note(buffered[:64])
        if words.keys() & {"applied", "stale", "repeated", "waiting"}:
            count = words.get("count", "")
            if count.isdigit() and int(count[:16]) < self.num_required:
                if buffered:
                    self.alarm.set()
                return
        self._poll_now = True
        self.alarm.set()

    def on_arrival(self, text: str | None) -> None:
        """Handles a message about a partition, in the thread that listens. A message that is missed only costs time."""
        message = None if text is None else parse_message(text)
        if isinstance(message, PartsArrived | SumStored):
            self._note(message)
            self.alarm.set()

    def _note(self, heard: Heard) -> None:
        """Notes what was heard. If it is too much, it is looked up instead: anybody may publish."""
        if len(self._heard) >= MOST_HEARD:
            self._heard.clear()
            heard = Interruption.MISSED
        self._heard.append(heard)

    def until_granted(self, lifetime: Lifetime) -> tuple[Granted, list[Any]] | None:
        """Polls until the round is granted and returns it, or returns None once the deadline has passed."""
        log = WaitLog(time.monotonic())
        next_poll = 0.0
        while True:
            self.alarm.clear()
            if lifetime.closed:
                raise self.cancelled()
            now = time.monotonic()
            if self._poll_now or now >= next_poll or now >= self.deadline:
                self._poll_now = False
                granted = self.poll()
                now = time.monotonic()
                next_poll = now + self._poll_interval
                if granted is not None or now >= self.deadline:
                    return granted
                if self.cancel is not None and self._outage.error is None and self.cancel():
                    raise CancelledError(f"{self.label}: a take was cancelled while it waited")
            if log.is_due(now):
                logger.warning("%s", self._state("is still waiting", self._contributors()), extra=self._fields)
            looked = self._look_ahead()
            if self.reader.calls_for_reducer():
                self._call_reducer()
            if looked:
                continue
            self.alarm.wait(min(next_poll, self.deadline, log.due) - now)

    @property
    def _poll_interval(self) -> float:
        """How long to wait for an event before the next poll, in seconds: no longer than the grace."""
        if self._seen is None or not self._seen.grace_left_ms:
            return POLL_INTERVAL
        return min(POLL_INTERVAL, self._seen.grace_left_ms / 1000)

    def _look_ahead(self) -> bool:
        """Adds some buffered gradients if this taker is next in the queue. Returns False if there is nothing to do."""
        if self._seen is None or self._seen.ahead or self._outage.error is not None:
            self._heard.clear()
            self._heard.append(Interruption.MISSED)
            return False
        if not self._heard and not self._broke_off:
            return False
        try:
            self._broke_off = self.reader.look_ahead(self._heard, self.num_required, lambda: self._poll_now)
        except (RedisAccError, PartMissingError) as error:
            # Looking ahead only saves time. If something is wrong, it shows when the round is read.
            logger.debug("%s: could not look ahead: %s", self.label, error)
            self.reader.forget()
            self._heard.append(Interruption.MISSED)
            self._broke_off = False
            return False
        return True

    def _call_reducer(self) -> None:
        """Tells reducers that one could be used here."""
        # Every node of a cluster passes on a message that belongs to no slot.
        try:
            self.transport.call("PUBLISH", self.keys.calls, f"required={self.num_required}", timeout=CALL_TIMEOUT)
        except NotPermittedError as error:
            self.reader.call_no_more()
            logger.warning("%s: takes cannot call for a reducer: %s", self.label, error, extra=self._fields)
        except RedisAccError as error:
            logger.debug("%s: could not call for a reducer: %s", self.label, error)

    def poll(self) -> tuple[Granted, list[Any]] | None:
        """Asks for the round once. Logs a warning and returns None if the server cannot be reached."""
        try:
            reply, pieces = self._ask()
        except ServerUnavailableError as error:
            if self._outage.error is None and self._seen is None and self.deadline == math.inf:
                raise
            self._outage.begin(error, self._fields)
            return None
        if self._outage.error is not None:
            self._outage.end(self._fields)
        pieces = self._without_lease(pieces)
        if isinstance(reply, Granted):
            self.session.learn(self._sequence)
            return reply, pieces
        self._seen = reply
        # Other takers are granted rounds while this one waits. If one of these is undone, this take has to notice.
        if self.history.note(pieces[-1]) and self.history.takes > self._takes:
            self._prepare()
        return None

    @property
    def _fields(self) -> dict[str, object]:
        """Fields of log records, for handlers that format them."""
        fields: dict[str, object] = {"accumulator": self.keys.name, "num_required": self.num_required}
        if self._seen is not None:
            fields |= {"global_step": self._seen.global_step, "num_accumulated": self._seen.num_accumulated}
        return fields

    def _ask(self) -> tuple[Granted | Queued, list[Any]]:
        while True:
            try:
                reply, pieces = self._take(timeout=self._poll_timeout())
                if not isinstance(reply, GoneBack):
                    return reply, pieces
                # The take goes on under a new session, and reports the loss when it has a round.
                self.loss = self._loss_of(reply)
                self.history.takes, self.history.losses = reply.takes, reply.losses
                self.session.begin_anew(self.session.born_ms)
                self._begin()
            except ForgottenError as error:
                if not self.session.was_idle():
                    self.loss = "no longer knows a session whose requests it had acknowledged"
                self.session.begin_anew(error.now_ms)
                self._begin()
            except StaleSequenceError:
                # The round was granted, the reply was lost, and another process recovered the round before this copy
                # arrived.
                self._begin()

    def _loss_of(self, reply: GoneBack) -> str:
        """Returns how it turned out that the accumulator has gone back."""
        if reply.takes < self._takes:
            return f"had granted {self._takes} rounds, but knows only of {reply.takes}"
        if reply.sequence < self.session.acknowledged:
            return "no longer knows a request of this handle that it had acknowledged"
        return "has gone back to older data, as another handle has noticed"

    def _read_commands(self) -> list[Command]:
        return [
            *read_commands(self.keys.taken_round(self._token)),
            ("HGET", self.keys.record, "takes"),
            ("EXISTS", *self.keys.reducers),
        ]

    def _without_lease(self, pieces: list[Any]) -> list[Any]:
        """Tells the reader whether there are reducers, which is the last of the pieces. Returns the others."""
        *others, leases = pieces
        self.reader.note_reducer(present=leases == len(self.keys.reducers))
        return others

    def _poll_timeout(self) -> float:
        return min(POLL_TIMEOUT, max(self.deadline - time.monotonic(), LAST_POLL_TIMEOUT))

    def leave(self) -> tuple[Granted, list[Any]] | None:
        """Leaves the queue. Returns the round if it was granted meanwhile."""
        if self._outage.error is not None:
            # The request cannot reach the server, but the lease will run out.
            return None
        granted = self._leave(POLL_TIMEOUT)
        if granted is None:
            return None
        return granted, self._without_lease(self.transport.pipeline(self._read_commands()))

    def _leave(self, timeout: float) -> Granted | None:
        if self.transport.lost != self._lost:
            # A stray copy may still arrive. Unless it is fenced, it could be granted a round that no taker would fetch.
            with contextlib.suppress(ForgottenError):
                self.scripts.resolve(session=self.session, sequence=self._sequence, worker=self.taker, timeout=timeout)
        return self.scripts.leave(token=self._token, timeout=timeout)

    def leave_quietly(self) -> None:
        """Leaves the queue because of an error, and raises none of its own: the caller has to see the first one."""
        try:
            granted = self._leave(1.0)
        except RedisAccError as error:
            logger.debug("%s: could not leave the queue: %s", self.label, error)
            return
        if granted is not None:
            logger.warning(
                "%s: the round of step %d, with %d gradients, was granted just when the take was interrupted. "
                "recover() hands it out",
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
        """Returns the error that says that the handle was closed."""
        return CancelledError(f"{self.label}: the handle was closed while a take waited")

    def timed_out(self, seconds: float) -> TakeTimeoutError:
        """Returns the error that says what had not arrived."""
        found = self._contributors()
        states = found.states if found else WorkersByState()
        error = TakeTimeoutError(
            self._state(f"timed out after {seconds:.3g} s", found),
            num_required=self.num_required,
            num_accumulated=self._seen.num_accumulated if self._seen else 0,
            workers=found.workers if found else {},
            expected=[worker.name for worker in states.expected[:LISTED]],
            late=[worker.name for worker in states.late[:LISTED]],
            gone=[worker.name for worker in states.gone[:LISTED]],
            num_expected=len(states.expected),
            num_late=len(states.late),
            num_gone=len(states.gone),
            min_weight=self.min_weight,
            total_weight=self._seen.total_weight if self._seen else 0.0,
        )
        error.__cause__ = self._outage.error
        return error

    def _contributors(self) -> Contributors | None:
        """Returns who has contributed and who has not, or None if that cannot be read."""
        if self._outage.error is not None:
            return None
        try:
            return read_contributors(self.transport, self.keys)
        except RedisAccError as failure:
            logger.debug("%s: %s", self.label, failure)
            return None

    def _state(self, what: str, found: Contributors | None) -> str:
        seen = self._seen
        required = self.required or (seen.required if seen else "as many gradients as the settings say")
        weight = f" with a weight of {self.min_weight:g}" if self.min_weight else ""
        text = f"{self.label}: a take of {required}{weight} {what}"
        if seen is None:
            return f"{text}: the server did not report how many gradients there are"
        weight = f", with a weight of {seen.total_weight:g} of {self.min_weight:g}," if self.min_weight else ""
        text += f": {seen.num_accumulated} of {self.num_required} gradients{weight} had arrived at step "
        text += str(seen.global_step)
        if seen.grace_left_ms:
            text += f", and {seen.grace_left_ms / 1000:.1f} s of the grace were left"
        if found is not None:
            text = "; ".join([text, *states_text(found)])
        if found is not None and found.none_to_come and seen.total_weight < self.min_weight:
            text += (
                "; every worker has contributed, and a round accepts one gradient of each, so the weight cannot be "
                "reached unless more workers join"
            )
        if found is not None and not found.ever_applied:
            text += "; nobody has ever applied a gradient to this accumulator, so check its name"
        if seen.ahead:
            text += f"; takers before it in the queue: {seen.ahead}"
        if self._outage.error is not None:
            return f"{text}; the server cannot be reached"
        more = self.describe() if self.describe is not None else ""
        return f"{text}; {more}" if more else text
