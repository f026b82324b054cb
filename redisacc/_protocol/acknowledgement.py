"""Removes a round that its taker has in memory: the script removes the hashes, and large parts are freed one by one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from redisacc._format.buffered import BufferedGradient, listed_part_keys, part_keys
from redisacc._format.keys import Keys
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
    transport: Transport, keys: Keys, scripts: Scripts, token: str, gradients: list[BufferedGradient]
) -> bool:
    """Removes a round of which everything is known. Returns False if there is no such round, or no longer."""
    parts = [key for gradient in gradients for key in part_keys(keys, gradient)]
    acknowledged = _run(scripts, token, parts)
    if acknowledged and parts:
        free_dropped(transport, keys, gradients)
    return acknowledged


def finish_acknowledgement(transport: Transport, keys: Keys, scripts: Scripts, token: str) -> bool:
    """Removes what is left of a round whose taker died while it acknowledged. Returns False if nothing is left."""
    parts: list[str] = []
    for field, entry in scan(transport, keys.taken_round(token).buffered).items():
        parts += listed_part_keys(keys, field, entry)
    return _run(scripts, token, parts)


def free_dropped(transport: Transport, keys: Keys, gradients: Sequence[BufferedGradient]) -> None:
    """Frees the parts that a script has just dropped and left to us, one part to a command, so that others get between.

    The script gave them an expiry, so nothing stays if this fails, and it raises nothing.
    """
    if sum(gradient.nbytes for gradient in gradients if not gradient.inline) > DROPPED_BYTES:
        try:
            transport.pipeline([("UNLINK", key) for gradient in gradients for key in part_keys(keys, gradient)])
        except RedisAccError as error:
            logger.debug("%s: dropped parts will expire: %s", keys.name, error)


def _run(scripts: Scripts, token: str, parts: list[str]) -> bool:
    *pieces, last = _batches(parts)
    # From the first call on, the round cannot be recovered any more. Another process may only finish what we began.
    begun = False
    for piece in pieces:
        if not scripts.acknowledge(token=token, parts=piece, more=True):
            return begun
        begun = True
    return scripts.acknowledge(token=token, parts=last, more=False) or begun


def _batches(parts: list[str]) -> Iterator[list[str]]:
    """Cuts a list into pieces, of which there is at least one."""
    for start in range(0, max(len(parts), 1), PARTS_PER_CALL):
        yield parts[start : start + PARTS_PER_CALL]
