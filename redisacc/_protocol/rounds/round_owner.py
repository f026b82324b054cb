"""Finds out whether a round still belongs to its taker and, if not, who has it."""

from __future__ import annotations

from redisacc._format.entries import parse_recoveries
from redisacc._format.keys import Keys
from redisacc._redis.transport import Transport
from redisacc._text import shown
from redisacc.errors import ConflictError, NotFoundError

# The number of recoveries that the server remembers: lua/recover.lua.
REMEMBERED = 100


def still_listed(transport: Transport, keys: Keys, incarnation: str, token: str, global_step: int) -> bool:
    """Returns whether a taken round is still listed under its token. Called only if the round seems to be gone.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        incarnation: of the accumulator that the round was taken from.
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
    if found != incarnation.encode():
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
