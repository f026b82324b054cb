"""Hashes of any size, sets and keys, read in pieces, so that no single command holds the server up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from redisacc._redis.sockets import Command
from redisacc._redis.transport import TIMEOUT, Transport
from redisacc._text import shown
from redisacc.errors import CorruptDataError

# The number of fields asked for in one HSCAN. The server serves no other client while it collects them: a thousand took
# it half a millisecond, and more than two in a table from which most fields had been removed.
SCAN_FIELDS = 250

Fields = dict[bytes, bytes]


def scan_command(key: str, cursor: int = 0) -> Command:
    """Returns the command that reads a piece of a hash."""
    return ("HSCAN", key, str(cursor), "COUNT", str(SCAN_FIELDS))


def scan_whole(transport: Transport, key: str, first: Any, *, timeout: float = TIMEOUT) -> Fields:
    """Returns all fields of a hash, given ``first``, its first piece.

    If more pieces follow, the hash is read again from its beginning, over one connection, because the first piece may
    have come over another: a cursor means something only to the server process that returned it. After a restart or a
    failover, the fields have another order, and a scan that continued would miss some.
    """
    if first == _EMPTY:
        return {}
    cursor, fields = scanned(key, first)
    return scan(transport, key, timeout=timeout) if cursor else fields


def scan_some(transport: Transport, key: str, first: Any, most: int) -> tuple[Fields, bool]:
    """Returns fields of a hash, given ``first``, its first piece, and whether they are all.

    Reading ends with the piece that brings the number of fields to ``most``.
    """
    cursor, fields = scanned(key, first)
    return _read(transport, key, most, TIMEOUT) if cursor else (fields, True)


def _read(transport: Transport, key: str, most: float, timeout: float) -> tuple[Fields, bool]:
    def read(send: Callable[[Command], Any]) -> tuple[Fields, bool]:
        cursor, fields = scanned(key, send(scan_command(key)))
        while cursor and len(fields) < most:
            cursor, more = scanned(key, send(scan_command(key, cursor)))
            # HSCAN may return a field twice; the last value counts.
            fields.update(more)
        return fields, not cursor

    return transport.converse(key, read, timeout=timeout)


# The reply of HSCAN where the hash does not exist.
_EMPTY = [b"0", []]


def scanned(key: str, reply: Any) -> tuple[int, Fields]:
    """Returns the next cursor of a reply to HSCAN, 0 at the end, and the fields in it."""
    match reply:
        case [bytes() | int() as cursor, list(flat)] if len(flat) % 2 == 0:
            if isinstance(cursor, int) or (cursor.isdigit() and len(cursor) <= 20):
                each = iter(flat)
                return int(cursor), dict(zip(each, each, strict=True))
    raise CorruptDataError(f"{key}: HSCAN replied {shown(reply)}")


def scan(transport: Transport, key: str, *, timeout: float = TIMEOUT) -> Fields:
    """Returns all fields of a hash, read in pieces over one connection."""
    return _read(transport, key, math.inf, timeout)[0]


# The number of keys or members that one SCAN or SSCAN asks for. The server serves no other client meanwhile.
SCAN_COUNT = 500


def scan_keys(transport: Transport, match: str) -> list[bytes]:
    """Returns all keys that match a glob, each once; in a cluster, from all masters.

    A key that moves from one master to another meanwhile may be missing.
    """
    found = transport.converse_with_all(_reader("SCAN", match=match))
    return list(dict.fromkeys(key for keys in found for key in keys))


def scan_members(transport: Transport, key: str, match: str = "*", most: float = math.inf) -> list[bytes]:
    """Returns the members of a set that match a glob, each once.

    Args:
        transport: the way to the server.
        key: the key of the set.
        match: the glob.
        most: reading ends with the piece that brings the number of members to this.
    """
    return transport.converse(key, _reader("SSCAN", key, match=match, most=most))


def _reader(*command: str, match: str, most: float = math.inf) -> Callable[[Callable[[Command], Any]], list[bytes]]:
    """Returns what reads a SCAN or SSCAN to its end, over one connection. As with HSCAN, a cursor needs that."""

    def read(send: Callable[[Command], Any]) -> list[bytes]:
        cursor, items = 0, dict[bytes, None]()
        while True:
            reply, found = send((*command, cursor, "MATCH", match, "COUNT", SCAN_COUNT))
            cursor = int(reply)
            items.update(dict.fromkeys(found))
            if cursor == 0 or len(items) >= most:
                return list(items)

    return read
