"""Access rules: the rules of a server's access control list (ACL) for each role.

A role declares the scripts that it runs, and the commands that it sends besides. Everything else follows: a script runs
with the rights of the user who sends it, so a role gets every command in its scripts; and a script is refused before it
begins if the user has no right to one of its keys, which are in its header. With selectors, a command may be used only
on keys of its type, and what removes a key only on those that the role removes.
docs/reference/access-control.md explains what these rules cannot separate.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from redisacc._arrays import validation
from redisacc._format.keys import ANY_PARTITION, NAMES, PREFIX
from redisacc._text import shown
from redisacc._wire.script_loader import load
from redisacc.errors import InvalidArgumentError

# What keys are called in the headers of scripts, and here.
_BASE = f"{PREFIX}{{NAME}}"
_IN_PARTITION = f"{PREFIX}{{NAME/{ANY_PARTITION}}}:partition"
_PARTS = (f"{_BASE}:part:*", f"{_IN_PARTITION}:part:*")
_PLACES = f"{_BASE}:place:*"
_SUMS = tuple([f"{base}:{sort}:*" for base in (_BASE, _IN_PARTITION) for sort in ("sum", "squares")])
_BLOBS = (f"{_BASE}:parameters:object:*", f"{_IN_PARTITION}:blob:*")
_ROUND = (f"{_BASE}:sums", f"{_BASE}:buffered", f"{_BASE}:inline", f"{_BASE}:workers", f"{_BASE}:taken:*")
_QUEUE = (f"{_BASE}:queue", f"{_BASE}:takers")
_REDUCERS = (f"{_BASE}:reducer", f"{_BASE}:reducer:*")
_CREW, _CLAIMS, _DELETED = f"{_BASE}:crew", f"{_BASE}:parameters:claims", f"{_BASE}:parameters:deleted"
_COMPACTING, _PARAMETERS, _HISTORY = f"{_BASE}:compacting", f"{_BASE}:parameters", f"{_BASE}:parameters:history"
_CHANNELS = (
    *(f"{_BASE}:events", f"{_BASE}:wake", f"{_BASE}:calls", f"{_BASE}:parameters:events"),
    *(f"{_BASE}:parameters:updated", f"{_IN_PARTITION}:wake", f"{_IN_PARTITION}:updated"),
)
# For each type, patterns of its keys, of those that are none of an earlier type; and of its commands.
_TYPES = (
    (re.compile(r".*:(queue|attempts|history)"), re.compile(r"z.*")),
    (re.compile(r".*:recovered"), re.compile(r"l(len|push|range|trim)")),
    (
        re.compile(r".*:(part|place|sum|squares|object|blob):.*|.*:(compacting|deleted|guard)"),
        re.compile(r"get|set|strlen|append|getrange"),
    ),
    (re.compile(r".*"), re.compile(r"h.*")),
)
# The commands by which a role reads what it only reads; and those for any type that can remove a key.
_READS = ("hmget", "hget", "hscan", "get", "strlen", "exists")
_REMOVES = re.compile(r"unlink|rename|pexpire|persist")
# What a name of a private accumulator looks like.
_PRIVATE = "private-0123456789abcdef"
_IN_LUA = re.compile(r"redis\.p?call\('([A-Z]+)'")


@dataclass(frozen=True)
class Role:
    """A role and its rights.

    Attributes:
        scripts: the scripts that it runs.
        sends: the commands that it sends itself.
        keys: patterns of the keys on which it uses these, besides those of its scripts.
        removes: patterns of the keys that it may remove, or give an expiry.
        reads: patterns of keys that it only reads.
        names: the commands that it may run on the set of all names.
        everything: whether it has all keys of its accumulators, and not only those that its work needs.
    """

    scripts: str = ""
    sends: str = ""
    keys: tuple[str, ...] = ()
    removes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    names: str = "sismember"
    everything: bool = False


_OPENS = "time info exists hget hmget hset publish subscribe unsubscribe"
_LOOKING = (
    "time info exists pttl type hget hmget hgetall hkeys hvals hlen hstrlen hscan zcard zrange llen lrange get "
    "getrange strlen subscribe unsubscribe psubscribe punsubscribe"
)
_LEASES = "hold_lease release_lease"
_WORKER = Role(
    f"open apply stage register commit renew_upload resolve sweep {_LEASES}",
    f"{_OPENS} hscan get set strlen unlink persist pexpire",
    (*_PARTS, _COMPACTING),
    (*_PARTS, _PLACES, _COMPACTING, _CREW),
    (_PARAMETERS, *_BLOBS, _DELETED),
    "sismember sadd",
)
_TAKER = Role(
    "open take leave acknowledge recover resolve set_global_step set_quorum sweep publish register_version amend claim "
    f"give_up {_LEASES}",
    f"{_OPENS} hsetnx hscan hlen hexists get set strlen unlink persist pexpire zrange hdel lrange",
    (*_PARTS, *_SUMS, *_BLOBS, *_REDUCERS),
    (*_PARTS, *_SUMS, *_BLOBS, *_ROUND, *_QUEUE, _CREW, _CLAIMS, _PARAMETERS, _HISTORY, f"{_PARAMETERS}:attempts"),
    names="sismember sadd",
)
_REDUCER = Role(
    "hold_reducer release_reducer",
    "time info exists hget hmget hscan get set strlen unlink pexpire publish psubscribe punsubscribe subscribe "
    "unsubscribe",
    (*_SUMS, *_BLOBS, *_REDUCERS),
    (*_SUMS, *_REDUCERS),
    (_BASE, f"{_BASE}:buffered", _PARAMETERS, *_PARTS),
)
ROLES = {
    "worker": _WORKER,
    "taker": _TAKER,
    "reducer": _REDUCER,
    "observer": Role(sends=_LOOKING, names="sismember smembers sscan", everything=True),
    "operator": Role(
        f"{_WORKER.scripts} {_TAKER.scripts} {_REDUCER.scripts} delete remove_orphans forget_worker",
        f"{_WORKER.sends} {_TAKER.sends} {_LOOKING} eval script|load scan memory|usage ping wait append",
        names="sismember sadd smembers sscan srem",
        everything=True,
    ),
}

# Commands by which every role finds the node that owns a slot.
_FINDS_NODES = ("cluster|slots", "asking")
# Commands about channels → the same for channels that belong to slots, as they do in clusters from version 7 on.
_SHARDED = {"publish": "spublish", "subscribe": "ssubscribe", "unsubscribe": "sunsubscribe"}


def rules(
    role: str,
    pattern: str,
    *,
    selectors: bool = True,
    eval_: bool = False,
    wait: bool = False,
    cluster: bool = False,
) -> list[str]:
    """Returns the rules of a role for the accumulators whose names match a pattern.

    ACL SETUSER has to apply them in this order.

    Args:
        role: a key of ``ROLES``.
        pattern: a glob of the server: ``*``, ``?``, ``[ab]``; a backslash before one of them takes it literally.
        selectors: whether the server supports selectors, which are rules in brackets (Redis 7.0, Valkey). Without
            them, a role may use all of its commands on all of its keys, and only operators and observers may touch the
            set of names, because nothing could keep the other roles from deleting it.
        eval_: whether the role may load the scripts itself, by running them. Otherwise another user has to load them.
        wait: whether the role may wait for replicas (``min_replicas=``).
        cluster: whether the server is a node of a Redis Cluster.

    Raises:
        InvalidArgumentError: the pattern is not a possible name, or contains a space.
    """
    given = ROLES[role]
    pattern = validation.text(pattern, "pattern", max_bytes=512)
    if any(character.isspace() for character in pattern):
        raise InvalidArgumentError(
            f"pattern must have no spaces, because access control lists cannot express them, not {shown(pattern)}"
        )
    commands = dict.fromkeys(commands_of(given))
    if eval_:
        commands["eval"] = None
    if wait:
        # Before it waits for replicas of a partition, a writer appends nothing to the parts that these are to have.
        commands |= dict.fromkeys(("wait", "append") if given.scripts and given.names != "sismember" else ("wait",))
    if cluster:
        commands |= dict.fromkeys(_FINDS_NODES)
        if selectors:
            # Servers without selectors do not know these either, and refuse rules with unknown commands.
            commands |= dict.fromkeys(sharded for name, sharded in _SHARDED.items() if name in commands)
    keys = dict.fromkeys(_keys_of(given))
    lists_names = not selectors and given.everything
    if lists_names:
        commands |= dict.fromkeys(given.names.split())
    inside: list[tuple[Iterable[str], Iterable[str]]] = []
    if not selectors:
        keys |= dict.fromkeys(given.reads)
    elif not given.everything:
        if fnmatch.fnmatchcase(_PRIVATE, pattern):
            # Each key of a private accumulator has an expiry, which its scripts extend.
            given = replace(given, removes=tuple(keys))
        inside = list(_selectors(given, commands, keys))
        moved = {command for some, _ in inside for command in some}
        commands = {command: None for command in commands if command not in moved}
        if given.reads:
            inside.append((_READS, given.reads))
    return [
        "on",
        "resetkeys",
        "resetchannels",
        *(["clearselectors"] if selectors else []),
        "-@all",
        *(f"~{_named(key, pattern)}" for key in keys),
        *([f"~{NAMES}"] if lists_names else []),
        *(f"&{_named(channel, pattern)}" for channel in _CHANNELS),
        *(f"+{command}" for command in commands),
        *(_selector(some, [_named(key, pattern) for key in of]) for some, of in inside),
        *([_selector(given.names.split(), [NAMES])] if selectors else []),
    ]


def commands_of(role: Role) -> list[str]:
    """Returns the commands that a role runs, inside its scripts or by itself."""
    inside = [command.lower() for script in role.scripts.split() for command in _IN_LUA.findall(load(script).text)]
    return sorted({*role.sends.split(), *inside, *(["evalsha"] if role.scripts else [])})


def _keys_of(role: Role) -> list[str]:
    """Returns the patterns of the keys that a role uses and does not only read."""
    if role.everything:
        return [_BASE, f"{_BASE}:*", f"{_IN_PARTITION}:*"]
    of_scripts = [
        re.sub(r":[A-Z]+\b.*", ":*", field.form) for script in role.scripts.split() for field in load(script).keys
    ]
    return sorted({*of_scripts, *role.keys})


def _selectors(role: Role, commands: Iterable[str], keys: Iterable[str]) -> Iterable[tuple[list[str], list[str]]]:
    """Yields commands and the keys on which the role may use them."""
    for of_keys, of_commands in _TYPES:
        found = [key for key in keys if of_keys.fullmatch(key)]
        keys = [key for key in keys if key not in found]
        some = [command for command in commands if of_commands.fullmatch(command)]
        if some and found:
            yield some, found
    yield [command for command in commands if _REMOVES.fullmatch(command)], list(role.removes)


def _named(key: str, pattern: str) -> str:
    return key.replace("{NAME", f"{{{pattern}", 1)


def _selector(commands: Iterable[str], keys: Sequence[str]) -> str:
    return f"({' '.join([f'+{command}' for command in commands] + [f'~{key}' for key in keys])})"
