"""Commands and replies on a plain socket of redis-py's connection, without its copies and per-command overhead.

redis-py packs arguments into new strings and reads replies through a buffer, which costs a large array several copies
and a small command more than its round trip. Where a connection is just a socket, arrays leave as the buffers that
they are (scatter-gather), and what is fetched is received straight into the memory where it will be used. Replies are
still parsed by hiredis. docs/measurements.md has the figures.

A socket in use here blocks, with the kernel's own timeout: Python's would cost two more calls of the kernel for each
that moves data, and two to set it. It is given back to redis-py as it was.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, Protocol

import redis
from redis.exceptions import AuthenticationError, BusyLoadingError, NoScriptError, ResponseError

try:
    import hiredis
except ImportError:  # redis-py's own parser will do
    hiredis = None  # type: ignore[assignment]

Argument = bytes | str | int | memoryview
Command = Sequence[Argument]

# Buffers below this size are copied together: a call of the kernel's for each costs more.
GATHER_BYTES = 16 * 1024
# The kernel takes this many buffers in one call (IOV_MAX).
GATHER_BUFFERS = 1024

_RECEIVE_BYTES = 64 * 1024

_CLOSED = "the server closed the connection"

# A silent server is noticed this late at most, in seconds: then it is seen whether the time is up. The kernel begins
# anew after a signal, so signals that come more often than that keep a wait from ending.
TICK = 0.02


class Packed(tuple[Command, ...]):
    """Commands that are sent more than once: put into RESP the first time only."""

    _buffers: list[bytes | memoryview] | None = None

    @property
    def buffers(self) -> list[bytes | memoryview]:
        """What ``pack`` makes of them."""
        if self._buffers is None:
            self._buffers = pack(self)
        return self._buffers


class Arrivals(Protocol):
    """Strings that somebody wants, in order. What has come is not asked for again if the connection breaks."""

    def wanted(self) -> list[str]:
        """The keys of those that haven't come yet."""

    def expected(self) -> memoryview:
        """Where the next one goes if it is as long as it should be. Written to before that is known."""

    def begin(self, length: int) -> memoryview:
        """Where the next one goes, as many bytes as it has; -1: there is none. Raises if it can't be right."""

    def finish(self) -> None:
        """It has come."""


class Wire(Protocol):
    """A connection out of a pool, for one user at a time. Whatever it raises, the connection is spoilt."""

    connection: Any
    # The process that it belongs to: after a fork it is still the parent's.
    pid: int

    def exchange(self, commands: Sequence[Command], give_up: float) -> list[Any]:
        """Sends commands and returns their replies, errors among them.

        Args:
            give_up: the end of the server's time to reply, on ``time.monotonic()``'s clock.
        """

    def fetch(self, arrivals: Arrivals, give_up: float) -> None:
        """GETs strings straight to where they go, in order."""

    def hear(self) -> list[Any]:
        """What the server says unasked, within a tick or about a second. Errors are raised."""

    def alive(self) -> bool:
        """Whether it is still what it was: somebody may close the client at any time."""

    def release(self) -> None:
        """Leaves the connection as redis-py had it."""


def wire_of(connection: Any, tick: float = TICK) -> Wire:
    """The fastest way to use a connection. ``tick``: how late it may notice that a time is up, in seconds."""
    sock = socket_of(connection)
    return Wrapped(connection) if sock is None else Plain(connection, sock, tick)


def socket_of(connection: Any) -> socket.socket | None:
    """The socket, if there is nothing between it and the server's RESP: no TLS, no cache, no fake."""
    if hiredis is None or type(connection) not in (redis.Connection, redis.UnixDomainSocketConnection):
        return None
    sock = connection._sock
    return sock if type(sock) is socket.socket else None


class Wrapped:
    """A connection of any kind, used as redis-py does."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.pid = os.getpid()

    def alive(self) -> bool:
        return getattr(self.connection, "_sock", self) is not None

    def release(self) -> None:
        pass

    def exchange(self, commands: Sequence[Command], give_up: float) -> list[Any]:
        connection = self.connection
        connection.send_packed_command(connection.pack_commands(commands))
        replies: list[Any] = []
        for _ in commands:
            # A user's client may have no timeout of its own; ours must not hang on a server that stalls.
            if not connection.can_read(timeout=max(0.0, give_up - time.monotonic())):
                raise redis.TimeoutError("the server did not reply in time")
            try:
                replies.append(connection.read_response(disable_decoding=True))
            except BusyLoadingError:
                raise
            except ResponseError as error:
                replies.append(error)
        return replies

    def hear(self) -> list[Any]:
        if not self.connection.can_read(timeout=1.0):
            return []
        # Under RESP3 messages are pushes, which redis-py hands only to who asks for them.
        return [self.connection.read_response(disable_decoding=True, push_request=True)]

    def fetch(self, arrivals: Arrivals, give_up: float) -> None:
        put(self.exchange([("GET", key) for key in arrivals.wanted()], give_up), arrivals)


def put(replies: Sequence[Any], arrivals: Arrivals) -> None:
    """Copies the replies to GETs to where they go."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
        view = arrivals.begin(-1 if reply is None else len(reply))
        view[:] = reply
        arrivals.finish()


class Plain:
    """A connection that is just a socket."""

    def __init__(self, connection: Any, sock: socket.socket, tick: float = TICK) -> None:
        self.connection = connection
        self.pid = os.getpid()
        self._sock = sock
        self._reader = hiredis.Reader(
            protocolError=redis.ConnectionError, replyError=_reply_error, notEnoughData=_NOT_YET
        )
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(tick))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(tick))

    def alive(self) -> bool:
        return self.connection._sock is self._sock

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(0))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(0))
            self._sock.settimeout(self.connection.socket_timeout)

    def exchange(self, commands: Sequence[Command], give_up: float) -> list[Any]:
        buffers = commands.buffers if type(commands) is Packed else pack(commands)
        sock, reader, wanted = self._sock, self._reader, len(commands)
        if len(buffers) > 1:
            self._send(buffers, give_up)
        else:
            # Mostly. What _send does would cost a small command more than the kernel's part.
            try:
                sent = sock.send(buffers[0])
            except BlockingIOError:
                sent = 0
            if sent < len(buffers[0]):
                self._send([memoryview(buffers[0])[sent:]], give_up)
        replies: list[Any] = []
        while len(replies) < wanted:
            try:
                data = sock.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                _check(give_up)
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

    def fetch(self, arrivals: Arrivals, give_up: float) -> None:
        keys = arrivals.wanted()
        self._send(pack([("GET", key) for key in keys]), give_up)
        incoming = _Incoming(self._sock, give_up)
        for _ in keys:
            if incoming.put(arrivals.expected()):
                arrivals.finish()
                continue
            head = incoming.line()
            if head[:1] == b"-":
                raise _reply_error(head[1:].decode(errors="replace"))
            missing = head in (b"$-1", b"_")
            if not missing and not (head[:1] == b"$" and head[1:].isdigit() and len(head) <= 20):
                raise redis.ConnectionError(f"an unexpected reply to GET: {head[:64]!r}")
            incoming.fill(arrivals.begin(-1 if missing else int(head[1:])))
            incoming.line()
            arrivals.finish()

    def _send(self, buffers: list[bytes | memoryview], give_up: float) -> None:
        # The caller may send these again.
        buffers, first = list(buffers), 0
        while first < len(buffers):
            try:
                sent = self._sock.sendmsg(buffers[first : first + GATHER_BUFFERS])
            except BlockingIOError:
                _check(give_up)
                continue
            while first < len(buffers) and sent >= len(buffers[first]):
                sent -= len(buffers[first])
                first += 1
            if sent:
                buffers[first] = memoryview(buffers[first])[sent:]


def _timeval(seconds: float) -> bytes:
    """As the kernel takes it; 0: no timeout."""
    return struct.pack("ll", int(seconds), round(seconds % 1 * 1e6))


def _check(give_up: float) -> None:
    if time.monotonic() >= give_up:
        raise redis.TimeoutError("the server did not reply in time")


class _Incoming:
    """What a socket delivers: strings of a known length straight to where they go, and all else through a buffer."""

    def __init__(self, sock: socket.socket, give_up: float) -> None:
        self._sock = sock
        self._give_up = give_up
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._start = self._end = 0

    def put(self, place: memoryview) -> bool:
        """Receives a bulk string that has the length of ``place``, mostly by two calls of the kernel.

        False if something else comes, or might: that is then the next to be read.
        """
        if not place or self._start < self._end:
            return False
        head, end = b"$%d\r\n" % len(place), bytearray(2)
        # Not all at once: something shorter, with nothing behind it, would be waited for until the next tick.
        received = self._receive(memoryview(self._buffer)[: len(head)])
        if self._buffer[:received] != head:
            # An error, or nothing, or another length. Also the first bytes of what is right: how many come is chance.
            self._start, self._end = 0, received
            return False
        received = 0
        while received < len(place):
            received += self._receive(place[received:], end, flags=socket.MSG_WAITALL)
        received -= len(place)
        while received < len(end):
            received += self._receive(memoryview(end)[received:])
        if end != b"\r\n":
            raise redis.ConnectionError("a string that doesn't end where it should")
        return True

    def line(self) -> bytes:
        """The next line, without its end."""
        while (stop := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            self._buffer[: self._end - self._start] = self._buffer[self._start : self._end]
            self._start, self._end = 0, self._end - self._start
            if self._end == len(self._buffer):
                raise redis.ConnectionError("a reply that is no RESP")
            self._end += self._receive(memoryview(self._buffer)[self._end :])
        line = bytes(self._buffer[self._start : stop])
        self._start = stop + 2
        return line

    def fill(self, view: memoryview) -> None:
        """Exactly as many bytes as the view has."""
        filled = min(self._end - self._start, len(view))
        view[:filled] = memoryview(self._buffer)[self._start : self._start + filled]
        self._start += filled
        while filled < len(view):
            filled += self._receive(view[filled:], flags=socket.MSG_WAITALL)

    def _receive(self, *places: memoryview | bytearray, flags: int = 0) -> int:
        """What comes next, into one place after the other. Returns how many bytes came: at least one."""
        while True:
            try:
                received = self._sock.recvmsg_into(places, 0, flags)[0]
            except BlockingIOError:
                _check(self._give_up)
                continue
            if not received:
                raise redis.ConnectionError(_CLOSED)
            return received


def pack(commands: Sequence[Command]) -> list[bytes | memoryview]:
    """Commands in RESP, as buffers: large memoryviews as they are, all else joined."""
    buffers: list[bytes | memoryview] = []
    pending: list[bytes] = []
    for command in commands:
        if memoryview not in map(type, command):
            pending.append(hiredis.pack_command(tuple(command)))  # type: ignore[arg-type]
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


def _reply_error(text: str) -> Exception:
    code, _, message = text.partition(" ")
    if code == "NOSCRIPT":
        return NoScriptError(message)
    if code == "LOADING":
        return BusyLoadingError(message)
    if code in ("NOAUTH", "WRONGPASS"):
        return AuthenticationError(message)
    return ResponseError(text)


_NOT_YET = object()
# What replies are that are neither errors nor said unasked.
VALUES = frozenset((list, bytes, int, type(None)))
# What the server says unasked under RESP3; replies come by themselves.
_PUSH: tuple[type, ...] = (hiredis.PushNotification,) if hasattr(hiredis, "PushNotification") else ()
