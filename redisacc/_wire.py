"""Commands and replies on a plain socket of redis-py's connection, without its copies and per-command overhead.

redis-py packs arguments into new strings and reads replies through a buffer, which costs a large array several copies
and a small command more than its round trip. Where a connection is just a socket, arrays leave as the buffers that
they are (scatter-gather), and what is fetched is received straight into the memory where it will be used. Replies are
still parsed by hiredis. docs/measurements.md has the figures.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

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


def socket_of(connection: Any) -> socket.socket | None:
    """The socket, if there is nothing between it and the server's RESP: no TLS, no cache, no fake."""
    if hiredis is None or type(connection) not in (redis.Connection, redis.UnixDomainSocketConnection):
        return None
    sock = connection._sock
    return sock if type(sock) is socket.socket else None


def _arm(sock: socket.socket, give_up: float) -> None:
    """Lets the next calls on the socket end at ``give_up``."""
    left = give_up - time.monotonic()
    if left <= 0:
        raise redis.TimeoutError("the server did not reply in time")
    sock.settimeout(left)


def exchange(connection: Any, sock: socket.socket, commands: Sequence[Command], give_up: float) -> list[Any]:
    """Sends commands and returns their replies, errors among them. Whatever it raises, the connection is spoilt."""
    _arm(sock, give_up)
    _send(sock, commands)
    reader = hiredis.Reader(replyError=_reply_error, notEnoughData=_NOT_YET)
    replies: list[Any] = []
    while len(replies) < len(commands):
        reply = reader.gets()
        if reply is _NOT_YET:
            reader.feed(_receive(sock))
        elif isinstance(reply, BusyLoadingError):
            raise reply
        elif not isinstance(reply, _PUSH):
            replies.append(reply)
    sock.settimeout(connection.socket_timeout)
    return replies


def fetch(
    connection: Any, sock: socket.socket, keys: Sequence[str], into: Sequence[memoryview], give_up: float
) -> list[int]:
    """GETs strings into the buffers given. Returns how many bytes each string has, -1 where there is none.

    A string of another length than its buffer isn't received, and neither is what follows: the list ends with it, and
    the connection is closed.
    """
    _arm(sock, give_up)
    _send(sock, [("GET", key) for key in keys])
    incoming = _Incoming(sock)
    lengths: list[int] = []
    for view in into:
        head = incoming.line()
        if head in (b"$-1", b"_"):
            lengths.append(-1)
            continue
        if head[:1] == b"-":
            raise _reply_error(head[1:].decode(errors="replace"))
        if head[:1] != b"$" or not head[1:].isdigit():
            raise redis.ConnectionError(f"an unexpected reply to GET: {head[:64]!r}")
        lengths.append(int(head[1:]))
        if lengths[-1] != len(view):
            connection.disconnect()
            return lengths
        incoming.fill(view)
        incoming.line()
    sock.settimeout(connection.socket_timeout)
    return lengths


class _Incoming:
    """What a socket delivers: lines through a small buffer, and the bytes of large strings past it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._start = self._end = 0

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
            filled += self._receive(view[filled:])

    def _receive(self, view: memoryview) -> int:
        received = self._sock.recv_into(view)
        if not received:
            raise redis.ConnectionError("the server closed the connection")
        return received


def pack(commands: Sequence[Command]) -> list[bytes | memoryview]:
    """Commands in RESP, as buffers: large ones as they are, all else joined."""
    buffers: list[bytes | memoryview] = []
    pending: list[bytes | memoryview] = []
    for command in commands:
        pending.append(b"*%d\r\n" % len(command))
        for argument in command:
            if isinstance(argument, str):
                data: bytes | memoryview = argument.encode()
            elif isinstance(argument, int):
                data = b"%d" % argument
            else:
                data = argument
            size = len(data)
            if size < GATHER_BYTES:
                pending += (b"$%d\r\n" % size, data, b"\r\n")
            else:
                pending.append(b"$%d\r\n" % size)
                buffers += (b"".join(pending), data)
                pending = [b"\r\n"]
    buffers.append(b"".join(pending))
    return buffers


def _send(sock: socket.socket, commands: Sequence[Command]) -> None:
    buffers = pack(commands)
    if len(buffers) == 1:
        sock.sendall(buffers[0])
        return
    first = 0
    while first < len(buffers):
        sent = sock.sendmsg(buffers[first : first + GATHER_BUFFERS])
        while first < len(buffers) and sent >= len(buffers[first]):
            sent -= len(buffers[first])
            first += 1
        if sent:
            buffers[first] = memoryview(buffers[first])[sent:]


def _receive(sock: socket.socket) -> bytes:
    data = sock.recv(_RECEIVE_BYTES)
    if not data:
        raise redis.ConnectionError("the server closed the connection")
    return data


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
# What the server says unasked under RESP3; replies come by themselves.
_PUSH: tuple[type, ...] = (hiredis.PushNotification,) if hasattr(hiredis, "PushNotification") else ()
