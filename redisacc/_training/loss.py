"""A server that has lost a training: who still has its parameters, and how they come back.

A loss is told from a deletion by the mark that a deletion leaves (``_protocol/parameters/marks.py``). Then:

- A living chief restores everything from its memory (``Chief``).
- Without one, workers that find their training gone write into Redis which step they have (``Claimant``). A chief that
  starts where nothing is published reads these claims first (``newest_claim``), and asks the worker with the newest
  step to publish its parameters (``wait_for_handover``). The chief's state, such as the optimiser's, is lost then.
- A checkpoint may be newer than what workers have. ``Chief`` compares them.
- If a node has lost a part that no process has, a chief gives the rest up (``give_up``), and continues in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from redisacc._clock import clock, durations
from redisacc._format.claims import Claim
from redisacc._format.keys import ParameterKeys
from redisacc._handles.environment import is_first_start
from redisacc._handles.parameters import Parameters
from redisacc._protocol.leases.crew import Crew
from redisacc._protocol.leases.process_identity import fate_of, own_identity
from redisacc._protocol.leases.renewals import interval_of
from redisacc._protocol.parameters.claims import read_claims
from redisacc._protocol.parameters.deletion import listed_objects
from redisacc._protocol.parameters.marks import deleted_incarnations
from redisacc._protocol.parameters.reader import ParameterReader
from redisacc._protocol.scripts import Reply, Scripts
from redisacc._protocol.waiting.wait_log import WaitLog
from redisacc._redis.server_state import may_have_lost_data
from redisacc._redis.transport import Transport
from redisacc._text import shown
from redisacc.errors import DataLossError, RedisAccError

logger = logging.getLogger("redisacc")


# How long a worker that a chief has asked may take until it has published what it has, in seconds. It may be computing
# a gradient: it is waited for as long as it holds its lease, but not for longer than this.
HANDOVER = 600.0


def claims_after() -> float:
    """Returns after how many seconds every living worker has claimed what it has, at the latest.

    A worker that waits looks once a second. For one that computes, the thread that extends its lease claims.
    """
    return interval_of(durations.lease) + 1.0


def newest_claim(transport: Transport, crew: Crew, name: str, *, follows: bool = False) -> Claim | None:
    """Returns what living workers have of a training that the server may have lost; None: nothing.

    If the server was started a moment ago, or has been flushed, this waits until every living worker has claimed what
    it has; else a training under a new name begins at once.

    Args:
        transport: the way to the server.
        crew: the crew of the training.
        name: its name.
        follows: whether another chief is known to have been there.
    """
    keys = ParameterKeys(name)
    scripts = Scripts(transport, keys)
    if not transport.call("EXISTS", keys.claims):
        if (is_first_start() and not follows) or deleted_incarnations(transport, keys):
            return None
        if not may_have_lost_data(transport, keys.record):
            return None
        logger.info(
            "%s: nothing is published under this name, and the server was started a moment ago, or was flushed; asking "
            "for %.1f s whether a worker still has a training of this name",
            name,
            claims_after(),
            extra={"accumulator": name},
        )
    # Asking nobody makes sure that there is a hash of claims.
    while scripts.claim(place="", incarnation="", step=0, process="", asks=True).outcome != "there":
        # Also if there is a claim: another worker may have a later step.
        transport.waits.sleep(claims_after())
        found = _newest(transport, crew, keys)
        if found is not None:
            return found
        # If the server has lost the claims meanwhile, workers claim again.
        if transport.call("UNLINK", keys.claims):
            break
    return None


def _newest(transport: Transport, crew: Crew, keys: ParameterKeys) -> Claim | None:
    """Returns the newest claim of a worker that lives, as far as is known."""
    deleted = deleted_incarnations(transport, keys)
    holders = {member.place: member.process for member in crew.members() if member.left > 0}
    for one in read_claims(transport, keys):
        if one.incarnation in deleted or fate_of(one.process) == "dead":
            continue
        # A worker takes its lease again when there is an accumulator again, and claims no more while it computes. If
        # another process has its place, it lives only for as long as it claims.
        if one.age < 2 * claims_after() or holders.get(one.place) == one.process:
            return one
    return None


def wait_for_handover(transport: Transport, crew: Crew, name: str, wanted: Claim, check: Callable[[], object]) -> None:
    """Blocks until a worker has published the parameters that it has.

    Args:
        transport: the way to the server.
        crew: the crew of the training.
        name: the name of the training.
        wanted: the newest claim. If its worker dies, the next one is asked.
        check: raises an error if this process is no longer the chief.

    Raises:
        DataLossError: no worker hands over what it has.
    """
    keys, log = ParameterKeys(name), WaitLog(clock.now())
    deadline = clock.now() + HANDOVER
    found: Claim | None = wanted
    while found is not None and clock.now() < deadline:
        check()
        claim = Scripts(transport, keys).claim
        reply = claim(place=found.place, incarnation=found.incarnation, step=found.step, process="", asks=True)
        if reply.outcome == "there":
            transport.call("UNLINK", keys.claims)
            return
        now = clock.now()
        if log.is_due(now):
            logger.warning(
                "%s: the server has lost this training; still waiting for %s, which has step %d, to publish it again",
                name,
                found.place,
                found.step,
                extra={"accumulator": name},
            )
        transport.waits.sleep(durations.claim_every)
        # If the server has lost the claims as well, those that live claim again.
        found = _newest(transport, crew, keys) or newest_claim(transport, crew, name, follows=True)
    if transport.call("HEXISTS", keys.record, "version"):
        # The worker has gone after it had published them.
        return
    raise DataLossError(
        f"{shown(name)}: the server has lost this training, and {wanted.place} had step {wanted.step} of its "
        "parameters, but has not published them: it has died, or its user may not publish. Start the chief again with "
        "a checkpoint; or, to begin again at step 0, stop the workers first"
    )


def give_up(transport: Transport, keys: ParameterKeys) -> bool:
    """Gives up the latest version, if it has lost a part that no process has. Removes what is left of its parts.

    Returns:
        Whether nothing is published any more, as after a loss of everything.
    """
    reader = ParameterReader(transport, keys)
    record = reader.poll()
    if record is None:
        return True
    if reader.is_complete(record):
        return False
    rest = listed_objects(transport, record.keys)
    reply = Scripts(transport, keys).give_up(incarnation=record.incarnation, version=record.version)
    if reply.outcome == "changed":
        return False
    transport.pipeline([("UNLINK", key) for key in rest])
    return True


class Claimant:
    """Claims what a worker has of its training, when the server has lost it.

    Args:
        transport: the way to the server.
        parameters: the worker's handle on the parameters.
        place: "worker" and its number.
    """

    def __init__(self, transport: Transport, parameters: Parameters, place: str) -> None:
        self._transport = transport
        self._parameters = parameters
        self._keys = ParameterKeys(parameters.shared_name)
        self._place = place
        self._latest: tuple[int, Any] | None = None
        self._may_publish = True

    def note(self, step: int, tree: Any) -> None:
        """Notes the parameters that the worker has got last."""
        self._latest = step, tree

    def claim_quietly(self) -> None:
        """Claims once what this worker has, and raises nothing. Any thread may call it."""
        try:
            self._claim(self._transport.blocking)
        except RedisAccError as error:
            logger.debug("%s: cannot claim what this worker has: %s", self._keys.name, error)

    def look(self) -> bool:
        """Claims what this worker has, and publishes it if a chief asks for it.

        Returns:
            Whether parameters are published.

        Raises:
            NotFoundError: they were deleted.
        """
        reply = self._claim(self._transport)
        if reply.outcome == "there":
            return True
        if reply.outcome == "deleted":
            # Raises the error that says so.
            self._parameters.step()
        latest = self._latest
        if reply.outcome == "claimed" and reply.place == self._place and latest is not None and self._may_publish:
            step, tree = latest
            try:
                self._parameters._restore(tree, step)
            except RedisAccError as error:
                self._may_publish = False
                # The chief must not wait for it.
                self._transport.call("HDEL", self._keys.claims, self._place)
                logger.warning(
                    "%s: cannot publish step %d, which this worker has and the server has lost: %s",
                    self._keys.name,
                    step,
                    error,
                    extra={"accumulator": self._keys.name},
                )
                return False
            logger.warning(
                "%s: the server had lost this training; published step %d, which this worker had",
                self._keys.name,
                step,
                extra={"accumulator": self._keys.name},
            )
            return True
        return False

    def _claim(self, transport: Transport) -> Reply:
        latest, incarnation = self._latest, self._parameters._reader.incarnation
        if latest is None or not incarnation or not self._may_publish:
            # It only looks whether they are there, or were deleted.
            version, deleted = transport.pipeline(
                [("HMGET", self._keys.record, "version"), ("GET", self._keys.deleted)]
            )
            if version != [None]:
                return Reply(outcome="there")
            was_deleted = incarnation and incarnation.encode() in (deleted or b"").split()
            return Reply(outcome="deleted" if was_deleted else "lost")
        claim = Scripts(transport, self._keys).claim
        return claim(place=self._place, incarnation=incarnation, step=latest[0], process=own_identity(), asks=False)
