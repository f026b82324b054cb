"""Hashes of any size, read in pieces, so that no single command holds the server up."""

from __future__ import annotations

from typing import Any

from redisacc._redis.fast_socket import Command
from redisacc._redis.transport import TIMEOUT, Transport
from redisacc._text import shown
from redisacc.errors import CorruptDataError

# The number of fields asked for in one HSCAN. The server serves no other client while it collects them: a thousand took
# it half a millisecond, and more than two in a table from which most fields had been removed.
SCAN_FIELDS = 250

Fields = dict[bytes, bytes]


def scan_command(key: str, cursor: int = 0) -> Command:
    """Returns the command that reads a piece of a hash."""
    return ("HSCAN", key, cursor, "COUNT", SCAN_FIELDS)


def scan_rest(transport: Transport, key: str, reply: Any, *, timeout: float = TIMEOUT) -> Fields:
    """Returns all fields of a hash, of which ``reply`` is the first piece.

    HSCAN may return a field twice; the last value counts.
    """
    if reply == _EMPTY:
        return {}
    cursor, fields = scanned(key, reply)
    while cursor:
        cursor, more = scanned(key, transport.call(*scan_command(key, cursor), timeout=timeout))
        fields.update(more)
    return fields


def scan_some(transport: Transport, key: str, reply: Any, most: int) -> tuple[Fields, bool]:
    """Returns fields of a hash, of which ``reply`` is the first piece, and whether they are all.

    Reading ends with the piece that brings the number of fields to ``most``.
    """
    cursor, fields = scanned(key, reply)
    while cursor and len(fields) < most:
        cursor, more = scanned(key, transport.call(*scan_command(key, cursor)))
        fields.update(more)
    return fields, not cursor


# The reply of HSCAN where the hash does not exist.
_EMPTY = [b"0", []]


def scanned(key: str, reply: Any) -> tuple[int, Fields]:
    """Returns the next cursor of a reply to HSCAN, 0 at the end, and the fields in it."""
    match reply:
        case [bytes() | int() as cursor, list(flat)] if len(flat) % 2 == 0 and _is_cursor(cursor):
            each = iter(flat)
            return int(cursor), dict(zip(each, each, strict=True))
    raise CorruptDataError(f"{key}: HSCAN replied {shown(reply)}")


def scan(transport: Transport, key: str, *, timeout: float = TIMEOUT) -> Fields:
    """Returns all fields of a hash, read in pieces."""
    return scan_rest(transport, key, transport.call(*scan_command(key), timeout=timeout), timeout=timeout)


def _is_cursor(cursor: bytes | int) -> bool:
    return isinstance(cursor, int) or (cursor.isdigit() and len(cursor) <= 20)
