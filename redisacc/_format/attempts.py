"""Attempts to store something in partitions, as the leader lists them.

The leader lists an attempt while its parts are being written, and once they are to be removed. What lasts, such as a
gradient that was counted, or a blob of the version that is published, is not in the list.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from redisacc._text import shown
from redisacc.errors import CorruptDataError

_MEMBER = re.compile(rb"([0-9a-z-]{1,64}) ([0-9]{1,7})")


@dataclass(frozen=True, slots=True)
class StoredAttempt:
    """An attempt, as the leader lists it.

    Attributes:
        id: names the parts: "SESSION-SEQUENCE-PLACE" of a gradient; of parameters, the id of a blob.
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
        if match is None:
            raise CorruptDataError(f"{key} lists {shown(member)}, which is not an attempt that redisacc wrote")
        return cls(match[1].decode(), int(match[2]))
