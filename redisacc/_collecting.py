"""Finds what nobody owns any more and removes it. Normally there is nothing: everybody who dies leaves only what ends
by itself, or what the next one finishes. What remains is what was interrupted and never taken up again, or was left by
somebody who removed keys by hand.

Left behind are, and live is nothing of it:

- a deletion that was interrupted: the record says "deleted:", and nobody has opened the name since;
- a round whose taker died while it acknowledged it: its gradients were handed out;
- the hashes of a round that is not listed in ``taken``;
- parts of parked gradients that no round names;
- staged parts without an expiry;
- keys of an accumulator whose record is gone;
- names in ``redisacc:names`` without a record.

Rounds that were granted and not acknowledged are no leftovers: ``recover()`` gets them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from redisacc import _deletion
from redisacc._keys import DELETING, NAMES, PREFIX, Keys
from redisacc._link import Link
from redisacc._looking import escape_glob, list_names, scan_keys
from redisacc._parked import number_of_parts
from redisacc._rounds import batches, scan
from redisacc._scripts import Scripts

# Lookups that one call of the script makes, about: each key is looked for in every round.
LOOKUPS = 200

_KEY = re.compile(re.escape(PREFIX) + r"\{([^{}]+)\}(?::(.+))?", re.DOTALL)
_PART = re.compile(r"(part|staged):([\w-]+):\d+")
_ROUND = re.compile(r"taken:([^:]+):(?:sums|parked|small|workers)")
_WHOLE = frozenset(("sums", "parked", "small", "workers", "clients", "queue", "takers", "taken", "folding"))

Why = Literal["deletion", "acknowledged", "round", "part", "staged", "record", "name"]

WORDS: dict[Why, str] = {
    "deletion": "a deletion that was interrupted",
    "acknowledged": "a round whose taker died while acknowledging",
    "round": "a round that is not listed",
    "part": "parts of gradients that no round names",
    "staged": "staged parts without an expiry",
    "record": "keys without an accumulator",
    "name": "a listed name without an accumulator",
}


@dataclass
class Leftover:
    """What is left behind of one accumulator, for one reason.

    Attributes:
        name: of the accumulator.
        why: which reason; WORDS says it.
        incarnation: of the accumulator that is there; "" if there is none.
        keys: key → its owner as ``lua/sweep.lua`` wants it.
        tokens: of the taken rounds when this was found; for "acknowledged", the round that is meant.
        nbytes: how much memory the keys take.
    """

    name: str
    why: Why
    incarnation: str = ""
    keys: dict[str, str] = field(default_factory=dict)
    tokens: Sequence[str] = ()
    nbytes: int = 0


def find(link: Link, name: str | None = None) -> list[Leftover]:
    """Leftovers of all accumulators, or of one. Changes nothing. Walks over all keys of the server, a few at a time."""
    pattern = "*" if name is None else escape_glob(name)
    keys_of: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for key in scan_keys(link, f"{PREFIX}{{{pattern}}}*"):
        if (match := _KEY.fullmatch(key)) is not None:
            keys_of[match[1]].append((key, match[2] or ""))
    found: list[Leftover] = []
    for owner, pairs in sorted(keys_of.items()):
        found += _of_one(link, owner, pairs)
    for listed in list_names(link, pattern):
        if not link.call("EXISTS", Keys(listed).record):
            found.append(Leftover(listed, "name"))
    for leftover in found:
        sizes = link.pipeline([("MEMORY", "USAGE", key) for key in leftover.keys]) if leftover.keys else []
        leftover.nbytes = sum(int(size or 0) for size in sizes)
    return found


def _of_one(link: Link, name: str, pairs: list[tuple[str, str]]) -> list[Leftover]:
    keys = Keys(name)
    kind, *ends = link.pipeline([("TYPE", keys.record), *(("PTTL", key) for key, _ in pairs)])
    # What has an expiry ends by itself.
    endless = [pair for pair, end in zip(pairs, ends, strict=True) if int(end) == -1]
    if kind == b"none":
        orphans = {key: "record" for key, suffix in endless if _is_ours(suffix)}
        return [Leftover(name, "record", keys=orphans)] if orphans else []
    incarnation = link.call("HGET", keys.record, "incarnation") if kind == b"hash" else None
    if incarnation is None:
        # Not ours, whatever it is.
        return []
    text = incarnation.decode(errors="replace")
    if incarnation.startswith(DELETING.encode()):
        return [Leftover(name, "deletion", text, {key: "" for key, suffix in pairs if suffix and _is_ours(suffix)})]
    return _of_a_live_one(link, keys, text, endless)


def _is_ours(suffix: str) -> bool:
    return suffix in _WHOLE or bool(_PART.fullmatch(suffix) or _ROUND.fullmatch(suffix))


def _of_a_live_one(link: Link, keys: Keys, incarnation: str, pairs: list[tuple[str, str]]) -> list[Leftover]:
    taken = scan(link, keys.taken)
    tokens = [token.decode(errors="replace") for token in taken]
    owners = set(scan(link, keys.current.parked))
    for token in tokens:
        owners |= set(scan(link, keys.taken_round(token).parked))
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


def remove(link: Link, leftover: Leftover) -> int:
    """Removes a leftover, if it is still one. Returns how many things were removed: keys, names, rounds, deletions."""
    keys = Keys(leftover.name)
    scripts = Scripts(link, keys, incarnation=leftover.incarnation)
    if leftover.why == "deletion":
        _deletion.delete(link, keys, leftover.incarnation.removeprefix(DELETING))
        return 1
    if leftover.why == "name":
        removed = int(link.call("SREM", NAMES, keys.name)) if not link.call("EXISTS", keys.record) else 0
        if removed and link.call("EXISTS", keys.record):
            # Somebody created it between our look and our removal, and listed it before that.
            link.call("SADD", NAMES, keys.name)
            removed = 0
        return removed
    if leftover.why == "acknowledged":
        (token,) = leftover.tokens
        parts: list[str] = []
        for field_, entry in scan(link, keys.taken_round(token).parked).items():
            gradient = field_.decode(errors="replace")
            parts += [keys.part(gradient, k) for k in range(number_of_parts(entry) or 0)]
        pieces = list(batches(parts))
        return int(all(scripts.acknowledge(token=token, parts=p, more=p is not pieces[-1]) for p in pieces))
    removed = 0
    items = list(leftover.keys.items())
    size = max(1, LOOKUPS // (len(leftover.tokens) + 4))
    for start in range(0, len(items), size):
        removed += scripts.sweep(tokens=leftover.tokens, owners=dict(items[start : start + size]))
    return removed
