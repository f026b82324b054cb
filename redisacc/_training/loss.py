"""What workers have of a run that the server has lost, as they say themselves.

A loss is told from a deletion by the mark that a deletion leaves (``_protocol/parameters/marks.py``). Workers that
find their training gone write into Redis which step they have (``Claimant``). A leader reads these claims if nothing is
published that it has itself (``Inquiry``), and asks the worker with the newest step to publish its parameters. The
state of the leader, such as the optimizer's, is lost then.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from redisacc._clock import clock, durations
from redisacc._format.crew_entries import Claim, parse_claims
from redisacc._format.keys import ParameterKeys
from redisacc._format.stored_text import clock_ms
from redisacc._handles.environment import is_first_start, is_started_again
from redisacc._handles.parameters import Parameters
from redisacc._log import inform, warn
from redisacc._protocol.leases.crew import Crew
from redisacc._protocol.leases.process_identity import fate_of, own_identity
from redisacc._protocol.leases.renewals import interval_of
from redisacc._protocol.parameters.deletion import listed_objects
from redisacc._protocol.parameters.marks import deleted_incarnations
from redisacc._protocol.parameters.reader import ParameterReader
from redisacc._protocol.scripts import Reply, Scripts
from redisacc._protocol.waiting.wait import WaitLog
from redisacc._wire.connect import may_have_lost_data
from redisacc._wire.faults import WritesRefusedError
from redisacc._wire.scans import scan_command, scan_whole
from redisacc._wire.transport import Transport, limited
from redisacc.errors import RedisAccError, ServerUnavailableError


def read_claims(transport: Transport, keys: ParameterKeys) -> list[Claim]:
    """Returns the claims, the newest step first.

    Raises:
        CorruptDataError: redisacc did not write one of them.
    """
    clock, first = transport.pipeline([("TIME",), scan_command(keys.claims)])
    return parse_claims(keys.claims, scan_whole(transport, keys.claims, first), clock_ms(clock))


logger = logging.getLogger("redisacc")


# How long a worker that a chief has asked may take until it has published what it has, in seconds. It may be computing
# a gradient: it is waited for as long as it holds its lease, but not for longer than this.
HANDOVER = 600.0


def claims_after() -> float:
    """Returns after how many seconds every living worker has claimed what it has, at the latest.

    A worker that waits looks once a second. For one that computes, the thread that extends its lease claims.
    """
    return interval_of(durations.lease) + 1.0


class Inquiry:
    """What a leader finds out from workers while nothing is published.

    Args:
        transport: the way to the server.
        crew: the crew of the run.
        name: its name.

    Attributes:
        wanted: the newest claim of a worker that lives, as far as is known.
        asked: the last worker that was asked to publish what it has, and its step.
    """

    def __init__(self, transport: Transport, crew: Crew, name: str) -> None:
        self._transport, self._crew, self._name = transport, crew, name
        self._keys = ParameterKeys(name)
        self._scripts = Scripts(transport, self._keys)
        self._began: float | None = None
        self._suspects: bool | None = None
        # Process -> when it was asked first.
        self._asked_at: dict[str, float] = {}
        self._log: WaitLog | None = None
        self.wanted: Claim | None = None
        self.asked: Claim | None = None

    def may_be_lost(self, *, is_lost: bool, follows: bool) -> bool:
        """Returns whether the server may have lost a run.

        Only if it is young or has been flushed, or this process follows another one: else a new run begins at once.

        Args:
            is_lost: whether this process knows that there was one.
            follows: whether another process is known to have led.
        """
        if self._suspects is None:
            if is_lost or self._transport.call("EXISTS", self._keys.claims):
                self._suspects = True
            elif (is_first_start() and not follows) or deleted_incarnations(self._transport, self._keys):
                self._suspects = False
            else:
                self._suspects = is_started_again() or may_have_lost_data(self._transport, self._keys.record)
        return self._suspects

    def ask(self) -> None:
        """Asks all workers, and blocks until those that live have had time to answer."""
        if self._began is None:
            inform(
                self._name,
                "nothing is published under this name, and the server may have lost it; asking for %.1f s whether a "
                "worker still has a run of this name",
                claims_after(),
            )
            # Asking nobody makes sure that there is a hash of claims.
            if self._asks("", "", 0):
                return
            self._began = clock.now()
        self._transport.waits.sleep(max(self._began + claims_after() - clock.now(), 0.0))

    def has_asked(self) -> bool:
        """Returns whether they have had that time. Looks for the newest claim."""
        if self._began is None or clock.now() < self._began + claims_after():
            return False
        self.wanted = self._newest()
        if self.wanted is None and not self._transport.call("EXISTS", self._keys.claims):
            # The server has lost the claims as well. Those that live claim again.
            self._began = None
            return False
        return True

    def hand_over(self) -> None:
        """Asks the worker with the newest claim to publish what it has, and lets it do so for a moment."""
        wanted = self.wanted
        assert wanted is not None
        self.asked = wanted
        now = clock.now()
        self._asked_at.setdefault(wanted.process, now)
        self._log = self._log or WaitLog(now)
        if self._asks(wanted.place, wanted.incarnation, wanted.step):
            self.end()
            return
        if self._log.is_due(now):
            warn(
                self._name,
                "the server has lost this run; still waiting for %s, which has step %d, to publish it again",
                wanted.place,
                wanted.step,
            )
        self._transport.waits.sleep(durations.claim_every)

    def end(self) -> None:
        """Removes the claims: something is published, or about to be."""
        self._transport.call("UNLINK", self._keys.claims)

    def _asks(self, place: str, incarnation: str, step: int) -> bool:
        """Asks a worker; "": nobody. Returns whether something is published."""
        reply = self._scripts.claim(place=place, incarnation=incarnation, step=step, process="", asks=True)
        return bool(reply.outcome == "there")

    def _newest(self) -> Claim | None:
        deleted = deleted_incarnations(self._transport, self._keys)
        holders = {member.place: member.process for member in self._crew.members() if member.left > 0}
        for one in read_claims(self._transport, self._keys):
            if one.incarnation in deleted or fate_of(one.process) == "dead":
                continue
            if clock.now() >= self._asked_at.get(one.process, clock.now()) + HANDOVER:
                continue
            # A worker takes its lease again when there is an accumulator again, and claims no more while it computes.
            # If another process has its place, it lives only for as long as it claims.
            if one.age < 2 * claims_after() or holders.get(one.place) == one.process:
                return one
        return None


def give_up(transport: Transport, keys: ParameterKeys) -> None:
    """Gives up the latest version, if it has lost a part that no process has. Removes what is left of its parts.

    Nothing is published any more, as after a loss of everything; unless another version was published meanwhile.
    """
    reader = ParameterReader(transport, keys)
    record = reader.poll()
    if record is None or reader.is_complete(record):
        return
    rest = listed_objects(transport, record.keys)
    reply = Scripts(transport, keys).give_up(incarnation=record.incarnation, version=record.version)
    if reply.outcome != "changed":
        transport.pipeline([("UNLINK", key) for key in rest])


class Claimant:
    """Claims what a worker has of its run, when the server has lost it.

    Args:
        transport: the way to the server.
        parameters: the worker's handle on the parameters.
        place: "worker" and its number.

    Attributes:
        latest: the step and the parameters that the worker has got last.
        is_over: whether its loop has ended, so that nobody would publish what is claimed in the background.
    """

    def __init__(self, transport: Transport, parameters: Parameters, place: str) -> None:
        self._transport = transport
        self._parameters = parameters
        self._keys = ParameterKeys(parameters.shared_name)
        self._place = place
        self.latest: tuple[int, Any] | None = None
        self.is_over = False
        self._may_publish = True

    @property
    def incarnation(self) -> str:
        """The incarnation that this worker has seen."""
        return self._parameters._reader.incarnation

    def claim_quietly(self) -> None:
        """Claims once what this worker has, and raises nothing. Any thread may call it."""
        if self.is_over:
            return
        try:
            self._claim(self._transport.blocking)
        except RedisAccError as error:
            logger.debug("%s: cannot claim what this worker has: %s", self._keys.name, error)

    def withdraw(self) -> None:
        """Claims no longer. A leader must not wait for what this process never publishes."""
        self.is_over = True
        with suppress(RedisAccError), limited(1.0):
            self._transport.call("HDEL", self._keys.claims, self._place)

    def look(self) -> bool:
        """Claims what this worker has, and publishes it if a chief asks for it. Returns whether it is published."""
        reply = self._claim(self._transport)
        if reply.outcome == "there":
            return True
        latest = self.latest
        if reply.outcome == "claimed" and reply.place == self._place and latest is not None and self._may_publish:
            step, tree = latest
            try:
                self._parameters._restore(tree, step, kept=self._parameters._reader.kept)
            except (ServerUnavailableError, WritesRefusedError):
                # It passes, and nobody may have anything newer.
                raise
            except RedisAccError as error:
                self._may_publish = False
                # The chief must not wait for it.
                self._transport.call("HDEL", self._keys.claims, self._place)
                warn(
                    self._keys.name,
                    "cannot publish step %d, which this worker has and the server has lost: %s",
                    step,
                    error,
                )
                return False
            warn(self._keys.name, "the server had lost this run; published step %d, which this worker had", step)
            return True
        return False

    def _claim(self, transport: Transport) -> Reply:
        latest, incarnation = self.latest, self.incarnation
        if latest is None or not incarnation or not self._may_publish:
            # It only looks whether they are there. The rules for workers let them read the record by this command.
            [version] = transport.call("HMGET", self._keys.record, "version")
            return Reply(outcome="lost" if version is None else "there")
        claim = Scripts(transport, self._keys).claim
        return claim(place=self._place, incarnation=incarnation, step=latest[0], process=own_identity(), asks=False)
