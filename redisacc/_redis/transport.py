"""The transport: sends commands over connections of a client's pool, and sends them again if a connection breaks.

Everything that redisacc sends may be sent twice: reads, plain SETs of bytes that do not change, and scripts that
recognise a request that they have seen. So a broken connection becomes an error only when the server has been silent
for the whole ``timeout`` of a call.

The client's library does what it is good at: addresses, authentication, TLS, Sentinel and pools. The retry is ours: it
has a time limit instead of a number of tries, and is the same for every library, version and client.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from redis.backoff import ExponentialBackoff

from redisacc._redis import fast_socket
from redisacc._redis.client_libraries import STUMBLES, fault_of, is_cluster, is_of_library, translated
from redisacc._redis.fast_socket import VALUES, A, Argument, Arrivals, Command, Connection, PackedCommands
from redisacc._redis.faults import FAULTS, BrokenError, RejectedError, ReplyError, SilentError, reason_of
from redisacc._redis.lanes import Lanes, fetch_over
from redisacc._redis.reply_errors import PASSING, refusal_of
from redisacc._redis.script_loader import Script
from redisacc._text import shown
from redisacc.errors import (
    CorruptDataError,
    NotPermittedError,
    RedisAccError,
    ServerError,
    ServerUnavailableError,
)

logger = logging.getLogger("redisacc")

Answer = TypeVar("Answer")

# How long a call tries to reach the server, in seconds.
TIMEOUT = 30.0
# A call that tries for longer than this logs its first retry.
PATIENT = 10.0
# A wrong address shows when an accumulator is opened, so that call fails sooner.
OPENING_TIMEOUT = 3.0

_BACKOFF = ExponentialBackoff(cap=1.0, base=0.01)


@dataclass(frozen=True, slots=True)
class Limits:
    """How patient the calls of a thread are with a server that does not answer, whatever their own timeouts are.

    Attributes:
        call: how long a single call tries to reach the server, in seconds.
        outage: how long a wait goes on while the server cannot be reached, in seconds.
    """

    call: float = math.inf
    outage: float = math.inf


_UNLIMITED = Limits()
# They are in effect in whatever the code that sets them calls, however deep that is.
LIMITS: ContextVar[Limits] = ContextVar("redisacc limits", default=_UNLIMITED)

_BYTES = frozenset((bytes,))
# A fake server, and a client that decodes, return strings.
_ITEMS = frozenset((bytes, str, int))


@dataclass(slots=True)
class Call:
    """A call of a script that may be repeated.

    Attributes:
        script: the script.
        commands: the EVALSHA, and the commands that follow it.
    """

    script: Script
    commands: PackedCommands


class Hint(tuple[Argument, ...]):
    """A command before a script that only saves time, so it may fail.

    Attributes:
        script: the script that it runs, if any.
    """

    script: Script | None = None

    @classmethod
    def running(cls, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Hint:
        """Returns the call of a script."""
        hint = cls(("EVALSHA", script.sha, len(keys), *keys, *args))
        hint.script = script
        return hint


class Transport:
    """The way to a server through one client. Threads and, after a fork, processes may share it.

    Attributes:
        client: the client of redis-py or valkey-py.
        address: where it points to, without its password.
        lost: the number of exchanges that broke off, in any thread. The server may have executed what was sent, or may
            yet. If the number is the same before and after a request, no stray copy of that request can still arrive.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        # A cluster client has no pool of its own, but one for each node, which it picks by a command's keys.
        self._pool: Any = getattr(client, "connection_pool", None)
        self._get_connection = _getter(self._pool)
        # One connection stays out of the pool between calls, unless the pool is so small that others may wait for it.
        self._kept: list[Connection] = []
        self._may_keep = getattr(self._pool, "max_connections", 0) >= 16
        self.address = _address(client, self._pool)
        self.lost = 0

        self._lanes = Lanes(self._pool, self._get_connection)

        weakref.finalize(self, _give_back, self._pool, self._kept, self._lanes.idle).atexit = False

    def __repr__(self) -> str:
        return f"Transport({self.address})"

    @property
    def keeps_together(self) -> bool:
        """Whether commands that are sent together travel over one connection. WAIT means nothing otherwise."""
        return not is_cluster(self.client)

    def call(self, *command: Argument, timeout: float = TIMEOUT) -> Any:
        """Returns the reply to one command. Bytes are never decoded."""
        return self.pipeline([command], timeout=timeout)[0]

    def pipeline(self, commands: Sequence[Command], *, timeout: float = TIMEOUT) -> list[Any]:
        """Returns the replies to several commands that travel together. The first that is an error is raised."""
        return _checked(self._exchange(commands, timeout))

    def run(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Argument],
        *,
        before: Sequence[Command] = (),
        timeout: float = TIMEOUT,
    ) -> list[bytes]:
        """Runs a script, with the commands ``before`` it in the same round trip, and returns its reply."""
        return self.run_and_read(script, keys, args, before=before, timeout=timeout)[0]

    def run_and_read(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Argument],
        *,
        before: Sequence[Command] = (),
        after: Sequence[Command] = (),
        timeout: float = TIMEOUT,
    ) -> tuple[list[bytes], list[Any]]:
        """Runs a script, with commands before and after it in the same round trip.

        Returns:
            The script's reply, and those of the commands ``after`` it.
        """
        commands = [*before, ("EVALSHA", script.sha, len(keys), *keys, *args), *after]
        return self._run(script, commands, len(before), timeout)

    def prepare(
        self, script: Script, keys: Sequence[str], args: Sequence[Argument], *, after: Sequence[Command] = ()
    ) -> Call:
        """Returns what ``run_and_read`` would send, for ``repeat`` to send."""
        return Call(script, PackedCommands((("EVALSHA", script.sha, len(keys), *keys, *args), *after)))

    def repeat(self, call: Call, *, timeout: float = TIMEOUT) -> tuple[list[bytes], list[Any]]:
        """Does the same as ``run_and_read``, for a call that was prepared."""
        return self._run(call.script, call.commands, 0, timeout)

    def _run(
        self, script: Script, commands: Sequence[Command], here: int, timeout: float
    ) -> tuple[list[bytes], list[Any]]:
        """Exchanges commands of which the one at ``here`` runs a script."""
        replies = self._exchange(commands, timeout)
        for number, command in enumerate(commands[:here]):
            if isinstance(command, Hint) and isinstance(replies[number], ReplyError):
                self._note_refused(command, replies[number])
                replies[number] = None
        if isinstance(replies[here], ReplyError) and replies[here].code == "NOSCRIPT":
            # The server is new, was restarted, or its script cache was flushed.
            whole = ("EVAL", script.text, *commands[here][2:])
            replies[here:] = self._exchange([whole, *commands[here + 1 :]], timeout)
            if isinstance(replies[here], ReplyError) and replies[here].code == "NOPERM":
                raise NotPermittedError(
                    f"the server at {self.address} does not have the script {shown(script.name)}, and this user may "
                    f"not load it: run `redisacc load-scripts` as a user who may ({reason_of(replies[here])})"
                ) from replies[here]
        if not VALUES.issuperset(map(type, replies)):
            _checked(replies)
        reply = replies[here]
        if not isinstance(reply, list) or not reply:
            raise CorruptDataError(f"script {script.name} replied {shown(reply)}")
        if not _BYTES.issuperset(map(type, reply)):
            if not _ITEMS.issuperset(map(type, reply)):
                raise CorruptDataError(f"script {script.name} replied with something other than strings and numbers")
            reply = [item if isinstance(item, bytes) else str(item).encode() for item in reply]
        return reply, replies[here + 1 :]

    def _note_refused(self, hint: Hint, error: ReplyError) -> None:
        logger.debug("%s refused %s: %s", self.address, hint[0], reason_of(error))
        if hint.script is not None and error.code == "NOSCRIPT":
            # For the next time. A user who may not load it does without.
            self._exchange([("SCRIPT", "LOAD", hint.script.text)], TIMEOUT)

    def fetch(self, arrivals: Arrivals[A], *, timeout: float = TIMEOUT) -> None:
        """GETs strings straight into the memory where they are used.

        If they have several lanes, and the server is on another machine, they arrive over several connections.

        Args:
            arrivals: says which, and where to. If it raises, the error passes through and the connection is closed.
            timeout: seconds to try to reach the server.
        """
        self._persist(partial(self._fetch_once, arrivals), timeout)

    def converse(self, talk: Callable[[Callable[[Command], Any]], Answer], *, timeout: float = TIMEOUT) -> Answer:
        """Returns what ``talk`` makes of the replies to commands that it sends one by one, over a single connection.

        A connection leads to one server process, so all replies are that process's own. If it breaks, ``talk`` is
        called again from its beginning, so it must only read. (A cluster's client has no such connection.)

        Args:
            talk: gets the function that sends a command and returns the reply.
            timeout: seconds to try to reach the server, for each command.
        """
        return self._persist(partial(self._converse_once, talk, timeout), timeout)

    def _exchange(self, commands: Sequence[Command], timeout: float) -> list[Any]:
        """Sends commands until they are answered or the time is up. Replies may be errors."""
        return self._persist(partial(self._exchange_once, commands), timeout)

    def _persist(self, attempt: Callable[[float], Answer], timeout: float) -> Answer:
        """Repeats an attempt, which gets its deadline, until it succeeds or the time is up."""
        deadline = time.monotonic() + min(timeout, LIMITS.get().call)
        failures, reason = 0, ""
        while True:
            try:
                return attempt(deadline)
            except FAULTS as error:
                failures += 1
                if not reason or not isinstance(error, SilentError):
                    # As text: the error itself would keep this frame, and a gradient with it.
                    reason = self._unavailable(error)
                self._pause_or_raise(error, reason, failures, deadline)

    def _pause_or_raise(self, error: Exception, reason: str, failures: int, deadline: float) -> None:
        """Raises what a failed attempt means, or pauses before the next one.

        Args:
            error: how the attempt failed.
            reason: what to report when the time is up. A last attempt that only ran out of time says less than the one
                before it, which a server may have answered: that it is loading, say.
            failures: how many attempts have failed.
            deadline: when the time is up, on ``time.monotonic()``'s clock.
        """
        if isinstance(error, RejectedError):
            raise ServerError(f"{self.address} refuses the connection: {error}") from error
        if isinstance(error, ReplyError) and error.code not in PASSING:
            raise refusal_of(error) from error
        pause = _BACKOFF.compute(failures)
        if failures == 2 and deadline - time.monotonic() > PATIENT:
            # The first attempt may have met a connection that had been idle for too long. Polls are brief, and their
            # callers log outages themselves.
            logger.warning(
                "%s: %s; trying again for %.0f s", self.address, reason_of(error), deadline - time.monotonic()
            )
        if time.monotonic() + pause >= deadline:
            # The reason is in the message. The client library chains two or three errors more, which say the same.
            raise ServerUnavailableError(reason) from None
        logger.debug("%s: %s; trying again in %.2f s", self.address, reason_of(error), pause)
        time.sleep(pause)

    def _unavailable(self, error: BaseException) -> str:
        if isinstance(error, ReplyError) and error.code in PASSING:
            return f"the server at {self.address} {PASSING[error.code]} ({reason_of(error)})"
        return (
            f"no Redis server answers at {self.address} ({reason_of(error)}). Start one with `redisacc server` "
            "(pip install 'redisacc[cli,server]'), or name another one with redis= or REDISACC_URL"
        )

    def _exchange_once(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        if self._pool is None:
            return self._exchange_by_client(commands)
        connection = self._borrow()
        try:
            replies = _exchange_over(connection, commands, deadline)
        except BaseException as error:
            self._spoil(connection, error)
            raise
        self._return(connection)
        return replies

    def _converse_once(
        self, talk: Callable[[Callable[[Command], Any]], Answer], timeout: float, deadline: float
    ) -> Answer:
        if self._pool is None:
            return talk(lambda command: _checked(self._exchange_by_client([command]))[0])
        connection = self._borrow()

        def send(command: Command) -> Any:
            return _checked(_exchange_over(connection, [command], max(deadline, time.monotonic() + timeout)))[0]

        try:
            answer = talk(send)
        except RedisAccError:
            # A refusal, or a reply that makes no sense: everything that was sent has been answered.
            self._return(connection)
            raise
        except BaseException as error:
            self._spoil(connection, error)
            raise
        self._return(connection)
        return answer

    def _fetch_once(self, arrivals: Arrivals[A], deadline: float) -> None:
        if self._pool is None:
            while wanted := arrivals.wanted():
                fast_socket.put(self._exchange_by_client(fast_socket.get_commands(wanted)), wanted, arrivals)
            return
        connection = self._borrow()
        more = self._lanes.borrow(connection) if arrivals.lanes > 1 else []
        try:
            if more:
                fetch_over([connection, *more], arrivals, deadline)
            else:
                connection.fetch(arrivals, deadline)
        except BaseException as error:
            self._lanes.spoil(more)
            self._spoil(connection, error)
            raise
        self._lanes.give_back(more)
        self._return(connection)

    # A connection that is in use belongs to one call. Borrowing is not a context manager, which would cost a small
    # command more time than all checks.

    def _borrow(self) -> Connection:
        """Returns the connection that was kept, or one of the pool."""
        try:
            connection = self._kept.pop()
        except IndexError:
            pass
        else:
            # After a fork it is the parent's. If it was closed meanwhile, it goes back to the pool, which reopens it.
            if connection.pid == os.getpid():
                if connection.alive():
                    return connection
                self._pool.release(connection.pooled)
        pooled = self._get_connection()
        try:
            return fast_socket.connection_of(pooled)
        except BaseException as error:
            self._spoil(fast_socket.ClientConnection(pooled), error)
            raise

    def _return(self, connection: Connection) -> None:
        if self._may_keep and not self._kept:
            # Taking a connection out of the pool and putting it back would cost as much as a small command.
            self._kept.append(connection)
        else:
            connection.release()
            self._pool.release(connection.pooled)

    def _spoil(self, connection: Connection, error: BaseException) -> None:
        """Closes a connection, because the next command would take unread replies for its own."""
        self.lost += 1
        lost = not connection.alive()
        with translated():
            connection.pooled.disconnect()
            self._pool.release(connection.pooled)
        if lost and isinstance(error, STUMBLES):
            raise BrokenError("another thread closed the connection") from error

    def _exchange_by_client(self, commands: Sequence[Command]) -> list[Any]:
        # This client sends commands again by itself, and does not report it.
        self.lost += 1
        replies: list[Any] = []
        for command in commands:
            try:
                with translated():
                    replies.append(self.client.execute_command(*fast_socket.plain(command), NEVER_DECODE=True))
            except ReplyError as error:
                replies.append(error)
        return replies

    @contextlib.contextmanager
    def subscriber(self) -> Iterator[Any]:
        """Yields a connection to listen on, and disconnects it. In a cluster, any node gets every message."""
        pool = self._pool
        if pool is None:
            with translated():
                pool = self.client.get_redis_connection(self.client.get_default_node()).connection_pool
        pooled = _getter(pool)()
        try:
            yield pooled
        finally:
            with contextlib.suppress(*FAULTS), translated():
                pooled.disconnect()
            pool.release(pooled)


def _give_back(pool: Any, *kept: list[Any]) -> None:
    """Puts the connections that were kept back into the pool, which counts them as in use."""
    for connections in kept:
        while connections:
            connection = connections.pop()
            if connection.pid == os.getpid():
                connection.release()
                pool.release(connection.pooled)


def _getter(pool: Any) -> Callable[[], Any]:
    """Returns the function that takes a connection out of a pool."""
    if pool is None:
        return lambda: None
    required = any(
        p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        for p in inspect.signature(pool.get_connection).parameters.values()
    )
    # valkey-py, and redis-py before 5.3, require the command's name; later versions warn about it.
    arguments = ("EVALSHA",) if required else ()

    def get() -> Any:
        try:
            return pool.get_connection(*arguments)
        except BaseException as error:
            # An error of the library's own closes the connection that was being made. Another one, such as an
            # interrupt, leaves it in the pool as it is, and the pool would hand it out as ready: without a password, or
            # with database 0 where another one was asked for.
            if not is_of_library(error):
                close_idle()
            # Spelled out, because a context manager would cost a small command too much.
            fault = fault_of(error) if isinstance(error, Exception) else None
            if fault is None or fault is error:
                raise
            raise fault from error

    def close_idle() -> None:
        # Before redis-py 7, the blocking pool has no argument that leaves connections in use open.
        arguments = (False,) if inspect.signature(pool.disconnect).parameters else ()
        with contextlib.suppress(Exception):
            pool.disconnect(*arguments)

    return get


def _exchange_over(connection: Connection, commands: Sequence[Command], deadline: float) -> list[Any]:
    """Exchanges commands. A refusal that passes by itself is raised, as a reason for another attempt."""
    replies = connection.exchange(commands, deadline)
    if not VALUES.issuperset(map(type, replies)):
        for reply in replies:
            if isinstance(reply, ReplyError) and reply.code in PASSING:
                raise reply
    return replies


def _checked(replies: list[Any]) -> list[Any]:
    """Returns the replies if none of them is an error. The first error is raised."""
    for reply in replies:
        if isinstance(reply, ReplyError):
            raise refusal_of(reply) from reply
    return replies


def _address(client: Any, pool: Any) -> str:
    """Returns where a client points to, without its password."""
    settings = getattr(pool, "connection_kwargs", None) or {}
    if "path" in settings:
        return f"unix://{settings['path']}"
    if "host" in settings:
        return f"{settings['host']}:{settings.get('port', 6379)}/{settings.get('db', 0)}"
    return type(client).__name__
