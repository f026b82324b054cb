"""The lease of the reducer that works on an accumulator: a small hash of plain text, with an expiry."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from redisacc._format.keys import Keys
from redisacc._redis.fast_socket import Command
from redisacc._text import printable

# Maximum number of sums that a lease lists, and of parts of one.
_MOST_SUMS, _MOST_PARTS = 8, 1000

_SUM = re.compile(rb"([0-9a-f]{32}):([1-9][0-9]{0,4})")

_FIELDS = ("who", "since_ms", "stored", "late")


@dataclass(frozen=True)
class ReducerInfo:
    """A reducer that works on an accumulator.

    Example:
        >>> import redisacc
        >>> with redisacc.ConditionalAccumulator("float32", [2]) as acc:
        ...     print(acc.info().reducer)
        None

    Attributes:
        who: the host and the process id of the reducer. Printable.
        since: when it began to work on the accumulator.
        stored: the number of rounds since then whose whole sum it has stored before the taker needed it.
        late: the number of rounds since then for which it was too late, or which held other gradients than it expected.
    """

    who: str
    since: datetime
    stored: int
    late: int

    @property
    def keeps_up(self) -> bool:
        """Whether it was in time for at least half of the rounds."""
        return self.stored >= self.late


def lease_command(keys: Keys) -> Command:
    """Returns the command that reads the lease."""
    return ("HMGET", keys.reducer, *_FIELDS)


def parse_lease(reply: object) -> ReducerInfo | None:
    """Returns what the reply to ``lease_command`` says; None if there is no reducer, or redisacc did not write it."""
    match reply:
        case [bytes() as who, bytes() as since, bytes() as stored, bytes() as late] if _are_numbers(
            [since, stored, late]
        ):
            began = datetime.fromtimestamp(int(since) / 1000, UTC)
            return ReducerInfo(printable(who.decode(errors="replace"), 200), began, int(stored), int(late))
    return None


def sums_text(sums: Mapping[str, int]) -> str:
    """Returns the field of the lease that lists sums, each given as its digest and the number of its parts."""
    return " ".join([f"{digest}:{parts}" for digest, parts in sums.items()])


def sums_command(keys: Keys) -> Command:
    """Returns the command that reads which sums the reducer keeps."""
    return ("HGET", keys.reducer, "sums")


def parse_sums(keys: Keys, reply: object) -> list[str]:
    """Returns the keys of the sums that the reply to ``sums_command`` lists, as far as redisacc may have written it."""
    listed = reply.split(b" ", _MOST_SUMS)[:_MOST_SUMS] if isinstance(reply, bytes) else []
    return [
        keys.sum(match[1].decode(), number)
        for match in map(_SUM.fullmatch, listed)
        if match is not None
        for number in range(min(int(match[2]), _MOST_PARTS))
    ]


def _are_numbers(values: Sequence[bytes]) -> bool:
    return all(value.isdigit() and len(value) <= 14 for value in values)
