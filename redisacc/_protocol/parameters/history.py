"""Reads the history of a run."""

from __future__ import annotations

from typing import Any

from redisacc._format.history_entries import PastStep, parse_history
from redisacc._format.keys import ParameterKeys
from redisacc._wire.transport import Transport
from redisacc.errors import CorruptDataError

# How many entries one command reads.
PIECE = 250
# A history has fewer entries than this: `keep_history` keeps about 1000.
MOST = 2000


def read_history(transport: Transport, keys: ParameterKeys) -> list[PastStep]:
    """Returns the steps in the history of a run, the first one first.

    Args:
        transport: the way to the server.
        keys: the keys of the parameters.

    Raises:
        CorruptDataError: Redis holds data that redisacc did not write.
    """
    low, found = "-inf", list[bytes]()
    latest = created = None
    while True:
        [latest, created], piece = transport.pipeline(
            [
                ("HMGET", keys.record, "history_latest", "created_ms"),
                ("ZRANGE", keys.history, low, "+inf", "BYSCORE", "LIMIT", 0, PIECE),
            ]
        )
        found += piece
        if len(piece) < PIECE:
            break
        if len(found) > MOST:
            raise CorruptDataError(f"{keys.history} holds more than the {MOST} entries that redisacc writes at most")
        # An entry begins with its score.
        low = f"({parse_history(keys.history, piece[-1:], None)[0].step}"
    if latest is not None:
        # It is not in the list if the list has only some of the latest steps.
        found.append(latest)
    return parse_history(keys.history, found, _milliseconds(created))


def _milliseconds(text: Any) -> int | None:
    return int(text) if isinstance(text, bytes) and text.isdigit() and len(text) <= 15 else None
