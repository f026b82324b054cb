"""Replies from untrusted bytes: a peer may send anything.

hiredis allocates an array as soon as its head says how long it is, and fills some kinds of arrays at once. So a head of
13 bytes can cost gigabytes, and seconds to free them. A head that claims more elements than an answer to the commands
can have is refused before hiredis sees it, and so is a reply without end.

The reply to each command has a form: a text, a number, a list. Callers rely on it, so a reply of another form is
refused here, where all replies pass. Otherwise, it would cause an index out of range or a missing attribute elsewhere.
The values themselves are not trusted either: the reader of a number or a text still checks it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import hiredis

from redisacc._text import QUOTED, printable, shown
from redisacc._wire.faults import BrokenError, ReplyError
from redisacc.errors import CorruptDataError

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


# The types of a text: a fake server, and a client that decodes, return strings.
_TEXT = frozenset((bytes, str))
_TEXT_OR_NIL: frozenset[type] = frozenset((bytes, str, type(None)))
_SCORE = frozenset((bytes, str, int, float))
# The most digits of a number that a server sends as a text.
_DIGITS = 20
# A later time has no date: the year 6325, in seconds.
_LATEST = 2**37


@dataclass(frozen=True, slots=True)
class _Form:
    """The form of every reply to a command.

    Attributes:
        text: a description for people.
        fits: returns whether a reply to a command has this form.
    """

    text: str
    fits: Callable[[Any, Sequence[Any]], bool]


def _is_list_of(types: frozenset[type], reply: Any) -> bool:
    return type(reply) is list and types.issuperset(map(type, reply))


def _is_digits(text: Any) -> bool:
    return type(text) in _TEXT and len(text) <= _DIGITS and text.isdigit() and text.isascii()


def _is_cursor(reply: Any) -> bool:
    return type(reply) is int or _is_digits(reply)


def _is_piece(reply: Any) -> bool:
    return type(reply) is list and len(reply) == 2 and _is_cursor(reply[0]) and _is_list_of(_TEXT, reply[1])


def _is_time(reply: Any) -> bool:
    return type(reply) is list and len(reply) == 2 and all(map(_is_digits, reply)) and int(reply[0]) < _LATEST


def _is_ranked(reply: Any) -> bool:
    # With protocol 3, members that come with their scores are pairs.
    pairs = type(reply) is list and all(
        type(item) is list and len(item) == 2 and type(item[0]) in _TEXT and type(item[1]) in _SCORE for item in reply
    )
    return pairs or _is_list_of(_TEXT, reply)


def _is_setting(reply: Any) -> bool:
    # A dict with protocol 3. The list is empty where the server does not know the setting.
    flat = [text for pair in reply.items() for text in pair] if type(reply) is dict else reply
    return _is_list_of(_TEXT, flat) and len(flat) % 2 == 0


# The commands whose replies have each form. Those of others are checked by who reads them.
_COMMANDS: Mapping[_Form, str] = {
    _Form("a text", lambda reply, _: type(reply) in _TEXT): "ACL GETRANGE INFO PING SCRIPT TYPE",
    _Form("a text or nil", lambda reply, _: type(reply) in _TEXT_OR_NIL): "GET HGET SET",
    _Form("a number", lambda reply, _: type(reply) is int): "PTTL",
    _Form("a number, 0 or more", lambda reply, _: type(reply) is int and reply >= 0): (
        "APPEND EXISTS HLEN PERSIST PEXPIRE PUBLISH SADD SISMEMBER SPUBLISH SREM STRLEN UNLINK WAIT ZCARD"
    ),
    _Form("a number or nil", lambda reply, _: reply is None or (type(reply) is int and reply >= 0)): "MEMORY",
    _Form("a list of texts", lambda reply, _: _is_list_of(_TEXT, reply)): "EVAL LRANGE ZRANGEBYSCORE",
    _Form("a list of texts", lambda reply, _: _is_ranked(reply)): "ZRANGE",
    _Form(
        "a list with a text or nil for each field",
        lambda reply, command: _is_list_of(_TEXT_OR_NIL, reply) and len(reply) == len(command) - 2,
    ): "HMGET",
    _Form("a cursor and a list of texts", lambda reply, _: _is_piece(reply)): "SCAN SSCAN",
    _Form(
        "a cursor and a list of fields and values", lambda reply, _: _is_piece(reply) and len(reply[1]) % 2 == 0
    ): "HSCAN",
    _Form("a time in seconds and microseconds", lambda reply, _: _is_time(reply)): "TIME",
    _Form("names and values", lambda reply, _: _is_setting(reply)): "CONFIG",
}
_FORMS = {name: form for form, names in _COMMANDS.items() for name in names.split()}


def check_form(command: Sequence[Any], reply: Any, address: str) -> None:
    """Refuses a reply that the command cannot have.

    Args:
        command: the command.
        reply: its reply, which is no error.
        address: where it came from.

    Raises:
        CorruptDataError: the reply has another form.
    """
    form = _FORMS.get(command[0])
    if form is not None and not form.fits(reply, command):
        raise CorruptDataError(f"{address} replied {shown(reply)} to {command[0]}, which is not {form.text}")


def parse_info(reply: Any) -> dict[str, str]:
    """Returns a reply to INFO as a flat dict, which is empty if there is none."""
    # A fake server, and a client that decodes, return a string.
    lines = (reply.encode(errors="replace") if isinstance(reply, str) else bytes(reply or b"")).splitlines()
    pairs = (line.partition(b":")[::2] for line in lines if b":" in line)
    return {printable(name, QUOTED): printable(value, QUOTED) for name, value in pairs}


def info_number(info: Mapping[str, str], name: str) -> float | None:
    """Returns a number in a reply to INFO; None if the server does not tell it."""
    text = info.get(name, "")
    return float(text) if len(text) <= 20 and text.replace(".", "", 1).isdigit() and text.isascii() else None
