"""Attempts to store something in partitions, as the leader lists them.

The leader lists an attempt while its parts are being written, and again when they are to be removed. Counted gradients
and the blobs of the published version are not in the list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

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


# Messages about gradients that are on their way: one when the upload begins, and others when parts have arrived.
#
# A reducer sends messages about the parts of sums that it has stored, on the channel of the messages about their parts.
#
# They are sent to the channel ``redisacc:{NAME}:wake``, so that they keep their order with the events that admit the
# gradients. If the parts are in partitions, their node sends the messages about them to a channel of the partition,
# ``redisacc:{NAME/p}:partition:wake``. A waiting taker adds the parts up while the rest is still being uploaded.
# Messages may get lost, and every user with the right to publish can forge them. Parts that are added because of a
# message therefore count only after they have been compared with the round that was granted: see
# ``_protocol/sums/part_sums.py``.

# A longer header is not announced. One of a tree with 50 sparse leaves has about 1.5 kB.
ANNOUNCED_HEADER = 8 * 1024

_BEGUN = re.compile(
    r"gradient=([0-9a-z-]{1,64}) place=(\d{1,15}(?:\*[0-9.e+-]{1,24})?) shape=(\[[\d,]*\]) header=([0-9a-f]*)"
    r"(?: lease=(\d{1,6}))?"
)
_SUM_STORED = re.compile(r"sum=([0-9a-f]{32}) part=(\d{1,6})")
_ARRIVED = re.compile(r"gradient=([0-9a-z-]{1,64}) parts=(\d{1,6})(?: from=(\d{1,6}))?(?: position=(\d{1,4}))?")

# The longest lease that a message can give an upload, in seconds.
LONGEST_LEASE = 60.0


class UploadBegun(NamedTuple):
    """The upload of a gradient begins (``lua/stage.lua``, ``lua/register.lua``).

    Attributes:
        gradient: the id of the gradient.
        entry: the entry that the ``buffered`` hash will have for it, in all likelihood.
        round_shape: the shape that binds its round, as text.
        lease: for how many seconds after each message the upload keeps its place although nothing arrives; 0: as long
            as any other one.
    """

    gradient: str
    entry: bytes
    round_shape: str
    lease: float = 0.0


class PartsArrived(NamedTuple):
    """Parts of a gradient have been written. With no parts, it only says that the upload continues.

    Attributes:
        gradient: the id of the gradient.
        parts: the number of these parts.
        position: the position of a partition, if only the parts there are meant; else None.
        first: the number of parts before them, of those that are meant.
    """

    gradient: str
    parts: int
    position: int | None = None
    first: int = 0


class SumStored(NamedTuple):
    """A reducer has stored a part of a sum.

    Attributes:
        digest: names the gradients in it (``buffered.digest_of``).
        part: the number of the part, counted from the first one with dense elements.
    """

    digest: str
    part: int


def sum_stored(digest: str, part: int) -> str:
    """Returns the message that a reducer sends."""
    return f"sum={digest} part={part}"


def upload_begun(gradient: str, place: str, *, weight: str, round_shape: str, header: bytes, lease_ms: int) -> str:
    """Returns what ``lua/include/announce_upload.lua`` publishes, for an upload whose weight was not known by then."""
    return f"gradient={gradient} place={place}*{weight} shape={round_shape} header={header.hex()} lease={lease_ms}"


def parts_arrived(gradient: str, parts: int, position: int | None = None, first: int = 0) -> str:
    """Returns the message that a client sends between parts. The arguments are the fields of ``PartsArrived``."""
    begins = f" from={first}" if first else ""
    return f"gradient={gradient} parts={parts}{begins}" + ("" if position is None else f" position={position}")


def parse_message(text: str) -> UploadBegun | PartsArrived | SumStored | None:
    """Parses a message. Returns None for a message that redisacc does not send."""
    if (match := _SUM_STORED.fullmatch(text)) is not None:
        return SumStored(match[1], int(match[2]))
    if (match := _ARRIVED.fullmatch(text)) is not None:
        position = None if match[4] is None else int(match[4])
        return PartsArrived(match[1], int(match[2]), position, int(match[3] or 0))
    if len(text) <= 3 * ANNOUNCED_HEADER and (match := _BEGUN.fullmatch(text)) is not None and len(match[4]) % 2 == 0:
        lease = min(int(match[5] or 0) / 1000, LONGEST_LEASE)
        return UploadBegun(match[1], f"{match[2]} ".encode() + bytes.fromhex(match[4]), match[3], lease)
    return None
