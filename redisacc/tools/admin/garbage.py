"""Finds garbage and removes it.

Normally there is none: a process that dies leaves only keys that expire, or work that the next process finishes.
Garbage is left by an operation that was interrupted and never continued, or by people who remove keys by hand.

The following keys are garbage: nothing uses them.

- A deletion that was interrupted: the record says "deleted:", and the name has not been opened since.
- A round whose taker died while acknowledging it: its gradients were handed out.
- The hashes of a round that is not listed in ``taken``.
- Parts of buffered gradients that no round lists; in partitions, only if no running attempt has them either.
- Attempts to store a gradient in partitions that are over, with their parts.
- Staged parts without an expiry.
- Keys of an accumulator whose record is gone.
- Objects of parameters that their record does not list, or whose record is gone; and an
  interrupted deletion of parameters.
- Parts of blobs in partitions that neither the record of the parameters nor a running attempt lists.
- Attempts to publish in partitions that are over, and blobs of earlier versions, with their parts. Without partitions,
  the list itself, with the parts: it belongs to an earlier incarnation, which never published a version.
- Names in ``redisacc:names`` without a record.

A round that was granted and not acknowledged is not garbage: ``recover()`` hands it out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

from redisacc._format.keys import ANY_PARTITION, DELETING, NAMES, PREFIX, Keys, ParameterKeys, PartitionedKeys
from redisacc._format.stored_text import clock_ms
from redisacc._protocol.lifecycle.deletion import delete
from redisacc._protocol.parameters.deletion import delete_parameters, listed_blobs, read_partitions
from redisacc._protocol.parts.sweep import listed_attempts, sweep
from redisacc._protocol.rounds.current_round import with_partitions
from redisacc._protocol.rounds.granted_rounds import finish_acknowledgement
from redisacc._protocol.scripts import OF_ACCUMULATORS, Scripts
from redisacc._protocol.updates.record import use_up_numbers
from redisacc._wire.scans import scan
from redisacc._wire.transport import Transport
from redisacc.errors import CorruptDataError, NotFoundError
from redisacc.tools.admin.catalog import escape_glob, listed, scan_keys

# The number of keys that one call of the script removes.
KEYS_PER_CALL = 50

# The number of tokens that one command looks up.
TOKENS_PER_CALL = 250

# How often to look for the owners of parts, if rounds are moved during each search.
SEARCHES = 10

_KEY = re.compile(re.escape(PREFIX) + r"\{([^{}]+)\}(?::(.+))?", re.DOTALL)
_PART = re.compile(r"part:([\w-]+):\d+|place:([\w-]+)")
_IN_PARTITION = re.compile(r"partition:part:([\w-]+):\d+")
_SUM = re.compile(r"(?:sum|squares):[0-9a-f]+:\d+")
_REDUCER = re.compile(r"reducer(?::\d+)?")
_ROUND = re.compile(r"taken:([^:]+):(?:sums|buffered|inline|workers)")
_WHOLE = frozenset(
    (
        *("sums", "buffered", "inline", "workers", "sessions", "queue", "takers", "taken", "recovered"),
        *("compacting", "crew", "attempts"),
    )
)

_PARAMETERS = re.compile(r"parameters(?::(?:object:[\w-]+:\d+|attempts|deleted|claims|history))?")
# How the keys of parts in partitions continue after the hash tag.
_ELSEWHERE = "partition:"
_BLOB_IN_PARTITION = re.compile(r"partition:blob:([\w-]+):\d+")

Why = Literal[
    "deletion",
    "acknowledged",
    "attempts",
    "round",
    "part",
    "partition",
    "record",
    "object",
    "blob",
    "blobs",
    "parameters",
    "name",
]

WORDS: dict[Why, str] = {
    "deletion": "an interrupted deletion",
    "acknowledged": "a round whose taker was killed while acknowledging it",
    "round": "data of a round that is not listed",
    "attempts": "expired attempts to store gradients in partitions",
    "part": "parts of gradients that no round refers to",
    "partition": "parts in partitions that no gradient refers to",
    "record": "keys without a record",
    "object": "objects that no parameters refer to",
    "blob": "parts in partitions that no parameters refer to",
    "blobs": "attempts to publish in partitions that are over, and blobs of earlier versions",
    "parameters": "an interrupted deletion of parameters",
    "name": "a listed name without a record",
}


@dataclass
class Leftover:
    """The garbage of one accumulator that has one cause.

    Attributes:
        name: the name of the accumulator; a listed name that is not UTF-8, with escapes.
        why: the cause; WORDS has a text for each.
        incarnation: the incarnation of the existing accumulator; "" if there is none.
        keys: key → its owner, in the form that ``lua/remove_orphans.lua`` expects; for "blob", the id of its blob.
        token: for "acknowledged", the token of the round.
        nbytes: the memory of the keys in bytes.
        listed_as: for "name", what is in the set of names. It need not be UTF-8.
    """

    name: str
    why: Why
    incarnation: str = ""
    keys: dict[str, str] = field(default_factory=dict)
    token: str = ""
    nbytes: int = 0
    listed_as: bytes = b""

    @property
    def items(self) -> int:
        """How many items `remove_garbage` counts for it."""
        return 1 if self.why in ("deletion", "acknowledged", "parameters", "name") else len(self.keys)


def find_garbage(transport: Transport, name: str | None = None) -> list[Leftover]:
    """Returns the garbage of all accumulators or of one. Scans all keys of the server in pieces, and changes nothing.

    Args:
        transport: the way to the server.
        name: the name of the accumulator. None means all of them.
    """
    pattern = "*" if name is None else escape_glob(name)
    keys_of: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for key in scan_keys(transport, f"{PREFIX}{{{pattern}}}*"):
        if (match := _KEY.fullmatch(key)) is not None and not (match[2] or "").startswith(_ELSEWHERE):
            keys_of[match[1]].append((key, match[2] or ""))
    found: list[Leftover] = []
    partitions = f"{PREFIX}{{{pattern}/{ANY_PARTITION}}}:partition"
    for owner, attempts in _in_partitions(transport, f"{partitions}:part:*", _IN_PARTITION):
        found += _of_partitions(transport, Keys(owner), attempts)
    for owner, blobs in _in_partitions(transport, f"{partitions}:blob:*", _BLOB_IN_PARTITION):
        found += _of_blobs(transport, ParameterKeys(owner), blobs)
    for owner, pairs in sorted(keys_of.items()):
        of_parameters = [pair for pair in pairs if _PARAMETERS.fullmatch(pair[1])]
        others = [pair for pair in pairs if not _PARAMETERS.fullmatch(pair[1])]
        if others:
            found += _of_one(transport, owner, others)
        if of_parameters:
            found += _of_parameters(transport, ParameterKeys(owner), of_parameters)
    for raw in sorted(listed(transport, pattern)):
        # As bytes, because any client can list a name that is not UTF-8. No accumulator has such a name.
        if not _is_used(transport, raw):
            found.append(Leftover(raw.decode(errors="backslashreplace"), "name", listed_as=raw))
    for leftover in found:
        sizes = transport.pipeline([("MEMORY", "USAGE", key) for key in leftover.keys]) if leftover.keys else []
        leftover.nbytes = sum(int(size or 0) for size in sizes)
    return found


def _in_partitions(
    transport: Transport, pattern: str, form: re.Pattern[str]
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Returns the parts in partitions: for each name, the key of each part, and the id of its attempt."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for key in scan_keys(transport, pattern):
        match, what = _KEY.fullmatch(key), key.rpartition("}:")[2]
        if match is not None and (part := form.fullmatch(what)) is not None:
            found[match[1].rpartition("/")[0]].append((key, part[1]))
    return sorted(found.items())


def _endless(transport: Transport, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns the pairs whose key has no expiry. A key with an expiry disappears by itself."""
    ends = transport.pipeline([("PTTL", key) for key, _ in pairs])
    return [pair for pair, end in zip(pairs, ends, strict=True) if int(end) == -1]


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


def _of_partitions(transport: Transport, keys: Keys, pairs: list[tuple[str, str]]) -> list[Leftover]:
    """Returns the garbage among the parts that an accumulator has in partitions.

    The leader is asked after the parts have been seen, because a part is written after its attempt was registered. An
    attempt that it does not know now was never counted, or its round is acknowledged, and it will not know it again. So
    no script has to check that again.

    Args:
        transport: the way to the nodes.
        keys: the keys of the accumulator.
        pairs: the key of each part, and the id of its attempt.
    """
    endless = _endless(transport, pairs)
    reply = transport.call("HGET", keys.record, "incarnation")
    incarnation = "" if reply is None else reply.decode(errors="replace")
    if incarnation.startswith(DELETING):
        # Finishing the deletion removes those that it knows; the next search finds the others.
        return []
    # Asked once, the list of attempts may come from a leader that had counted an attempt already, and what is counted
    # from its replica, which has not heard of that and lists it. Of two answers, one comes from one server.
    for _ in range(2 if reply is not None else 0):
        held = _held_attempts(transport, keys)
        endless = [] if held is None else [(key, attempt) for key, attempt in endless if attempt not in held]
        if not endless:
            return []
    return [Leftover(keys.name, "partition", incarnation, {key: "" for key, _ in endless})] if endless else []


def _held_attempts(transport: Transport, keys: Keys) -> set[str] | None:
    """Returns the ids of all attempts that are listed, or whose gradients are in a round.

    None means redisacc did not write one of them, or rounds move all the time. Then it is unknown which parts are in
    use.
    """
    try:
        # In this order: an attempt that is counted meanwhile moves from the list to a round.
        listed = {attempt.id for attempt in listed_attempts(transport, keys)}
    except CorruptDataError:
        return None
    held = _held_gradients(transport, keys)
    return None if held is None else listed | {of.decode(errors="replace") for of in held}


def _of_blobs(transport: Transport, keys: ParameterKeys, pairs: list[tuple[str, str]]) -> list[Leftover]:
    """Returns the garbage among the parts that parameters have in partitions. Why, ``_of_partitions`` says.

    Args:
        transport: the way to the nodes.
        keys: the keys of the parameters.
        pairs: the key of each part, and the id of its blob.
    """
    endless = _endless(transport, pairs)
    incarnation = _incarnation(transport, keys)
    if incarnation.startswith(DELETING):
        # Finishing the deletion removes those that it knows; the next search finds the others.
        return []
    held = _held_blobs(transport, keys) if incarnation else set()
    # Once is enough here: the leader is asked again before they are removed.
    orphans = {key: blob for key, blob in endless if held is not None and blob not in held}
    return [Leftover(keys.name, "blob", incarnation, orphans)] if orphans else []


def _held_blobs(transport: Transport, keys: ParameterKeys) -> set[str] | None:
    """Returns the ids of all blobs that the record or an attempt lists; None if redisacc did not write one of them."""
    try:
        # In this order: a blob that is published meanwhile moves from the list to the record.
        listed_now = listed_attempts(transport, keys)
        # Without partitions, the list belongs to an earlier incarnation.
        held = {attempt.id for attempt in listed_now} if read_partitions(transport, keys).partitions else set()
        return held | {blob.id for blob in listed_blobs(transport, keys)}
    except CorruptDataError:
        return None


def _incarnation(transport: Transport, keys: ParameterKeys) -> str:
    """Returns the incarnation of parameters; "" if there are none."""
    return (transport.call("HGET", keys.record, "incarnation") or b"").decode(errors="replace")


def _is_used(transport: Transport, name: bytes) -> bool:
    """Returns whether a name in the set of names has an accumulator or parameters."""
    record = f"{PREFIX}{{".encode() + name + b"}"
    return any(transport.pipeline([("EXISTS", record), ("EXISTS", record + b":parameters")]))


def _of_parameters(transport: Transport, keys: ParameterKeys, pairs: list[tuple[str, str]]) -> list[Leftover]:
    """Returns the garbage of the parameters of one name.

    No script has to check again, when it is removed, that it is garbage: an object that has no expiry was listed by a
    record when it was named. If the record doesn't list it now, it never will again.
    """
    objects = [key for key, suffix in _endless(transport, pairs) if suffix != "parameters"]
    incarnation = _incarnation(transport, keys)
    if incarnation.startswith(DELETING):
        # The mark of the deletion stays: it has an expiry.
        return [Leftover(keys.name, "parameters", incarnation, {key: "" for key, _ in pairs if key != keys.deleted})]
    found: list[Leftover] = []
    if transport.call("EXISTS", keys.record):
        try:
            keys = read_partitions(transport, keys)
            listed = {key for blob in listed_blobs(transport, keys) for key in blob.keys(keys)}
        except CorruptDataError:
            # It is unknown which parts are in use, so none of them is garbage.
            return []
        if not listed and keys.attempts not in objects:
            # Deleted since then.
            return []
        # Without partitions, a list belongs to an earlier incarnation.
        over = keys.attempts in objects and (not keys.partitions or _has_due_attempts(transport, keys))
        objects = [key for key in objects if key not in listed and key not in (keys.attempts, keys.history)]
        if over:
            found.append(Leftover(keys.name, "blobs", incarnation, {keys.attempts: ""}))
    if objects:
        found.append(Leftover(keys.name, "object", incarnation, dict.fromkeys(objects, "")))
    return found


def _has_due_attempts(transport: Transport, keys: PartitionedKeys) -> bool:
    """Returns whether the leases of any attempts are over."""
    now_ms = clock_ms(transport.call("TIME", beside=keys.record))
    return bool(transport.call("ZRANGEBYSCORE", keys.attempts, 0, now_ms, "LIMIT", 0, 1))


def _is_ours(suffix: str) -> bool:
    return suffix in _WHOLE or any(pattern.fullmatch(suffix) for pattern in (_PART, _SUM, _REDUCER, _ROUND))


def _of_a_live_one(transport: Transport, keys: Keys, incarnation: str, pairs: list[tuple[str, str]]) -> list[Leftover]:
    taken = scan(transport, keys.taken)
    tokens = {token.decode(errors="replace") for token in taken}
    found = [
        Leftover(keys.name, "acknowledged", incarnation, token=token.decode(errors="replace"))
        for token, text in taken.items()
        if text.startswith(b"acknowledged ")
    ]
    # Each of them was over when its lease ended, and has not been swept.
    if _has_due_attempts(transport, keys):
        found.append(Leftover(keys.name, "attempts", incarnation, {keys.attempts: ""}))
    sorts: dict[Why, dict[str, str]] = {"round": {}, "part": {}}
    for key, suffix in pairs:
        if (of_round := _ROUND.fullmatch(suffix)) is not None:
            if of_round[1] not in tokens:
                sorts["round"][key] = f"round {of_round[1]}"
        elif (part := _PART.fullmatch(suffix)) is not None:
            sorts["part"][key] = f"part {part[1] or part[2]}"
    if sorts["part"]:
        owners = _held_gradients(transport, keys)
        sorts["part"] = {
            key: owner
            for key, owner in sorts["part"].items()
            if owners is not None and owner.removeprefix("part ").encode() not in owners
        }
    return found + [Leftover(keys.name, why, incarnation, orphans) for why, orphans in sorts.items() if orphans]


def _held_gradients(transport: Transport, keys: Keys) -> set[bytes] | None:
    """Returns the ids of all gradients that are buffered in any round; None if rounds move all the time.

    The set holds every gradient that was stored before the call and that is still held by a round. This is why:

    - Gradients leave the current round, and never return to it. It is read before the taken rounds, so a gradient that
      is in neither place now was in a taken round already when these were listed.
    - All taken rounds are known at one moment: the list is as long as the hash is at that moment, and each token of the
      list exists before and after it, because a token that is gone never comes back.
    - A round keeps its gradients while its token exists, and each token still exists after its round has been read.
    """
    for _ in range(SEARCHES):
        held = set(scan(transport, keys.current.buffered))
        taken = list(scan(transport, keys.taken))
        if transport.call("HLEN", keys.taken) != len(taken):
            continue
        for token in taken:
            held |= set(scan(transport, keys.taken_round(token.decode(errors="replace")).buffered))
        if all(
            None not in transport.call("HMGET", keys.taken, *taken[start : start + TOKENS_PER_CALL])
            for start in range(0, len(taken), TOKENS_PER_CALL)
        ):
            return held
    return None


def remove_garbage(transport: Transport, leftover: Leftover) -> int:
    """Removes garbage if it is still garbage. Returns how many keys, names, rounds or deletions were removed."""
    keys = Keys(leftover.name)
    scripts = Scripts(transport, keys, OF_ACCUMULATORS, incarnation=leftover.incarnation)
    if leftover.why == "deletion":
        delete(transport, keys, leftover.incarnation.removeprefix(DELETING))
        return 1
    if leftover.why == "parameters":
        parameters = ParameterKeys(leftover.name)
        # Those that the record lists, and then, without it, those that it does not.
        delete_parameters(transport, parameters, leftover.incarnation.removeprefix(DELETING))
        _unlink(transport, [key for key in leftover.keys if key != parameters.record])
        return 1
    if leftover.why in ("object", "partition", "blob"):
        return _unlink(transport, _unused(transport, leftover) if leftover.why == "blob" else list(leftover.keys))
    if leftover.why == "name":
        name = leftover.listed_as
        removed = int(transport.call("SREM", NAMES, name)) if not _is_used(transport, name) else 0
        if removed and _is_used(transport, name):
            # The accumulator was created, and its name listed, after the first EXISTS and before SREM.
            transport.call("SADD", NAMES, name)
            removed = 0
        return removed
    if leftover.why in ("acknowledged", "attempts", "blobs"):
        return _finish(transport, leftover)
    removed = 0
    items = list(leftover.keys.items())
    for start in range(0, len(items), KEYS_PER_CALL):
        some = dict(items[start : start + KEYS_PER_CALL])
        reply = scripts.remove_orphans(garbage=list(some), owners=list(some.values()))
        removed += reply.number if reply.outcome == "removed" else 0
    return removed


def _unused(transport: Transport, leftover: Leftover) -> list[str]:
    """Returns which parts of blobs in partitions nothing lists, and never will.

    After a failover to a replica that lagged behind, the leader may have forgotten an update that its chief is about to
    register again, under the same id. So the numbers of the blobs are used up before it is asked once more.
    """
    keys = ParameterKeys(leftover.name)
    try:
        if not use_up_numbers(transport, keys, max(map(_number_of, leftover.keys.values()))):
            return []
        held = _held_blobs(transport, keys)
    except (CorruptDataError, NotFoundError):
        return []
    return [] if held is None else [key for key, blob in leftover.keys.items() if blob not in held]


def _number_of(blob: str) -> int:
    """Returns the number of the attempt that a blob is of: its id is "VERSION-NUMBER-SORT"."""
    number = blob.rpartition("-")[0].rpartition("-")[2]
    return int(number) if number.isdecimal() and len(number) <= 15 else 0


def _finish(transport: Transport, leftover: Leftover) -> int:
    """Finishes an acknowledgement, or sweeps attempts. Returns 1 if anything was left to do."""
    if leftover.why == "blobs":
        return _end_attempts(transport, read_partitions(transport, ParameterKeys(leftover.name)))
    keys = with_partitions(transport, Keys(leftover.name))
    if leftover.why == "attempts":
        return _end_attempts(transport, keys)
    scripts = Scripts(transport, keys, OF_ACCUMULATORS, incarnation=leftover.incarnation)
    return int(finish_acknowledgement(keys, scripts, leftover.token))


def _end_attempts(transport: Transport, keys: PartitionedKeys) -> int:
    """Removes the parts of attempts that are over. Returns 1 if there were any."""
    if keys.partitions:
        return int(sweep(transport, keys) > 0)
    # The attempts belong to an earlier incarnation, whose partitions are no longer listed. If another one with
    # partitions has just begun, this gives its attempts up, and their writers begin new ones.
    return int(transport.call("UNLINK", keys.attempts))


def _unlink(transport: Transport, objects: list[str]) -> int:
    # One to a command, because freeing a large string takes the server some time: others get between.
    return sum(map(int, transport.pipeline([("UNLINK", key) for key in objects]))) if objects else 0
