"""The entries of the hash of leases that the chief and the workers of a run hold."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass

from redisacc._format.stored_text import parse_int64, parsed, time_of
from redisacc._text import printable

_ENTRY = re.compile(rb"(\S{1,64}) ([0-9]{1,15}) (\S{1,64}) (.{1,1024})", re.DOTALL)
_MEMORY = re.compile(r"(.+) ([0-9]{1,9}) MiB")
_PLACE = re.compile(rb"chief|worker (0|[1-9][0-9]{0,11})")


@dataclass(frozen=True)
class Member:
    """A lease, held or run out.

    Attributes:
        place: "chief", or "worker" and a number.
        number: the number of a worker; None for the chief.
        holder: the random id of the holder's place.
        process: the identity of its process.
        who: a name of the holder, for people.
        memory: how many bytes of its memory were resident when it took or extended the lease; None if unknown.
        ends_at: when the lease ends, by the server's clock.
        left: how many more seconds the lease lasts; negative if it has run out.
    """

    place: str
    number: int | None
    holder: str
    process: str
    who: str
    memory: int | None
    ends_at: datetime.datetime
    left: float


def number_of_worker(name: str) -> str | None:
    """Returns the digits of the number of a worker of a run; None if these have other names."""
    found = _PLACE.fullmatch(name.encode(errors="replace"))
    return None if found is None or found[1] is None else found[1].decode()


def parse_crew(key: str, fields: Mapping[bytes, bytes], now_ms: int) -> list[Member]:
    """Returns all leases that somebody holds, or held and did not give back: the chief's first, then by number.

    Raises:
        CorruptDataError: an entry is not one that redisacc writes.
    """
    members = [parsed(key, field, entry, _member, field, now_ms) for field, entry in fields.items()]
    return sorted(members, key=lambda member: (member.number is not None, member.number or 0))


def _member(entry: bytes, field: bytes, now_ms: int) -> Member:
    place, held = _PLACE.fullmatch(field), _ENTRY.fullmatch(entry)
    if place is None or held is None:
        raise ValueError(entry)
    holder, ends_ms, process = held[1].decode("ascii", "replace"), int(held[2]), held[3].decode("ascii", "replace")
    number = None if place[1] is None else int(place[1])
    left = (ends_ms - now_ms) / 1000
    return Member(field.decode(), number, holder, process, *split_who(printable(held[4])), time_of(ends_ms), left)


def split_who(text: str) -> tuple[str, int | None]:
    """Splits the last part of an entry, such as "node1:4711 512 MiB", into a name and a number of bytes."""
    found = _MEMORY.fullmatch(text)
    return (text, None) if found is None else (found[1], int(found[2]) << 20)


# The claims of workers whose training the server has lost: which step of its parameters each of them has.

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
