"""Removes a round that its taker has in memory: the script removes the hashes, and large parts are freed one by one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redisacc._format.attempts import StoredAttempt
from redisacc._format.buffered import BufferedGradient, listed_part_keys, number_of_parts, part_keys
from redisacc._format.keys import Keys
from redisacc._protocol.parts.sweep import sweep_quietly
from redisacc._protocol.scripts import Scripts
from redisacc._redis.hash_scan import scan
from redisacc._redis.transport import Transport
from redisacc.errors import RedisAccError

logger = logging.getLogger("redisacc")

# The number of parts that one call of a script removes: each takes it about 1.7 microseconds.
PARTS_PER_CALL = 100

# The bytes that a script frees itself (lua/include/drop_strings.lua).
DROPPED_BYTES = 4 * 2**20


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
    acknowledged = _run(scripts, ended.keys, ended.token, ended.items, metrics)
    if acknowledged and ended.items:
        if ended.keys.partitions:
            sweep_quietly(transport, ended.keys, min_replicas=scripts.min_replicas)
        else:
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
    acknowledged = _run(scripts, keys, token, items, "")
    if acknowledged and items and keys.partitions:
        sweep_quietly(transport, keys, min_replicas=scripts.min_replicas)
    return acknowledged


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


def _run(scripts: Scripts, keys: Keys, token: str, items: Sequence[str], metrics: str) -> bool:
    """Acknowledges a round, given the keys of its parts, or its attempts if these are in partitions."""
    # From the first call on, the round cannot be recovered any more. Another process may only finish what we began.
    begun = False
    for start in range(0, max(len(items), 1), PARTS_PER_CALL):
        some, more = items[start : start + PARTS_PER_CALL], start + PARTS_PER_CALL < len(items)
        parts, attempts = ((), some) if keys.partitions else (some, ())
        reply = scripts.acknowledge(token=token, parts=parts, attempts=attempts, metrics=metrics, more=more)
        if reply.outcome == "unknown":
            return begun
        begun = True
    return begun
