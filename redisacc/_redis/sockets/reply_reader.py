"""Reads replies from untrusted bytes: a peer may send anything.

hiredis allocates an array as soon as its head says how long it is, and fills some kinds of arrays at once. So a head of
13 bytes can cost gigabytes, and seconds to free them. A head that claims more elements than an answer to the commands
can have is refused before hiredis sees it, and so is a reply without end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import hiredis

from redisacc._redis.faults import BrokenError, ReplyError

# How many elements all arrays of an exchange may claim together, in addition to one for each argument that was sent.
# An HSCAN asks for up to 250 fields and may return some more; a hash that is stored compactly is returned whole.
MAX_ELEMENTS = 1_000_000
# How many bytes the reply to one command may have. Scripts reply with numbers and names.
MAX_BYTES = 16 * 2**20
# The same for commands that read gradients. HMGET has as much, and as much more for each field as rows of a hundred
# thousand elements need. HSCAN returns about a thousand of those. A string has at most 512 MiB.
MAX_FIELD_BYTES = 2**20
MAX_SCAN_BYTES = MAX_STRING_BYTES = 2**30
DATA_COMMANDS = frozenset(("GET", "HMGET", "HSCAN"))

# Heads of arrays, pushes, sets and attributes. A head with fewer digits costs next to nothing. Also matches a head
# that may continue in the next data.
_HEAD = rb"[*>~|](?:\d{4,}|\d*\Z)"
_at_start = re.compile(_HEAD).match
_at_line = re.compile(rb"\n" + _HEAD).search
_heads = re.compile(rb"(?:\A|(?<=\n))" + _HEAD).finditer
# More digits than any length has.
_MANY_DIGITS = 19

NOT_YET = object()


class ReplyReader:
    """Reads the replies of one connection. Whoever begins an exchange sets the attributes.

    Attributes:
        commands: data from now on answer these commands.
        claimed: how many elements arrays have claimed in this exchange.
        received: how many bytes were received in it.
    """

    commands: Sequence[Sequence[Any]] = ()
    claimed = received = 0

    def __init__(self) -> None:
        self._reader = hiredis.Reader(protocolError=BrokenError, replyError=ReplyError, notEnoughData=NOT_YET)
        self._gets = self._reader.gets
        # The beginning of a head, which the next data continues.
        self._held = b""

    def read(self, data: bytes) -> list[Any]:
        """Returns the elements that this data completes: replies, errors as ReplyError, and pushes.

        Raises:
            BrokenError: it is not RESP, or more than the commands can be answered with.
        """
        found: list[Any] = []
        self.received += len(data)
        if self.received > MAX_BYTES:
            self._check_bytes()
        # One search for each end of a line costs a small reply less than half a microsecond.
        if self._held or _at_start(data) or _at_line(data):
            data = self._checked(data, found)
        self._reader.feed(data)
        while (reply := self._gets()) is not NOT_YET:
            found.append(reply)
        return found

    def _checked(self, data: bytes, found: list[Any]) -> bytes:
        """Reads up to the last head, checking each, and returns the rest."""
        data, self._held = self._held + data, b""
        start = 0
        for match in _heads(data):
            first, digits = match.start(), match.end() - match.start() - 1
            if match.end() == len(data) and digits <= _MANY_DIGITS:
                self._held = data[first:]
                return data[start:first]
            self._reader.feed(data[start:first])
            start = first
            while (reply := self._gets()) is not NOT_YET:
                found.append(reply)
            # Something unread means that these bytes are inside of a string, which may hold anything.
            if not self._reader.has_data():
                self._claim(int(match[0][1 : _MANY_DIGITS + 2]))
        return data[start:]

    def _claim(self, elements: int) -> None:
        self.claimed += elements
        if self.claimed > MAX_ELEMENTS + sum(map(len, self.commands)):
            raise BrokenError(
                f"it sent an array of {elements} elements in reply to {self._names()}, which cannot have that many"
            )

    def _check_bytes(self) -> None:
        allowed = sum(map(_allowed, self.commands))
        if self.received > max(allowed, MAX_BYTES):
            raise BrokenError(f"it sent {self.received} bytes in reply to {self._names()}, which cannot have that many")

    def reads_data(self) -> bool:
        """Returns whether the commands read gradients, which may take long over a slow network."""
        return any(command[0] in DATA_COMMANDS for command in self.commands)

    def _names(self) -> str:
        names = dict.fromkeys(str(command[0]) for command in self.commands[:100])
        return ", ".join(names) or "no command"


def _allowed(command: Sequence[Any]) -> int:
    """Returns how many bytes may be received in reply to a command."""
    match command[0]:
        case "HMGET":
            return MAX_BYTES + MAX_FIELD_BYTES * len(command)
        case "HSCAN":
            return MAX_SCAN_BYTES
        case "GET":
            return MAX_STRING_BYTES
    return MAX_BYTES
