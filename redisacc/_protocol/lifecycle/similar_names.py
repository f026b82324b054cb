"""Finds names that somebody may have meant, for the message that there is nothing of a name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from redisacc._format.keys import NAMES
from redisacc._text import shown
from redisacc._wire.scans import scan_members
from redisacc._wire.transport import Transport
from redisacc.errors import RedisAccError

# Minimum number of names that are compared, if there are as many, and maximum number that are suggested.
COMPARED = 10_000
SUGGESTED = 3


def did_you_mean(name: str, others: Iterable[str]) -> str:
    """Returns a clause that asks for names similar to ``name``, such as ``; did you mean 'words'?``, or nothing."""
    others = [other for other in others if other != name]
    similar = [shown(other) for other in difflib.get_close_matches(name, others, SUGGESTED)]
    if not similar:
        return ""
    *most, last = similar
    return f"; did you mean {', '.join(most)} or {last}?" if most else f"; did you mean {last}?"


def suggestion(transport: Transport, name: str) -> str:
    """Returns a clause that asks for similar names of accumulators and parameters on the server, or nothing."""
    try:
        names = scan_members(transport, NAMES, most=COMPARED)
    except RedisAccError:
        # For example, because this user may not list names. The message is good enough without.
        return ""
    return did_you_mean(name, [other.decode(errors="replace") for other in names])
