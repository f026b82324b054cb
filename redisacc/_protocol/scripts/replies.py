"""Replies that scripts of several kinds share."""

from __future__ import annotations

from redisacc._text import QUOTED, printable, shown
from redisacc.errors import CorruptDataError


def corrupt(key: str, reply: list[bytes]) -> CorruptDataError:
    """Returns the error for a script that found data that redisacc never writes, or whose reply makes no sense.

    Args:
        key: the key that the script works on.
        reply: its reply.
    """
    match reply:
        case [b"corrupt", where, text]:
            return CorruptDataError(
                f"{key}: {printable(where, QUOTED)} holds {shown(text)}, which redisacc does not write there"
            )
    return CorruptDataError(f"{key}: a script gave the unexpected reply {shown(reply)}")
