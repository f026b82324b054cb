"""The lease of a reducer that works on an accumulator, or on one of its partitions: a small hash with an expiry."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from redisacc._format.keys import Keys
from redisacc._format.stored_text import parse_number, parse_time
from redisacc._interrupts import suppressed
from redisacc._text import printable
from redisacc._wire.sockets import Command

# Maximum number of sums that a lease lists, and of parts of one; and of the parts that all leases list together.
_MOST_SUMS, _MOST_PARTS = 8, 1000
_MOST_KEYS = 50_000

_SUM = re.compile(rb"([0-9a-f]{32}):([1-9][0-9]{0,4})")

_FIELDS = ("who", "since_ms", "stored", "late")


@dataclass(frozen=True)
class ReducerInfo:
    """The reducer that works on an accumulator; with partitions, the reducers that work on them.

    Example:
        >>> import redisacc
        >>> with redisacc.ConditionalAccumulator("float32", [2]) as acc:
        ...     print(acc.info().reducer)
        None

    Attributes:
        who: the host and the process id of the reducer; of several, each once, with commas. Printable.
        since: when it began to work on the accumulator; of several, the last one.
        stored: the number of rounds since then whose whole sum it stored before the taker needed it; of several
            reducers, the slowest one's.
        late: the number of rounds since then for which it was too late, or which held other gradients than it expected;
            of several reducers, the slowest one's.
        missing: the number of partitions without a reducer. While any is missing, takers rely on no reducer.
    """

    who: str
    since: datetime
    stored: int
    late: int
    missing: int = 0

    @property
    def keeps_up(self) -> bool:
        """Whether it was in time for at least half of the rounds, and no partition lacks one."""
        return self.stored >= self.late and not self.missing

    @property
    def state(self) -> str:
        """A text for people: "has begun", "keeps up", "is late", or on how many partitions a reducer is missing."""
        if self.missing:
            return f"is missing on {self.missing} of the partitions"
        if not self.stored and not self.late:
            return "has begun"
        return "keeps up" if self.keeps_up else "is late"


def lease_commands(keys: Keys) -> list[Command]:
    """Returns the commands that read the lease; with partitions, one for each of them."""
    return [("HMGET", key, *_FIELDS) for key in keys.reducers]


def parse_leases(replies: Sequence[object]) -> ReducerInfo | None:
    """Parses the replies to ``lease_commands``; None if there is no reducer."""
    found = [lease for lease in map(_parse_lease, replies) if lease is not None]
    if not found:
        return None
    return ReducerInfo(
        printable(", ".join(dict.fromkeys(lease.who for lease in found)), 200),
        max(lease.since for lease in found),
        min(lease.stored for lease in found),
        max(lease.late for lease in found),
        len(replies) - len(found),
    )


def _parse_lease(reply: object) -> ReducerInfo | None:
    """Parses a lease; None if there is none, or redisacc did not write it."""
    match reply:
        case [bytes() as who, bytes() as since, bytes() as stored, bytes() as late]:
            with suppressed(ValueError, OverflowError, OSError):
                name = printable(who.decode(errors="replace"), 200)
                return ReducerInfo(name, parse_time(since), parse_number(stored), parse_number(late))
    return None


def sums_text(sums: Mapping[str, int]) -> str:
    """Returns the field of the lease that lists sums, each given as its digest and the number of its parts."""
    return " ".join([f"{digest}:{parts}" for digest, parts in sums.items()])


def sums_commands(keys: Keys) -> list[Command]:
    """Returns the commands that read which sums reducers keep."""
    return [("HGET", key, "sums") for key in keys.reducers]


def parse_sums(keys: Keys, replies: Sequence[object]) -> list[str]:
    """Returns the keys of the sums that the replies to ``sums_commands`` list, if redisacc may have written them."""
    step = len(keys.partitions) or 1
    found: list[str] = []
    for position, reply in zip(keys.positions, replies, strict=True):
        listed = reply.split(b" ", _MOST_SUMS)[:_MOST_SUMS] if isinstance(reply, bytes) else []
        for match in map(_SUM.fullmatch, listed):
            if match is not None:
                numbers = range(position or 0, min(int(match[2]), _MOST_PARTS) * step, step)
                some = numbers[: _MOST_KEYS - len(found)]
                found += [keys.sum(match[1].decode(), number) for number in some]
    return found
