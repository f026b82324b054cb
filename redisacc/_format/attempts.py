"""Attempts to store something in partitions, as the leader lists them.

The leader lists an attempt while its parts are being written, and again when they are to be removed. Counted gradients
and the blobs of the published version are not in the list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from redisacc._format.keys import PartitionedKeys
from redisacc._text import shown
from redisacc.errors import CorruptDataError

# The most parts that a gradient or a blob in partitions may have. Parts of large ones have 2 MiB, so these have up to
# 200 GB. So a forged list cannot cause millions of commands for one attempt.
MOST_PARTS = 100_000
# The number of parts about which commands are sent at once: each takes some memory here and on the server.
PARTS_AT_ONCE = 10_000

_MEMBER = re.compile(rb"([0-9a-z_-]{1,64}) ([0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class StoredAttempt:
    """An attempt, as the leader lists it.

    Attributes:
        id: names the parts: "SESSION-SEQUENCE-RANDOM-PLACE" of a gradient; of parameters, the id of a blob.
        parts: how many there are.
    """

    id: str
    parts: int

    def __str__(self) -> str:
        return f"{self.id} {self.parts}"

    @classmethod
    def parse(cls, key: str, member: object) -> StoredAttempt:
        """Returns the attempt that a member of an ``attempts`` set describes.

        Raises:
            CorruptDataError: redisacc did not write it.
        """
        match = _MEMBER.fullmatch(member) if isinstance(member, bytes) else None
        if match is None or int(match[2]) > MOST_PARTS:
            raise CorruptDataError(f"{key} lists {shown(member)}, which is not an attempt that redisacc wrote")
        return cls(match[1].decode(), int(match[2]))


def part_keys(keys: PartitionedKeys, attempts: Sequence[StoredAttempt]) -> Iterator[list[str]]:
    """Yields the keys of all parts of attempts, at most ``PARTS_AT_ONCE`` at a time."""
    every = (keys.part(attempt.id, number) for attempt in attempts for number in range(attempt.parts))
    while some := list(islice(every, PARTS_AT_ONCE)):
        yield some
