"""Forgets a worker, which no list has until it sends another gradient."""

from __future__ import annotations

import secrets

from redisacc._format.entries import sessions_of
from redisacc._format.keys import Keys
from redisacc._protocol.leases.crew import Crew
from redisacc._protocol.scripts import OF_ACCUMULATORS, OF_CREWS, Scripts
from redisacc._text import shown
from redisacc._wire.scans import scan
from redisacc._wire.transport import Transport
from redisacc.errors import ConflictError


def forget_worker(transport: Transport, keys: Keys, incarnation: str, worker: str) -> bool:
    """Removes a worker from the known ones of an accumulator. Its gradients in the round stay, and count.

    The server keeps the data by which it recognizes a repeated request, so this is safe while the worker is alive. If
    the worker sends another gradient, it is known again.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        incarnation: which accumulator of that name.
        worker: the name of the worker.

    Returns:
        Whether the worker was known, or had a lease in a run that has run out.

    Raises:
        ConflictError: it is a worker of a run, and its lease has not run out. Nothing was changed.
        NotFoundError: the accumulator was deleted.
        CorruptDataError: something under its keys is not as redisacc writes it.
    """
    found = False
    crew = Crew(transport, keys.name, holder=secrets.token_hex(8), who="forget_worker")
    for member in crew.members():
        if member.number is None or member.place != worker:
            continue
        if member.left > 0:
            raise ConflictError(
                f"{worker} of {shown(keys.name)} ({member.who}) has a lease for {member.left:.0f} more seconds. If the "
                "process has ended, wait for that time, and then forget it"
            )
        # If somebody takes the lease meanwhile, the holder is another one, and nothing happens.
        release = Scripts(transport, keys, OF_CREWS).release_lease
        reply = release(place=member.place, holder=member.holder, process=member.process)
        found |= reply.outcome == "released"
    scripts = Scripts(transport, keys, OF_ACCUMULATORS, incarnation=incarnation)
    for session in sessions_of(keys, scan(transport, keys.sessions), worker):
        found |= scripts.forget_worker(session=session, worker=worker).outcome == "cleared"
    return found
