"""Removes the parts of attempts that are over: of acknowledged rounds, of replaced versions, and of dead writers.

The leader lists these attempts. Each was fenced there before the first of its parts is removed, so none of them can be
counted or published later, and is forgotten only when all its parts are gone. If the sweeper dies in between, the next
one removes the rest.

With ``min_replicas``, replicas of the leader have confirmed that the attempts are over before anything is removed. A
replica that took over without knowing it would still count on the parts.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

from redisacc._format.attempts import MOST_PARTS, StoredAttempt, part_keys
from redisacc._format.keys import PartitionedKeys
from redisacc._protocol.parts.write import call_nodes
from redisacc._protocol.scripts import Scripts
from redisacc._wire.transport import Transport
from redisacc.errors import NotFoundError, RedisAccError, ServerUnavailableError

logger = logging.getLogger("redisacc")

# How many attempts are removed before the next ones are asked for.
ATTEMPTS_PER_CALL = 50


def sweep(
    transport: Transport,
    keys: PartitionedKeys,
    abandoned: Sequence[StoredAttempt] = (),
    *,
    min_replicas: int = 0,
) -> int:
    """Removes the parts of all attempts that are over, and returns how many attempts these were.

    Args:
        transport: the way to the nodes.
        keys: the keys of the accumulator, or of the parameters, with the partitions.
        abandoned: attempts that their writer, the caller, gives up.
        min_replicas: how many replicas of the leader must confirm that attempts are over; 0 asks none.

    Raises:
        NotReplicatedError: too few replicas know that the attempts are over. Their parts stay for the next sweep.
    """
    scripts = Scripts(transport, keys, base=keys.record, min_replicas=min_replicas)
    number = 0
    removed: list[StoredAttempt] = []
    while True:
        reply = scripts.sweep(
            limit=ATTEMPTS_PER_CALL,
            most_parts=MOST_PARTS,
            confirm=min_replicas > 0,
            abandoned=list(map(str, abandoned)),
            removed=list(map(str, removed)),
            replicated=True,
        )
        if not reply.attempt:
            return number
        scripts.check_replicated(reply.replicas, f"{len(reply.attempt)} attempt(s) ended")
        due = [StoredAttempt.parse(keys.attempts, member) for member in reply.attempt]
        remove_parts(transport, keys, due)
        number += len(due)
        abandoned, removed = (), due


def listed_attempts(transport: Transport, keys: PartitionedKeys) -> list[StoredAttempt]:
    """Returns the attempts that the leader lists: those under way, and those whose parts are to be removed.

    A gradient that was counted is not among them, nor is a blob of the version that is published.

    Raises:
        CorruptDataError: redisacc did not write one of them.
    """
    # There are few: one for each upload that is under way, and those that nobody has swept yet.
    members = transport.call("ZRANGE", keys.attempts, 0, -1)
    return [StoredAttempt.parse(keys.attempts, member) for member in members]


def sweep_quietly(
    transport: Transport,
    keys: PartitionedKeys,
    abandoned: Sequence[StoredAttempt] = (),
    *,
    min_replicas: int = 0,
) -> None:
    """Does the same, and raises nothing: another sweep removes what is left."""
    try:
        sweep(transport, keys, abandoned, min_replicas=min_replicas)
    except RedisAccError as error:
        logger.debug("%s: could not remove parts that are no longer needed: %s", keys.name, error)


def remove_parts(transport: Transport, keys: PartitionedKeys, attempts: Sequence[StoredAttempt]) -> None:
    """Removes the parts of attempts, on all nodes at once; one part to a command, so that others get between."""
    for some in part_keys(keys, attempts):
        call_nodes(transport, [("UNLINK", key) for key in some])


def remove_parts_quietly(transport: Transport, keys: PartitionedKeys, attempts: Sequence[StoredAttempt]) -> None:
    """Removes the parts of attempts that the leader no longer knows. If that fails, `doctor --fix` does so later."""
    with contextlib.suppress(RedisAccError):
        remove_parts(transport, keys, attempts)


@contextlib.contextmanager
def given_up_on_error(
    transport: Transport, keys: PartitionedKeys, attempts: Sequence[StoredAttempt], *, min_replicas: int = 0
) -> Iterator[None]:
    """Gives up attempts of the caller if the block, in which it writes and commits them, raises an error.

    Args:
        transport: the way to the nodes.
        keys: the keys of the accumulator, or of the parameters, with the partitions.
        attempts: the attempts.
        min_replicas: how many replicas of the leader must confirm that they are over; 0 asks none.
    """
    try:
        yield
    except NotFoundError:
        # Nothing can count or publish them now, and nobody else knows of their parts.
        remove_parts_quietly(transport, keys, attempts)
        raise
    except ServerUnavailableError:
        # The commit may still arrive: only the end of the lease may give the attempts up.
        raise
    except RedisAccError:
        sweep_quietly(transport, keys, attempts, min_replicas=min_replicas)
        raise
