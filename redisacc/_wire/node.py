"""One server: the connections to it, and what travels over them."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from redisacc._clock import clock, running_time
from redisacc._interrupts import interrupt_in
from redisacc._wire import forks
from redisacc._wire.clients import Endpoint, GivenPool, translated
from redisacc._wire.faults import PASSING, REDIRECTIONS, BrokenError, ReplyError, SilentError, reason_of, refusal_of
from redisacc._wire.lanes import LANES, is_quiet, is_remote
from redisacc._wire.replies import check_form
from redisacc._wire.sockets import (
    TICK,
    VALUES,
    A,
    Arrivals,
    ClientConnection,
    Command,
    Connection,
)
from redisacc._wire.waits import BLOCKING, Waits
from redisacc.errors import RedisAccError

logger = logging.getLogger("redisacc")

Answer = TypeVar("Answer")

# Sends a command, and returns the reply.
Send = Callable[[Command], Any]

# A client that may have fewer connections than this has none for lanes.
LEAST_CONNECTIONS = 32
# After connections for lanes were opened, or one broke, no more are opened for this long, in seconds.
LANES_PAUSE = 10.0
# The pause between two looks for a connection where the client's max_connections are in use, in seconds.
_PAUSE = 0.002


@dataclass(slots=True)
class Losses:
    """How many exchanges broke off, in any thread: the server may have executed what was sent, or may yet."""

    count: int = 0


class _Place:
    """One of the connections that a client may have. It is free again when nothing refers to this object."""

    def __init__(self) -> None:
        self.pid = os.getpid()


class _Opener:
    """Opens connections to an endpoint, as many as a client may have.

    Args:
        endpoint: where they lead.
        waits: how calls wait.
    """

    def __init__(self, endpoint: Endpoint | GivenPool, waits: Waits) -> None:
        self.endpoint = endpoint
        self._waits = waits
        # Guards the next one.
        self._lock = forks.lock()
        self._places: weakref.WeakSet[_Place] = weakref.WeakSet()

    def open(self, tick: float = TICK) -> Connection | None:
        """Returns a new connection; None if there are as many as there may be."""
        place = _Place()
        if self.endpoint.most is not None:
            with self._lock:
                if sum(taken.pid == place.pid for taken in self._places) >= self.endpoint.most:
                    return None
                self._places.add(place)
        try:
            with translated():
                if isinstance(self.endpoint, GivenPool):
                    return ClientConnection(self.endpoint.open(), self.endpoint.pool)
                connection = self._waits.open(self.endpoint, tick)
        except BaseException:
            # The library has waited for as long as its own timeout says.
            running_time(waited=math.inf)
            raise
        connection.place = place
        return connection


class Node:
    """The way to one server. Threads and, after a fork, processes may share it.

    Args:
        endpoint: where its connections lead.
        losses: counts the exchanges that break off; None means a counter of its own.
        address: where the connections lead. None means as the endpoint says.
        waits: how calls wait.

    Attributes:
        address: where the connections lead, without a password.
        tls: whether they speak TLS.
        is_local: whether they lead to this machine.
        losses: counts the exchanges that break off.
        reached: whether a connection was ever made.
        gathers: whether a fetch may use several of its connections, or some of several nodes, at the same time.
    """

    def __init__(
        self,
        endpoint: Endpoint | GivenPool,
        losses: Losses | None = None,
        address: str | None = None,
        *,
        waits: Waits = BLOCKING,
    ) -> None:
        self.losses = losses or Losses()
        self.address = address or endpoint.address
        self.tls, self.is_local = endpoint.tls, endpoint.is_local
        self.reached = False
        self._waits = waits
        self._turns = waits.turns(endpoint.most)
        self._opener = _Opener(endpoint, waits)
        # Connections that are open and not in use.
        self._idle: list[Connection] = []
        self.gathers = waits.opens_lanes and endpoint.is_own
        # Whether a fetch may use several, and when connections for that may be opened.
        self._has_lanes = self.gathers and (endpoint.most is None or endpoint.most >= LEAST_CONNECTIONS)
        self._next_lanes_at = 0.0
        self._freshness = endpoint.freshness
        # Whether a connection that was used needs nothing but a place among them.
        self._keeps = self._turns is None and endpoint.is_own and self._freshness == math.inf
        self._is_closed = False
        self._leave = weakref.finalize(self, _close, self._idle)
        self._leave.atexit = False

    def close(self) -> None:
        """Closes the connections that are not in use. No call may be under way."""
        # A settle() may follow, of the handle or of an error: its connection is then closed.
        self._is_closed, self._keeps = True, False
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
        connection = self._borrow(deadline)
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
        if self._keeps:
            self._idle.append(connection)
        else:
            self._give_back(connection)
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

        if self._turns is not None:
            deadline += self._turns.take()
        connection = self._borrow(deadline)
        try:
            answer = talk(send)
        except RedisAccError:
            # A refusal, or a reply that makes no sense: everything that was sent has been answered.
            self._give_back(connection)
            raise
        except BaseException as error:
            self._spoil(connection, error)
            raise
        self._give_back(connection)
        return answer

    def converse_with_all(self, talk: Callable[[Send], Answer], timeout: float, deadline: float) -> list[Answer]:
        """Does the same for commands without a key. Returns one answer, because it is one server."""
        return [self.converse("", talk, timeout, deadline)]

    def fetch(self, arrivals: Arrivals[A], deadline: float) -> None:
        """GETs strings straight into the memory where they are used, over one connection or several."""
        if self._turns is not None:
            deadline += self._turns.take()
        connection = self._borrow(deadline)
        lanes = self._has_lanes and arrivals.lanes > 1 and connection.is_remote is not False
        more = self._more(connection) if lanes else []
        try:
            connection.fetch(arrivals, deadline, more)
        except BaseException as error:
            _close(more)
            self._next_lanes_at = clock.now() + LANES_PAUSE
            self._spoil(connection, error)
            raise
        for one in (*more, connection):
            self._give_back(one)

    def _more(self, first: Connection) -> list[Connection]:
        """Returns further connections for a fetch from another machine, and has those opened that are missing."""
        if first.is_remote is None:
            first.is_remote = is_remote(first.sock)
        more: list[Connection] = []
        while first.is_remote and len(more) < LANES - 1:
            try:
                more.append(self._idle.pop())
            except IndexError:
                now = clock.now()
                if now >= self._next_lanes_at:
                    self._next_lanes_at = now + LANES_PAUSE
                    opens = partial(_open_more, self._opener, LANES - 1 - len(more), self._idle)
                    # RuntimeError: the interpreter ends, or the machine has no thread left.
                    with contextlib.suppress(RuntimeError):
                        self._waits.start(opens, "redisacc-lanes")
                break
            if more[-1].pid != os.getpid() or not is_quiet(more[-1].sock):
                more.pop().close()
        return more

    @contextlib.contextmanager
    def subscriber(self, place: int | None, tick: float) -> Iterator[Connection]:  # noqa: ARG002
        """Yields a connection to listen on, and disconnects it. A single server has every channel.

        Args:
            place: plays no role here.
            tick: how long the connection listens before it returns without a message, in seconds.
        """
        connection = self._opener.open(tick)
        if connection is None:
            raise self._too_many()
        try:
            yield connection
        except OSError as error:
            _raise_fault(error)
            raise
        finally:
            connection.close()

    # A connection that is in use belongs to one call. Borrowing is not a context manager, which would cost a small
    # command more time than all checks.

    def _borrow(self, deadline: float) -> Connection:
        """Returns a connection that is open, or opens one. If turns are taken, it is the caller's turn."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                if (opened := self._opened()) is not None:
                    return opened
                if running_time() >= deadline:
                    raise self._too_many() from None
                self._waits.sleep(_PAUSE)
                continue
            # After a fork it is the parent's.
            if connection.pid == os.getpid() and connection.fresh_until > time.monotonic():
                return connection
            connection.close()

    def _opened(self) -> Connection | None:
        try:
            connection = self._opener.open()
        except BaseException as error:
            if self._turns is not None:
                self._turns.give_back(silent=isinstance(error, SilentError))
            raise
        self.reached = True
        return connection

    def _too_many(self) -> BrokenError:
        return BrokenError(f"no connection available: all {self._opener.endpoint.most} of the client's are in use")

    def _give_back(self, connection: Connection) -> None:
        """Ends the use of a connection whose requests have all been answered."""
        if isinstance(connection, ClientConnection):
            connection.release()
        elif self._is_closed:
            connection.close()
        else:
            connection.fresh_until = time.monotonic() + self._freshness
            self._idle.append(connection)
        if self._turns is not None:
            self._turns.give_back()

    def _spoil(self, connection: Connection, error: BaseException) -> None:
        """Closes a connection that broke, or was interrupted: the next command would take unread replies for its own.

        Raises:
            BrokenError: its socket failed.
        """
        self.losses.count += 1
        connection.close()
        if self._turns is not None:
            self._turns.give_back(silent=isinstance(error, SilentError))
        _raise_fault(error)


def fetch_from_nodes(nodes: Sequence[Node], routes: Sequence[int], arrivals: Arrivals[A], deadline: float) -> None:
    """GETs strings from several servers at once, straight into the memory where they are used.

    Args:
        nodes: the servers, all of which gather.
        routes: for each lane the position of its server among them.
        arrivals: the strings.
        deadline: when a server counts as silent if it sends nothing, on ``running_time()``'s clock.

    Raises:
        ReplyError, BrokenError, RejectedError: as ``Node.fetch``.
    """
    borrowed: list[Connection] = []
    try:
        for node in nodes:
            borrowed.append(node._borrow(deadline))  # noqa: PERF401 - those before an error have to be closed
        borrowed[0].fetch(arrivals, deadline, borrowed[1:], routes)
    except BaseException as error:
        for node, connection in zip(nodes, borrowed, strict=False):
            with contextlib.suppress(BrokenError):
                node._spoil(connection, error)
        _raise_fault(error)
        raise
    for node, connection in zip(nodes, borrowed, strict=True):
        node._give_back(connection)


def _open_more(opener: _Opener, number: int, idle: list[Connection]) -> None:
    """Opens connections for lanes."""
    for _ in range(number):
        try:
            connection = opener.open()
        except Exception as error:  # noqa: BLE001 - whatever it is, one connection suffices
            logger.debug("no more lanes: %s", reason_of(error))
            return
        if connection is None:
            return
        idle.append(connection)


def _raise_fault(error: BaseException) -> None:
    """Raises BrokenError if an error means that. Returns if it does not, or if a signal handler has raised it."""
    if isinstance(error, OSError) and interrupt_in(error) is None:
        raise BrokenError(reason_of(error)) from error


def _close(connections: list[Connection]) -> None:
    while connections:
        connections.pop().close()


def _raise_passing(replies: Sequence[Any]) -> None:
    """Raises a refusal that passes by itself, as a reason for another attempt."""
    for reply in replies:
        if isinstance(reply, ReplyError) and reply.code in PASSING:
            raise reply
