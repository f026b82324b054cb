"""The claims of workers whose training the server has lost: which step of its parameters each of them has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from redisacc._text import shown
from redisacc.errors import CorruptDataError

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
    claims = []
    for field, entry in fields.items():
        if field == b"asked":
            continue
        claim = _CLAIM.fullmatch(entry)
        if claim is None or _WORKER.fullmatch(field) is None or not -(2**63) <= int(claim[1]) < 2**63:
            raise CorruptDataError(f"{key}: {shown(field)} holds {shown(entry)}, which redisacc did not write")
        age = (now_ms - int(claim[3])) / 1000
        process = claim[4].decode("ascii", "replace")
        claims.append(Claim(field.decode(), int(claim[1]), claim[2].decode(), age, process))
    return sorted(claims, key=lambda claim: (-claim.step, claim.place))
