"""Who may do what: the rules of a server's access control list (ACL) for each role.

A script runs with the rights of whoever sends it, so a role gets every command that its scripts run, on the keys that
those touch, and no others. What keeps roles apart are the keys: a script is refused before it begins if one of the keys
that it is sent with isn't the user's. docs/reliability-server.md says what this can't keep apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redisacc import _arguments
from redisacc._keys import NAMES, Keys
from redisacc.errors import InvalidArgumentError


@dataclass(frozen=True)
class Role:
    """What a role may do.

    Attributes:
        does: for people.
        commands: what it may run on the keys of its accumulators, by itself or inside a script.
        names_commands: what it may run on the set of all names.
        listens: whether it may subscribe to its accumulators' channels; who may publish there may.
        everything: whether all keys of its accumulators are its, and not only those of the current round.
    """

    does: str
    commands: str
    names_commands: str = "sismember"
    takes: bool = False
    applies: bool = False
    everything: bool = False


_OPENS = "evalsha exists hmget hset hrandfield hdel time info"
_APPLIES = "hget hincrby hlen hstrlen strlen publish hdel set get rename persist pexpire unlink hscan"
_TAKES = (
    "hget hincrby hlen strlen publish hdel hscan get rename pexpire pttl unlink zadd zrange zrank zrem zscore "
    "subscribe unsubscribe"
)
_LOOKS = (
    "hmget hget hgetall hkeys hvals hlen hscan zrange get getrange strlen exists type pttl time subscribe unsubscribe "
    "info"
)
ROLES = {
    "worker": Role("opens, creates and applies", f"{_OPENS} {_APPLIES}", "sismember sadd", applies=True),
    "taker": Role("opens, creates, takes, recovers, sets the step", f"{_OPENS} {_TAKES}", "sismember sadd", takes=True),
    "observer": Role("looks, and listens to events", _LOOKS, "sismember smembers sscan", everything=True),
    "operator": Role(
        "all of that, deletes, cleans up, and loads the scripts",
        f"{_OPENS} {_APPLIES} {_TAKES} {_LOOKS} eval script|load scan memory|usage persist ping wait",
        "sismember sadd smembers sscan srem",
        everything=True,
    ),
}


def rules(role: str, pattern: str, *, selectors: bool = True, eval_: bool = False, wait: bool = False) -> list[str]:
    """The rules of a role for the accumulators whose names match a pattern, in the order in which they must be set.

    Args:
        pattern: a glob of the server's: ``*``, ``?``, ``[ab]``; a backslash before one of them takes it literally.
        selectors: whether the server knows rules in brackets (Redis 7.0, Valkey). Without them, only operators and
            observers may touch the set of names: for others they couldn't be kept from deleting it.
        eval_: whether the role may load the scripts itself, by running them. Otherwise somebody has to load them.
        wait: whether it may wait for replicas (``min_replicas=``).
    """
    given = ROLES[role]
    pattern = _arguments.text(pattern, "pattern", max_bytes=512)
    if any(character.isspace() for character in pattern):
        raise InvalidArgumentError(f"a pattern in an access control list can't hold spaces: {pattern!r}")
    commands = dict.fromkeys(given.commands.split())
    if eval_:
        commands["eval"] = None
    if wait:
        commands["wait"] = None
    lists_names = not selectors and given.everything
    if lists_names:
        commands |= dict.fromkeys(given.names_commands.split())
    keys = _keys(given, Keys(pattern))
    channels = [Keys(pattern).events, Keys(pattern).wake]
    return [
        "on",
        "resetkeys",
        "resetchannels",
        *(["clearselectors"] if selectors else []),
        "-@all",
        *(f"~{key}" for key in keys),
        *([f"~{NAMES}"] if lists_names else []),
        *(f"&{channel}" for channel in channels),
        *(f"+{command}" for command in commands),
        *([f"({' '.join(f'+{c}' for c in given.names_commands.split())} ~{NAMES})"] if selectors else []),
    ]


def _keys(role: Role, keys: Keys) -> Sequence[str]:
    if role.everything:
        return [keys.record, f"{keys.record}:*"]
    current = keys.current
    found = [keys.record, current.sums, current.parked, current.small, current.workers, keys.clients]
    found.append(f"{keys.record}:part:*")
    if role.applies:
        found += [f"{keys.record}:staged:*", keys.folding]
    if role.takes:
        found += [keys.queue, keys.takers, keys.taken, f"{keys.taken}:*"]
    return found
