"""The claims of workers whose training the server has lost: which step of its parameters each of them has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from redisacc._format.stored_text import parse_int64, parsed

_CLAIM = re.compile(rb"(-?[0-9]{1,19}) ([0-9a-f]{1,64}) ([0-9]{1,15}) (\S{1,64})")
_WORKER = re.compile(rb"worker [0-9]{1,12}")


@dataclass(frozen=True)
class Claim:
    """What a worker says that it has.

    Attributes:
        place: "worker" and its number.
        step: the step of its parameters.
        incarnation: the incarnation that it has seen.
        age: for how many seconds it has not said so again.
        process: the identity of its process.
    """

    place: str
    step: int
    incarnation: str
    age: float
    process: str


def parse_claims(key: str, fields: Mapping[bytes, bytes], now_ms: int) -> list[Claim]:
    """Returns the claims, the newest step first, and of one step by place.

    Raises:
        CorruptDataError: redisacc did not write one of them.
    """
    claims = [parsed(key, field, entry, _claim, field, now_ms) for field, entry in fields.items() if field != b"asked"]
    return sorted(claims, key=lambda claim: (-claim.step, claim.place))


def _claim(entry: bytes, field: bytes, now_ms: int) -> Claim:
    found = _CLAIM.fullmatch(entry)
    if found is None or _WORKER.fullmatch(field) is None:
        raise ValueError(entry)
    age, process = (now_ms - int(found[3])) / 1000, found[4].decode("ascii", "replace")
    return Claim(field.decode(), parse_int64(found[1]), found[2].decode(), age, process)
