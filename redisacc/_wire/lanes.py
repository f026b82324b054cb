"""Lanes: several connections to a server on another machine, over which large strings are fetched at the same time.

While a machine receives uploads, the acknowledgements of the data that it sends wait behind them, up to 20 ms
in a switch. TCP's congestion control then sends accordingly little on each connection, so several of them fetch more.
On one machine nothing waits, and one connection is fastest. docs/explanations/benchmarks.md has the figures.

A fetch uses connections that are open and never waits for one. If one breaks, the fetch is repeated over a single
connection.
"""

from __future__ import annotations

import ipaddress
import selectors
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from typing import Generic

from redisacc._interrupts import interrupt_in
from redisacc._wire.faults import BrokenError
from redisacc._wire.sockets import (
    CLOSED,
    SLOWEST,
    TICK,
    TICKS,
    A,
    Arrivals,
    Connection,
    SocketConnection,
    check_silence,
    check_tick,
    length_of,
)

# How many lanes there are, the first connection included. Eight were no faster than four.
LANES = 4
# How many bytes are received where a line is expected. Bytes after the line are copied.
_LINE_BYTES = 64
# No line of a reply to GET is longer, in bytes.
_LONGEST_LINE = 64 * 1024


def is_remote(sock: socket.socket) -> bool:
    """Returns whether a socket leads to another machine."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        here, there = sock.getsockname()[0], sock.getpeername()[0]
        address = ipaddress.ip_address(there.partition("%")[0])
    except (OSError, ValueError) as error:
        if interrupt_in(error) is not None:
            raise
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    return here != there and not mapped.is_loopback


def is_quiet(sock: socket.socket) -> bool:
    """Returns whether nothing arrived on an idle socket: no reply to an earlier request, and no end."""
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        return not selector.select(0)


def fetch_over(
    connections: Sequence[Connection], arrivals: Arrivals[A], deadline: float, routes: Sequence[int] = ()
) -> None:
    """GETs strings over several connections at once, straight into the memory where they are used.

    Args:
        connections: all are SocketConnections. Each serves one lane or more.
        arrivals: the strings.
        deadline: when the server counts as silent if it sends nothing, on ``running_time()``'s clock.
        routes: for each lane the position of its connection. Empty: the connections take turns.

    Raises:
        BrokenError, SilentError, ReplyError: a connection failed. None of them can be used again. The same holds if
            ``arrivals`` raises.
    """
    lanes = [_Lane[A](connection) for connection in connections if isinstance(connection, SocketConnection)]
    with selectors.DefaultSelector() as selector:
        for lane in lanes:
            selector.register(lane.sock, selectors.EVENT_READ, lane)
        received, wanted = 0, arrivals.wanted()
        while True:
            until = deadline + received / SLOWEST
            for number, lane in enumerate(lanes):
                lane.request([one for one in wanted if _route(one.lane, routes, len(lanes)) == number], until)
            if not any(lane.awaited for lane in lanes):
                return
            for key, _ in selector.select(TICK):
                received += key.data.receive(arrivals)
            # Even after data: a server that sends a byte now and then could keep the call forever.
            check_silence(deadline + received / SLOWEST)
            wanted = arrivals.more()


def _route(lane: int, routes: Sequence[int], connections: int) -> int:
    return routes[lane] if routes else lane % connections


class _Lane(Generic[A]):
    """A connection, and the strings that are on their way over it, in order.

    Attributes:
        sock: the socket.
        awaited: the strings.
    """

    def __init__(self, connection: SocketConnection) -> None:
        self.sock = connection.sock
        self.awaited: deque[A] = deque()
        self._connection = connection
        # What was received where lines are expected, and not yet read.
        self._text = bytearray()
        # Where the rest of a string goes that has begun to arrive, and whether only its end is missing.
        self._place = memoryview(b"")
        self._ends = False

    def request(self, wanted: Sequence[A], deadline: float) -> None:
        """Sends the GETs of strings."""
        if wanted:
            self._connection.request(wanted, deadline)
            self.awaited.extend(wanted)

    def receive(self, arrivals: Arrivals[A]) -> int:
        """Receives what is there, and finishes the strings that are complete. Returns the number of bytes."""
        total = 0
        while True:
            try:
                total += self._receive_once(arrivals)
            except TICKS as error:
                check_tick(error)
                # Of a TLS record, only a piece has arrived.
                return total
            # No selector wakes for bytes that TLS has already decrypted.
            if not (isinstance(self.sock, ssl.SSLSocket) and self.sock.pending()):
                return total

    def _receive_once(self, arrivals: Arrivals[A]) -> int:
        if self._place:
            received: int = self.sock.recv_into(self._place)
            self._place = self._place[received:]
        else:
            data = self.sock.recv(_LINE_BYTES)
            received = len(data)
            self._text += data
        if not received:
            raise BrokenError(CLOSED)
        while not self._place and self._read(arrivals):
            pass
        return received

    def _read(self, arrivals: Arrivals[A]) -> bool:
        """Reads the end of a string, or the line before one. Returns False if more has to be received first."""
        stop = self._text.find(b"\r\n")
        if self._ends and (stop > 0 or (stop < 0 and len(self._text) > 1)):
            raise BrokenError("a string does not end where its length says it should")
        if stop < 0:
            if len(self._text) > _LONGEST_LINE:
                raise BrokenError("a reply is not RESP")
            return False
        head = bytes(self._text[:stop])
        del self._text[: stop + 2]
        if self._ends:
            self._ends = False
            arrivals.finish(self.awaited.popleft())
            return True
        if not self.awaited:
            raise BrokenError("it sent more replies than it was sent commands")
        length = length_of(head)
        if length is None:
            arrivals.missing(self.awaited.popleft())
            return True
        place = arrivals.begin(self.awaited[0], length)
        there = min(length, len(self._text))
        place[:there] = self._text[:there]
        del self._text[:there]
        self._place, self._ends = place[there:], True
        return True
