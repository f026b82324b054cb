"""Finds names that somebody may have meant, for the message that there is no accumulator of a name."""

from __future__ import annotations

import difflib

from redisacc._format.keys import NAMES
from redisacc._redis.item_scan import scan_members
from redisacc._redis.transport import Transport
from redisacc._text import shown
from redisacc.errors import RedisAccError

# At least this many names are compared, if there are so many, and at most this many are suggested.
COMPARED = 10_000
SUGGESTED = 3


def suggestion(transport: Transport, name: str) -> str:
    """Returns a clause that names similar accumulators, such as ``; similar names: 'words'``, or nothing."""
    try:
        names = scan_members(transport, NAMES, most=COMPARED)
    except RedisAccError:
        # For example, because this user may not list names. The message is good enough without.
        return ""
    similar = difflib.get_close_matches(name, [other.decode(errors="replace") for other in names], SUGGESTED)
    return f"; similar names: {', '.join(map(shown, similar))}" if similar else ""
