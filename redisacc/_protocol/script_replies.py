"""Replies that scripts of several kinds share."""

from __future__ import annotations

from typing import Literal

from redisacc._text import QUOTED, printable, shown
from redisacc.errors import CorruptDataError

Deletion = Literal["closed", "deleted", "missing", "replaced"]
_DELETIONS: dict[bytes, Deletion] = {
    b"closed": "closed",
    b"deleted": "deleted",
    b"missing": "missing",
    b"replaced": "replaced",
}


def deletion_of(reply: list[bytes]) -> Deletion | None:
    """Returns what a call that deletes has done; None if it says something else."""
    return _DELETIONS.get(reply[0]) if len(reply) == 1 else None


def corrupt(key: str, reply: list[bytes]) -> CorruptDataError:
    """Returns the error for a script that found what redisacc never writes, or replied what it never replies.

    Args:
        key: the key that the script is about.
        reply: its reply.
    """
    match reply:
        case [b"corrupt", where, text]:
            return CorruptDataError(
                f"{key}: {printable(where, QUOTED)} holds {shown(text)}, which redisacc does not write there"
            )
    return CorruptDataError(f"{key}: a script gave the unexpected reply {shown(reply)}")
