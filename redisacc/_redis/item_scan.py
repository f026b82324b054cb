"""Keys and members of sets, read in pieces, so that the server never holds up other clients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from redisacc._redis.sockets.fast_socket import Command
from redisacc._redis.transport import Transport

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
