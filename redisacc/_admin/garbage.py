"""Finds garbage and removes it.

Normally there is none: a process that dies leaves only keys that expire, or work that the next process finishes.
Garbage is left by an operation that was interrupted and never continued, or by people who remove keys by hand.

The following keys are garbage: nothing uses them.

- A deletion that was interrupted: the record says "deleted:", and the name has not been opened since.
- A round whose taker died while acknowledging it: its gradients were handed out.
- The hashes of a round that is not listed in ``taken``.
- Parts of buffered gradients that no round lists.
- Staged parts without an expiry.
- Keys of an accumulator whose record is gone.
- Names in ``redisacc:names`` without a record.

A round that was granted and not acknowledged is not garbage: ``recover()`` hands it out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from redisacc._admin.catalogue import escape_glob, listed, scan_keys
from redisacc._format.keys import DELETING, NAMES, PREFIX, Keys
from redisacc._protocol.acknowledgement import finish_acknowledgement
from redisacc._protocol.deletion import delete
from redisacc._protocol.scripts import Scripts
from redisacc._redis.hash_scan import scan
from redisacc._redis.transport import Transport

# The approximate number of lookups in one call of the script, which looks for each key in every round.
LOOKUPS = 200

_KEY = re.compile(re.escape(PREFIX) + r"\{([^{}]+)\}(?::(.+))?", re.DOTALL)
_PART = re.compile(r"(part|staged):([\w-]+):\d+")
_ROUND = re.compile(r"taken:([^:]+):(?:sums|buffered|inline|workers)")
_WHOLE = frozenset(
    ("sums", "buffered", "inline", "workers", "sessions", "queue", "takers", "taken", "recovered", "compacting")
)

Why = Literal["deletion", "acknowledged", "round", "part", "staged", "record", "name"]

WORDS: dict[Why, str] = {
    "deletion": "an interrupted deletion",
    "acknowledged": "a round whose taker died while acknowledging it",
    "round": "data of a round that is not listed",
    "part": "parts of gradients that no round refers to",
    "staged": "staged parts without an expiry",
    "record": "keys without a record",
    "name": "a listed name without a record",
}


@dataclass
class Leftover:
    """The garbage of one accumulator that has one cause.

    Attributes:
        name: the name of the accumulator; a listed name that is not UTF-8, with escapes.
        why: the cause; WORDS has a text for each.
        incarnation: the incarnation of the existing accumulator; "" if there is none.
        keys: key → its owner, in the form that ``lua/remove_orphans.lua`` expects.
        tokens: the tokens of all taken rounds when this was found; for "acknowledged", only that of the round itself.
        nbytes: the memory of the keys in bytes.
        listed_as: for "name", what is in the set of names. It need not be UTF-8.
    """

    name: str
    why: Why
    incarnation: str = ""
    keys: dict[str, str] = field(default_factory=dict)
    tokens: Sequence[str] = ()
    nbytes: int = 0
    listed_as: bytes = b""


def find_garbage(transport: Transport, name: str | None = None) -> list[Leftover]:
    """Returns the garbage of all accumulators or of one. Scans all keys of the server in pieces, and changes nothing.

    Args:
        transport: the way to the server.
        name: the name of the accumulator. None: all of them.
    """
    pattern = "*" if name is None else escape_glob(name)
    keys_of: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for key in scan_keys(transport, f"{PREFIX}{{{pattern}}}*"):
        if (match := _KEY.fullmatch(key)) is not None:
            keys_of[match[1]].append((key, match[2] or ""))
    found: list[Leftover] = []
    for owner, pairs in sorted(keys_of.items()):
        found += _of_one(transport, owner, pairs)
    for raw in sorted(listed(transport, pattern)):
        # As bytes, because anybody can list a name that is not UTF-8. No accumulator has such a name.
        if not transport.call("EXISTS", _record_of(raw)):
            found.append(Leftover(raw.decode(errors="backslashreplace"), "name", listed_as=raw))
    for leftover in found:
        sizes = transport.pipeline([("MEMORY", "USAGE", key) for key in leftover.keys]) if leftover.keys else []
        leftover.nbytes = sum(int(size or 0) for size in sizes)
    return found


def _of_one(transport: Transport, name: str, pairs: list[tuple[str, str]]) -> list[Leftover]:
    keys = Keys(name)
    kind, *ends = transport.pipeline([("TYPE", keys.record), *(("PTTL", key) for key, _ in pairs)])
    # A key with an expiry is not garbage: it disappears by itself.
    endless = [pair for pair, end in zip(pairs, ends, strict=True) if int(end) == -1]
    if kind == b"none":
        orphans = {key: "record" for key, suffix in endless if _is_ours(suffix)}
        return [Leftover(name, "record", keys=orphans)] if orphans else []
    incarnation = transport.call("HGET", keys.record, "incarnation") if kind == b"hash" else None
    if incarnation is None:
        # The key was not written by redisacc.
        return []
    text = incarnation.decode(errors="replace")
    if incarnation.startswith(DELETING.encode()):
        return [Leftover(name, "deletion", text, {key: "" for key, suffix in pairs if suffix and _is_ours(suffix)})]
    return _of_a_live_one(transport, keys, text, endless)


def _record_of(name: bytes) -> bytes:
    """Returns the key of the record of a name in the set of names."""
    return f"{PREFIX}{{".encode() + name + b"}"


def _is_ours(suffix: str) -> bool:
    return suffix in _WHOLE or bool(_PART.fullmatch(suffix) or _ROUND.fullmatch(suffix))


def _of_a_live_one(transport: Transport, keys: Keys, incarnation: str, pairs: list[tuple[str, str]]) -> list[Leftover]:
    taken = scan(transport, keys.taken)
    tokens = [token.decode(errors="replace") for token in taken]
    owners = set(scan(transport, keys.current.buffered))
    for token in tokens:
        owners |= set(scan(transport, keys.taken_round(token).buffered))
    found = [
        Leftover(keys.name, "acknowledged", incarnation, tokens=[token.decode(errors="replace")])
        for token, text in taken.items()
        if text.startswith(b"acknowledged ")
    ]
    sorts: dict[Why, dict[str, str]] = {"round": {}, "part": {}, "staged": {}}
    for key, suffix in pairs:
        if (of_round := _ROUND.fullmatch(suffix)) is not None:
            if of_round[1] not in tokens:
                sorts["round"][key] = f"round {of_round[1]}"
        elif (part := _PART.fullmatch(suffix)) is not None:
            if part[1] == "staged":
                sorts["staged"][key] = "staged"
            elif part[2].encode() not in owners:
                sorts["part"][key] = f"part {part[2]}"
    return found + [Leftover(keys.name, why, incarnation, orphans, tokens) for why, orphans in sorts.items() if orphans]


def remove_garbage(transport: Transport, leftover: Leftover) -> int:
    """Removes garbage if it is still garbage. Returns how many keys, names, rounds or deletions were removed."""
    keys = Keys(leftover.name)
    scripts = Scripts(transport, keys, incarnation=leftover.incarnation)
    if leftover.why == "deletion":
        delete(transport, keys, leftover.incarnation.removeprefix(DELETING))
        return 1
    if leftover.why == "name":
        name, record = leftover.listed_as, _record_of(leftover.listed_as)
        removed = int(transport.call("SREM", NAMES, name)) if not transport.call("EXISTS", record) else 0
        if removed and transport.call("EXISTS", record):
            # The accumulator was created, and its name listed, after the first EXISTS and before SREM.
            transport.call("SADD", NAMES, name)
            removed = 0
        return removed
    if leftover.why == "acknowledged":
        (token,) = leftover.tokens
        return int(finish_acknowledgement(transport, keys, scripts, token))
    removed = 0
    items = list(leftover.keys.items())
    size = max(1, LOOKUPS // (len(leftover.tokens) + 4))
    for start in range(0, len(items), size):
        removed += scripts.remove_orphans(tokens=leftover.tokens, owners=dict(items[start : start + size]))
    return removed
