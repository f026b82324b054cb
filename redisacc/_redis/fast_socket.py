"""Commands and replies on a plain socket of redis-py's connection, without its copies and per-command overhead.

redis-py packs arguments into new strings and reads replies through a buffer, which costs a large array several copies,
and a small command more than its round trip. If a connection is nothing but a socket, arrays are sent from the memory
where they are (scatter-gather), and fetched strings are received straight into the memory where they will be used.
hiredis still parses the replies. docs/measurements.md has the figures.

A socket in use here blocks, with the kernel's own timeout: Python's timeout would cost two more system calls for each
that moves data, and two to set it. The socket is given back to redis-py as it was.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, Protocol

import hiredis
import redis
from redis.exceptions import AuthenticationError, BusyLoadingError, NoScriptError, ResponseError

from redisacc._text import printable, shown

Argument = bytes | str | int | memoryview
Command = Sequence[Argument]

# Buffers below this size are copied together, because a system call for each would cost more.
GATHER_BYTES = 16 * 1024
# The kernel takes at most this many buffers in one call (IOV_MAX).
GATHER_BUFFERS = 1024

_RECEIVE_BYTES = 64 * 1024

_CLOSED = "the server closed the connection"

# A silent server is noticed at most this late, in seconds: then it is checked whether the deadline has passed. After a
# signal the kernel starts its timeout again, so signals that come more often than this keep a wait from ending.
TICK = 0.02


class PackedCommands(tuple[Command, ...]):
    """Commands that may be sent more than once. They are put into RESP only the first time."""

    _buffers: list[bytes | memoryview] | None = None

    @property
    def buffers(self) -> list[bytes | memoryview]:
        """The commands in RESP, as ``pack`` returns them."""
        if self._buffers is None:
            self._buffers = pack_commands(self)
        return self._buffers


class Arrivals(Protocol):
    """Strings to fetch, in order. If the connection breaks, only those that are still missing are fetched again."""

    def wanted(self) -> list[str]:
        """Returns the keys of the strings that have not arrived."""

    def expected(self) -> memoryview:
        """Returns where the next one goes if it has the expected length. It is written to before that is known."""

    def begin(self, length: int) -> memoryview:
        """Returns where the next one goes, given its length in bytes, -1 if there is none. Raises if that is wrong."""

    def finish(self) -> None:
        """Notes that the string has arrived."""


class Connection(Protocol):
    """A connection out of a pool, used by one caller at a time. If anything here raises, it cannot be used again.

    Attributes:
        pooled: the connection of redis-py.
        pid: the process that it belongs to. After a fork it still belongs to the parent.
    """

    pooled: Any
    pid: int

    def exchange(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        """Sends commands and returns their replies, which may be errors.

        Args:
            commands: the commands.
            deadline: when the server has to have replied, on ``time.monotonic()``'s clock.
        """

    def fetch(self, arrivals: Arrivals, deadline: float) -> None:
        """GETs strings in order, straight into the memory where they are used."""

    def hear(self) -> list[Any]:
        """Returns messages that the server sends by itself, after a tick or about a second at most. Raises errors."""

    def alive(self) -> bool:
        """Returns whether the client is still open."""

    def release(self) -> None:
        """Leaves the connection as redis-py had it."""


def connection_of(pooled: Any, tick: float = TICK) -> Connection:
    """Returns the fastest way to use a connection.

    Args:
        pooled: a connection of redis-py.
        tick: by how many seconds it may notice too late that a deadline has passed.
    """
    sock = socket_of(pooled)
    return ClientConnection(pooled) if sock is None else SocketConnection(pooled, sock, tick)


def socket_of(pooled: Any) -> socket.socket | None:
    """Returns the socket if RESP passes through it as it is: no TLS, no client-side cache, no fake. Otherwise None."""
    if type(pooled) not in (redis.Connection, redis.UnixDomainSocketConnection):
        return None
    sock = pooled._sock
    return sock if type(sock) is socket.socket else None


class ClientConnection:
    """A connection of any kind, used through redis-py."""

    def __init__(self, pooled: Any) -> None:
        self.pooled = pooled
        self.pid = os.getpid()

    def alive(self) -> bool:
        return getattr(self.pooled, "_sock", self) is not None

    def release(self) -> None:
        pass

    def exchange(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        pooled = self.pooled
        pooled.send_packed_command(pooled.pack_commands([_without_numbers(command) for command in commands]))
        replies: list[Any] = []
        for _ in commands:
            # The user's client may have no timeout, and a server that stalls must not block this call forever.
            if not pooled.can_read(timeout=max(0.0, deadline - time.monotonic())):
                raise redis.TimeoutError("the server did not reply in time")
            try:
                replies.append(pooled.read_response(disable_decoding=True))
            except BusyLoadingError:
                raise
            except ResponseError as error:
                replies.append(error)
        return replies

    def hear(self) -> list[Any]:
        if not self.pooled.can_read(timeout=1.0):
            return []
        # Under RESP3 messages are pushes, which redis-py returns only on request.
        return [self.pooled.read_response(disable_decoding=True, push_request=True)]

    def fetch(self, arrivals: Arrivals, deadline: float) -> None:
        put(self.exchange([("GET", key) for key in arrivals.wanted()], deadline), arrivals)


def put(replies: Sequence[Any], arrivals: Arrivals) -> None:
    """Copies the replies to GETs into the memory where they are used."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
        view = arrivals.begin(-1 if reply is None else len(reply))
        view[:] = reply
        arrivals.finish()


class SocketConnection:
    """A connection that is nothing but a socket."""

    def __init__(self, pooled: Any, sock: socket.socket, tick: float = TICK) -> None:
        self.pooled = pooled
        self.pid = os.getpid()
        self._sock = sock
        self._reader = hiredis.Reader(
            protocolError=redis.ConnectionError, replyError=_reply_error, notEnoughData=_NOT_YET
        )
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(tick))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(tick))

    def alive(self) -> bool:
        return self.pooled._sock is self._sock

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(0))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(0))
            self._sock.settimeout(self.pooled.socket_timeout)

    def exchange(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        buffers = commands.buffers if type(commands) is PackedCommands else pack_commands(commands)
        sock, reader, wanted = self._sock, self._reader, len(commands)
        if len(buffers) > 1:
            self._send(buffers, deadline)
        else:
            # The most frequent case: _send would cost a small command more time than the kernel takes.
            try:
                sent = sock.send(buffers[0])
            except BlockingIOError:
                sent = 0
            if sent < len(buffers[0]):
                self._send([memoryview(buffers[0])[sent:]], deadline)
        replies: list[Any] = []
        while len(replies) < wanted:
            try:
                data = sock.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                _check(deadline)
                continue
            if not data:
                raise redis.ConnectionError(_CLOSED)
            reader.feed(data)
            while (reply := reader.gets()) is not _NOT_YET:
                if type(reply) in VALUES:
                    replies.append(reply)
                elif isinstance(reply, BusyLoadingError):
                    raise reply
                elif not isinstance(reply, _PUSH):
                    replies.append(reply)
        return replies

    def hear(self) -> list[Any]:
        try:
            data = self._sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise redis.ConnectionError(_CLOSED)
        self._reader.feed(data)
        said: list[Any] = []
        while (reply := self._reader.gets()) is not _NOT_YET:
            if isinstance(reply, Exception):
                raise reply
            said.append(reply)
        return said

    def fetch(self, arrivals: Arrivals, deadline: float) -> None:
        keys = arrivals.wanted()
        self._send(pack_commands([("GET", key) for key in keys]), deadline)
        incoming = _Incoming(self._sock, deadline)
        for _ in keys:
            if incoming.put(arrivals.expected()):
                arrivals.finish()
                continue
            head = incoming.line()
            if head[:1] == b"-":
                raise _reply_error(head[1:])
            missing = head in (b"$-1", b"_")
            if not missing and not (head[:1] == b"$" and head[1:].isdigit() and len(head) <= 20):
                raise redis.ConnectionError(f"an unexpected reply to GET: {shown(head)}")
            incoming.fill(arrivals.begin(-1 if missing else int(head[1:])))
            incoming.line()
            arrivals.finish()

    def _send(self, buffers: list[bytes | memoryview], deadline: float) -> None:
        # The caller may send the same buffers again.
        buffers, first = list(buffers), 0
        while first < len(buffers):
            try:
                sent = self._sock.sendmsg(buffers[first : first + GATHER_BUFFERS])
            except BlockingIOError:
                _check(deadline)
                continue
            while first < len(buffers) and sent >= len(buffers[first]):
                sent -= len(buffers[first])
                first += 1
            if sent:
                buffers[first] = memoryview(buffers[first])[sent:]


def _timeval(seconds: float) -> bytes:
    """Returns a timeout in the kernel's format. 0 means none."""
    return struct.pack("ll", int(seconds), round(seconds % 1 * 1e6))


def _check(deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise redis.TimeoutError("the server did not reply in time")


class _Incoming:
    """What a socket delivers: strings of known length straight into their memory, and all else through a buffer."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._start = self._end = 0

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
            raise redis.ConnectionError("a string does not end where its length says it should")
        return True

    def line(self) -> bytes:
        """Returns the next line, without its end."""
        while (stop := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            self._buffer[: self._end - self._start] = self._buffer[self._start : self._end]
            self._start, self._end = 0, self._end - self._start
            if self._end == len(self._buffer):
                raise redis.ConnectionError("a reply is not RESP")
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
            except BlockingIOError:
                _check(self._deadline)
                continue
            if not received:
                raise redis.ConnectionError(_CLOSED)
            return received


def pack_commands(commands: Sequence[Command]) -> list[bytes | memoryview]:
    """Returns commands in RESP, as buffers: large memoryviews as they are, and everything else joined."""
    buffers: list[bytes | memoryview] = []
    pending: list[bytes] = []
    for command in commands:
        if memoryview not in map(type, command):
            pending.append(hiredis.pack_command(_without_numbers(command)))
            continue
        pending.append(b"*%d\r\n" % len(command))
        for argument in command:
            if isinstance(argument, memoryview) and len(argument) >= GATHER_BYTES:
                pending.append(b"$%d\r\n" % len(argument))
                buffers += (b"".join(pending), argument)
                pending = [b"\r\n"]
                continue
            data = str(argument).encode() if isinstance(argument, (str, int)) else bytes(argument)
            pending.append(b"$%d\r\n%b\r\n" % (len(data), data))
    buffers.append(pending[0] if len(pending) == 1 else b"".join(pending))
    return buffers


def _without_numbers(command: Command) -> tuple[Any, ...]:
    """Returns a command with its numbers as text.

    If a signal handler raises while hiredis (3.5.0) converts a number, hiredis crashes the process.
    """
    return tuple([b"%d" % argument if type(argument) is int else argument for argument in command])


def _reply_error(text: bytes | str) -> Exception:
    text = printable(text)
    code, _, message = text.partition(" ")
    if code == "NOSCRIPT":
        return NoScriptError(message)
    if code == "LOADING":
        return BusyLoadingError(message)
    if code in ("NOAUTH", "WRONGPASS"):
        return AuthenticationError(message)
    return ResponseError(text)


_NOT_YET = object()
# The types of replies that are neither errors nor pushes.
VALUES = frozenset((list, bytes, int, type(None)))
# The types of messages that the server sends by itself under RESP3.
_PUSH = hiredis.PushNotification
