"""A take that waits for enough gradients. While it waits, it adds up those that have arrived.

It waits for a number of gradients, for a grace in which more of them may arrive, and for a sum of weights.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import deque
from dataclasses import dataclass
from typing import Any, Unpack

from redisacc._arrays import validation
from redisacc._clock import durations
from redisacc._format.attempts import PartsArrived, SumStored, UploadBegun, parse_message
from redisacc._format.buffered import ANNOUNCED_BYTES, PartMissingError
from redisacc._format.entries import ANY_NUMBER, WorkersByState
from redisacc._format.keys import Keys
from redisacc._format.quorum import Quorum, milliseconds
from redisacc._format.stored_text import weight_text
from redisacc._protocol.rounds.round_reader import RoundReader, read_commands
from redisacc._protocol.rounds.who_contributed import Contributors, read_contributors, states_text
from redisacc._protocol.scripts import ForgottenError, Reply, Scripts, StaleSequenceError
from redisacc._protocol.sessions import Request, Session
from redisacc._protocol.sums.round_so_far import Heard, Interruption, heard_in, note
from redisacc._protocol.waiting.lifetime import Lifetime
from redisacc._protocol.waiting.wait import Wait, WaitOptions
from redisacc._text import shown
from redisacc._wire.faults import NotPermittedError
from redisacc._wire.pubsub import pubsub_of
from redisacc._wire.transport import Transport, limited
from redisacc.errors import CorruptDataError, InvalidArgumentError, RedisAccError, TakeTimeoutError

logger = logging.getLogger("redisacc")

_APPLIED = re.compile(r"applied step=\S+ count=(\d{1,16})\b")

# How long a call for a reducer, or one that leaves the queue after an error, tries to reach the server, in seconds.
CALL_TIMEOUT = 1.0
# With more partitions than this, a take listens to none of them, because each takes a thread and a connection. It then
# begins to add gradients up when they are counted, and asks for the sums of reducers when its round is granted.
MOST_CHANNELS = 128
# How many takes that wait are removed for a chief that begins: usually there is one, its predecessor's. No token is
# longer, in bytes.
_MOST_TAKES, _LONGEST_TOKEN = 16, 200


def requirement_text(num_required: int, most: int, grace_ms: int) -> str:
    """Returns which gradients a round needs before it is granted. The arguments are those of ``take``."""
    if not grace_ms or most == num_required:
        return str(num_required)
    return f"{num_required}, or up to {'more' if most == ANY_NUMBER else most} within {grace_ms / 1000:g} s"


def demand_of(num_required: Any, most: Any, grace: Any, min_weight: Any) -> Quorum:
    """Returns what a caller's arguments ask for. Without ``least``, the quorum of the accumulator applies.

    Raises:
        InvalidArgumentError: an argument is invalid, or ``most`` is given without ``grace``, or one of the two without
            ``num_required``.
    """
    if num_required is not None:
        if type(num_required) is not int or not 1 <= num_required <= validation.INT64_MAX:
            num_required = validation.integer(num_required, "num_required", low=1)
    elif most is not None or grace is not None:
        raise InvalidArgumentError(
            f"{'grace' if most is None else 'most'}={shown(grace if most is None else most)} needs num_required: a "
            "take either says all that it waits for, or leaves all of it to the quorum of the accumulator"
        )
    return Quorum(num_required, most, grace, min_weight)


@dataclass(slots=True)
class History:
    """A handle's knowledge of an accumulator's past. If the record knows less, the data has gone back.

    Attributes:
        takes: the most rounds that it has granted.
        losses: how often it was noticed that it had gone back. The first handle that notices raises this number in the
            record, and by it those notice that know of nothing later.
    """

    takes: int = 0
    losses: int = 0

    def note(self, takes: object) -> bool:
        """Notes how many rounds the record says were granted. Returns False if redisacc has not written that."""
        if not (isinstance(takes, bytes) and takes.isdigit() and len(takes) <= 15):
            return False
        self.takes = max(self.takes, int(takes))
        return True


# The reply that granted a round, with its ``token``; and the replies to ``read_commands`` for it, followed by the
# number of rounds granted until then.
Taken = tuple[Reply, list[Any]]


class TakeWait(Wait[Taken]):
    """A take. ``run`` blocks until a round is granted.

    Args:
        reader: adds the round up, and begins with it while it is still growing.
        lifetime: the lifetime of the handle.
        scripts: the scripts of the accumulator.
        session: used only by this take while it waits.
        history: the handle's knowledge of the accumulator's past.
        demand: the gradients that the take requires.
        taker: the name of the taker.
        how: of the wait.

    Attributes:
        loss: how the take noticed that the accumulator has gone back to older data; None means it has not.
    """

    doing = "a take was waiting"

    loss: str | None = None
    # The last reply that left the take waiting.
    _seen: Reply | None = None
    # Whether the last look ahead was broken off to poll.
    _broke_off = False

    def __init__(  # noqa: PLR0917
        self,
        reader: RoundReader,
        lifetime: Lifetime,
        scripts: Scripts,
        session: Session,
        history: History,
        demand: Quorum,
        *,
        taker: str,
        **how: Unpack[WaitOptions],
    ) -> None:
        keys = reader.keys
        super().__init__(reader.transport, lifetime, keys.wake, name=keys.name, **how)
        self._keys, self._scripts, self._session = keys, scripts, session
        self._min_weight, least = demand.min_weight or 0.0, demand.least or 0
        # As the script gets them. Without numbers, the quorum of the accumulator applies, as it is at each attempt.
        self._required = least, least, 0
        if demand.grace is not None:
            self._required = least, max(least, min(demand.most or ANY_NUMBER, ANY_NUMBER)), milliseconds(demand.grace)
        self._taker, self._reader, self._history = taker, reader, history
        self._reducers = keys.reducers
        self._lost = reader.transport.lost
        # Filled by the thread that listens.
        self._heard: deque[Heard] = deque()
        self._begin()

    def _begin(self) -> None:
        self._sequence = self._session.next()
        self._token = f"{self._session.id}-{self._sequence}"
        self._prepare()

    def _prepare(self) -> None:
        self._takes = self._history.takes
        self._read_commands = [
            *read_commands(self._keys.taken_round(self._token)),
            ("HGET", self._keys.record, "takes"),
            ("EXISTS", *self._reducers),
        ]
        num_required, most, grace_ms = self._required
        self._take = self._scripts.prepare(
            "take",
            token=self._token,
            num_required=num_required,
            min_weight=weight_text(self._min_weight) if self._min_weight else "0",
            most=most,
            grace_ms=grace_ms,
            lease_ms=round(1000 * durations.taker_lease),
            taker=self._taker,
            session=self._session.id,
            sequence=self._sequence,
            acknowledged=self._session.acknowledged,
            takes=self._takes,
            losses=self._history.losses,
            after=self._read_commands,
        )

    @property
    def num_required(self) -> int:
        """How many gradients the take required when the server answered last; 0 if only the server knows."""
        return self._required[0] or (0 if self._seen is None else int(self._seen.num_required))

    def poll(self, timeout: float) -> Taken | None:
        """Asks for the round once."""
        while True:
            try:
                reply = self._take(timeout=timeout)
            except ForgottenError as error:
                if not self._session.was_idle():
                    self.loss = "no longer knows a session whose requests it had acknowledged"
                self._session.begin_anew(error.now_ms)
                self._begin()
            except StaleSequenceError:
                # The round was granted, the reply was lost, and another process recovered the round before this copy
                # arrived.
                self._begin()
            else:
                if reply.outcome != "gone_back":
                    break
                # The take continues under a new session, and reports the loss when it has a round.
                self.loss = self._loss_of(reply)
                self._history.takes, self._history.losses = reply.takes, reply.losses
                self._session.begin_anew(self._session.born_ms)
                self._begin()
        pieces = self._without_leases(reply.read)
        if reply.outcome == "granted":
            self._session.learn(self._sequence)
            reply.token = self._token
            return reply, pieces
        self._seen = reply
        if (
            reply.buffered_bytes >= ANNOUNCED_BYTES
            and self._reader.part_sums is None
            and not (self._heard and self._heard[0] is Interruption.MISSED)
        ):
            # They were announced before this take listened.
            self._heard.appendleft(Interruption.MISSED)
        # Other takers are granted rounds while this one waits. If such a grant is undone, this take has to notice.
        if self._history.note(pieces[-1]) and self._history.takes > self._takes:
            self._prepare()
        return None

    def _loss_of(self, reply: Reply) -> str:
        """Returns how it turned out that the accumulator has gone back."""
        if reply.takes < self._takes:
            return f"had granted {self._takes} rounds, but knows only of {reply.takes}"
        if reply.sequence < self._session.acknowledged:
            return "no longer knows a request of this handle that it had acknowledged"
        return "has gone back to older data, as another handle has noticed"

    def _without_leases(self, pieces: list[Any]) -> list[Any]:
        """Tells the reader whether there are reducers, which is the last of the pieces. Returns the others."""
        *others, leases = pieces
        self._reader.note_reducer(present=leases == len(self._reducers))
        return others

    @property
    def poll_interval(self) -> float:
        """How long to wait for an event before the next poll, in seconds: no longer than the grace."""
        interval = super().poll_interval
        if self._seen is None or not self._seen.grace_left_ms:
            return interval
        return min(interval, float(self._seen.grace_left_ms) / 1000)

    def on_event(self, event: str | None) -> None:
        """Handles a message, in the thread that listens.

        It wakes the wait only if it may complete the round, or if there is something to fetch ahead.
        """
        heard = heard_in(event)
        if heard is not None:
            note(self._heard, heard)
        count = None if event is None else _APPLIED.match(event)
        if isinstance(heard, UploadBegun | PartsArrived | SumStored) or (
            count is not None and int(count[1]) < self.num_required
        ):
            if heard is not None:
                self.alarm.set()
        else:
            self.poll_soon()

    def on_arrival(self, text: str | None) -> None:
        """Handles a message about a partition, in the thread that listens. A message that is missed only costs time."""
        message = None if text is None else parse_message(text)
        if isinstance(message, PartsArrived | SumStored):
            note(self._heard, message)
            self.alarm.set()

    def listen_elsewhere(self, listening: contextlib.ExitStack) -> None:
        """Listens to messages from the nodes of the partitions. Without it, all takes longer."""
        positions = range(len(self._keys.partitions))
        if len(positions) > MOST_CHANNELS:
            return
        try:
            for channel in map(self._keys.wake_of, positions):
                # A node that does not answer must not keep the take from polling.
                heard = pubsub_of(self.transport, channel).listen(channel, self.on_arrival, confirmed=False)
                listening.enter_context(heard)
        except RuntimeError as error:
            logger.debug("%s: there is no thread left to listen: %s", self.label, error)

    def work(self) -> bool:
        """Looks ahead, and calls for reducers if there are none."""
        looked = self._look_ahead()
        if self._reader.calls_for_reducer():
            self._call_reducer()
        return looked

    def _look_ahead(self) -> bool:
        """Adds some buffered gradients if this taker is next in the queue. Returns False if there is nothing to do."""
        if self._seen is None or self._seen.ahead or self.outage is not None:
            self._heard.clear()
            self._heard.append(Interruption.MISSED)
            return False
        if not self._heard and not self._broke_off:
            return False
        try:
            with limited(self.call_timeout):
                self._broke_off = self._reader.look_ahead(self._heard, self.num_required, lambda: self._poll_now)
        except (RedisAccError, PartMissingError) as error:
            # Looking ahead only saves time. If something is wrong, it shows when the round is read.
            logger.debug("%s: could not look ahead: %s", self.label, error)
            self._reader.forget()
            self._heard.append(Interruption.MISSED)
            self._broke_off = False
            return False
        return True

    def _call_reducer(self) -> None:
        """Tells reducers that one could be used here."""
        # Every node of a cluster passes on a message that belongs to no slot.
        try:
            with limited(CALL_TIMEOUT):
                self.transport.call("PUBLISH", self._keys.calls, f"required={self.num_required}")
        except NotPermittedError as error:
            if self._reader.relies is not None:
                self._reader.relies.call_no_more()
            logger.warning("%s: takes cannot call for a reducer: %s", self.label, error, extra=self.fields)
        except RedisAccError as error:
            logger.debug("%s: could not call for a reducer: %s", self.label, error)

    def leave(self) -> Taken | None:
        """Leaves the queue. Returns the round if it was granted meanwhile."""
        if self.outage is not None:
            # The request cannot reach the server, but the lease will run out.
            return None
        try:
            granted = self._leave()
            if granted is None:
                return None
            return granted, self._without_leases(self.transport.pipeline(self._read_commands))
        except RedisAccError:
            raise
        except BaseException:
            # It may still be in the queue.
            self.abandon()
            raise

    def _leave(self) -> Reply | None:
        if self.transport.lost != self._lost:
            # A stray copy may still arrive. Unless it is fenced, it could be granted a round that no taker would fetch.
            with contextlib.suppress(ForgottenError):
                request = Request(self._session, self._sequence, self._taker)
                self._scripts.resolve(**request.arguments(), allowed=("fenced",))
        return leave(self._scripts, self._token)

    def abandon(self) -> None:
        """Leaves the queue: the next taker must not wait until the lease of this one has run out."""
        try:
            with limited(CALL_TIMEOUT):
                granted = self._leave()
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
                    "accumulator": self.name,
                    "global_step": granted.global_step,
                    "num_accumulated": granted.num_accumulated,
                    "token": granted.token,
                },
            )

    @property
    def fields(self) -> dict[str, object]:
        """Fields of log records, for handlers that format them."""
        fields: dict[str, object] = {"accumulator": self.name, "num_required": self.num_required}
        if self._seen is not None:
            fields |= {"global_step": self._seen.global_step, "num_accumulated": self._seen.num_accumulated}
        return fields

    def progress(self) -> str:
        """Describes the take in messages about a long wait."""
        return self._text("is still waiting", self._contributors())

    def timed_out(self, seconds: float) -> TakeTimeoutError:
        """Returns the error, which says what was missing."""
        seen, found = self._seen, self._contributors()
        states = found.states if found else WorkersByState()
        return TakeTimeoutError(
            self._text(f"timed out after {seconds:.3g} s", found),
            num_required=self.num_required,
            num_accumulated=seen.num_accumulated if seen else 0,
            workers=found.workers if found else {},
            expected=[worker.name for worker in states.expected],
            late=[worker.name for worker in states.late],
            gone=[worker.name for worker in states.gone],
            min_weight=self._min_weight,
            total_weight=seen.total_weight if seen else 0.0,
        )

    def _contributors(self) -> Contributors | None:
        """Asks who has contributed to the round; None means the server does not say."""
        if self.outage is None:
            try:
                with limited(self.call_timeout):
                    return read_contributors(self.transport, self._keys)
            except RedisAccError as failure:
                logger.debug("%s: %s", self.label, failure)
        return None

    def _text(self, what: str, found: Contributors | None) -> str:
        """Returns a message: ``what`` the take does, such as "is still waiting", and what has arrived so far."""
        seen, least = self._seen, self._min_weight
        required = "as many gradients as the quorum says"
        if self._required[0]:
            required = requirement_text(*self._required)
        elif seen is not None:
            required = requirement_text(seen.num_required, seen.most, seen.grace_ms)
        weight = f" with a weight of {least:g}" if least else ""
        text = f"{self.label}: a take of {required}{weight} {what}"
        if seen is None:
            return self.described(f"{text}: the server did not report how many gradients there are")
        weight = f", with a weight of {seen.total_weight:g} of {least:g}," if least else ""
        text += f": {seen.num_accumulated} of {self.num_required} gradients{weight} had arrived at step "
        text += str(seen.global_step)
        if seen.grace_left_ms:
            text += f", and {seen.grace_left_ms / 1000:.1f} s of the grace were left"
        if found is not None:
            text = "; ".join([text, *states_text(found)])
            if found.none_to_come and seen.total_weight < least:
                text += (
                    "; every worker has contributed, and a round accepts one gradient of each, so the weight cannot be "
                    "reached unless more workers join"
                )
            if not found.ever_applied:
                text += "; no gradient was ever applied to this accumulator, so check its name"
        if seen.ahead:
            text += f"; takers before it in the queue: {seen.ahead}"
        return self.described(text)


def leave(scripts: Scripts, token: str, *, replicated: bool = False) -> Reply | None:
    """Leaves the queue of takers.

    Args:
        scripts: the scripts of the accumulator.
        token: the id of the take.
        replicated: whether replicas have to confirm.

    Returns:
        The reply that granted a round, with its ``token``; None means none was granted.
    """
    reply = scripts.leave(token=token, confirm=replicated, replicated=replicated)
    reply.token = token
    return reply if reply.outcome == "granted" else None


def end_takes(transport: Transport, keys: Keys, scripts: Scripts) -> None:
    """Removes the takes that wait. One of a process that died would hold up the next for as long as its lease.

    A take that is still alive puts itself into the queue again within a second. One that was granted a round in the
    meantime keeps it.
    """
    tokens = transport.call("ZRANGE", keys.queue, 0, _MOST_TAKES - 1)
    if not isinstance(tokens, list) or not all(isinstance(token, bytes) for token in tokens):
        raise CorruptDataError(f"{keys.queue}: ZRANGE replied {shown(tokens)}, not tokens")
    for token in tokens:
        if len(token) <= _LONGEST_TOKEN:
            leave(scripts, token.decode(errors="replace"))
