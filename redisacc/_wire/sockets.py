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
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

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

CLOSED = "the server closed the connection"
_SILENT = "the server did not reply in time"

# The slowest transfer of gradients that is not taken for silence, in bytes per second: a reply may come over a slow
# network, but a server that sends a byte now and then must not keep a call forever.
SLOWEST = 128 * 1024
# The deadline is checked after this many receptions in a row.
LOOKS = 16
# How many messages may be pushed before a command is answered.
_MAX_PUSHED = 100_000
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

    def expected(self, arrival: A, /) -> memoryview:
        """Returns where a string goes if it has the expected length. It is written to before that is known."""

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
    """

    sock: Any = None
    fresh_until: float = math.inf
    is_remote: bool | None = False
    place: object = None

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

    def fetch(self, arrivals: Arrivals[A], deadline: float) -> None:
        """GETs strings in order, straight into the memory where they are used, if that is possible."""
        fetch_together(self, arrivals, deadline)

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

    def hear(self) -> list[Any]:
        with translated():
            if not self.pooled.can_read(timeout=1.0):
                return []
            # Under RESP3 messages are pushes, which redis-py returns only on request.
            return [self.pooled.read_response(disable_decoding=True, push_request=True)]


def fetch_together(connection: Any, arrivals: Arrivals[A], deadline: float) -> None:
    """GETs strings over a connection or from a cluster, some at a time, and copies them to where they are used."""
    while wanted := arrivals.wanted()[:_FETCH_TOGETHER]:
        put(connection.exchange(get_commands(wanted), deadline), wanted, arrivals)


def get_commands(wanted: Sequence[Arrival]) -> list[Command]:
    """Returns the commands that GET strings."""
    return [("GET", arrival.key) for arrival in wanted]


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
    if head in (b"$-1", b"_"):
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
            deadline += self._send(buffers, deadline, sent)
        replies: list[Any] = []
        received = pushed = 0
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
            if not PUSHES.isdisjoint(map(type, found)):
                pushed += len(found)
                if pushed > _MAX_PUSHED:
                    raise BrokenError(f"it pushed more than {_MAX_PUSHED} messages instead of a reply")
                found = [reply for reply in found if type(reply) not in PUSHES]
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

    def fetch(self, arrivals: Arrivals[A], deadline: float) -> None:
        wanted, awaited = arrivals.wanted(), deque[A]()
        incoming = _Incoming(self.sock, deadline)
        while wanted or awaited:
            if wanted:
                self.request(wanted, deadline)
                awaited.extend(wanted)
            arrival = awaited.popleft()
            # Most are there as they are expected.
            if incoming.put(arrivals.expected(arrival)) or self._receive(incoming, arrivals, arrival):
                arrivals.finish(arrival)
            wanted = arrivals.more()

    def request(self, wanted: Sequence[Arrival], deadline: float) -> None:
        """Sends the GETs of strings. Their replies are still to be received."""
        self._send(pack_commands(get_commands(wanted)), deadline)

    @staticmethod
    def _receive(incoming: _Incoming, arrivals: Arrivals[A], arrival: A) -> bool:
        """Receives the reply to a GET. Returns whether there is such a string."""
        length = length_of(incoming.line())
        if length is None:
            arrivals.missing(arrival)
            return False
        incoming.fill(arrivals.begin(arrival, length))
        incoming.line()
        return True

    def _send(self, buffers: list[bytes | memoryview], deadline: float, sent: int = 0) -> float:
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

    def __init__(self, pooled: Any, sock: socket.socket, tick: float = TICK) -> None:
        super().__init__(pooled, sock, tick)
        self._send_some = lambda buffers: sock.send(buffers[0])

    def _set_tick(self, tick: float) -> None:
        self.sock.settimeout(tick)

    fetch = Connection.fetch


def _timeval(seconds: float) -> bytes:
    """Returns a timeout in the kernel's format. 0 means none."""
    return struct.pack("ll", int(seconds), round(seconds % 1 * 1e6))


def check_silence(deadline: float) -> None:
    """Raises SilentError once the deadline has passed."""
    if running_time() >= deadline:
        raise SilentError(_SILENT)


class _Incoming:
    """Receives from a socket: strings of known length straight into their memory, the rest through a buffer."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._start = self._end = 0
        self._received = 0

    def put(self, place: memoryview) -> bool:
        """Receives a bulk string that has the length of ``place``, mostly by two system calls.

        Returns False if something else arrives, or may: that is then read next.
        """
        if not place or self._start < self._end:
            return False
        head, end = b"$%d\r\n" % len(place), bytearray(2)
        # The head comes first: if a shorter reply with nothing behind it were received together with the string, the
        # kernel would wait for more until the next tick.
        received = self._receive(memoryview(self._buffer)[: len(head)])
        if self._buffer[:received] != head:
            # An error, a missing string, another length, or only the first bytes of the right head.
            self._start, self._end = 0, received
            return False
        received = 0
        while received < len(place):
            received += self._receive(place[received:], end, flags=socket.MSG_WAITALL)
        received -= len(place)
        while received < len(end):
            received += self._receive(memoryview(end)[received:])
        if end != b"\r\n":
            raise BrokenError("a string does not end where its length says it should")
        return True

    def line(self) -> bytes:
        """Returns the next line, without its end."""
        while (stop := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            self._buffer[: self._end - self._start] = self._buffer[self._start : self._end]
            self._start, self._end = 0, self._end - self._start
            if self._end == len(self._buffer):
                raise BrokenError("a reply is not RESP")
            self._end += self._receive(memoryview(self._buffer)[self._end :])
        line = bytes(self._buffer[self._start : stop])
        self._start = stop + 2
        return line

    def fill(self, view: memoryview) -> None:
        """Receives exactly as many bytes as the view has."""
        filled = min(self._end - self._start, len(view))
        view[:filled] = memoryview(self._buffer)[self._start : self._start + filled]
        self._start += filled
        while filled < len(view):
            filled += self._receive(view[filled:], flags=socket.MSG_WAITALL)

    def _receive(self, *places: memoryview | bytearray, flags: int = 0) -> int:
        """Receives into one place after the other. Returns how many bytes arrived, which is at least one."""
        while True:
            try:
                received = self._sock.recvmsg_into(places, 0, flags)[0]
            except TICKS as error:
                check_tick(error)
                received = -1
            if not received:
                raise BrokenError(CLOSED)
            self._received += max(received, 0)
            if received < sum(map(len, places)):
                # Even after data: a server that sends a byte now and then could keep the call forever.
                check_silence(self._deadline + self._received / SLOWEST)
            if received > 0:
                return received


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


# The types of replies that are neither errors nor pushes.
VALUES = frozenset((list, bytes, int, type(None)))
# The types of messages that the server sends by itself under RESP3.
PUSHES = frozenset((hiredis.PushNotification,))
