"""Access rules: the rules of a server's access control list (ACL) for each role.

A script runs with the rights of the user who sends it, so a role gets every command that its scripts run, on the keys
that these touch, and no others. The keys separate the roles: a script is refused before it begins if the user has no
right to one of its keys. docs/reference/access-control.md explains what these rules cannot separate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redisacc._data import validation
from redisacc._format.keys import ANY_PARTITION, NAMES, PREFIX, Keys, ParameterKeys
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError


@dataclass(frozen=True)
class Role:
    """A role and its rights.

    Attributes:
        does: a description of the role, for people.
        commands: the commands that it may run on the keys of its accumulators, directly or inside a script.
        names_commands: the commands that it may run on the set of all names.
        takes: whether it has the keys of the queue and of taken rounds, and publishes parameters.
        applies: whether it has the keys of staged parts and the lock for compacting.
        reduces: whether it has the keys of staged parts and of sums, and the lease of the reducer; and may read the
            record of parameters, and read and write their parts.
        everything: whether it has all keys of its accumulators, and not only those that its work needs.
    """

    does: str
    commands: str
    names_commands: str = "sismember"
    takes: bool = False
    applies: bool = False
    reduces: bool = False
    everything: bool = False


_OPENS = "evalsha exists hmget hset hrandfield hdel time info"
_APPLIES = (
    "hget hincrby hlen hstrlen strlen publish hdel set get rename persist pexpire unlink hscan zadd zrangebyscore "
    "zrem zscore"
)
_TAKES = (
    "hget hincrby hlen strlen publish hdel hscan get rename pexpire pttl unlink zadd zrange zrank zrem zscore "
    "zrangebyscore llen lpush lrange ltrim subscribe unsubscribe"
)
# Commands of the scripts that publish a version and delete earlier ones.
_PUBLISHES = (
    "hmget hsetnx hincrby hdel set rename persist pexpire pttl unlink strlen publish get exists zadd zscore "
    "zcard zrangebyscore zrem"
)
_REDUCES = (
    "evalsha exists hget hmget hset hscan get set strlen unlink pexpire publish time info psubscribe punsubscribe "
    "subscribe unsubscribe"
)
# Commands by which a worker reads parameters, and those by which a reducer also writes parts of the next version. Only
# selectors can restrict a role to these for some keys.
_READS_PARAMETERS = "hmget get strlen"
_WRITES_PARTS = "get set strlen"
_READS_RECORD = "hmget"
# Commands by which a taker reads parts before their gradients are accepted.
_READS_STAGED = "get strlen"
# Commands by which handles and the scripts of lua/inspect read.
_LOOKS = (
    "hmget hget hgetall hkeys hvals hlen hstrlen hscan zcard zrange llen lrange get getrange strlen exists type pttl "
    "time subscribe unsubscribe psubscribe punsubscribe info"
)
ROLES = {
    "worker": Role(
        "opens, creates and applies; reads parameters",
        f"{_OPENS} {_APPLIES} subscribe unsubscribe",
        "sismember sadd",
        applies=True,
    ),
    "taker": Role(
        "opens, creates, takes, recovers, sets the step and the quorum; publishes parameters",
        f"{_OPENS} {_TAKES} {_PUBLISHES}",
        "sismember sadd",
        takes=True,
    ),
    "reducer": Role(
        "adds up large gradients next to the server, and updates parameters with them", _REDUCES, reduces=True
    ),
    "observer": Role("reads, and listens to events", _LOOKS, "sismember smembers sscan", everything=True),
    "operator": Role(
        "all of the above; also deletes, cleans up, and loads the scripts",
        f"{_OPENS} {_APPLIES} {_TAKES} {_PUBLISHES} {_LOOKS} eval script|load scan memory|usage persist ping "
        "wait append",
        "sismember sadd smembers sscan srem",
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
            them, only operators and observers may touch the set of names, because nothing could keep the other roles
            from deleting it.
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
    commands = dict.fromkeys(given.commands.split())
    if eval_:
        commands["eval"] = None
    if wait:
        # Before it waits for replicas of a partition, a writer appends nothing to the parts that these are to have.
        commands |= dict.fromkeys(("wait", "append") if given.applies or given.takes else ("wait",))
    if cluster:
        commands |= dict.fromkeys(_FINDS_NODES)
        if selectors:
            # Servers without selectors do not know these either, and refuse rules with unknown commands.
            commands |= dict.fromkeys(sharded for name, sharded in _SHARDED.items() if name in commands)
    lists_names = not selectors and given.everything
    if lists_names:
        commands |= dict.fromkeys(given.names_commands.split())
    keys = _keys(given, Keys(pattern))
    parameters = ParameterKeys(pattern)
    of = Keys(pattern)
    channels = [of.events, of.wake, of.calls, parameters.events, parameters.updated_of(0)]
    channels += [_in_partitions(of, channel) for channel in ("wake", "updated")]
    blobs = [f"{parameters.record}:object:*", _in_partitions(of, "blob:*")]
    selected: list[tuple[str, list[str]]] = []
    if given.applies:
        selected = [(_READS_PARAMETERS, [parameters.record, *blobs, parameters.deleted])]
    elif given.reduces:
        selected = [(_READS_RECORD, [parameters.record]), (_WRITES_PARTS, blobs)]
    elif given.takes and selectors:
        # A waiting take looks ahead. It could also write these parts without selectors, so it does without them there.
        selected = [(_READS_STAGED, [f"{of.record}:staged:*"])]
    if not selectors:
        keys += [key for _, of in selected for key in of]
        selected = []
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
        *(_selector(commands_of, of) for commands_of, of in selected),
        *([_selector(given.names_commands, [NAMES])] if selectors else []),
    ]


def _selector(commands: str, keys: Sequence[str]) -> str:
    return f"({' '.join([f'+{command}' for command in commands.split()] + [f'~{key}' for key in keys])})"


def _in_partitions(keys: Keys, what: str) -> str:
    """Returns the pattern of keys, or of a channel, in partitions."""
    return f"{PREFIX}{{{keys.name}/{ANY_PARTITION}}}:partition:{what}"


def _keys(role: Role, keys: Keys) -> list[str]:
    if role.everything:
        return [keys.record, f"{keys.record}:*", _in_partitions(keys, "*")]
    current = keys.current
    if role.reduces:
        read = [keys.record, current.buffered, f"{keys.record}:part:*", f"{keys.record}:staged:*"]
        return [*read, _in_partitions(keys, "part:*"), *_reduces(keys)]
    found = [keys.record, current.sums, current.buffered, current.inline, current.workers, keys.sessions]
    # A role that applies or takes gradients may run a worker or a chief, and these hold leases.
    # They also find out whether a training was deleted or lost, and say what they have of a lost one.
    found += [f"{keys.record}:part:*", keys.crew, keys.attempts, _in_partitions(keys, "part:*")]
    found += [ParameterKeys(keys.name).claims]
    if role.applies:
        found += [f"{keys.record}:staged:*", keys.compacting]
    if role.takes:
        found += [keys.queue, keys.takers, keys.taken, keys.recovered, f"{keys.taken}:*"]
        found += _reduces(keys)
        parameters = ParameterKeys(keys.name)
        found += [parameters.record, f"{parameters.record}:object:*"]
        found += [parameters.attempts, parameters.deleted, parameters.history, _in_partitions(keys, "blob:*")]
    return found


def _reduces(keys: Keys) -> list[str]:
    """Returns the patterns of the leases of reducers, of the parts of sums, and of the sums of their squares."""
    lease = keys.reducer(None)
    found = [lease, f"{lease}:*"]
    for sort in ("sum", "squares"):
        found += [f"{keys.record}:{sort}:*", _in_partitions(keys, f"{sort}:*")]
    return found
