"""A reducer's work for one accumulator: it adds up gradients during their upload, and stores the sum for the taker.

If the accumulator has partitions, this is the work for one of them: the sums of its parts are stored in it.

It keeps no state that matters. It only reads the accumulator; it writes nothing but its lease and the parts of sums,
which expire. So it may be killed at any moment, and several may run: at worst, a taker adds up by itself.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from redisacc._arrays.spec import AccumulatorSpec
from redisacc._clock import clock, durations
from redisacc._format.attempts import PartsArrived, SumStored, sum_stored
from redisacc._format.buffered import PartMissingError
from redisacc._format.keys import Keys
from redisacc._format.record import Record
from redisacc._log import inform, warn
from redisacc._protocol.scripts import Scripts
from redisacc._protocol.sums.cells import SumPart
from redisacc._protocol.sums.round_so_far import Heard, Interruption, RoundSoFar, heard_in, note
from redisacc._protocol.updates.updater import PartUpdater
from redisacc._text import printable
from redisacc._wire.faults import WritesRefusedError
from redisacc._wire.sockets import Command, Pieces
from redisacc._wire.transport import Hint, Transport
from redisacc.errors import NotFoundError, RedisAccError, ServerUnavailableError

logger = logging.getLogger("redisacc")

# How often the lease is extended, in seconds.
RENEWAL = 1.0
# The expiry of a part of a sum, in milliseconds. Takers fetch it much sooner, or never.
SUM_MS = 60_000
# The number of rounds whose sums are kept. Earlier ones are removed at once, because their takers are done.
SUMS_KEPT = 2
# After this many seconds without a message, the accumulator is left in any case. A step of a large model may take
# minutes, and a taker relies only on a reducer that was there before the first gradient arrived.
LONGEST_IDLE = 600.0
# How often to look for stalled uploads, in seconds.
LOOK = 0.25
# How long an accumulator is left alone after a temporary error and after a permanent one, in seconds.
SHORT_PAUSE = 1.0
LONG_PAUSE = 30.0


@dataclass(eq=False)
class Reduction:
    """A reducer's work for one accumulator, or for one of its partitions. One thread works; another one listens.

    Attributes:
        transport: the way to the server.
        keys: the keys of the accumulator, with its partitions.
        position: the position of the partition; None means there are none.
        holder: the random id of the reducer.
        who: a name of the reducer, for people.
        updates: updates the parameters of the same name.
        due: when to call ``work`` at the latest, by ``clock.now()``.
        is_over: whether the accumulator was deleted. Another one of its name may have other partitions.
        listening: ends the subscriptions to its channels.
        look_at: when to look whether the node still stores what it adds up, by ``clock.now()``.
    """

    transport: Transport
    keys: Keys
    position: int | None
    holder: str
    who: str
    due: float = 0.0
    is_over: bool = False
    listening: ExitStack = field(default_factory=ExitStack)
    look_at: float = 0.0
    _spec: AccumulatorSpec | None = None
    _heard: deque[Heard] = field(default_factory=lambda: deque([Interruption.MISSED]))
    _heard_at: float = field(default_factory=clock.now)
    _growing: RoundSoFar | None = None
    _incarnation: str = ""
    _wanted: int = 0
    _holds: bool = False
    _renew_at: float = 0.0
    # Digest -> the keys of the parts that were stored under it, the oldest first.
    _sums: dict[str, list[str]] = field(default_factory=dict)
    # Why a part could not be stored.
    _failure: RedisAccError | None = None
    # The last problem that was logged, so that it is logged once.
    _logged: str = ""
    # How long it was left alone after the last attempt to reach the server, in seconds.
    _outage: float = 0.0
    # When it was found that there is no accumulator any more.
    _gone_at: float | None = None

    def __post_init__(self) -> None:
        self.updates = PartUpdater(self.transport, self.keys)
        self._wake = self.keys.wake_of(self.position)
        self._scripts = Scripts(
            self.transport, self.keys, reducer=self.keys.reducer(self.position), holder=self.holder, who=self.who
        )

    @property
    def channels(self) -> list[str]:
        """The channels whose messages concern it."""
        return list(dict.fromkeys([self.keys.wake, self._wake, self.updates.channel]))

    def hear(self, channel: str, text: str | None) -> bool:
        """Notes a message of one of the channels. None means messages were missed. Returns whether there is work.

        Called by the threads that listen.
        """
        if channel == self.updates.channel:
            return self.updates.hear(text)
        found = heard_in(text)
        # Other messages come to the leader's channel only: on the channel of a partition, they are not trusted.
        is_trusted = text is None or channel == self.keys.wake or isinstance(found, PartsArrived)
        if found is None or isinstance(found, SumStored) or not is_trusted:
            return False
        if text is not None:
            self._heard_at = clock.now()
        note(self._heard, found)
        return True

    @property
    def has_work(self) -> bool:
        """Whether something was heard that is still to be used, unless the accumulator is left alone for a moment."""
        may_work = self._holds or clock.now() >= self.due
        return self.updates.is_asked or (may_work and (bool(self._heard) or self.updates.has_work))

    def is_idle(self, seconds: float) -> bool:
        """Returns whether nothing was heard for this many seconds."""
        return clock.now() - self._heard_at > seconds

    @property
    def is_left_alone(self) -> bool:
        """Whether nothing can be done for the accumulator for the time being."""
        return not self._holds and self.due - clock.now() > 2 * _renewal()

    def work(self, interrupted: Callable[[], bool]) -> None:
        """Adds up and stores the parts that have arrived.

        Args:
            interrupted: returns whether to stop, because others wait. ``work`` is then due again.

        Raises:
            ServerUnavailableError: the server cannot be reached.
        """
        try:
            self._work(interrupted)
        except ServerUnavailableError:
            self._begin_anew()
            # The lease may be over when the server is back.
            self._holds = False
            self._outage = min(max(2 * self._outage, SHORT_PAUSE), LONG_PAUSE)
            self.due = self._renew_at = clock.now() + self._outage
            raise
        except NotFoundError:
            self._wait_for_chief()
        except PartMissingError as error:
            # The round was taken and acknowledged meanwhile, or gradients were compacted.
            logger.debug("%s: %s", self.keys.name, error)
            self._begin_anew()
            self.due = clock.now()
        except WritesRefusedError as error:
            self._log(f"the reducer pauses: {error}")
            self._pause(SHORT_PAUSE)
        except RedisAccError as error:
            self._log(f"the reducer leaves it alone: {error}")
            self._pause(LONG_PAUSE)

    def _wait_for_chief(self) -> None:
        """Keeps parameters for a while, because a server that lost the accumulator has lost these, too."""
        now = clock.now()
        if self._gone_at is None:
            self._gone_at = now
        self.is_over = not self.updates.has_parts or now - self._gone_at >= durations.kept
        self._forget()
        self._holds = False
        self._incarnation = ""
        self.due = self._renew_at = now + _renewal()

    def _work(self, interrupted: Callable[[], bool]) -> None:
        if self.updates.is_asked:
            self.updates.answer()
        now = clock.now()
        if now >= self._renew_at:
            self._renew_at = now + _renewal()
            self._read_record()
            # Reads that record as well: once this holds the lease, it should look for gradients at once.
            self.updates.exists()
            self._gone_at = None
            self._hold()
        if not self._holds or self._growing is None:
            self._forget()
            self.due = self._renew_at
            return
        self._outage = 0.0
        self.updates.work()
        self._growing.is_updated = self.updates.exists()
        goes_on = self._growing.look_ahead(self._heard, self._wanted, interrupted)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        now = clock.now()
        self.due = now if goes_on else min(self._renew_at, now + LOOK if self._growing.part_sums else self._renew_at)

    def _read_record(self) -> None:
        """Reads the accumulator's specification, and how many gradients the first taker in the queue wants."""
        record_reply, tree, wanted = self.transport.pipeline(
            [Record.command(self.keys), Record.tree_command(self.keys), Record.wanted_command(self.keys)]
        )
        record = Record(self.keys, record_reply)
        number = Record.parse_wanted(wanted)
        if record.partitions != self.keys.partitions:
            raise NotFoundError(f"{self.keys.name} was created again, with other partitions")
        if record.incarnation != self._incarnation:
            self._spec = record.spec(tree if record.kind == "tree" else b"")
            self._growing = RoundSoFar(
                self.transport,
                self.keys,
                self._spec,
                store=self._store,
                position=self.position,
            )
            self._incarnation = record.incarnation
        if number != self._wanted:
            self._wanted = number
            self._begin_anew()

    def _hold(self) -> None:
        """Takes or extends the lease."""
        growing = self._growing
        reply = self._scripts.hold_reducer(
            stored=growing.num_stored if growing else 0,
            late=growing.num_late if growing else 0,
            lease_ms=round(1000 * durations.reducer_lease),
        )
        held, self._holds = self._holds, reply.outcome == "held"
        if self._holds and not held:
            self._begin_anew()
            inform(self.keys.name, "the reducer works on it")
        elif held and not self._holds:
            self._log(f"another reducer has taken over: {printable(reply.who)}")

    def _store(self, part: SumPart) -> None:
        """Updates the parameters with a part of a sum; or stores it, and tells the taker."""
        if self._failure is not None:
            return
        try:
            self._use(part)
        except RedisAccError as error:
            # Raised later: here it would break off a fetch.
            self._failure = error

    def _use(self, part: SumPart) -> None:
        assert self._spec is not None
        if self.updates.update(part, self._spec.update_divisor(part.gradients, part.weight)):
            return
        digest, number = part.digest, part.number
        key = self.keys.sum(digest, number)
        little = [np.ascontiguousarray(e, e.dtype.newbyteorder("<")).reshape(-1) for e in part.elements]
        data = Pieces([elements.view(np.uint8).data for elements in little])
        commands: list[Command] = [
            ("SET", key, data[0] if len(data) == 1 else data, "PX", SUM_MS),
            Hint(("PUBLISH", self._wake, sum_stored(digest, number))),
        ]
        if digest not in self._sums:
            self._sums[digest] = []
            while len(self._sums) > SUMS_KEPT:
                commands += [("UNLINK", old) for old in self._sums.pop(next(iter(self._sums)))]
        self._sums[digest].append(key)
        self.transport.pipeline(commands)

    def _begin_anew(self) -> None:
        """Drops the sums so far, and looks everything up again before it uses later messages."""
        if self._growing is not None:
            self._growing.forget()
        self._failure = None
        self._heard.appendleft(Interruption.MISSED)

    def _forget(self) -> None:
        """Drops the sums so far, and all messages."""
        if self._growing is not None:
            self._growing.forget()
        self._failure = None
        self._heard.clear()

    def _pause(self, seconds: float) -> None:
        """Leaves the accumulator alone for a while. Takers are told so by the lease, which ends."""
        self.release()
        self._begin_anew()
        self._incarnation = ""
        self.due = self._renew_at = clock.now() + seconds

    def _log(self, problem: str) -> None:
        if problem != self._logged:
            self._logged = problem
            warn(self.keys.name, "%s", problem)

    def release(self) -> bool:
        """Gives the lease back, and removes the sums. Returns whether the server answered: otherwise, they expire."""
        self._forget()
        self.updates.forget()
        if not self._holds:
            return True
        self._holds = False
        answered = True
        try:
            self._scripts.release_reducer()
            sums = [key for keys in self._sums.values() for key in keys]
            if sums:
                self.transport.pipeline([("UNLINK", key) for key in sums])
        except RedisAccError as error:
            answered = not isinstance(error, ServerUnavailableError)
            logger.debug("%s: the lease of the reducer ends by itself: %s", self.keys.name, printable(str(error)))
        self._sums.clear()
        return answered


def _renewal() -> float:
    """Returns how often the lease is extended, in seconds."""
    return durations.reducer_lease / 3
