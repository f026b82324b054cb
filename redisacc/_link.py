"""The way to the server: sends commands over connections of redis-py's pool, and sends them again if one breaks.

Everything that redisacc sends may be sent twice: reads, plain SETs of bytes that don't change, and scripts that
recognise a request they have seen. So a broken connection is no error here until the server has been silent for the
whole ``patience`` of a call.

redis-py keeps what it is good at (addresses, authentication, TLS, Sentinel, pools, parsing). What is ours is the
retry: a time limit instead of a number of tries, and the same for every version and for every way a client was made.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry

from redisacc import _wire
from redisacc._lua import Script
from redisacc._wire import VALUES, Argument, Arrivals, Command, Packed, Wire
from redisacc.errors import (
    CorruptDataError,
    InvalidArgumentError,
    NotPermittedError,
    ServerError,
    ServerOutOfMemoryError,
    ServerUnavailableError,
)

logger = logging.getLogger("redisacc")

DEFAULT_URL = "redis://localhost:6379/0"

# How long a call goes on trying to reach the server, in seconds.
PATIENCE = 30.0
# Opening is where a wrong address shows, so there it is said soon.
OPENING_PATIENCE = 3.0

_BACKOFF = ExponentialBackoff(cap=1.0, base=0.01)
# The third: whoever answers there speaks another protocol.
_BROKEN = (redis.ConnectionError, redis.TimeoutError, redis.InvalidResponse, OSError)
# How an attempt may end; refusals of the connection, and of what was sent, are no reason for another.
_FAILED = (AuthenticationError, AuthorizationError, ResponseError, *_BROKEN)

_BYTES = frozenset((bytes,))

# Refusals that pass by themselves: a server that runs a long script, a cluster that moves, a master that has just been
# demoted. A new connection, by Sentinel or through a name that moves, finds the one that was promoted.
_PASSING = {
    "BUSY": "is busy",
    "LOADING": "still loads its data",
    "TRYAGAIN": "is moving the key",
    "CLUSTERDOWN": "belongs to a cluster that is down",
    "MASTERDOWN": "is a replica that has lost its master",
    "READONLY": "is a read-only replica: name its master, or go through Sentinel",
}
# redis-py takes the code of these off their message.
_CODES = (
    (BusyLoadingError, "LOADING"),
    (ReadOnlyError, "READONLY"),
    (OutOfMemoryError, "OOM"),
    (NoPermissionError, "NOPERM"),
    (TryAgainError, "TRYAGAIN"),
    (ClusterDownError, "CLUSTERDOWN"),
    (MasterDownError, "MASTERDOWN"),
)
# Redis 7 and Valkey, where the user who runs a script may not run a command in it, or not on that key.
_FORBIDDEN_IN_SCRIPT = re.compile(r"The user executing the script can't|ACL failure in script")
# Servers before 7.0 wrap what a command inside a script was refused with.
_IN_SCRIPT = re.compile(r"@user_script: ?\d+: -(?P<code>[A-Z]+) ")


@dataclass(slots=True)
class Call:
    """A script that is run again and again.

    Attributes:
        commands: the EVALSHA, and what follows it.
    """

    script: Script
    commands: Packed


class Link:
    """A server as one client of redis-py reaches it. Threads and, after a fork, processes may share it."""

    def __init__(self, client: Any) -> None:
        self.client = client
        # A cluster client has a pool for each node and picks the node by a command's keys.
        self._pool: Any = getattr(client, "connection_pool", None)
        self._get_connection = _getter(self._pool)
        # One connection that stays out of the pool between calls. Not of a pool so small that somebody may wait for it.
        self._kept: list[Wire] = []
        self._may_keep = getattr(self._pool, "max_connections", 0) >= 16
        self.address = _address(client, self._pool)
        # Exchanges that broke off, whoever's: the server may execute what was sent, now or later. Who finds the same
        # number before and after a request knows that no copy of it is about.
        self.lost = 0

        weakref.finalize(self, _give_back, self._pool, self._kept).atexit = False

    def __repr__(self) -> str:
        return f"Link({self.address})"

    def call(self, *command: Argument, patience: float = PATIENCE) -> Any:
        """The reply to one command; bytes are never decoded."""
        return self.pipeline([command], patience=patience)[0]

    def pipeline(self, commands: Sequence[Command], *, patience: float = PATIENCE) -> list[Any]:
        """The replies to several commands that travel together. The first that is an error is raised."""
        return _checked(self._exchange(commands, patience))

    def run(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Argument],
        *,
        before: Sequence[Command] = (),
        patience: float = PATIENCE,
    ) -> list[bytes]:
        """Runs a script, with the commands ``before`` it in the same round trip, and returns its reply."""
        return self.run_and_read(script, keys, args, before=before, patience=patience)[0]

    def run_and_read(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Argument],
        *,
        before: Sequence[Command] = (),
        after: Sequence[Command] = (),
        patience: float = PATIENCE,
    ) -> tuple[list[bytes], list[Any]]:
        """Runs a script, with commands before and after it in the same round trip.

        Returns:
            The script's reply, and those of the commands ``after`` it.
        """
        commands = [*before, ("EVALSHA", script.sha, len(keys), *keys, *args), *after]
        return self._run(script, commands, len(before), patience)

    def prepare(
        self, script: Script, keys: Sequence[str], args: Sequence[Argument], *, after: Sequence[Command] = ()
    ) -> Call:
        """What ``run_and_read`` would send, to be sent by ``repeat``."""
        return Call(script, Packed((("EVALSHA", script.sha, len(keys), *keys, *args), *after)))

    def repeat(self, call: Call, *, patience: float = PATIENCE) -> tuple[list[bytes], list[Any]]:
        """As ``run_and_read``, for a call that is made again and again."""
        return self._run(call.script, call.commands, 0, patience)

    def _run(
        self, script: Script, commands: Sequence[Command], here: int, patience: float
    ) -> tuple[list[bytes], list[Any]]:
        """Exchanges commands of which the one at ``here`` runs a script."""
        replies = self._exchange(commands, patience)
        if isinstance(replies[here], NoScriptError):
            # A server that is new, was restarted, or had its scripts flushed.
            whole = ("EVAL", script.text, *commands[here][2:])
            replies[here:] = self._exchange([whole, *commands[here + 1 :]], patience)
            if isinstance(replies[here], Exception) and _code(replies[here]) == "NOPERM":
                raise NotPermittedError(
                    f"{self.address} doesn't have the script {script.name!r}, and this user may not load it: "
                    f"somebody who may has to run `redisacc load-scripts` ({replies[here]})"
                ) from replies[here]
        if not VALUES.issuperset(map(type, replies)):
            _checked(replies)
        reply = replies[here]
        if not isinstance(reply, list) or not reply:
            raise CorruptDataError(f"script {script.name} replied {reply!r:.100}")
        if not _BYTES.issuperset(map(type, reply)):
            reply = [item if isinstance(item, bytes) else str(item).encode() for item in reply]
        return reply, replies[here + 1 :]

    def fetch(self, arrivals: Arrivals, *, patience: float = PATIENCE) -> None:
        """GETs strings straight to where they go. What ``arrivals`` raises goes through, and spoils the connection."""
        give_up = time.monotonic() + patience
        failures = 0
        while True:
            try:
                return self._fetch_once(arrivals, give_up)
            except _FAILED as error:
                failures += 1
                self._rest(error, failures, give_up)

    def _exchange(self, commands: Sequence[Command], patience: float) -> list[Any]:
        """Sends commands until they are answered or the time is up. Errors are among the replies."""
        give_up = time.monotonic() + patience
        failures = 0
        while True:
            try:
                return self._exchange_once(commands, give_up)
            except _FAILED as error:
                failures += 1
                self._rest(error, failures, give_up)

    def _rest(self, error: Exception, failures: int, give_up: float) -> None:
        """Raises what a failed attempt means, or rests before the next one."""
        if isinstance(error, (AuthenticationError, AuthorizationError)):
            raise ServerError(f"{self.address} refuses to let us in: {error}") from error
        if isinstance(error, ResponseError):
            raise _refusal(error) from error
        pause = _BACKOFF.compute(failures)
        if time.monotonic() + pause >= give_up:
            raise ServerUnavailableError(self._unavailable(error)) from error
        logger.debug("%s: %s; trying again in %.2f s", self.address, _reason(error), pause)
        time.sleep(pause)

    def _unavailable(self, error: BaseException) -> str:
        refused = error.__cause__ if isinstance(error.__cause__, ResponseError) else error
        state = _PASSING.get(_code(refused))
        if state is not None:
            return f"the server at {self.address} {state} ({_reason(refused)})"
        return (
            f"no Redis server answers at {self.address} ({_reason(error)}). Start one with `redisacc server` "
            "(pip install 'redisacc[cli,server]'), or name another by redis= or REDISACC_URL"
        )

    def _exchange_once(self, commands: Sequence[Command], give_up: float) -> list[Any]:
        if self._pool is None:
            return self._exchange_by_client(commands)
        wire = self._borrow()
        try:
            replies = wire.exchange(commands, give_up)
            if not VALUES.issuperset(map(type, replies)):
                for reply in replies:
                    if isinstance(reply, ResponseError) and _code(reply) in _PASSING:
                        raise redis.ConnectionError(str(reply)) from reply
        except BaseException as error:
            self._spoil(wire, error)
            raise
        self._return(wire)
        return replies

    def _fetch_once(self, arrivals: Arrivals, give_up: float) -> None:
        if self._pool is None:
            _wire.put(self._exchange_by_client([("GET", key) for key in arrivals.wanted()]), arrivals)
            return
        wire = self._borrow()
        try:
            wire.fetch(arrivals, give_up)
        except BaseException as error:
            self._spoil(wire, error)
            raise
        self._return(wire)

    # A connection that is in use belongs to one call. Written out, not a context manager: that took a small command
    # longer than its checks do.

    def _borrow(self) -> Wire:
        """The connection that is kept, or one of the pool's."""
        try:
            wire = self._kept.pop()
        except IndexError:
            pass
        else:
            # After a fork it is our parent's. One that was closed meanwhile goes back to the pool, which mends it.
            if wire.pid == os.getpid():
                if wire.alive():
                    return wire
                self._pool.release(wire.connection)
        connection = self._get_connection()
        try:
            return _wire.wire_of(connection)
        except BaseException as error:
            self._spoil(_wire.Wrapped(connection), error)
            raise

    def _return(self, wire: Wire) -> None:
        if self._may_keep and not self._kept:
            # Taking one out of the pool and putting it back costs as much as a small command.
            self._kept.append(wire)
        else:
            wire.release()
            self._pool.release(wire.connection)

    def _spoil(self, wire: Wire, error: BaseException) -> None:
        """Closes a connection: replies that nobody read must not be taken for those of the next command."""
        self.lost += 1
        lost = not wire.alive()
        wire.connection.disconnect()
        self._pool.release(wire.connection)
        if lost and isinstance(error, _STUMBLES):
            raise redis.ConnectionError("the connection was closed by somebody else") from error

    def _exchange_by_client(self, commands: Sequence[Command]) -> list[Any]:
        # This client sends again by itself, and doesn't say so.
        self.lost += 1
        replies: list[Any] = []
        for command in commands:
            try:
                replies.append(self.client.execute_command(*command, NEVER_DECODE=True))
            except ResponseError as error:
                replies.append(error)
        return replies

    @contextlib.contextmanager
    def subscriber(self) -> Iterator[Any]:
        """A connection to listen on, disconnected at the end. In a cluster any node has every message."""
        pool = self._pool
        if pool is None:
            pool = self.client.get_redis_connection(self.client.get_default_node()).connection_pool
        connection = _getter(pool)()
        try:
            yield connection
        finally:
            with contextlib.suppress(redis.RedisError, OSError):
                connection.disconnect()
            pool.release(connection)


def _give_back(pool: Any, kept: list[Wire]) -> None:
    """Puts what a link kept back into the pool, which counts it as in use."""
    while kept:
        wire = kept.pop()
        if wire.pid == os.getpid():
            wire.release()
            pool.release(wire.connection)


# How redis-py stumbles when another thread closes the client under it.
_STUMBLES = (TypeError, ValueError, AttributeError)


def _getter(pool: Any) -> Callable[[], Any]:
    """What takes a connection out of a pool."""
    if pool is None:
        return lambda: None
    required = any(
        p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        for p in inspect.signature(pool.get_connection).parameters.values()
    )
    # redis-py before 5.3 wants to be told the command, and later ones warn when they are.
    arguments = ("EVALSHA",) if required else ()

    def get() -> Any:
        try:
            return pool.get_connection(*arguments)
        except _STUMBLES as error:
            raise redis.ConnectionError("the connection was closed by somebody else") from error

    return get


def _checked(replies: list[Any]) -> list[Any]:
    """The replies, if none of them is an error; the first that is one is raised."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise _refusal(reply) from reply
    return replies


def _code(error: BaseException) -> str:
    """The first word of a refusal, "OOM"; also where redis-py took it off, or an old server wrapped it."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    text = str(error)
    if _FORBIDDEN_IN_SCRIPT.search(text):
        return "NOPERM"
    wrapped = _IN_SCRIPT.search(text)
    return wrapped["code"] if wrapped else text.partition(" ")[0]


def _refusal(error: Exception) -> ServerError | CorruptDataError:
    message = str(error)
    if "WRONGTYPE" in message:
        return CorruptDataError(f"a key of the accumulator is of another type than redisacc gives it: {message}")
    if "not an integer" in message:
        return CorruptDataError(f"the accumulator's record holds something else than a count: {message}")
    if _code(error) == "NOPERM":
        return NotPermittedError(f"the server's access control list refuses: {message} (see `redisacc acl`)")
    if _code(error) == "OOM":
        return ServerOutOfMemoryError(
            f"the server has reached its maxmemory and stores no more: take rounds, which works all the same, or give "
            f"it more ({message})"
        )
    return ServerError(f"the server refused: {message}")


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    return text or type(error).__name__


def _address(client: Any, pool: Any) -> str:
    """Where a client points to, without its password."""
    settings = getattr(pool, "connection_kwargs", None) or {}
    if "path" in settings:
        return f"unix://{settings['path']}"
    if "host" in settings:
        return f"{settings['host']}:{settings.get('port', 6379)}/{settings.get('db', 0)}"
    return type(client).__name__


_links: weakref.WeakValueDictionary[Any, Link] = weakref.WeakValueDictionary()
_links_lock = threading.Lock()


def link_to(where: object) -> Link:
    """The link for a client of redis-py, a URL, or None (``REDISACC_URL``, else ``redis://localhost:6379/0``).

    The same client or URL gives the same link as long as somebody holds it.
    """
    if where is None:
        where = os.environ.get("REDISACC_URL") or DEFAULT_URL
    if isinstance(where, str):
        key: Any = where
    elif callable(getattr(where, "execute_command", None)):
        if inspect.iscoroutinefunction(where.execute_command):  # type: ignore[attr-defined]
            raise InvalidArgumentError("redis must be a blocking client of redis-py, not an asyncio one")
        # Clients made of one pool are one way to the server.
        key = id(getattr(where, "connection_pool", where))
    else:
        raise InvalidArgumentError(f"redis must be a client of redis-py, a URL or None, not {type(where).__name__}")
    with _links_lock:
        link = _links.get(key)
        if link is None:
            link = Link(_client_of(where) if isinstance(where, str) else where)
            _links[key] = link
        return link


def _client_of(url: str) -> redis.Redis:
    scheme = url.partition(":")[0].lower()
    if scheme not in ("redis", "rediss", "unix"):
        # Not the URL itself: it may carry a password.
        raise InvalidArgumentError("a URL must begin with redis://, rediss:// or unix://")
    settings: dict[str, Any] = {
        # The retries are ours.
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
        # Only for redis-py's handshakes; an exchange has a limit of its own. Before redis-py 8 there was none, and a
        # server that takes a connection and then stands still held whoever opened it for good.
        "socket_timeout": 5.0,
        # Nothing of RESP3 is of use here, and its handshakes cost round trips.
        "protocol": 2,
    }
    if scheme != "unix":
        settings |= {"socket_connect_timeout": 5.0, "socket_keepalive": True}
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        client = redis.Redis.from_url(url, **settings)
        # A setting that redis-py doesn't know shows here.
        client.connection_pool.connection_class(**client.connection_pool.connection_kwargs)
        return client
    # Outside of the error, which quotes what it couldn't read: a part of the password, if that wasn't percent-encoded.
    raise InvalidArgumentError(
        f"a {scheme}:// URL that can't be read: its port, its database or a setting after the question mark isn't "
        "what redis-py takes, or a password in it has characters that must be percent-encoded"
    )


def _forget_links() -> None:
    global _links_lock  # noqa: PLW0603
    _links_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_links)
