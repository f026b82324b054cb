"""Removes a round that its taker has in memory: the script removes the hashes, and large parts are freed one by one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from redisacc._format.attempts import StoredAttempt
from redisacc._format.buffered import BufferedGradient, listed_part_keys, number_of_parts, part_keys
from redisacc._format.keys import Keys
from redisacc._protocol.partition_scripts import PartitionScripts
from redisacc._protocol.partition_sweep import sweep_quietly
from redisacc._protocol.scripts import Scripts
from redisacc._redis.hash_scan import scan
from redisacc._redis.transport import Transport
from redisacc.errors import RedisAccError

logger = logging.getLogger("redisacc")

# The number of parts that one call of a script removes: each takes it about 1.7 microseconds.
PARTS_PER_CALL = 100

# What a script frees itself, in bytes: lua/include/drop_strings.lua.
DROPPED_BYTES = 4 * 2**20


def acknowledge(
    transport: Transport, keys: Keys, scripts: PartitionScripts, token: str, gradients: list[BufferedGradient]
) -> bool:
    """Removes a round of which everything is known. Returns False if there is no such round, or no longer."""
    if keys.partitions:
        attempts = [StoredAttempt(gradient.id, len(gradient.lengths)) for gradient in gradients if not gradient.inline]
        return _end_attempts(transport, keys, scripts, token, attempts)
    parts = [key for gradient in gradients for key in part_keys(keys, gradient)]
    acknowledged = _run(scripts, token, parts)
    if acknowledged and parts:
        free_dropped(transport, keys, gradients)
    return acknowledged


def finish_acknowledgement(transport: Transport, keys: Keys, scripts: PartitionScripts, token: str) -> bool:
    """Removes what is left of a round whose taker died while it acknowledged. Returns False if nothing is left."""
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
    instead (``partition_sweep.py``).
    """
    if keys.partitions:
        return
    if sum(gradient.nbytes for gradient in gradients if not gradient.inline) > DROPPED_BYTES:
        try:
            transport.pipeline([("UNLINK", key) for gradient in gradients for key in part_keys(keys, gradient)])
        except RedisAccError as error:
            logger.debug("%s: dropped parts will expire: %s", keys.name, error)


def _end_attempts(
    transport: Transport, keys: Keys, scripts: PartitionScripts, token: str, attempts: Sequence[StoredAttempt]
) -> bool:
    """Removes a round whose gradients have their parts in partitions. The leader lists these until they are removed."""
    acknowledged = _run(scripts, token, list(map(str, attempts)), in_partitions=True)
    if acknowledged and attempts:
        sweep_quietly(transport, keys, min_replicas=scripts.min_replicas)
    return acknowledged


def _run(scripts: Scripts, token: str, items: list[str], *, in_partitions: bool = False) -> bool:
    """Acknowledges a round, given the keys of its parts, or its attempts if these are in partitions."""
    *pieces, last = _batches(items)
    # From the first call on, the round cannot be recovered any more. Another process may only finish what we began.
    begun = False
    for piece in pieces:
        if not scripts.acknowledge(token=token, **_of(piece, in_partitions), more=True):
            return begun
        begun = True
    return scripts.acknowledge(token=token, **_of(last, in_partitions), more=False) or begun


def _of(items: list[str], in_partitions: bool) -> dict[str, list[str]]:
    return {"parts": [], "attempts": items} if in_partitions else {"parts": items}


def _batches(parts: list[str]) -> Iterator[list[str]]:
    """Cuts a list into pieces, of which there is at least one."""
    for start in range(0, max(len(parts), 1), PARTS_PER_CALL):
        yield parts[start : start + PARTS_PER_CALL]
