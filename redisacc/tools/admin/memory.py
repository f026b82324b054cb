"""Measures the memory of an accumulator, by kind of key."""

from __future__ import annotations

from dataclasses import dataclass

from redisacc._format.buffered import listed_lengths
from redisacc._format.keys import Keys
from redisacc._protocol.rounds.current_round import with_partitions
from redisacc._protocol.rounds.round_reader import all_rounds
from redisacc._wire.scans import scan
from redisacc._wire.transport import Transport
from redisacc.errors import ServerError, ServerUnavailableError


@dataclass(frozen=True)
class Memory:
    """The memory of the keys of one kind.

    Attributes:
        what: the kind: "record", "sums", "buffered", "parts", …; "reducer" are the leases of reducers. The sums
            that these store expire within a minute, and are left out.
        keys: the number of keys.
        nbytes: their memory in bytes as the server reports it, including its overhead; of parts, only their content.
    """

    what: str
    keys: int
    nbytes: int


def memory(transport: Transport, keys: Keys) -> list[Memory]:
    """Returns the memory of an accumulator by kind of key, taken rounds included; [] if the user may not ask for it."""
    keys = with_partitions(transport, keys)
    record, *rounds = [keys.record], *all_rounds(transport, keys)
    sorts = {
        "record": record,
        "sums": [of.sums for of in rounds],
        "buffered": [of.buffered for of in rounds],
        "inline": [of.inline for of in rounds],
        "workers": [of.workers for of in rounds],
        "sessions": [keys.sessions],
        "takers": [keys.queue, keys.takers],
        "taken": [keys.taken, keys.recovered],
        "attempts": [keys.attempts],
        "reducer": keys.reducers,
    }
    flat = [key for group in sorts.values() for key in group]
    try:
        sizes = dict(zip(flat, transport.pipeline([("MEMORY", "USAGE", key) for key in flat]), strict=True))
    except ServerUnavailableError:
        raise
    except ServerError:
        # This user may read keys, but may not run MEMORY USAGE.
        return []
    found = []
    for what, group in sorts.items():
        there = [int(sizes[key]) for key in group if sizes[key] is not None]
        if there:
            found.append(Memory(what, len(there), sum(there)))
    number = size = 0
    for of in rounds:
        for entry in scan(transport, of.buffered).values():
            lengths = listed_lengths(entry) or []
            number += len(lengths)
            size += sum(lengths)
    if number:
        found.append(Memory("parts", number, size))
    return found
