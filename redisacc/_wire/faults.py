"""How an exchange with a server can fail, what callers are told then, and which failures pass by themselves.

The first errors stay inside redisacc. A signal handler may raise the same errors as a socket, such as TimeoutError.
OSError is therefore not among them: the module that owns a connection raises BrokenError in its place, unless a handler
has raised it.
"""

from __future__ import annotations

import functools
import re

from redisacc._text import printable
from redisacc.errors import CorruptDataError, ServerError

# How Redis 7 and Valkey say that a user may run a script, but not one of the commands in it, or not on that key.
_FORBIDDEN_IN_SCRIPT = re.compile(r"The user executing the script can't|ACL failure in script")
# How a server that was demoted answers WAIT. A client that was waiting already gets UNBLOCKED.
_DEMOTED = "WAIT cannot be used with replica instances"
# Servers before 7.0 wrap the refusal of a command inside a script.
_IN_SCRIPT = re.compile(r"@user_script: ?\d+: -(?P<code>[A-Z]+) ")


class BrokenError(Exception):
    """The connection broke, could not be made, or carried something that cannot be a reply."""


class SilentError(BrokenError):
    """The server did not reply in time."""


class SlotMovedError(BrokenError):
    """A node of a cluster ended a subscription, because the slot of the channel has moved to another node."""


class RejectedError(Exception):
    """The server refuses the connection, because of a wrong password for example."""


# The length at which the text of a refusal is cut.
_LONGEST_REASON = 500


class ReplyError(Exception):
    """The server replied with an error. The text is the server's own, which begins with a code, but printable."""

    def __init__(self, text: bytes | str) -> None:
        super().__init__(printable(text, _LONGEST_REASON))

    @functools.cached_property
    def code(self) -> str:
        """The code of the refusal, such as "OOM", even where an old server wrapped it."""
        text = str(self)
        if _FORBIDDEN_IN_SCRIPT.search(text):
            return "NOPERM"
        if _DEMOTED in text:
            return "READONLY"
        wrapped = _IN_SCRIPT.search(text)
        return wrapped["code"] if wrapped else text.partition(" ")[0]


# How an attempt may fail.
FAULTS = (ReplyError, RejectedError, BrokenError)


def reason_of(error: BaseException) -> str:
    """Returns the text of an error, printable, or its type if it has none."""
    return printable(str(error).strip(), _LONGEST_REASON) or type(error).__name__


class NotPermittedError(ServerError):
    """The server's access control list does not permit the command to the user."""


class WritesRefusedError(ServerError):
    """The server stores nothing for the time being. Nothing was changed."""


# Refusals that pass by themselves: a server that runs a long script, a cluster that moves keys, a master that has just
# been demoted. A new connection, through Sentinel or a name that moves, finds the replica that was promoted.
PASSING = {
    "BUSY": "is busy",
    "LOADING": "is still loading its data",
    "TRYAGAIN": "is moving the key",
    "CLUSTERDOWN": "belongs to a cluster that is down, or has no master for the key: see `redisacc doctor`",
    "MASTERDOWN": "is a replica that has lost its master",
    "UNBLOCKED": "was demoted to a replica while it waited for its replicas",
    "READONLY": "is a read-only replica: name its master, or go through Sentinel",
}

# How a node of a cluster refuses a command for a key that another node has, or may have.
REDIRECTIONS = frozenset(("MOVED", "ASK"))


_ELSEWHERE = (
    # Over a cluster's transport, these never get here.
    "the server is a node of a Redis Cluster, and another node has the key ({}): give redis= a URL "
    "redis+cluster://HOST:PORT, or a redis.RedisCluster"
)
# Codes of refusals → the error that callers get, and its message, which contains the server's text.
_MEANINGS: dict[str, tuple[type[ServerError], str]] = {
    "NOPERM": (
        NotPermittedError,
        "the server's access control list refuses this user: {}. `redisacc acl` prints rules that suffice",
    ),
    "NOAUTH": (
        ServerError,
        "the server asks for a password ({}): name it in the URL, as in redis://:PASSWORD@HOST:PORT, or as "
        "redis://USER:PASSWORD@HOST:PORT",
    ),
    "MOVED": (ServerError, _ELSEWHERE),
    "ASK": (ServerError, _ELSEWHERE),
    "MISCONF": (
        WritesRefusedError,
        "the server stores nothing as long as it cannot save its data: its disk may be full, or its folder gone ({})",
    ),
    "NOREPLICAS": (
        WritesRefusedError,
        "the server stores nothing as long as too few of its replicas are connected ({})",
    ),
    "OOM": (
        WritesRefusedError,
        "the server has reached its maxmemory and stores nothing more. Take rounds, which still works and frees "
        "memory, or give the server more ({})",
    ),
}


def refusal_of(error: ReplyError) -> ServerError | CorruptDataError:
    """Returns the error that callers get for a refusal of the server."""
    message = str(error)
    if "WRONGTYPE" in message:
        return CorruptDataError(f"a key of the accumulator has another type than redisacc gives it: {message}")
    if "not an integer" in message:
        return CorruptDataError(f"a field of the accumulator's record is not the number that belongs there: {message}")
    # A server refuses a long command before it has looked who sends it.
    code = "NOAUTH" if "unauthenticated" in message else error.code
    kind, text = _MEANINGS.get(code, (ServerError, "the server refused: {}"))
    return kind(text.format(message))


def rejection_of(error: RejectedError, address: str) -> ServerError:
    """Returns the error that callers get if the server at an address refuses the connection."""
    message = str(error)
    if "authentication required" in message.lower():
        kind, text = _MEANINGS["NOAUTH"]
        return kind(text.format(message))
    return ServerError(f"{address} refuses the connection: {message}")


START = (
    "Start one with `redisacc server` (pip install 'redisacc[server]'), or name another one with redis= or REDISACC_URL"
)
START_NODES = "Start the nodes of the cluster, or name another one with redis= or REDISACC_URL"
_SILENT = (
    "Something listens there, but sends no reply: it hangs, or speaks TLS (then use rediss://), or is no Redis server"
)
_SILENT_TLS = "Look whether a server runs there. If it does not speak TLS, use redis:// instead of rediss://"
_NO_WAY = "Nothing at that address answers this machine: check the address, and whether a firewall is in between"
_PLAIN = "Something listens there, but ends the connection. If it speaks TLS, use rediss:// instead of redis://"


def _table(*rows: tuple[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    """Returns texts of errors, each with the remedy. The first that is found counts."""
    return tuple((re.compile(pattern, re.IGNORECASE), remedy) for pattern, remedy in rows)


# With TLS and without it.
_ALWAYS = _table(
    ("connection refused", START),
    (
        "name or service not known|nodename nor servname|name resolution|no address associated",
        "This machine cannot resolve the name of the host: check it",
    ),
    ("no route to host|unreachable", _NO_WAY),
    (
        "too many connections|no connection available",
        "All connections of this client's pool are in use: give it a larger max_connections",
    ),
    (
        "max number of clients",
        "The server has as many clients as its maxclients allows: close some of them, or raise it",
    ),
    ("no master found", "Check the name of the master, and the addresses of the Sentinels"),
)
_OF_TLS = _table(
    (
        "certificate verify failed.*mismatch",
        "The certificate is made out to another name: connect to that name",
    ),
    ("certificate verify failed.*expired", "Renew the server's certificate, or set this machine's clock"),
    (
        "certificate verify failed",
        "This machine trusts no authority that signed the server's certificate: name the file of that authority's "
        "certificate in the URL, as in rediss://HOST:PORT?ssl_ca_certs=FILE",
    ),
    (
        "alert certificate required|alert handshake failure",
        "The server asks for a certificate: name its files in the URL with ssl_certfile=FILE and ssl_keyfile=FILE",
    ),
    (
        "alert unknown ca|alert bad certificate|alert certificate",
        "The server does not trust this client's certificate: use one that an authority of the server has signed",
    ),
    (
        "no such file|PEM lib|X509|key values mismatch",
        "Check the files that ssl_ca_certs=, ssl_certfile= and ssl_keyfile= name: one is missing or cannot be used",
    ),
    (
        "wrong version number|record layer failure|unexpected eof|eof occurred|unknown protocol",
        "It does not speak TLS there: use redis:// instead of rediss://",
    ),
    ("timed? ?out|reset by peer|closed", _SILENT_TLS),
)
_WITHOUT_TLS = _table(
    # A server that speaks TLS ends a connection that does not, some after an alert, of type 0x15.
    (r"reset by peer|closed (the )?connection|connection closed|\\x15", _PLAIN),
    ("timeout reading", _SILENT),
    ("timeout connecting", _NO_WAY),
    # The file of a Unix socket.
    ("no such file", START),
    ("protocol error|not RESP", "Something listens there that is no Redis server: check the address"),
)


def remedy_for(error: BaseException, reason: str, *, tls: bool, cluster: bool) -> str:
    """Returns what to do about a server that cannot be reached; "" if that is unknown.

    Args:
        error: how the last attempt failed.
        reason: its text.
        tls: whether the attempt was made over TLS.
        cluster: whether the way leads to a cluster.
    """
    for pattern, remedy in (*_ALWAYS, *(_OF_TLS if tls else _WITHOUT_TLS)):
        if pattern.search(reason):
            return START_NODES if cluster and remedy is START else remedy
    return _SILENT if isinstance(error, SilentError) and not tls else ""
