"""Rounds that were granted: acknowledges them, takes those of dead takers over, and finds out whose they are.

Only a round that its taker has in memory is acknowledged: the script removes the hashes, and large parts are freed one
by one.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redisacc._format.attempts import StoredAttempt
from redisacc._format.buffered import BufferedGradient, listed_part_keys, number_of_parts, part_keys
from redisacc._format.entries import parse_recoveries, parse_taken
from redisacc._format.keys import Keys
from redisacc._protocol.parts.sweep import sweep_quietly
from redisacc._protocol.scripts import Reply, Scripts
from redisacc._text import shown
from redisacc._wire.scans import scan
from redisacc._wire.transport import Transport
from redisacc.errors import ConflictError, NotFoundError, RedisAccError

logger = logging.getLogger("redisacc")

# The number of parts that one call of a script removes: each takes it about 1.7 microseconds.
PARTS_PER_CALL = 100

# The bytes that a script frees itself (lua/include/drop_strings.lua).
DROPPED_BYTES = 4 * 2**20

# The number of recoveries that the server remembers: lua/recover.lua.
REMEMBERED = 100


@dataclass(frozen=True)
class EndedRound:
    """A round whose gradients are all known, and which is removed.

    Attributes:
        keys: the keys of the accumulator.
        token: the id of the take.
        gradients: its buffered gradients.
        items: what the scripts remove or list: the keys of its parts; in partitions, the attempts that wrote them.
    """

    keys: Keys
    token: str
    gradients: Sequence[BufferedGradient]
    items: Sequence[str]

    @property
    def is_long(self) -> bool:
        """Whether one call of a script cannot remove it."""
        return len(self.items) > PARTS_PER_CALL

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of ``publish`` that concern it."""
        some, in_partitions = self.items[:PARTS_PER_CALL], bool(self.keys.partitions)
        return {
            "token": self.token,
            "more": self.is_long,
            "round_parts": () if in_partitions else some,
            "round_removed": some if in_partitions else (),
        }


def ended_round(keys: Keys, token: str, gradients: Sequence[BufferedGradient]) -> EndedRound:
    """Returns what has to be removed of a round whose gradients are all known."""
    if keys.partitions:
        items = [str(StoredAttempt(of.id, len(of.lengths))) for of in gradients if not of.inline]
    else:
        items = [key for gradient in gradients for key in part_keys(keys, gradient)] if gradients else []
    return EndedRound(keys, token, gradients, items)


def acknowledge(transport: Transport, scripts: Scripts, ended: EndedRound, *, metrics: str = "") -> bool:
    """Removes a round whose gradients are all known. Returns False if there is no such round, or no longer.

    Args:
        transport: the way to the server.
        scripts: the scripts of the accumulator.
        ended: the round.
        metrics: the means of its metrics, as ``metrics_text`` makes them, for the record; "": there are none.
    """
    acknowledged = _acknowledge(transport, ended.keys, scripts, ended.token, ended.items, metrics=metrics)
    if acknowledged and ended.items:
        free_dropped(transport, ended.keys, ended.gradients)
    return acknowledged


def finish_acknowledgement(transport: Transport, keys: Keys, scripts: Scripts, token: str) -> bool:
    """Removes the rest of a round whose taker died while it acknowledged. Returns False if nothing is left."""
    items: list[str] = []
    for field, entry in scan(transport, keys.taken_round(token).buffered).items():
        if not keys.partitions:
            items += listed_part_keys(keys, field, entry)
        elif number := number_of_parts(entry):
            items.append(str(StoredAttempt(field.decode(errors="replace"), number)))
    return _acknowledge(transport, keys, scripts, token, items)


def clean_up(transport: Transport, scripts: Scripts, ended: EndedRound) -> None:
    """Frees what one call of a script has dropped or listed of a round, and removes the rest of a long one."""
    if ended.is_long:
        acknowledge(transport, scripts, ended)
    elif ended.items and ended.keys.partitions:
        sweep_quietly(transport, ended.keys, min_replicas=scripts.min_replicas)
    else:
        free_dropped(transport, ended.keys, ended.gradients)


def free_dropped(transport: Transport, keys: Keys, gradients: Sequence[BufferedGradient]) -> None:
    """Frees the parts that a script has just dropped and left to us, one part to a command, so that others get between.

    The script gave them an expiry, so nothing stays if this fails, and it raises nothing. Parts in partitions are swept
    instead (``parts/sweep.py``).
    """
    if keys.partitions:
        return
    if sum([gradient.nbytes for gradient in gradients if not gradient.inline]) > DROPPED_BYTES:
        try:
            transport.pipeline([("UNLINK", key) for gradient in gradients for key in part_keys(keys, gradient)])
        except RedisAccError as error:
            logger.debug("%s: dropped parts will expire: %s", keys.name, error)


def _acknowledge(
    transport: Transport, keys: Keys, scripts: Scripts, token: str, items: Sequence[str], *, metrics: str = ""
) -> bool:
    """Acknowledges a round, given the keys of its parts. If these are in partitions, it is given its attempts instead.

    The leader lists attempts until their parts are removed.
    """
    # From the first call on, the round cannot be recovered any more. Another process may only finish what we began.
    begun = False
    for start in range(0, max(len(items), 1), PARTS_PER_CALL):
        some, more = items[start : start + PARTS_PER_CALL], start + PARTS_PER_CALL < len(items)
        parts, attempts = ((), some) if keys.partitions else (some, ())
        reply = scripts.acknowledge(token=token, parts=parts, attempts=attempts, metrics=metrics, more=more)
        if reply.outcome == "unknown":
            break
        begun = True
    if begun and items and keys.partitions:
        sweep_quietly(transport, keys, min_replicas=scripts.min_replicas)
    return begun


def take_over(transport: Transport, keys: Keys, scripts: Scripts, token: str | None, *, name: str) -> Reply | None:
    """Moves a round that was granted and not acknowledged to a new token. Its former taker can no longer read it.

    Rounds whose takers died while they acknowledged are removed on the way: their gradients have been handed out.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        scripts: its scripts.
        token: which round; None: the oldest.
        name: the name of the new taker.

    Returns:
        The reply that granted the round, with its ``token``; None if there is none to recover.
    """
    entries = scan(transport, keys.taken).items()
    found = [parse_taken(keys, field, text) for field, text in entries]
    for state, taken in found:
        if state == "acknowledged":
            finish_acknowledgement(transport, keys, scripts, taken.token)
    rounds = sorted((taken for state, taken in found if state == "granted"), key=lambda taken: taken.granted_at)
    for taken in rounds:
        if token in (None, taken.token):
            new = secrets.token_hex(16)
            reply = scripts.recover(old=taken.token, token=new, taker=name, replicated=True)
            if reply.outcome == "granted":
                reply.token = new
                return reply
    return None


def still_listed(transport: Transport, keys: Keys, scripts: Scripts, token: str, global_step: int) -> bool:
    """Returns whether a taken round is still listed under its token. Called only if the round seems to be gone.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        scripts: the scripts of the accumulator that the round was taken from.
        token: the id of the take.
        global_step: the step that the take closed.

    Returns:
        False if the round was acknowledged, or if the server lost it: both leave no trace.

    Raises:
        NotFoundError: the accumulator was deleted.
        ConflictError: another taker has recovered the round.
    """
    found, entry, recoveries = transport.pipeline(
        [
            ("HGET", keys.record, "incarnation"),
            ("HGET", keys.taken, token),
            ("LRANGE", keys.recovered, 0, REMEMBERED - 1),
        ]
    )
    if found != scripts.incarnation.encode():
        raise NotFoundError(
            f"accumulator {shown(keys.name)} was deleted after its round of step {global_step} was taken and before "
            "the round was acknowledged. It cannot be known whether another process had recovered the round"
        )
    if entry is not None:
        return True
    owner, new = token, None
    for recovery in parse_recoveries(keys, recoveries):
        # The new owner may have lost the round as well: the last one in the chain counts.
        if recovery.old == owner:
            owner, new = recovery.token, recovery
    if new is None:
        return False
    raise ConflictError(
        f"{keys.name}: the round of step {global_step} does not belong to this take any more: recover() gave it to "
        f"{shown(new.taker)} at {new.recovered_at:%Y-%m-%d %H:%M:%S} UTC, under the token {shown(new.token)}. Do not "
        "use its gradient, because the new owner does"
    )
