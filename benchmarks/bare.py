"""A bare socket that speaks just enough of the protocol: the least that any client of the server has to do."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import numpy as np

# More buffers than this in one sendmsg is an error on Linux.
_MOST_BUFFERS = 1024


class Bare:
    """A connection. Large arguments leave from where they stand, large replies arrive where they are wanted."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        """Closes it."""
        self._socket.close()

    def send(self, *arguments: bytes | memoryview) -> None:
        """Sends a command, scatter-gather, without copying a large argument."""
        buffers: list[bytes | memoryview] = []
        text = bytearray(b"*%d\r\n" % len(arguments))
        for argument in arguments:
            text += b"$%d\r\n" % len(argument)
            if len(argument) < 1024:
                text += argument
            else:
                buffers += [bytes(text), argument]
                text = bytearray()
            text += b"\r\n"
        buffers.append(bytes(text))
        self._send_all([memoryview(buffer).cast("B") for buffer in buffers])

    def _send_all(self, buffers: Sequence[memoryview]) -> None:
        left = list(buffers)
        while left:
            sent = self._socket.sendmsg(left[:_MOST_BUFFERS])
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]

    def line(self) -> bytes:
        """A reply of one line."""
        data = self._socket.recv(4096)
        while not data.endswith(b"\r\n"):
            data += self._socket.recv(4096)
        if data.startswith(b"-"):
            raise RuntimeError(data.decode())
        return data

    def bulk_into(self, array: np.ndarray[Any, Any]) -> None:
        """A reply of the array's length, into the array."""
        view = memoryview(array.reshape(-1).view(np.uint8)).cast("B")
        head = b"$%d\r\n" % len(view)
        got = b""
        while len(got) < len(head):
            got += self._socket.recv(len(head) - len(got))
        if got != head:
            raise RuntimeError(f"expected {head!r}, got {got!r}")
        start = 0
        while start < len(view):
            start += self._socket.recv_into(view[start:])
        end = self._socket.recv(2)
        while len(end) < 2:
            end += self._socket.recv(1)
