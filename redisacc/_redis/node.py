"""One server: the connections of a client's pool to it, and what travels over them."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from redisacc._interrupts import interrupt_in
from redisacc._redis import forks
from redisacc._redis.client_libraries import STUMBLES, fault_of, is_of_library, translated
from redisacc._redis.faults import FAULTS, BrokenError, ReplyError, SilentError, reason_of
from redisacc._redis.remedies import speaks_tls
from redisacc._redis.reply_errors import PASSING, REDIRECTIONS, refusal_of
from redisacc._redis.running_time import running_time
from redisacc._redis.sockets.fast_socket import (
    VALUES,
    A,
    Arrivals,
    ClientConnection,
    Command,
    Connection,
    SocketConnection,
    get_commands,
    put,
)
from redisacc._redis.sockets.lanes import Lanes, fetch_over
from redisacc._redis.sockets.reply_forms import check_form
from redisacc._redis.waits import BLOCKING, Waits
from redisacc.errors import RedisAccError

Answer = TypeVar("Answer")

# Sends a command, and returns the reply.
Send = Callable[[Command], Any]


@dataclass(slots=True)
class Losses:
    """How many exchanges broke off, in any thread: the server may have executed what was sent, or may yet."""

    count: int = 0


class Node:
    """The way to one server through one pool. Threads and, after a fork, processes may share it.

    Args:
        pool: the pool of connections.
        losses: counts the exchanges that break off.
        address: where the pool's connections lead. None: as the pool says.
        owns_pool: whether to close the pool's connections when this object is no longer in use.
        waits: how calls wait.

    Attributes:
        address: where the pool's connections lead, without a password.
        tls: whether the pool's connections speak TLS.
        reached: whether a connection was ever made.
    """

    def __init__(
        self,
        pool: Any,
        losses: Losses,
        address: str | None = None,
        *,
        owns_pool: bool = False,
        waits: Waits = BLOCKING,
    ) -> None:
        forks.release_locks_of(pool)
        self._pool = pool
        self._losses = losses
        self._waits = waits
        self._turns = waits.turns()
        self._openings = waits.openings()
        self._get_connection = _getter(pool, waits)
        # Connections stay out of the pool between calls, unless the pool is so small that others may wait for them.
        self._kept: list[Connection] = []
        self._keeps = waits.keeps if getattr(pool, "max_connections", 0) >= 16 else 0
        self.address = address or _address(pool)
        self.tls = speaks_tls(pool)
        self.reached = False

        self._lanes = Lanes(pool if waits.opens_lanes else None, self._get_connection)

        self._leave = weakref.finalize(self, _leave, pool, owns_pool, self._kept, self._lanes.idle)
        self._leave.atexit = False

    def close(self) -> None:
        """Gives back, or closes, the connections that were kept. No call may be under way."""
        # A settle() may follow, of the handle or of an error: its connection then goes back to the pool.
        self._keeps = 0
        self._leave()

    def exchange(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        """Sends commands over one connection and returns their replies, which may be errors.

        Args:
            commands: the commands.
            deadline: when the server has to have replied, on ``running_time()``'s clock.

        Raises:
            ReplyError: one of the replies is a refusal that passes by itself.
            BrokenError: the connection broke, or could not be made.
            RejectedError: the server refuses the connection.
        """
        if self._turns is not None:
            deadline += self._turns.take()
        connection = self._borrow()
        try:
            if commands and commands[-1][0] == "WAIT":
                # The server waits for its replicas for that long before it replies, and is not silent meanwhile.
                deadline += int(str(commands[-1][2])) / 1000
            replies = connection.exchange(commands, deadline)
            if not VALUES.issuperset(map(type, replies)):
                _raise_passing(replies)
        except BaseException as error:
            self._spoil(connection, error)
            raise
        self._return(connection)
        return replies

    def converse(
        self,
        key: str,  # noqa: ARG002
        talk: Callable[[Send], Answer],
        timeout: float,
        deadline: float,
        *,
        asking: bool = False,
    ) -> Answer:
        """Returns the result of ``talk``, which sends commands one by one over one connection and gets their replies.

        Args:
            key: the key of the commands; ignored by a single server.
            talk: gets the function that sends a command and returns the reply.
            timeout: seconds that the server has for each reply, in any case.
            deadline: until when it has more time.
            asking: whether the commands are for a slot that this node is about to get from another one.

        Raises:
            ReplyError: a reply is a refusal that passes by itself, or a redirection to another node.
            RedisAccError: another refusal, or an error that ``talk`` raises.
        """
        if self._turns is not None:
            deadline += self._turns.take()
        connection = self._borrow()

        def send(command: Command) -> Any:
            # ASKING lasts for one command.
            commands = [("ASKING",), command] if asking else [command]
            reply = connection.exchange(commands, max(deadline, running_time() + timeout))[-1]
            _raise_passing([reply])
            if isinstance(reply, ReplyError):
                if reply.code in REDIRECTIONS:
                    raise reply
                raise refusal_of(reply) from reply
            check_form(command, reply, self.address)
            return reply

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

    def converse_with_all(self, talk: Callable[[Send], Answer], timeout: float, deadline: float) -> list[Answer]:
        """Does the same for commands without a key. Returns one answer, because it is one server."""
        return [self.converse("", talk, timeout, deadline)]

    def fetch(self, arrivals: Arrivals[A], deadline: float) -> None:
        """GETs strings straight into the memory where they are used, over one connection or several."""
        if self._turns is not None:
            deadline += self._turns.take()
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

    @contextlib.contextmanager
    def subscriber(self, channel: str, tick: float) -> Iterator[Connection]:  # noqa: ARG002
        """Yields a connection to listen on, and disconnects it. A single server has every channel.

        Args:
            channel: plays no role here.
            tick: how long the connection listens before it returns without a message, in seconds.
        """
        connection = self._opened(self._get_connection(), tick)
        try:
            yield connection
        except OSError as error:
            _raise_fault(error)
            raise
        finally:
            with contextlib.suppress(*FAULTS):
                connection.close()
            self._pool.release(connection.pooled)

    # A connection that is in use belongs to one call. Borrowing is not a context manager, which would cost a small
    # command more time than all checks.

    def _borrow(self) -> Connection:
        """Returns a connection that was kept, or one of the pool. If turns are taken, it is the caller's turn."""
        try:
            while True:
                connection = self._kept.pop()
                # After a fork it is the parent's. If it was closed meanwhile, the pool opens it again.
                if connection.pid == os.getpid():
                    if connection.alive():
                        return connection
                    connection.release()
                    self._pool.release(connection.pooled)
        except IndexError:
            pass
        try:
            connection = self._new()
        except BaseException as error:
            if self._turns is not None:
                self._turns.give_back(silent=isinstance(error, SilentError))
            raise
        self.reached = True
        return connection

    def _new(self) -> Connection:
        """Returns a connection of the pool, which may have to open it."""
        if self._openings is None:
            return self._opened(self._get_connection())
        self._openings.take()
        try:
            connection = self._opened(self._get_connection())
        except BaseException as error:
            self._openings.give_back(silent=isinstance(error, SilentError))
            raise
        self._openings.give_back()
        return connection

    def _opened(self, pooled: Any, *tick: float) -> Connection:
        """Returns the way to use a connection of the pool."""
        try:
            return self._waits.connection_of(pooled, *tick)
        except BaseException as error:
            self._discard(ClientConnection(pooled), error)
            raise

    def _return(self, connection: Connection) -> None:
        if len(self._kept) < self._keeps:
            # Taking a connection out of the pool and putting it back would cost as much as a small command.
            self._kept.append(connection)
        else:
            connection.release()
            self._pool.release(connection.pooled)
        if self._turns is not None:
            self._turns.give_back()

    def _spoil(self, connection: Connection, error: BaseException) -> None:
        """Ends the use of a connection that broke, or was interrupted. Raises BrokenError if its socket failed."""
        if self._turns is not None:
            self._turns.give_back(silent=isinstance(error, SilentError))
        self._discard(connection, error)

    def _discard(self, connection: Connection, error: BaseException) -> None:
        """Closes a connection, because the next command would take unread replies for its own.

        Raises:
            BrokenError: the error means that.
        """
        self._losses.count += 1
        lost = not connection.alive()
        connection.close()
        with translated():
            self._pool.release(connection.pooled)
        _raise_fault(error, lost=lost)


def fetch_from_nodes(nodes: Sequence[Node], routes: Sequence[int], arrivals: Arrivals[A], deadline: float) -> None:
    """GETs strings from several servers at once, straight into the memory where they are used.

    Args:
        nodes: the servers.
        routes: for each lane the position of its server among them.
        arrivals: the strings.
        deadline: when a server counts as silent if it sends nothing, on ``running_time()``'s clock.

    Raises:
        ReplyError, BrokenError, RejectedError: as ``Node.fetch``.
    """
    borrowed: list[Connection] = []
    turns: list[Node] = []
    try:
        # All calls take their turns in the same order, so that none waits for another one that waits for it.
        for node in sorted(nodes, key=lambda node: node.address):
            if node._turns is not None:
                deadline += node._turns.take()
                turns.append(node)
        for node in nodes:
            if node in turns:
                # From here on, it is given back with the connection.
                turns.remove(node)
            borrowed.append(node._borrow())
        if all(isinstance(connection, SocketConnection) for connection in borrowed) and nodes[0]._waits.opens_lanes:
            fetch_over(borrowed, arrivals, deadline, routes)
        else:
            _fetch_in_turn(borrowed, routes, arrivals, deadline)
    except BaseException as error:
        for node in turns:
            if node._turns is not None:
                node._turns.give_back()
        for node, connection in zip(nodes, borrowed, strict=False):
            with contextlib.suppress(BrokenError):
                node._spoil(connection, error)
        _raise_fault(error)
        raise
    for node, connection in zip(nodes, borrowed, strict=True):
        node._return(connection)


def _raise_fault(error: BaseException, *, lost: bool = False) -> None:
    """Raises BrokenError if that is what an error means. Returns if it does not, or if a signal handler has raised it.

    Args:
        error: the error.
        lost: whether the client had lost the connection by then.
    """
    if interrupt_in(error) is not None:
        return
    if lost and isinstance(error, STUMBLES):
        raise BrokenError("another thread closed the connection") from error
    if isinstance(error, OSError):
        raise BrokenError(reason_of(error)) from error


def _fetch_in_turn(
    connections: Sequence[Connection], routes: Sequence[int], arrivals: Arrivals[A], deadline: float
) -> None:
    """Does the same, one after the other, over connections that can only exchange commands."""
    while wanted := arrivals.wanted():
        for number, connection in enumerate(connections):
            of_one = [arrival for arrival in wanted if routes[arrival.lane] == number]
            if of_one:
                put(connection.exchange(get_commands(of_one), deadline), of_one, arrivals)


def _leave(pool: Any, owns_pool: bool, *kept: list[Any]) -> None:
    """Puts the connections that were kept back into the pool, which counts them as in use, or closes all of them."""
    for connections in kept:
        while connections:
            connection = connections.pop()
            if connection.pid == os.getpid():
                connection.release()
                pool.release(connection.pooled)
    if owns_pool:
        with contextlib.suppress(*FAULTS), translated():
            pool.disconnect()


def _getter(pool: Any, waits: Waits = BLOCKING) -> Callable[[], Any]:
    """Returns the function that takes a connection out of a pool."""
    required = any(
        p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        for p in inspect.signature(pool.get_connection).parameters.values()
    )
    # valkey-py, and redis-py before 5.3, require the command's name; later versions warn about it.
    arguments = ("EVALSHA",) if required else ()

    def make() -> Any:
        with forks.opening():
            return pool.get_connection(*arguments)

    def discard(pooled: Any) -> None:
        with contextlib.suppress(*FAULTS), translated():
            pooled.disconnect()
        pool.release(pooled)

    def get() -> Any:
        try:
            return waits.call(make, discard)
        except BaseException as error:
            # The library has waited for as long as its own timeout says.
            running_time(waited=math.inf)
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


def _raise_passing(replies: Sequence[Any]) -> None:
    """Raises a refusal that passes by itself, as a reason for another attempt."""
    for reply in replies:
        if isinstance(reply, ReplyError) and reply.code in PASSING:
            raise reply


def _address(pool: Any) -> str:
    """Returns where a pool's connections lead, without its password."""
    settings = getattr(pool, "connection_kwargs", None) or {}
    if "path" in settings:
        return f"unix://{settings['path']}"
    if "host" in settings:
        return f"{settings['host']}:{settings.get('port', 6379)}/{settings.get('db', 0)}"
    return type(pool).__name__
