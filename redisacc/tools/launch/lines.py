"""Cuts what a process writes into lines, with bounded memory."""

from __future__ import annotations

import re
from collections.abc import Callable

from redisacc._clock import clock

# The longest line in bytes. What is longer becomes several lines.
LIMIT = 64 * 1024

# A line that its process rewrites, such as a progress bar, is shown at most once in this many seconds.
INTERVAL = 5.0

# A carriage return at the very end may be the first half of "\r\n", so it waits for the next byte.
_END = re.compile(rb"\r?\n|\r(?=[^\n])")


class Lines:
    r"""Cuts the bytes of one stream into lines without their ends.

    A line ends with ``\n`` or ``\r\n``. After a lone ``\r`` the process rewrites its line, as progress bars do. Of the
    states that such a line goes through, the last one is a line, and any other only if no other was one within the last
    `INTERVAL` seconds.

    Args:
        now: returns the time in seconds.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now = now or clock.now
        self._pending = bytearray()
        # Up to here there is no end of a line in `_pending`.
        self._searched = 0
        # The state of a line that is being rewritten, if it hasn't been shown.
        self._hidden = b""
        self._next_state = -float("inf")

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines that these bytes complete, each at most `LIMIT` bytes long."""
        found: list[bytes] = []
        self._pending += data
        start = 0
        while match := _END.search(self._pending, max(start, self._searched)):
            text = bytes(self._pending[start : match.start()])
            start = match.end()
            if match[0] == b"\r":
                self._rewritten(text, found)
            else:
                # The process ended the line without rewriting it after the last carriage return.
                found += _pieces(text or self._hidden)
                self._hidden = b""
        del self._pending[:start]
        if len(self._pending) > LIMIT:
            *pieces, rest = _pieces(bytes(self._pending))
            found += pieces
            self._pending = bytearray(rest)
        self._searched = max(0, len(self._pending) - 1)
        return found

    def end(self) -> list[bytes]:
        """Returns the last line, which the process didn't end; the next bytes belong to another process."""
        text = bytes(self._pending.removesuffix(b"\r")) or self._hidden
        self._pending.clear()
        self._searched, self._hidden = 0, b""
        return list(_pieces(text)) if text else []

    def _rewritten(self, text: bytes, found: list[bytes]) -> None:
        if not text:
            return
        now = self._now()
        if now >= self._next_state:
            self._next_state = now + INTERVAL
            self._hidden = b""
            found += _pieces(text)
        else:
            self._hidden = text


def _pieces(text: bytes) -> list[bytes]:
    pieces = []
    while len(text) > LIMIT:
        cut = _cut(text)
        pieces.append(text[:cut])
        text = text[cut:]
    return [*pieces, text]


def _cut(text: bytes) -> int:
    """Returns where to cut a text that is longer than `LIMIT`: not inside of a character in UTF-8."""
    for cut in range(LIMIT, LIMIT - 4, -1):
        if text[cut] & 0xC0 != 0x80:
            return cut
    return LIMIT
