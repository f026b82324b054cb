"""Finds names that somebody may have meant, for the message that there is no accumulator of a name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from redisacc._format.keys import NAMES
from redisacc._redis.fast_socket import Command
from redisacc._redis.transport import Transport
from redisacc._text import shown
from redisacc.errors import RedisAccError

# At least this many names are compared, if there are so many, and at most this many are suggested.
COMPARED = 10_000
SUGGESTED = 3
_PIECE = 500


def suggestion(transport: Transport, name: str) -> str:
    """Returns a clause that names similar accumulators, such as ``; similar names: 'words'``, or nothing."""
    try:
        names = transport.converse(_some_names)
    except RedisAccError:
        # For example, because this user may not list names. The message is good enough without.
        return ""
    similar = difflib.get_close_matches(name, names, SUGGESTED)
    return f"; similar names: {', '.join(map(shown, similar))}" if similar else ""


def _some_names(send: Callable[[Command], Any]) -> list[str]:
    cursor, names = 0, dict[str, None]()
    while len(names) < COMPARED:
        reply, found = send(("SSCAN", NAMES, cursor, "COUNT", _PIECE))
        names.update((name.decode(errors="replace"), None) for name in found)
        cursor = int(reply)
        if cursor == 0:
            break
    return list(names)
