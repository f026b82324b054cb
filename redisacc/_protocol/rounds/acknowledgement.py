"""Removes a round that its taker has in memory: the script removes the hashes, and large parts are freed one by one."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from redisacc._format.attempts import StoredAttempt
from redisacc._format.buffered import BufferedGradient, listed_part_keys, number_of_parts, part_keys
from redisacc._format.keys import Keys
from redisacc._protocol.parts.sweep import sweep_quietly
from redisacc._protocol.scripts import Scripts
from redisacc._redis.scans import scan
from redisacc._redis.transport import Transport
from redisacc.errors import RedisAccError

logger = logging.getLogger("redisacc")

# The number of parts that one call of a script removes: each takes it about 1.7 microseconds.
PARTS_PER_CALL = 100

# The bytes that a script frees itself (lua/include/drop_strings.lua).
DROPPED_BYTES = 4 * 2**20


def acknowledge(
    transport: Transport,
    keys: Keys,
    scripts: Scripts,
    token: str,
    gradients: list[BufferedGradient],
    *,
    metrics: str = "",
) -> bool:
    """Removes a round whose gradients are all known. Returns False if there is no such round, or no longer.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        scripts: its scripts.
        token: the id of the take.
        gradients: the buffered gradients of the round.
        metrics: the means of its metrics, as ``metrics_text`` makes them, for the record; "": there are none.
    """
    if keys.partitions:
        attempts = [StoredAttempt(gradient.id, len(gradient.lengths)) for gradient in gradients if not gradient.inline]
        return _end_attempts(transport, keys, scripts, token, attempts, metrics=metrics)
    parts = [key for gradient in gradients for key in part_keys(keys, gradient)] if gradients else []
    acknowledged = _run(scripts, token, parts, metrics=metrics)
    if acknowledged and parts:
        free_dropped(transport, keys, gradients)
    return acknowledged


def finish_acknowledgement(transport: Transport, keys: Keys, scripts: Scripts, token: str) -> bool:
    """Removes the rest of a round whose taker died while it acknowledged. Returns False if nothing is left."""
    entries = scan(transport, keys.taken_round(token).buffered)
    if keys.partitions:
        attempts = [
            StoredAttempt(field.decode(errors="replace"), number)
            for field, entry in entries.items()
            if (number := number_of_parts(entry))
        ]
        return _end_attempts(transport, keys, scripts, token, attempts)
    parts: list[str] = []
    for field, entry in entries.items():
        parts += listed_part_keys(keys, field, entry)
    return _run(scripts, token, parts)


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


def _end_attempts(
    transport: Transport,
    keys: Keys,
    scripts: Scripts,
    token: str,
    attempts: Sequence[StoredAttempt],
    *,
    metrics: str = "",
) -> bool:
    """Removes a round whose gradients have their parts in partitions. The leader lists these until they are removed."""
    acknowledged = _run(scripts, token, list(map(str, attempts)), metrics=metrics, in_partitions=True)
    if acknowledged and attempts:
        sweep_quietly(transport, keys, min_replicas=scripts.min_replicas)
    return acknowledged


def _run(scripts: Scripts, token: str, items: list[str], *, metrics: str = "", in_partitions: bool = False) -> bool:
    """Acknowledges a round, given the keys of its parts, or its attempts if these are in partitions."""
    # From the first call on, the round cannot be recovered any more. Another process may only finish what we began.
    begun = False
    for start in range(0, max(len(items), 1), PARTS_PER_CALL):
        some, more = items[start : start + PARTS_PER_CALL], start + PARTS_PER_CALL < len(items)
        parts, attempts = ([], some) if in_partitions else (some, [])
        reply = scripts.acknowledge(token=token, parts=parts, attempts=attempts, metrics=metrics, more=more)
        if reply.outcome == "unknown":
            return begun
        begun = True
    return begun
