"""Sockets of an event loop, which look like blocking ones to the code of a call.

A receive is carried out by the loop, as soon as something is there, straight into the memory where it is used. So each
piece that arrives gives the other tasks a turn, also if the next piece is there already.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import socket
import ssl
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Literal

from redisacc._interrupts import interrupt_in
from redisacc._wire.sockets import TICK, SocketConnection, TlsConnection, pack_commands
from redisacc.asyncio._calls import wait

_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Arrival:
    """A future that wakes its task at once, and not in the next turn of the loop, which a small command would notice.

    Tasks accept any object that has the methods of a future (``asyncio.isfuture``).

    Args:
        loop: the event loop.
    """

    __slots__ = ("_asyncio_future_blocking", "_callback", "_context", "_loop", "_outcome", "_state")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._asyncio_future_blocking = False
        self._loop = loop
        self._state: Literal["pending", "done", "cancelled"] = "pending"
        self._outcome: object = None
        self._callback: Callable[[Arrival], object] | None = None
        self._context: contextvars.Context | None = None

    def finish(self, outcome: object) -> None:
        """Wakes the task with an outcome, unless it is awake already."""
        if self._state != "pending":
            return
        self._state, self._outcome = "done", outcome
        if self._callback is not None and self._context is not None:
            self._context.run(self._callback, self)

    def __await__(self) -> Generator[Any, None, object]:
        if self._state == "pending":
            self._asyncio_future_blocking = True
            yield self
        return self.result()

    # As for a future

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def done(self) -> bool:
        return self._state != "pending"

    def cancelled(self) -> bool:
        return self._state == "cancelled"

    def result(self) -> object:
        if self._state == "cancelled":
            raise asyncio.CancelledError
        return self._outcome

    def exception(self) -> None:
        self.result()

    def add_done_callback(
        self, callback: Callable[[Arrival], object], *, context: contextvars.Context | None = None
    ) -> None:
        self._callback, self._context = callback, context or contextvars.copy_context()
        if self._state != "pending":
            self._loop.call_soon(callback, self, context=context)

    def remove_done_callback(self, callback: Callable[[Arrival], object]) -> int:
        found = self._callback == callback
        if found:
            self._callback = None
        return int(found)

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002 - as for a future
        if self._state != "pending":
            return False
        self._state = "cancelled"
        if self._callback is not None:
            # Not at once: the caller does not expect the task to run now.
            self._loop.call_soon(self._callback, self, context=self._context)
        return True


class Clock:
    """Ends ticks. One timer for all of them costs a small command less than a timer of its own.

    Args:
        loop: the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ends: dict[Arrival, float] = {}
        self._runs = False

    def start(self, arrival: Arrival, tick: float) -> None:
        """Wakes the task with BlockingIOError if nothing else has for ``tick`` seconds, or a little longer."""
        self._ends[arrival] = time.monotonic() + tick
        if not self._runs:
            self._runs = True
            self._loop.call_later(TICK, self._look)

    def stop(self, arrival: Arrival) -> None:
        """Lets the tick end without consequences."""
        del self._ends[arrival]

    def _look(self) -> None:
        self._runs = bool(self._ends)
        if self._runs:
            self._loop.call_later(TICK, self._look)
            now = time.monotonic()
            for arrival in [arrival for arrival, end in self._ends.items() if now >= end]:
                arrival.finish(BlockingIOError())


class LoopSocket:
    """A socket that lets the loop run other tasks while it waits. One call at a time may use it.

    As with the timeout of the kernel, it raises BlockingIOError if nothing has happened for a tick.

    Args:
        sock: a socket that is connected. It no longer blocks.
        loop: the event loop.
        clock: ends the ticks.
        tick: in seconds.
    """

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop, clock: Clock, tick: float) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        self._fileno = sock.fileno()
        self._loop = loop
        self._clock = clock
        self._tick = tick
        # What receives as soon as there is something, and what the call waits for.
        self._operation: Callable[[], Any] | None = None
        self._arrival: Arrival | None = None
        self._outgoing = bytearray()
        self._is_watched = False
        self._watch()

    # As for a socket

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Receives up to ``size`` bytes."""
        received: bytes = self._receive(partial(self._sock.recv, size, flags))
        return received

    def recv_into(self, place: memoryview, size: int, flags: int) -> int:
        """Receives up to ``size`` bytes into a place."""
        # The flag to wait until it is full has no effect on a socket that does not block.
        received: int = self._receive(partial(self._sock.recv_into, place, size, flags))
        return received

    def send(self, data: Any) -> int:
        """Sends some of the data. Returns the number of bytes."""
        return self._send(partial(self._sock.send, data))

    def sendmsg(self, buffers: Sequence[Any]) -> int:
        """Sends some of the buffers. Returns the number of bytes."""
        return self._send(partial(self._sock.sendmsg, buffers))

    def _receive(self, operation: Callable[[], Any]) -> Any:
        # No event announces what TLS has already decrypted.
        if self._tls is not None and self._tls.pending():
            with contextlib.suppress(*_WOULD_BLOCK):
                return operation()
        self._operation = operation
        if not self._is_watched:
            self._watch()
        try:
            return self._wait()
        finally:
            self._operation = None

    def _send(self, operation: Callable[[], int]) -> int:
        try:
            return operation()
        except _WOULD_BLOCK:
            pass
        self._loop.add_writer(self._fileno, self._wake, None)
        try:
            self._wait()
            return operation()
        except _WOULD_BLOCK:
            raise BlockingIOError from None
        finally:
            self._loop.remove_writer(self._fileno)

    def _wait(self) -> Any:
        """Waits for what ``_wake`` is called with, which is raised if it is an error, for a tick at most."""
        self._arrival = arrival = Arrival(self._loop)
        self._clock.start(arrival, self._tick)
        try:
            outcome = wait(arrival)
        finally:
            self._clock.stop(arrival)
            self._arrival = None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _wake(self, outcome: object) -> None:
        if self._arrival is not None:
            self._arrival.finish(outcome)

    # Called by the loop

    def _watch(self) -> None:
        # The loop may be closed by now.
        with contextlib.suppress(RuntimeError):
            self._loop.add_reader(self._fileno, self._on_readable)
        self._is_watched = True

    def _unwatch(self) -> None:
        # The loop may be closed by now.
        with contextlib.suppress(RuntimeError):
            self._loop.remove_reader(self._fileno)
        self._is_watched = False

    def _on_readable(self) -> None:
        operation = self._operation
        if operation is None:
            # Nobody receives at the moment. The loop would call this again and again.
            self._unwatch()
            return
        try:
            outcome = operation()
        except _WOULD_BLOCK:
            # Of a TLS record, only a piece has arrived.
            return
        except Exception as error:  # noqa: BLE001 - it is raised in the call
            outcome = error
        self._operation = None
        self._wake(outcome)

    # Not as for a socket

    def push(self, data: bytes) -> None:
        """Sends data, without waiting: what the kernel does not take now, the loop sends later."""
        self._outgoing += data
        self._flush()

    def _flush(self) -> None:
        was_full = len(self._outgoing)
        try:
            del self._outgoing[: self._sock.send(self._outgoing)]
        except _WOULD_BLOCK:
            pass
        except OSError as error:
            # Whoever receives notices as well.
            self._outgoing.clear()
            if interrupt_in(error) is not None:
                raise
        if self._outgoing:
            self._loop.add_writer(self._fileno, self._flush)
        elif was_full:
            self._loop.remove_writer(self._fileno)

    def detach(self) -> None:
        """Lets the loop watch the socket no longer."""
        self._unwatch()
        with contextlib.suppress(RuntimeError):
            self._loop.remove_writer(self._fileno)


class _OnLoop:
    """What differs for a connection of an event loop.

    Args:
        pooled: the connection of redis-py.
        sock: its socket.
        loop: the event loop.
        clock: ends the ticks of its socket.
        tick: by how many seconds it may notice too late that a deadline has passed.
    """

    sock: Any

    def __init__(
        self, pooled: Any, sock: socket.socket, loop: asyncio.AbstractEventLoop, clock: Clock, tick: float
    ) -> None:
        super().__init__(pooled, LoopSocket(sock, loop, clock, tick), tick)  # type: ignore[call-arg]

    def _set_tick(self, tick: float) -> None:
        """The socket has it already."""

    def tell(self, *command: str) -> None:
        self.sock.push(b"".join(pack_commands([command])))

    def close(self) -> None:
        # First: a number of a file that was closed may soon belong to another one.
        self.sock.detach()
        super().close()  # type: ignore[misc]


class LoopConnection(_OnLoop, SocketConnection):
    """A connection that is nothing but a socket."""


class LoopTlsConnection(_OnLoop, TlsConnection):
    """A connection over TLS."""
