"""Errors that a server replies with: which of them pass by themselves, and what the others become."""

from __future__ import annotations

import re

from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TryAgainError,
)

from redisacc._text import printable
from redisacc.errors import CorruptDataError, NotPermittedError, ServerError, ServerOutOfMemoryError

# Refusals that pass by themselves: a server that runs a long script, a cluster that moves keys, a master that has just
# been demoted. A new connection, through Sentinel or a name that moves, finds the replica that was promoted.
PASSING = {
    "BUSY": "is busy",
    "LOADING": "is still loading its data",
    "TRYAGAIN": "is moving the key",
    "CLUSTERDOWN": "belongs to a cluster that is down",
    "MASTERDOWN": "is a replica that has lost its master",
    "READONLY": "is a read-only replica: name its master, or go through Sentinel",
}
# The length at which the text of a refusal is cut.
_LONGEST_REASON = 500

# redis-py removes the code from the message of these.
_CODES = (
    (BusyLoadingError, "LOADING"),
    (ReadOnlyError, "READONLY"),
    (OutOfMemoryError, "OOM"),
    (NoPermissionError, "NOPERM"),
    (TryAgainError, "TRYAGAIN"),
    (ClusterDownError, "CLUSTERDOWN"),
    (MasterDownError, "MASTERDOWN"),
)
# How Redis 7 and Valkey say that a user may run a script, but not one of the commands in it, or not on that key.
_FORBIDDEN_IN_SCRIPT = re.compile(r"The user executing the script can't|ACL failure in script")
# Servers before 7.0 wrap the refusal of a command inside a script.
_IN_SCRIPT = re.compile(r"@user_script: ?\d+: -(?P<code>[A-Z]+) ")


def code_of(error: BaseException) -> str:
    """Returns the code of a refusal, such as "OOM", even where redis-py removed it or an old server wrapped it."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    text = str(error)
    if _FORBIDDEN_IN_SCRIPT.search(text):
        return "NOPERM"
    wrapped = _IN_SCRIPT.search(text)
    return wrapped["code"] if wrapped else text.partition(" ")[0]


def refusal_of(error: Exception) -> ServerError | CorruptDataError:
    """Returns the error that callers get for a refusal of the server."""
    defuse(error)
    message = reason_of(error)
    if "WRONGTYPE" in message:
        return CorruptDataError(f"a key of the accumulator has another type than redisacc gives it: {message}")
    if "not an integer" in message:
        return CorruptDataError(f"a field of the accumulator's record is not the number that belongs there: {message}")
    code = code_of(error)
    if code == "NOPERM":
        return NotPermittedError(
            f"the server's access control list refuses this user: {message}. `redisacc acl` prints rules that suffice"
        )
    if code == "OOM":
        return ServerOutOfMemoryError(
            "the server has reached its maxmemory and stores nothing more. Take rounds, which still works and frees "
            f"memory, or give the server more ({message})"
        )
    return ServerError(f"the server refused: {message}")


def reason_of(error: BaseException) -> str:
    """Returns the text of an error, printable, or its type if it has none."""
    return printable(str(error).strip(), _LONGEST_REASON) or type(error).__name__


def defuse(error: BaseException) -> None:
    """Makes the texts of an error and of its causes printable: they are the server's, and tracebacks print them."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, RedisError):
            link.args = tuple(printable(arg) if isinstance(arg, str) else arg for arg in link.args)
        link = link.__cause__ or link.__context__
