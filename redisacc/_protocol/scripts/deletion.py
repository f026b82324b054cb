"""Crosses into Lua to delete an accumulator, or parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from redisacc._protocol.scripts.replies import corrupt
from redisacc._redis.script_loader import load
from redisacc._redis.transport import Transport

Deletion = Literal["closed", "deleted", "missing", "replaced"]
_DELETIONS: dict[bytes, Deletion] = {
    b"closed": "closed",
    b"deleted": "deleted",
    b"missing": "missing",
    b"replaced": "replaced",
}


def run_delete(
    transport: Transport,
    record: str,
    others: Sequence[str],
    *,
    marks: Sequence[str] = (),
    incarnation: str,
    finish: bool,
    wakes: bool,
    timeout: float,
) -> Deletion:
    """Closes an accumulator or parameters for everybody, or removes them once they are closed.

    Args:
        transport: the way to the server.
        record: the key of the record.
        others: all other keys of a fixed name that belong to it. The server refuses the script to users who may not
            touch each of them, whether it exists or not, so these keys also decide who may delete.
        marks: keys that get a mark of the deletion, from which others learn that it was no loss of data.
        incarnation: the incarnation to delete.
        finish: whether to remove the keys instead of closing the record.
        wakes: whether takers may be waiting, and are told.
        timeout: how long to try to reach the server, in seconds.
    """
    reply = transport.run(
        *load("delete").bind(
            keys={"record": record, "marks": marks, "others": others},
            args={"incarnation": incarnation, "finish": int(finish), "wakes": int(wakes)},
        ),
        timeout=timeout,
    )
    done = _DELETIONS.get(reply[0]) if len(reply) == 1 else None
    if done is None:
        raise corrupt(record, reply)
    return done
