"""Hashes of any size, sets and keys, read in pieces, so that no single command holds the server up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from redisacc._text import shown
from redisacc._wire.node import Send
from redisacc._wire.sockets import Command
from redisacc._wire.transport import Transport
from redisacc.errors import CorruptDataError

# The number of fields asked for in one HSCAN. The server serves no other client while it collects them: a thousand took
# it half a millisecond, and more than two in a table from which most fields had been removed.
SCAN_FIELDS = 250
# The same for keys, and for members of a set.
SCAN_COUNT = 500

Fields = dict[bytes, bytes]


def scan_command(key: str, cursor: int = 0) -> Command:
    """Returns the command that reads a piece of a hash."""
    return ("HSCAN", key, str(cursor), "COUNT", str(SCAN_FIELDS))


def scanned(key: str, reply: Any) -> tuple[int, Fields]:
    """Returns the next cursor of a reply to HSCAN, 0 at the end, and the fields in it."""
    match reply:
        case [bytes() | int() as cursor, list(flat)] if len(flat) % 2 == 0:
            if isinstance(cursor, int) or (cursor.isdigit() and len(cursor) <= 20):
                each = iter(flat)
                return int(cursor), dict(zip(each, each, strict=True))
    raise CorruptDataError(f"{key}: HSCAN replied {shown(reply)}")


def scan_whole(transport: Transport, key: str, first: Any) -> Fields:
    """Returns all fields of a hash, given ``first``, its first piece.

    If more pieces follow, the hash is read again from its beginning, over one connection, because the first piece may
    have come over another: a cursor means something only to the server process that returned it. After a restart or a
    failover, the fields have another order, and a scan that continued would miss some.
    """
    match first:
        case [b"0", list(flat)] if len(flat) % 2 == 0:
            # As in scanned(): most hashes are read by the first piece, and a call takes as long as that.
            each = iter(flat)
            return dict(zip(each, each, strict=True))
    cursor, fields = scanned(key, first)
    return scan(transport, key) if cursor else fields


def scan(transport: Transport, key: str) -> Fields:
    """Returns all fields of a hash, read in pieces over one connection."""
    return transport.converse(key, _reader(partial(scan_command, key), partial(scanned, key)))


def scan_keys(transport: Transport, match: str) -> list[bytes]:
    """Returns all keys that match a glob, each once; in a cluster, from all masters.

    A key that moves from one master to another meanwhile may be missing.
    """
    found = transport.converse_with_all(_reader(lambda cursor: ("SCAN", cursor, *_matching(match)), _items))
    return list(dict.fromkeys(key for keys in found for key in keys))


def scan_members(transport: Transport, key: str, match: str) -> list[bytes]:
    """Returns the members of a set that match a glob, each once."""
    return list(transport.converse(key, _reader(lambda cursor: ("SSCAN", key, cursor, *_matching(match)), _items)))


def _matching(match: str) -> Command:
    return ("MATCH", match, "COUNT", SCAN_COUNT)


def _items(reply: Any) -> tuple[int, Fields]:
    return int(reply[0]), dict.fromkeys(reply[1], b"")


def _reader(command: Callable[[int], Command], parsed: Callable[[Any], tuple[int, Fields]]) -> Callable[[Send], Fields]:
    """Returns what reads pieces until nothing is left."""

    def read(send: Send) -> Fields:
        cursor, found = parsed(send(command(0)))
        while cursor:
            cursor, more = parsed(send(command(cursor)))
            # An item may come twice; the last value counts.
            found.update(more)
        return found

    return read
