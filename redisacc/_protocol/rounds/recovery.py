"""Recovery: takes over a round whose taker died before it acknowledged the round."""

from __future__ import annotations

import secrets

from redisacc._format.entries import parse_taken
from redisacc._format.keys import Keys
from redisacc._protocol.rounds.acknowledgement import finish_acknowledgement
from redisacc._protocol.scripts import Reply, Scripts
from redisacc._redis.scans import scan
from redisacc._redis.transport import Transport


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
