"""Commands and replies on the socket of a connection that redis-py has opened, without its copies and overhead.

redis-py packs arguments into new strings and reads replies through a buffer, which costs a large array several copies,
and a small command more than its round trip. If a connection is nothing but a socket, arrays are sent from the memory
where they are (scatter-gather), and fetched strings are received straight into the memory where they will be used.
hiredis still parses the replies. docs/explanations/benchmarks.md has the figures.

A plain socket blocks, with the kernel's own timeout: Python's timeout would cost two more system calls for each that
moves data, and two to set it.
"""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

import hiredis

from redisacc._clock import running_time
from redisacc._interrupts import interrupt_in, suppressed
from redisacc._text import shown
from redisacc._wire.clients import disconnect, translated
from redisacc._wire.faults import BrokenError, ReplyError, SilentError
from redisacc._wire.replies import ReplyReader


class Pieces(tuple[memoryview, ...]):
    """An argument that lies in several places in memory, piece by piece. It is sent without being put together.

    Attributes:
        nbytes: its length in bytes.
    """

    nbytes: int

    def __new__(cls, pieces: Iterable[memoryview] = ()) -> Pieces:
        made = super().__new__(cls, pieces)
        made.nbytes = sum(map(len, made))
        return made


Argument = bytes | str | int | memoryview | Pieces
Command = Sequence[Argument]

# Buffers below this size are copied together, because a system call for each would cost more.
GATHER_BYTES = 16 * 1024
# The kernel takes at most this many buffers in one call (IOV_MAX).
GATHER_BUFFERS = 1024

_RECEIVE_BYTES = 64 * 1024
# The same where a line is expected. Bytes after the line are copied.
_LINE_BYTES = 64
# No line of a reply to GET is longer, in bytes.
_LONGEST_LINE = 64 * 1024

CLOSED = "the server closed the connection"
_SILENT = "the server did not reply in time"
_NO_END = "a string does not end where its length says it should"

# The slowest transfer of gradients that is not taken for silence, in bytes per second: a reply may come over a slow
# network, but a server that sends a byte now and then must not keep a call forever.
SLOWEST = 128 * 1024
# The deadline is checked after this many receptions in a row.
LOOKS = 16
# The number of strings that are fetched together where they do not go straight to their place.
_FETCH_TOGETHER = 8

# A silent server is noticed at most this late, in seconds: then it is checked whether the deadline has passed. After a
# signal the kernel starts its timeout again, so signals that come more often than this keep a wait from ending.
TICK = 0.02


# How a socket ends a tick: with the kernel's timeout, or with Python's.
TICKS = (BlockingIOError, TimeoutError)


def check_tick(error: OSError) -> None:
    """Raises an error that is one of ``TICKS`` and does not end a tick: the peer vanished, or a signal handler raised.

    Args:
        error: the error, which is being handled.
    """
    if error.errno == errno.ETIMEDOUT or interrupt_in(error) is not None:
        raise error


class PackedCommands(tuple[Command, ...]):
    """Commands that may be sent more than once. They are put into RESP only the first time.

    Attributes:
        buffers: the commands in RESP, as ``pack_commands`` returns them; empty: they have not been sent yet.
        script: the script that the first one runs.
    """

    buffers: list[bytes | memoryview] = []  # noqa: RUF012 - replaced, never changed
    script: Any = None


class Arrival(Protocol):
    """A string to fetch."""

    @property
    def key(self) -> str:
        """Its key."""

    @property
    def lane(self) -> int:
        """Its lane, from 0 on. Strings of one lane arrive in the order in which they are wanted."""


A = TypeVar("A", bound=Arrival)


class Arrivals(Protocol[A]):
    """Strings to fetch. If a connection breaks, only those that have not arrived are fetched again.

    Attributes:
        lanes: the number of lanes. Strings of different lanes may arrive in any order, and at the same time.
        homes: if each lane has a slot of its own, a key in that slot, for each lane; otherwise empty.
    """

    @property
    def lanes(self) -> int: ...

    @property
    def homes(self) -> Sequence[str]: ...

    def wanted(self) -> list[A]:
        """Returns all strings that are wanted now and have not arrived."""

    def more(self) -> list[A]:
        """Returns the strings that have been added to ``wanted`` since it was called, or this."""

    def begin(self, arrival: A, length: int, /) -> memoryview:
        """Returns where a string goes, given its length in bytes. Raises if that is wrong."""

    def missing(self, arrival: A, /) -> None:
        """Notes that there is no such string, or raises."""

    def finish(self, arrival: A, /) -> None:
        """Notes that the string has arrived."""


class Connection:
    """A connection, used by one caller at a time. If anything here raises, it cannot be used again.

    Attributes:
        pooled: the connection of redis-py.
        sock: its socket.
        pid: the process that it belongs to. After a fork it still belongs to the parent.
        fresh_until: until when it may be used once more.
        is_remote: whether it leads to another machine; None means nobody has asked yet.
        place: its place among the connections that a client may have.
        is_tls: whether it is known to speak TLS.
    """

    sock: Any = None
    fresh_until: float = math.inf
    is_remote: bool | None = False
    place: object = None
    is_tls: bool = False

    def __init__(self, pooled: Any) -> None:
        self.pooled = pooled
        self.pid = os.getpid()

    def exchange(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        """Sends commands and returns their replies, which may be errors.

        Args:
            commands: the commands.
            deadline: when the server has to have replied, on ``running_time()``'s clock.
        """
        raise NotImplementedError

    def fetch(
        self,
        arrivals: Arrivals[A],
        deadline: float,
        others: Sequence[Connection] = (),
        routes: Sequence[int] = (),
    ) -> None:
        """GETs strings straight into the memory where they are used.

        Args:
            arrivals: the strings.
            deadline: when the server counts as silent if it sends nothing, on ``running_time()``'s clock.
            others: further connections for them, as good as this one. Each serves one lane or more.
            routes: for each lane the position of its connection. Empty: the connections take turns.

        Raises:
            BrokenError, SilentError, ReplyError: a connection failed. None of them can be used again. The same holds if
                ``arrivals`` raises.
        """
        raise NotImplementedError

    def hear(self) -> list[Any]:
        """Returns messages that the server sends by itself, after a tick or about a second at most. Raises errors."""
        raise NotImplementedError

    def tell(self, *command: str) -> None:
        """Sends a command whose reply is heard, as a message. Does not wait."""
        with translated():
            self.pooled.send_command(*command, check_health=False)

    def close(self) -> None:
        """Ends the connection."""
        # Tracebacks may keep this object while another connection is opened.
        self.place = None
        disconnect(self.pooled)


def connection_of(pooled: Any, tick: float = TICK) -> SocketConnection:
    """Returns the fastest way to use a connection of redis-py.

    Args:
        pooled: the connection.
        tick: by how many seconds it may notice too late that a deadline has passed.
    """
    kind = TlsConnection if isinstance(pooled._sock, ssl.SSLSocket) else SocketConnection
    return kind(pooled, pooled._sock, tick)


class ClientConnection(Connection):
    """A connection of any kind, used through its client: a fake one, or one of the user's own class.

    Args:
        pooled: the connection.
        pool: where it came from.
    """

    def __init__(self, pooled: Any, pool: Any) -> None:
        super().__init__(pooled)
        self._pool = pool

    def release(self) -> None:
        """Gives it back to the pool."""
        with translated():
            self._pool.release(self.pooled)

    def close(self) -> None:
        super().close()
        self.release()

    def exchange(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        pooled = self.pooled
        with translated():
            pooled.send_packed_command(pooled.pack_commands([plain(command) for command in commands]))
        return [self._reply(deadline) for _ in commands]

    def _reply(self, deadline: float) -> Any:
        pooled, remaining = self.pooled, max(0.0, deadline - running_time())
        sock = getattr(pooled, "_sock", None)
        try:
            with translated():
                # The user's client may have no timeout, and a server that stalls must not block this call forever.
                # can_read of some versions decodes what it has read already, so it is only for what has no socket.
                if isinstance(sock, socket.socket):
                    sock.settimeout(max(remaining, TICK))
                elif not pooled.can_read(timeout=remaining):
                    raise SilentError(_SILENT)
                return pooled.read_response(disable_decoding=True)
        except ReplyError as error:
            return error
        except SilentError:
            running_time(waited=remaining)
            raise
        finally:
            if isinstance(sock, socket.socket):
                with suppressed(OSError):
                    sock.settimeout(pooled.socket_timeout)

    def fetch(self, arrivals: Arrivals[A], deadline: float, *_: object) -> None:
        fetch_together(self, arrivals, deadline)

    def hear(self) -> list[Any]:
        with translated():
            if not self.pooled.can_read(timeout=1.0):
                return []
            # Under RESP3 messages are pushes, which redis-py returns only on request.
            return [self.pooled.read_response(disable_decoding=True, push_request=True)]


def fetch_together(connection: Any, arrivals: Arrivals[A], deadline: float) -> None:
    """GETs strings over a connection or from a cluster, some at a time, and copies them to where they are used."""
    while wanted := arrivals.wanted()[:_FETCH_TOGETHER]:
        put(connection.exchange([("GET", each.key) for each in wanted], deadline), wanted, arrivals)


def put(replies: Sequence[Any], wanted: Sequence[A], arrivals: Arrivals[A]) -> None:
    """Copies the replies to GETs into the memory where they are used."""
    for arrival, reply in zip(wanted, replies, strict=True):
        if isinstance(reply, Exception):
            raise reply
        if reply is None:
            arrivals.missing(arrival)
            continue
        if not isinstance(reply, bytes):
            raise BrokenError(f"an unexpected reply to GET: {shown(reply)}")
        arrivals.begin(arrival, len(reply))[:] = reply
        arrivals.finish(arrival)


def length_of(head: bytes) -> int | None:
    """Returns the length of a string, given the first line of the reply to its GET; None means there is no such string.

    Raises:
        ReplyError: the reply is an error.
        BrokenError: no server replies this to GET.
    """
    if head[:1] == b"-":
        raise ReplyError(head[1:])
    if head == b"$-1":
        return None
    if not (head[:1] == b"$" and head[1:].isdigit() and len(head) <= 20):
        raise BrokenError(f"an unexpected reply to GET: {shown(head)}")
    return int(head[1:])


class SocketConnection(Connection):
    """A connection that is nothing but a socket."""

    def __init__(self, pooled: Any, sock: socket.socket, tick: float = TICK) -> None:
        super().__init__(pooled)
        self.sock = sock
        self.is_remote = None
        self._reader = ReplyReader()
        self._set_tick(tick)
        self._send_some: Callable[[list[bytes | memoryview]], int] = sock.sendmsg

    def _set_tick(self, tick: float) -> None:
        self.sock.settimeout(None)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(tick))
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(tick))

    def exchange(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        if type(commands) is PackedCommands:
            buffers = commands.buffers = commands.buffers or pack_commands(commands)
        else:
            buffers = pack_commands(commands)
        sock, reader, wanted = self.sock, self._reader, len(commands)
        reader.commands, reader.claimed, reader.received = commands, 0, 0
        # A call for it would cost a small command more time than the kernel takes.
        try:
            sent = sock.send(buffers[0]) if len(buffers) == 1 else self._send_some(buffers[:GATHER_BUFFERS])
        except TICKS as error:
            check_tick(error)
            sent = 0
        if sent < sum(map(len, buffers)):
            # A server that takes its time to receive a gradient is not silent meanwhile.
            deadline += self.send(buffers, deadline, sent)
        replies: list[Any] = []
        received = 0
        while len(replies) < wanted:
            try:
                data = sock.recv(_RECEIVE_BYTES)
            except TICKS as error:
                check_tick(error)
                self._check(deadline)
                continue
            if not data:
                raise BrokenError(CLOSED)
            found = reader.read(data)
            replies = replies + found if replies else found
            received += 1
            if received % LOOKS == 0 and len(replies) < wanted:
                # Otherwise, a slow server could keep the call forever.
                self._check(deadline)
        if len(replies) > wanted:
            raise BrokenError("it sent more replies than it was sent commands")
        return replies

    def _check(self, deadline: float) -> None:
        received = self._reader.received
        if received > _RECEIVE_BYTES and self._reader.reads_data():
            deadline += received / SLOWEST
        check_silence(deadline)

    def hear(self) -> list[Any]:
        try:
            data = self.sock.recv(_RECEIVE_BYTES)
        except TICKS as error:
            check_tick(error)
            return []
        if not data:
            raise BrokenError(CLOSED)
        said = self._reader.read(data)
        for message in said:
            if isinstance(message, Exception):
                raise message
        if said:
            self._reader.commands, self._reader.claimed, self._reader.received = (), 0, 0
        return said

    def fetch(
        self,
        arrivals: Arrivals[A],
        deadline: float,
        others: Sequence[Connection] = (),
        routes: Sequence[int] = (),
    ) -> None:
        lanes = list(map(_Lane[A], (self, *others), repeat(not others)))
        ready, numbers, poll = lanes, dict[int, _Lane[A]](), select.poll()
        if others:
            for lane in lanes:
                numbers[lane.sock.fileno()] = lane
                poll.register(lane.sock, select.POLLIN)
        received, wanted = 0, arrivals.wanted()
        while True:
            for number, lane in enumerate(lanes if wanted else ()):
                some = [one for one in wanted if _route(one.lane, routes, len(lanes)) == number] if others else wanted
                if some:
                    lane.connection.send(
                        pack_commands([("GET", one.key) for one in some]), deadline + received / SLOWEST
                    )
                    lane.awaited.extend(some)
            if not any(map(_AWAITED, lanes)):
                return
            if others:
                ready = [numbers[number] for number, _ in poll.poll(TICK * 1000)] or lanes
            for lane in ready:
                awaited = len(lane.awaited)
                received += lane.receive(arrivals)
                if len(lane.awaited) == awaited:
                    # Even after data: a server that sends a byte now and then could keep the call forever.
                    check_silence(deadline + received / SLOWEST)
            wanted = arrivals.more()

    def send(self, buffers: list[bytes | memoryview], deadline: float, sent: int = 0) -> float:
        """Sends the rest of buffers, after so many bytes. Returns how many seconds that took, or 0."""
        began, first, total, length = running_time() if sent else 0.0, 0, sent, sum(map(len, buffers))
        # The caller may send the same buffers again.
        buffers = list(buffers)
        while total < length:
            while sent >= len(buffers[first]):
                sent -= len(buffers[first])
                first += 1
            buffers[first] = memoryview(buffers[first])[sent:]
            try:
                sent = self._send_some(buffers[first : first + GATHER_BUFFERS])
            except TICKS as error:
                check_tick(error)
                sent = 0
            total += sent
            if total < length:
                began = began or running_time()
                check_silence(deadline + total / SLOWEST)
        return running_time() - began if began else 0.0


class TlsConnection(SocketConnection):
    """A connection over TLS, which takes one buffer at a time and has Python's timeout only."""

    is_tls = True

    def __init__(self, pooled: Any, sock: socket.socket, tick: float = TICK) -> None:
        super().__init__(pooled, sock, tick)
        self._send_some = lambda buffers: sock.send(buffers[0])

    def _set_tick(self, tick: float) -> None:
        self.sock.settimeout(tick)


def _timeval(seconds: float) -> bytes:
    """Returns a timeout in the kernel's format. 0 means none."""
    return struct.pack("ll", int(seconds), round(seconds % 1 * 1e6))


def check_silence(deadline: float) -> None:
    """Raises SilentError once the deadline has passed."""
    if running_time() >= deadline:
        raise SilentError(_SILENT)


def _route(lane: int, routes: Sequence[int], connections: int) -> int:
    return routes[lane] if routes else lane % connections


_AWAITED = attrgetter("awaited")


class _Lane(Generic[A]):
    """A connection, and the strings that are on their way over it, in order.

    Args:
        connection: the connection, a SocketConnection.
        is_alone: whether the caller waits for no other one, so that it may block here.

    Attributes:
        connection: the connection.
        sock: its socket.
        awaited: the strings.
    """

    def __init__(self, connection: Any, is_alone: bool) -> None:
        self.connection, self.sock = connection, connection.sock
        self.awaited: deque[A] = deque()
        # For a line, and for a string. TLS knows no flags.
        self._flags = (0, 0)
        if not connection.is_tls:
            self._flags = (0, socket.MSG_WAITALL) if is_alone else (socket.MSG_DONTWAIT, socket.MSG_DONTWAIT)
        # poll() does not announce bytes that TLS has already decrypted.
        self._pending = self.sock.pending if connection.is_tls and not is_alone else None
        # What was received where lines are expected, and not yet read.
        self._text = bytearray()
        # Where the rest of a string goes that has begun to arrive, and whether only its end is missing.
        self._place = memoryview(b"")
        self._ends = False

    def receive(self, arrivals: Arrivals[A]) -> int:
        """Receives what is there, up to the end of a string at most. Returns the number of bytes."""
        total, awaited, text = 0, len(self.awaited), self._text
        while True:
            size = len(self._place) or _LINE_BYTES
            try:
                if self._place:
                    received: int = self.sock.recv_into(self._place, size, self._flags[1])
                    self._place = self._place[received:]
                else:
                    data = self.sock.recv(size, self._flags[0])
                    received = len(data)
                    text += data
            except TICKS as error:
                check_tick(error)
                # Nothing has arrived, or only a piece of a TLS record.
                return total
            if not received:
                raise BrokenError(CLOSED)
            total += received
            while not self._place and (stop := text.find(b"\r\n")) >= 0:
                line = bytes(text[:stop])
                del text[: stop + 2]
                if self._ends and not line:
                    self._ends = False
                    arrivals.finish(self.awaited.popleft())
                elif self._ends or not self.awaited:
                    raise BrokenError(_NO_END if self._ends else "it sent more replies than it was sent commands")
                elif (length := length_of(line)) is None:
                    arrivals.missing(self.awaited.popleft())
                else:
                    place = arrivals.begin(self.awaited[0], length)
                    there = min(length, len(text))
                    place[:there] = text[:there]
                    del text[:there]
                    self._place, self._ends = place[there:], True
            if len(text) > (1 if self._ends else _LONGEST_LINE):
                raise BrokenError(_NO_END if self._ends else "a reply is not RESP")
            if not self._pending() if self._pending else received < size or len(self.awaited) < awaited:
                return total


def pack_commands(commands: Sequence[Command]) -> list[bytes | memoryview]:
    """Returns commands in RESP, as buffers: large memoryviews as they are, and everything else joined."""
    buffers: list[bytes | memoryview] = []
    pending: list[bytes | memoryview] = []
    for command in commands:
        types = list(map(type, command))
        if _VIEWS.isdisjoint(types):
            texts: Any = command
            if int in types:
                # If a signal handler raises while hiredis (3.5.0) converts a number, hiredis crashes the process.
                texts, place = list(command), -1
                # Few are numbers: to look at each argument here would take longer than all else.
                for _ in range(types.count(int)):
                    place = types.index(int, place + 1)
                    texts[place] = b"%d" % texts[place]
            pending.append(hiredis.pack_command(tuple(texts)))
            continue
        pending.append(b"*%d\r\n" % len(command))
        for argument in command:
            if not isinstance(argument, (memoryview, Pieces)):
                data = argument if isinstance(argument, bytes) else str(argument).encode()
                pending.append(b"$%d\r\n%b\r\n" % (len(data), data))
                continue
            pending.append(b"$%d\r\n" % argument.nbytes)
            for piece in argument if isinstance(argument, Pieces) else (argument,):
                if len(piece) < GATHER_BYTES:
                    pending.append(piece)
                    continue
                if pending:
                    buffers.append(b"".join(pending))
                buffers.append(piece)
                pending = []
            pending.append(b"\r\n")
    buffers.append(pending[0] if len(pending) == 1 else b"".join(pending))
    return buffers


def plain(command: Command) -> tuple[Any, ...]:
    """Returns a command as clients take it: its numbers as text, and arguments in pieces put together."""
    return tuple(
        b"%d" % part if type(part) is int else b"".join(part) if type(part) is Pieces else part for part in command
    )


_VIEWS = frozenset((memoryview, Pieces))


# The types of replies that are no errors.
VALUES = frozenset((list, bytes, int, type(None)))
