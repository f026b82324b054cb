"""The crew of a run: the chief and the workers, each with a lease that it extends for as long as it lives."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace

from redisacc._clock import clock, durations
from redisacc._format.crew_entries import Member, parse_crew, split_who
from redisacc._format.keys import Keys, ParameterKeys
from redisacc._format.stored_text import clock_ms
from redisacc._log import inform, warn
from redisacc._protocol.leases.process_identity import fate_of, memory_text, own_identity
from redisacc._protocol.leases.renewals import interval_of, renewals_over
from redisacc._protocol.parameters.marks import whereabouts
from redisacc._protocol.scripts import OF_CREWS, Scripts
from redisacc._protocol.waiting.wait import until
from redisacc._text import printable, shown
from redisacc._wire import forks
from redisacc._wire.scans import scan_command, scan_whole
from redisacc._wire.transport import Transport, limited
from redisacc.errors import CancelledError, ConflictError, NotFoundError, RedisAccError

logger = logging.getLogger("redisacc")

# How often a process asks for a lease that it waits for, in seconds.
LEASE_LOOK = 0.25

_ITSELF = (
    ". It is this process itself: close() the object that holds the lease, such as one that an earlier run of a "
    "notebook's cell has made"
)
_STAND_BY = "; or give it standby=True, and it takes over when that process has gone"


@dataclass(frozen=True)
class HeldByOther:
    """A lease that another process holds.

    Attributes:
        left: seconds until it expires, unless it is extended.
        process: the identity of its process, as far as it can be trusted.
        who: a printable name of the holder, for people.
        until: when it expires, on this machine's clock.
    """

    left: float
    process: str
    who: str
    until: float


@dataclass(eq=False)
class Crew:
    """The leases under one name.

    Attributes:
        transport: the way to the server.
        name: the name.
        holder: the random id of this process, or of its place in a run.
        who: a name of this process, for people.
    """

    transport: Transport
    name: str
    _: KW_ONLY
    holder: str
    who: str
    # The holder of the lease for which this process has stood by.
    _followed: HeldByOther | None = None

    def __post_init__(self) -> None:
        self._key = Keys(self.name).crew
        self._scripts = Scripts(self.transport, Keys(self.name), OF_CREWS, holder=self.holder)

    def members(self) -> list[Member]:
        """Returns all leases that somebody holds, or held within the last hour and did not give back."""
        clock, first = self.transport.pipeline([("TIME",), scan_command(self._key)])
        return parse_crew(self._key, scan_whole(self.transport, self._key, first), clock_ms(clock))

    def workers(self) -> set[str]:
        """Returns the places of the workers that hold their lease. A process that is known to be dead holds none."""
        return {
            member.place
            for member in self.members()
            if member.number is not None and member.left > 0 and fate_of(member.process) != "dead"
        }

    def text(self) -> str:
        """Returns clauses for a message: how many workers hold a lease, and whether no chief does; "" if unknown."""
        try:
            members = [member for member in self.members() if member.left > 0]
        except RedisAccError as error:
            # The message that it is for matters more.
            logger.debug("cannot read the crew: %s", error)
            return ""
        workers = sum(member.number is not None for member in members)
        text = f"{workers} worker{'' if workers == 1 else 's'} with a lease"
        return text if workers < len(members) else f"{text}; no chief"

    def hold(
        self,
        place: str,
        *,
        dead: str = "",
        renews: bool = False,
        extends: bool = False,
    ) -> HeldByOther | None:
        """Takes or extends a lease.

        Args:
            place: "chief", or "worker" and a number.
            dead: the identity of a process that is dead, so that its lease can be taken at once. "": of none.
            renews: whether this process takes it only in an accumulator: it succeeds another one, or had it before.
            extends: whether it only extends a lease that is there.

        Returns:
            None if this process holds it now; else who does.

        Raises:
            NotFoundError: there is no such lease, because the accumulator was deleted, or lost by the
                server; and it ``extends``, or ``renews`` and there is no accumulator.
        """
        reply = self._scripts.hold_lease(
            place=place,
            process=own_identity(),
            who=self.who + memory_text(),
            lease_ms=round(durations.lease * 1000),
            dead=dead,
            renews=renews,
            extends=extends,
        )
        if reply.outcome == "held":
            return None
        left = reply.left_ms / 1000
        return HeldByOther(left, reply.process, split_who(printable(reply.who))[0], clock.now() + left)

    def take(self, place: str, *, renews: bool = False, extends: bool = False) -> HeldByOther | None:
        """Takes a lease, also from a process that is known to be dead. Returns who else holds it, or None."""
        taken = self.hold(place, renews=renews, extends=extends)
        if taken is not None and fate_of(taken.process) == "dead":
            taken = self.hold(place, dead=taken.process)
        return taken

    def wait_for(self, place: str) -> bool:
        """Takes a lease. Waits for a lease that is not extended to expire, because its holder may have died.

        Blocks for a lease at most, and not at all if the holder was a process on this machine that is dead.

        Returns:
            Whether another process had it.

        Raises:
            ConflictError: its holder extends it.
        """
        deadline = clock.now() + durations.lease + 1.0
        holder: HeldByOther | None = None

        def take() -> bool | None:
            nonlocal holder
            taken = self.take(place)
            if taken is None:
                return True
            # A lease that is still fresh when it should have run out has been extended: its holder is alive.
            if clock.now() + taken.left > deadline:
                raise ConflictError(
                    f"{taken.who} is the {place} of {shown(self.name)} and extends its lease, so this process cannot "
                    f"be it. Stop that process first, or leave this one out{_STAND_BY if place == 'chief' else ''}"
                    f"{_ITSELF if taken.process == own_identity() else ''}"
                )
            if holder is None:
                warn(
                    self.name,
                    "%s held the lease of the %s last; waiting up to %.0f s for it to run out, or until that "
                    "process shows that it is alive by extending it",
                    taken.who,
                    place,
                    taken.left,
                )
            holder = taken
            return None

        until(self.transport.waits, take, every=LEASE_LOOK)
        return holder is not None

    def stand_by(self, place: str, cancel: Callable[[], bool], *, follows: bool = False) -> bool:
        """Takes a lease. Blocks for as long as another process extends it.

        Args:
            place: "chief", or "worker" and a number.
            cancel: asked several times a second. True ends the wait.
            follows: whether another process must have had it.

        Returns:
            Whether another process had it, before or in this call, or in one that the loss of the server has ended.

        Raises:
            CancelledError: ``cancel`` has returned True.
        """
        if follows or self._followed is not None:
            # After an outage, the holder needs time to extend its lease.
            followed = self._followed or HeldByOther(0.0, "", "", 0.0)
            self._followed = replace(followed, until=clock.now() + interval_of(durations.lease) + 1.0)
        while (taken := self._succeed(place, cancel)) is not None:
            if self._followed is None or taken.who != self._followed.who:
                inform(self.name, "%s is the %s; standing by to follow it", taken.who, place)
            self._followed = taken
            self._watch(taken, min(taken.left + 0.01, durations.standby_asks_every), cancel)
        return self._followed is not None

    def _succeed(self, place: str, cancel: Callable[[], bool]) -> HeldByOther | None:
        """Takes a lease that another process had. Returns who holds it, or None.

        If the server has lost it with all its data, this first waits until a holder that lives has found that out and
        taken it back, because it alone has all of what is lost. If it is known to live, it may be busy restoring that:
        until something is published, an accumulator alone does not show that the holder has given the lease back. With
        older data comes an older lease: one that has run out too early is as good as lost.
        """
        followed = self._followed
        if followed is not None:
            is_alive = fate_of(followed.process) == "alive"
            deadline = clock.now() + (durations.lease if is_alive else interval_of(durations.lease) + 1.0)
            while (left := deadline - clock.now()) > 0:
                if not (clock.now() < followed.until and self._has_run_out(place)):
                    with suppress(NotFoundError):
                        return self.take(place, extends=True)
                    with suppress(NotFoundError):
                        if self.transport.call("EXISTS", ParameterKeys(self.name).record):
                            # `redisacc restore` publishes parameters without an accumulator, and nobody has led then.
                            return self.take(place, renews=bool(followed.who))
                self._watch(followed, min(left, durations.standby_asks_every), cancel)
                if fate_of(followed.process) == "dead":
                    break
        return self.take(place)

    def _has_run_out(self, place: str) -> bool:
        """Returns whether there is a lease that has run out, whose holder is not known to be dead."""
        now, [entry] = self.transport.pipeline([("TIME",), ("HMGET", self._key, place)])
        held = {} if entry is None else {place.encode(): entry}
        found = parse_crew(self._key, held, clock_ms(now))
        return any(one.left <= 0 and fate_of(one.process) != "dead" for one in found)

    def _watch(self, holder: HeldByOther, seconds: float, cancel: Callable[[], bool]) -> None:
        """Blocks for some seconds, or until the holder of a lease is known to be dead."""

        def check() -> None:
            if cancel():
                raise CancelledError(f"this process no longer stands by to lead {shown(self.name)}")

        until(
            self.transport.waits,
            lambda: fate_of(holder.process) == "dead" or None,
            every=durations.standby_looks_every,
            check=check,
            deadline=clock.now() + seconds,
        )

    def take_number(self) -> int:
        """Takes the lease of a number, and returns that number.

        It is the one that this process's predecessor in the same place of a run had, if nobody has taken it since; else
        the lowest that no worker holds.
        """
        while True:
            workers = [member for member in self.members() if member.number is not None]
            # A worker of the same place that lives is no predecessor: several may have inherited one environment.
            own = [one.number for one in workers if one.holder == self.holder and fate_of(one.process) != "alive"]
            held = {one.number for one in workers if one.left > 0 and fate_of(one.process) != "dead"}
            free = next(number for number in range(len(held) + 1) if number not in held)
            number = own[0] if own else free
            if self.take(f"worker {number}") is None:
                assert number is not None
                return number

    def release(self, place: str) -> None:
        """Gives a lease back, so that no process has to wait for it to expire."""
        with limited(durations.release):
            self._scripts.release_lease(place=place, process=own_identity())


class Lease:
    """A lease that this process holds. A thread extends it until it is given back.

    Args:
        crew: the crew. The lease was taken a moment ago.
        place: "chief", or "worker" and a number.
        incarnation: returns the incarnation of the parameters that this process has seen; "" if it has seen none.
    """

    def __init__(self, crew: Crew, place: str, incarnation: Callable[[], str]) -> None:
        # A task could not extend the lease while another one keeps the event loop for itself, which a step of a
        # training may do for long.
        self._crew = replace(crew, transport=crew.transport.blocking)
        self._waits = crew.transport.waits
        self._place = place
        self._incarnation = incarnation
        self._pid = os.getpid()
        self._lost_to: str | None = None
        # How often it may have run out before it was held again, so that another process could have had it meanwhile.
        self.gaps = 0
        # Called in the thread of the renewals if the accumulator is gone, and the lease with it.
        self.on_missing: Callable[[], object] | None = None
        # Until then, no other process can have it, on this machine's clock. The lease was taken a little earlier, which
        # does no harm: the next process that takes it needs some time to begin.
        self._sure_until = clock.now() + durations.lease
        self._over = forks.event()
        # Held while the lease is extended, so that it is not extended after it was given back.
        self._extending = forks.lock()
        self._renewals = renewals_over(self._crew.transport)
        self._renewals.add(self)

    @property
    def interval(self) -> float:
        """Seconds between two renewals."""
        return interval_of(durations.lease)

    @property
    def lost(self) -> bool:
        """Whether another process holds the lease."""
        return self._lost_to is not None

    @property
    def is_over(self) -> bool:
        """Whether the lease was given back, or lost."""
        return self._over.is_set() or self.lost

    def check(self) -> None:
        """Raises ConflictError if another process holds the lease.

        After a pause, this process may run again before its thread does. So a lease that may have run out is extended
        first, which blocks for a round trip.

        Raises:
            ConflictError: another process holds it.
            ServerUnavailableError: it may have run out, and the server does not answer.
        """
        if self._lost_to is None and clock.now() >= self._sure_until:
            self.take_again()
        if self._lost_to is not None:
            raise ConflictError(
                f"this process was the {self._place} but could not extend its lease for {durations.lease:.0f} s, "
                f"because it or the server stood still, or the server had lost it; {self._lost_to} is the "
                f"{self._place} now. This process can no longer be the {self._place}"
            )

    def take_again(self) -> None:
        """Takes the lease again, if the server may have lost it; ``lost`` says if another process was faster."""
        self._waits.call(self._hold_again)

    def give_back(self) -> None:
        """Gives the lease back. If the server does not answer within 2 seconds, it runs out by itself.

        Does nothing in a process that was forked from the one that took it.
        """
        if os.getpid() == self._pid:
            self._waits.call(self._give_back)

    def _give_back(self) -> None:
        self._over.set()
        self._renewals.drop_ended()
        held = self._extending.acquire(timeout=2.0)
        try:
            self._crew.release(self._place)
        except RedisAccError as error:
            logger.debug("the lease of the %s will run out by itself: %s", self._place, error)
        finally:
            if held:
                self._extending.release()

    def _hold_again(self, *, renews: bool = False, extends: bool = False) -> None:
        """Extends the lease or, as far as ``Crew.hold`` is to, takes it again; or notes who holds it."""
        with self._extending:
            if self._over.is_set():
                return
            asked_at = clock.now()
            # Older data may have that of a predecessor.
            taken = self._crew.take(self._place, renews=renews, extends=extends)
            if taken is None:
                self.gaps += asked_at >= self._sure_until
                self._sure_until = asked_at + durations.lease
            else:
                self._lost_to = taken.who

    def renew(self) -> None:
        """Tries to extend the lease, and raises nothing.

        If the server has lost it, it is taken again in the run that is restored. If it was deleted with its
        training, it is over: another run of this name may have begun, to which this process does not belong.
        """
        try:
            try:
                self._hold_again(extends=True)
            except NotFoundError:
                keys = ParameterKeys(self._crew.name)
                if whereabouts(self._crew.transport, keys, self._incarnation()) == "deleted":
                    self._over.set()
                self._hold_again(renews=True)
        except Exception as error:  # noqa: BLE001 - whatever it is, the next attempt may succeed
            logger.debug("cannot extend the lease of the %s: %s", self._place, error)
            if isinstance(error, NotFoundError) and self.on_missing is not None:
                self.on_missing()
