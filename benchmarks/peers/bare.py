"""A bare socket with just enough of the protocol: the least that any client of the server has to do."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

# The length of redisacc's parts.
PIECE = 2 * 2**20 - 64

# Linux refuses more buffers than this in one sendmsg.
_MOST_BUFFERS = 1024


class Bare:
    """A connection that copies neither large arguments nor large replies."""

    def __init__(self, host: str, port: int) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def of_url(cls, url: str) -> Bare:
        """Connects to the server of a URL."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        return cls(parts.hostname, parts.port)

    def close(self) -> None:
        """Closes the connection."""
        self.socket.close()

    @staticmethod
    def pack(*arguments: bytes | memoryview) -> list[bytes | memoryview]:
        """Returns a command as buffers; the large ones are the caller's memory."""
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
        return buffers

    def send(self, *arguments: bytes | memoryview) -> None:
        """Sends a command by scatter-gather, without copying large arguments."""
        self.send_all(self.pack(*arguments))

    def send_all(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Sends packed commands."""
        left = [memoryview(buffer).cast("B") for buffer in buffers]
        while left:
            sent = self.socket.sendmsg(left[:_MOST_BUFFERS])
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]

    def lines(self, number: int = 1) -> bytes:
        """Returns the given number of lines of replies, or more, in one piece."""
        data = self.socket.recv(4096)
        while data.count(b"\r\n") < number:
            data += self.socket.recv(4096)
        if data.startswith(b"-"):
            raise RuntimeError(data.decode())
        return data

    def pop(self, name: bytes) -> bytes:
        """Waits for an element of a list, and returns it."""
        self.send(b"BRPOP", name, b"0")
        return self.popped()

    def popped(self) -> bytes:
        """Returns the element of a list for which BRPOP has been sent."""
        return self.lines(5).split(b"\r\n")[4]

    def bulk_into(self, array: np.ndarray[Any, Any]) -> None:
        """Receives a reply of the array's length into the array."""
        view = memoryview(array.reshape(-1).view(np.uint8)).cast("B")
        head = b"$%d\r\n" % len(view)
        got = b""
        while len(got) < len(head):
            got += self.socket.recv(len(head) - len(got))
        if got != head:
            raise RuntimeError(f"expected {head!r}, got {got!r}")
        start = 0
        while start < len(view):
            start += self.socket.recv_into(view[start:])
        end = self.socket.recv(2)
        while len(end) < 2:
            end += self.socket.recv(1)


class PieceSums:
    """Adds up the pieces of gradients that workers SET, each as it comes.

    Args:
        bare: the connection to their server.
        workers: how many workers have each piece.
        longest: the most elements of a piece.
    """

    def __init__(self, bare: Bare, workers: int, longest: int) -> None:
        self._bare = bare
        self._workers = workers
        self._passage = np.empty(longest, np.float32)
        # Where a piece begins -> how many workers' pieces are in the sum, and the sum.
        self._sums: dict[int, tuple[int, np.ndarray[Any, Any]]] = {}

    def add(self, number: int, start: int, elements: int) -> np.ndarray[Any, Any] | None:
        """GETs a worker's piece, and adds it. Returns the sum if it has a piece of every worker now, else None."""
        count, total = self._sums.pop(start, (0, np.empty(0)))
        place = self._passage[:elements] if count else np.empty(elements, np.float32)
        self._bare.send(b"GET", b"piece:%d:%d" % (number, start))
        self._bare.bulk_into(place)
        if count:
            total += place
        else:
            total = place
        if count + 1 == self._workers:
            return total
        self._sums[start] = count + 1, total
        return None
