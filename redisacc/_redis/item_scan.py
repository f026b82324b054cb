"""Keys and members of sets, read in pieces, so that the server never holds up other clients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from redisacc._redis.fast_socket import Command
from redisacc._redis.transport import Transport

# The number of keys or members that one SCAN or SSCAN asks for. The server serves no other client meanwhile.
SCAN_COUNT = 500


def scan_items(transport: Transport, *command: str, match: str = "*", most: float = math.inf) -> list[bytes]:
    """Returns what a SCAN or SSCAN finds, each item once, over one connection. As with HSCAN, a cursor needs that.

    Args:
        transport: the way to the server.
        command: the command, up to its cursor.
        match: a glob that the items match.
        most: reading ends with the piece that brings the number of items to this.
    """

    def read(send: Callable[[Command], Any]) -> list[bytes]:
        cursor, items = 0, dict[bytes, None]()
        while True:
            reply, found = send((*command, cursor, "MATCH", match, "COUNT", SCAN_COUNT))
            cursor = int(reply)
            items.update(dict.fromkeys(found))
            if cursor == 0 or len(items) >= most:
                return list(items)

    return transport.converse(read)
