"""Text for messages and terminals: foreign text is escaped, and of bounded length.

Names, workers, events, fields and error texts come from Redis, where anybody who may write can put any bytes. Printed
as they are, they could send commands to the reader's terminal, reorder or hide the text beside them, forge lines of a
log, or fill it. So everything foreign passes `printable` before a person reads it.

And lists and durations, as messages and commands say them.
"""

from __future__ import annotations

import datetime
import reprlib
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")

# Longer than every name that redisacc accepts, so that names are never cut.
LIMIT = 1000
# The largest length of a whole message.
MESSAGE = 1800
# The length of a value that a message quotes.
QUOTED = 100
# What may have happened to a key that is missing. Whether it did depends on the settings of the server.
EVICTED = "evicted (`redisacc doctor` tells whether this server evicts keys)"

_ELLIPSIS = "..."


def printable(foreign: bytes | str, limit: int = LIMIT) -> str:
    r"""Returns foreign bytes or text as people may see it: printable, on one line, at most ``limit`` characters.

    Letters, digits, symbols and emoji stay as they are. Control characters (also those that begin an escape sequence
    or a line), invisible and reversing marks, lone surrogates and bytes that are not UTF-8 become escapes such as
    ``\x1b`` and ``\u202e``. The result passes unchanged through a second call.
    """
    # No character has more than 4 bytes. What lies beyond is not even decoded.
    head = foreign[: 4 * limit + 4]
    text = head.decode(errors="backslashreplace") if isinstance(head, bytes) else head
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= limit else text[: limit - len(_ELLIPSIS)] + _ELLIPSIS


def is_unicode(text: str) -> bool:
    """Returns whether a text can be written in UTF-8. A lone surrogate, from bytes that were not UTF-8, cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def printable_lines(foreign: str) -> str:
    """Returns foreign text of several lines as people may see it: each line printable, at most 1,800 characters."""
    lines = "\n".join(printable(line, MESSAGE) for line in foreign[: 2 * MESSAGE].split("\n"))
    return lines if len(lines) <= MESSAGE else lines[: MESSAGE - len(_ELLIPSIS)] + _ELLIPSIS


class _Bounded(reprlib.Repr):
    """Makes the repr of a value without looking at all of it, however large or deep it is."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 10
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = self.maxdeque = QUOTED
        self.maxlong = self.maxother = 40 * QUOTED

    def repr_str(self, x: str, level: int) -> str:  # noqa: ARG002
        return repr(x[: 4 * QUOTED])

    def repr_bytes(self, x: bytes, level: int) -> str:  # noqa: ARG002
        return repr(x[: 4 * QUOTED])


_repr = _Bounded().repr


def shown(value: object) -> str:
    """Returns any value, a caller's or from Redis, as a message quotes it: on one line, with at most 100 characters."""
    try:
        text = _repr(value)
    except Exception:  # noqa: BLE001 - someone else's broken __repr__ must not hide our message
        text = f"<{type(value).__name__}>"
    return printable(" ".join(text.split()), QUOTED)


def listed(items: Sequence[Item], most: int, text: Callable[[Item], str] = str, separator: str = ", ") -> str:
    """Returns the first items as a text, and how many more there are, for example "a, b and 3 more"."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(map(text, items[:most])) + more


def seconds_text(seconds: float) -> str:
    """Returns a duration as text, for example "1.2 s", "34 s", "5 min", "6 h" or "7 d"."""
    seconds = max(seconds, 0.0)
    for limit, divisor, unit in ((90, 1, "s"), (90 * 60, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            amount = seconds / divisor
            return f"{amount:.1f} {unit}" if unit == "s" and amount < 9.95 else f"{amount:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def age_text(now: datetime.datetime, then: datetime.datetime) -> str:
    """Returns the time from ``then`` to ``now`` as text."""
    return seconds_text((now - then).total_seconds())
