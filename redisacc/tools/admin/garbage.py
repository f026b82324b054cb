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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from redisacc._format.keys import ANY_PARTITION, DELETING, NAMES, PREFIX, Keys, ParameterKeys, PartitionedKeys
from redisacc._format.stored_text import clock_ms
from redisacc._protocol.lifecycle.deletion import delete
from redisacc._protocol.parameters.deletion import delete_parameters, listed_blobs
from redisacc._protocol.parts.sweep import listed_attempts, sweep
from redisacc._protocol.rounds.current_round import OfName, with_partitions
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
_ROUND = re.compile(r"taken:([^:]+):(?:sums|buffered|inline|workers)")
# Every key of an accumulator but its record.
_OURS = re.compile(
    rf"{_PART.pattern}|{_ROUND.pattern}|(?:sum|squares):[0-9a-f]+:\d+|reducer(?::\d+)?"
    "|sums|buffered|inline|workers|sessions|queue|takers|taken|recovered|compacting|crew|attempts"
)

_PARAMETERS = re.compile(r"parameters(?::(?:object:[\w-]+:\d+|attempts|deleted|claims|history))?")
# How the keys of parts in partitions continue after the hash tag.
_ELSEWHERE = "partition:"
_BLOB_IN_PARTITION = re.compile(r"partition:blob:([\w-]+):\d+")

# The causes of garbage.
WORDS = {
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
        keys: its keys.
        remove: removes it if it is still garbage. Returns how many keys, names, rounds or deletions were removed.
        nbytes: the memory of the keys in bytes.
    """

    name: str
    why: str
    keys: Sequence[str]
    remove: Callable[[], int]
    nbytes: int = 0

    @property
    def items(self) -> int:
        """How many items ``remove`` counts for it."""
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
    for owner, parts in _in_partitions(transport, f"{partitions}:part:*", _IN_PARTITION):
        found += _of_partitions(transport, Keys(owner), "partition", parts, _held_attempts)
    for owner, parts in _in_partitions(transport, f"{partitions}:blob:*", _BLOB_IN_PARTITION):
        found += _of_partitions(transport, ParameterKeys(owner), "blob", parts, _held_blobs)
    for owner, pairs in sorted(keys_of.items()):
        of_parameters = [pair for pair in pairs if _PARAMETERS.fullmatch(pair[1])]
        others = [pair for pair in pairs if not _PARAMETERS.fullmatch(pair[1])]
        if others:
            found += _of_one(transport, Keys(owner), others)
        if of_parameters:
            found += _of_parameters(transport, ParameterKeys(owner), of_parameters)
    for raw in sorted(listed(transport, pattern)):
        # As bytes, because any client can list a name that is not UTF-8. No accumulator has such a name.
        if not _is_used(transport, raw):
            shown = raw.decode(errors="backslashreplace")
            found.append(Leftover(shown, "name", [], partial(_remove_name, transport, raw)))
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


def _incarnation(transport: Transport, keys: Keys | ParameterKeys) -> str:
    """Returns the incarnation of an accumulator or of parameters; "" if there is none."""
    return (transport.call("HGET", keys.record, "incarnation") or b"").decode(errors="replace")


def _of_one(transport: Transport, keys: Keys, pairs: list[tuple[str, str]]) -> list[Leftover]:
    kind = transport.call("TYPE", keys.record)
    endless = _endless(transport, pairs)
    if kind == b"none":
        orphans = {key: "record" for key, suffix in endless if _OURS.fullmatch(suffix)}
        return [_orphaned(transport, keys, "record", "", orphans)] if orphans else []
    incarnation = _incarnation(transport, keys) if kind == b"hash" else ""
    if not incarnation:
        # The key was not written by redisacc.
        return []
    if incarnation.startswith(DELETING):

        def finish() -> int:
            delete(transport, keys, incarnation.removeprefix(DELETING))
            return 1

        return [Leftover(keys.name, "deletion", [key for key, what in pairs if _OURS.fullmatch(what)], finish)]
    return _of_a_live_one(transport, keys, incarnation, endless)


def _of_partitions(
    transport: Transport,
    keys: OfName,
    why: str,
    pairs: list[tuple[str, str]],
    held_by: Callable[[Transport, OfName], set[str] | None],
) -> list[Leftover]:
    """Returns the garbage among the parts that an accumulator, or parameters, have in partitions.

    The leader is asked after the parts have been seen, because a part is written after its attempt was registered. A
    gradient's attempt that it does not know now was never counted, or its round is acknowledged, and it will not know
    it again. So no script has to check that again.

    Args:
        transport: the way to the nodes.
        keys: the keys of the accumulator, or of the parameters.
        why: the cause, if there is garbage.
        pairs: the key of each part, and the id of its attempt, or of its blob.
        held_by: returns the ids that are in use; None if that is unknown.
    """
    endless = _endless(transport, pairs)
    incarnation = _incarnation(transport, keys)
    if incarnation.startswith(DELETING):
        # Finishing the deletion removes those that it knows; the next search finds the others.
        return []
    # Asked once, the list of attempts may come from a leader that had counted an attempt already, and what is counted
    # from its replica, which has not heard of that and lists it. Of two answers, one comes from one server.
    for _ in range(2 if incarnation else 0):
        held = held_by(transport, keys)
        endless = [] if held is None else [pair for pair in endless if pair[1] not in held]
    if not endless:
        return []
    orphans = dict(endless)
    if isinstance(keys, ParameterKeys):
        return [Leftover(keys.name, why, list(orphans), partial(_remove_blobs, transport, keys, orphans))]
    return [Leftover(keys.name, why, list(orphans), partial(_unlink, transport, list(orphans)))]


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


def _held_blobs(transport: Transport, keys: ParameterKeys) -> set[str] | None:
    """Returns the ids of all blobs that the record or an attempt lists; None if redisacc did not write one of them."""
    try:
        # In this order: a blob that is published meanwhile moves from the list to the record.
        listed_now = listed_attempts(transport, keys)
        # Without partitions, the list belongs to an earlier incarnation.
        held = {attempt.id for attempt in listed_now} if with_partitions(transport, keys).partitions else set()
        return held | {blob.id for blob in listed_blobs(transport, keys)}
    except CorruptDataError:
        return None


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
        marked = [key for key, _ in pairs if key != keys.deleted]

        def finish() -> int:
            # Those that the record lists, and then, without it, those that it does not.
            delete_parameters(transport, keys, incarnation.removeprefix(DELETING))
            _unlink(transport, [key for key in marked if key != keys.record])
            return 1

        return [Leftover(keys.name, "parameters", marked, finish)]
    found: list[Leftover] = []
    if transport.call("EXISTS", keys.record):
        try:
            current = with_partitions(transport, keys)
            listed = {key for blob in listed_blobs(transport, current) for key in blob.keys(current)}
        except CorruptDataError:
            # It is unknown which parts are in use, so none of them is garbage.
            return []
        if not listed and keys.attempts not in objects:
            # Deleted since then.
            return []
        # Without partitions, a list belongs to an earlier incarnation.
        over = keys.attempts in objects and (not current.partitions or _has_due_attempts(transport, keys))
        objects = [key for key in objects if key not in listed and key not in (keys.attempts, keys.history)]
        if over:
            found.append(_attempts(transport, keys, "blobs"))
    if objects:
        found.append(Leftover(keys.name, "object", objects, partial(_unlink, transport, objects)))
    return found


def _has_due_attempts(transport: Transport, keys: PartitionedKeys) -> bool:
    """Returns whether the leases of any attempts are over."""
    now_ms = clock_ms(transport.call("TIME", beside=keys.record))
    return bool(transport.call("ZRANGEBYSCORE", keys.attempts, 0, now_ms, "LIMIT", 0, 1))


def _of_a_live_one(transport: Transport, keys: Keys, incarnation: str, pairs: list[tuple[str, str]]) -> list[Leftover]:
    taken = {token.decode(errors="replace"): text for token, text in scan(transport, keys.taken).items()}
    found = [
        Leftover(keys.name, "acknowledged", [], partial(_acknowledge, transport, keys, incarnation, token))
        for token, text in taken.items()
        if text.startswith(b"acknowledged ")
    ]
    # Each of them was over when its lease ended, and has not been swept.
    if _has_due_attempts(transport, keys):
        found.append(_attempts(transport, keys, "attempts"))
    sorts: dict[str, dict[str, str]] = {"round": {}, "part": {}}
    for key, suffix in pairs:
        if (of_round := _ROUND.fullmatch(suffix)) is not None:
            if of_round[1] not in taken:
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
    return found + [_orphaned(transport, keys, why, incarnation, orphans) for why, orphans in sorts.items() if orphans]


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


def _orphaned(transport: Transport, keys: Keys, why: str, incarnation: str, orphans: dict[str, str]) -> Leftover:
    """Returns keys that a script removes if they still have no owner.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        why: the cause.
        incarnation: the incarnation of the existing accumulator; "" if there is none.
        orphans: key → its owner, in the form that ``lua/remove_orphans.lua`` expects.
    """

    def remove() -> int:
        scripts, removed = Scripts(transport, keys, OF_ACCUMULATORS, incarnation=incarnation), 0
        for start in range(0, len(orphans), KEYS_PER_CALL):
            some = dict(list(orphans.items())[start : start + KEYS_PER_CALL])
            reply = scripts.remove_orphans(garbage=list(some), owners=list(some.values()))
            removed += reply.number if reply.outcome == "removed" else 0
        return removed

    return Leftover(keys.name, why, list(orphans), remove)


def _remove_name(transport: Transport, name: bytes) -> int:
    removed = int(transport.call("SREM", NAMES, name)) if not _is_used(transport, name) else 0
    if removed and _is_used(transport, name):
        # The accumulator was created, and its name listed, after the first EXISTS and before SREM.
        transport.call("SADD", NAMES, name)
        removed = 0
    return removed


def _remove_blobs(transport: Transport, keys: ParameterKeys, blobs: Mapping[str, str]) -> int:
    """Removes parts of blobs in partitions that nothing lists, and never will.

    After a failover to a replica that lagged behind, the leader may have forgotten an update that its chief is about to
    register again, under the same id. So the numbers of the blobs are used up before it is asked once more.
    """
    try:
        if not use_up_numbers(transport, keys, max(map(_number_of, blobs.values()))):
            return 0
        held = _held_blobs(transport, keys)
    except (CorruptDataError, NotFoundError):
        return 0
    return 0 if held is None else _unlink(transport, [key for key, blob in blobs.items() if blob not in held])


def _number_of(blob: str) -> int:
    """Returns the number of the attempt that a blob is of: its id is "VERSION-NUMBER-SORT"."""
    number = blob.rpartition("-")[0].rpartition("-")[2]
    return int(number) if number.isdecimal() and len(number) <= 15 else 0


def _acknowledge(transport: Transport, keys: Keys, incarnation: str, token: str) -> int:
    """Finishes an acknowledgement. Returns 1 if anything was left to do."""
    keys = with_partitions(transport, keys)
    return int(finish_acknowledgement(keys, Scripts(transport, keys, OF_ACCUMULATORS, incarnation=incarnation), token))


def _attempts(transport: Transport, keys: OfName, why: str) -> Leftover:
    """Returns the attempts that are over, which are removed with their parts."""

    def remove() -> int:
        current = with_partitions(transport, keys)
        if current.partitions:
            return int(sweep(transport, current) > 0)
        # The attempts belong to an earlier incarnation, whose partitions are no longer listed. If another one with
        # partitions has just begun, this gives its attempts up, and their writers begin new ones.
        return int(transport.call("UNLINK", keys.attempts))

    return Leftover(keys.name, why, [keys.attempts], remove)


def _unlink(transport: Transport, objects: list[str]) -> int:
    # One to a command, because freeing a large string takes the server some time: others get between.
    return sum(map(int, transport.pipeline([("UNLINK", key) for key in objects]))) if objects else 0
