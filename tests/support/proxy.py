"""A TCP proxy before a Redis server that breaks connections at chosen places, or at random from a seed.

It knows where requests and replies begin and end, so that a fault can be put before, inside or after any of them.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

Direction = Literal["request", "reply"]
# cut: close both sides. reset: the same with a TCP reset. late (requests only): close the client's side, keep what it
# sent, and hand it to the server later, as a network may. stall: pass nothing on until resume(); hold: the same, but
# only on this connection, and only this way.
Action = Literal["cut", "reset", "late", "stall", "hold"]

# How long a held request waits for the rest of its pipeline, in seconds.
TOGETHER = 0.05


class Messages:
    """Cuts a stream of RESP into its requests, or its replies."""

    def __init__(self) -> None:
        self._values = 1
        self._skip = 0
        self._line = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bool]]:
        """The pieces of the messages in the data; True with the piece that ends one."""
        start = here = 0
        while here < len(data):
            if self._skip:
                skipped = min(self._skip, len(data) - here)
                here += skipped
                self._skip -= skipped
                done = self._skip == 0
            else:
                end = data.find(b"\n", here) + 1
                self._line += data[here : end or len(data)]
                here = end or len(data)
                if not end:
                    break
                done = self._head(bytes(self._line))
                self._line.clear()
            if done:
                self._values -= 1
                if self._values == 0:
                    self._values = 1
                    yield data[start:here], True
                    start = here
        if start < len(data):
            yield data[start:], False

    def _head(self, line: bytes) -> bool:
        """Whether the value ends with its first line."""
        kind, rest = line[:1], line[1:].strip()
        if kind in b"$=!" and rest[:1] != b"-":
            self._skip = int(rest) + 2
            return False
        if kind in b"*~>%" and rest[:1] != b"-":
            self._values += int(rest) * (2 if kind == b"%" else 1)
        return True


@dataclass(frozen=True)
class Fault:
    """A fault, and the number of bytes (None: all) of the message with that number after which it happens."""

    direction: Direction
    number: int
    offset: int | None
    action: Action = "cut"


@dataclass(frozen=True)
class Weather:
    """The probability of each fault, for each message."""

    cut: float = 0.0
    late: float = 0.0
    delay: float = 0.0
    bytewise: float = 0.0
    longest_delay: float = 0.05
    longest_late: float = 2.0


class Proxy:
    """Listens on a port of its own until it is closed.

    Attributes:
        port: where it listens, on 127.0.0.1.
        bytewise: pass everything on byte by byte.
        refuses: close new connections at once.
        fired: how many faults there were of each kind.
        when_it_happens: called when an armed fault happens, before its connection breaks.
    """

    def __init__(self, server: tuple[str, int] | str, seed: int = 0) -> None:
        self._server = server
        self._random = random.Random(seed)
        self._weather: Weather | None = None
        self._lock = threading.Lock()
        self._numbers: dict[Direction, int] = {"request": 0, "reply": 0}
        self._fault: Fault | None = None
        self._happened = threading.Event()
        self._open: set[socket.socket] = set()
        self._late: list[tuple[threading.Event, threading.Thread]] = []
        self._flowing, self._released = threading.Event(), threading.Event()
        self._flowing.set()
        self._closed = False
        self.bytewise = False
        self.refuses = False
        self.when_it_happens: Callable[[], object] = lambda: None
        self.fired: dict[str, int] = {}
        self.lengths: dict[Direction, list[int]] = {"request": [], "reply": []}
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    # Called by tests

    def listen_anew(self) -> None:
        """Numbers messages of all connections from 0 again, and forgets their lengths."""
        with self._lock:
            self._numbers = {"request": 0, "reply": 0}
            self.lengths = {"request": [], "reply": []}

    def arm(self, fault: Fault | None) -> None:
        """Waits for the place of a fault, numbering from 0. After the fault, everything passes again."""
        self.listen_anew()
        self._happened.clear()
        self._fault = fault

    def happened(self, timeout: float = 10.0) -> bool:
        """Whether the fault has happened. If it follows the last byte, the client may not have noticed it yet."""
        return self._happened.wait(timeout)

    def weather(self, weather: Weather | None) -> None:
        """Sets the random faults from now on; None ends them."""
        self._weather = weather

    def stall(self) -> None:
        """Passes nothing on until resume()."""
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()
        self._released.set()

    def deliver_late(self) -> int:
        """Hands the server all requests that were kept back, and waits until it has answered. Returns their number."""
        late, self._late = self._late, []
        for now, _ in late:
            now.set()
        for _, thread in late:
            thread.join(20)
            assert not thread.is_alive(), "the server does not answer late requests"
        return len(late)

    def cut_all(self) -> None:
        """Cuts every connection."""
        with self._lock:
            for sock in self._open:
                _close(sock)

    def close(self) -> None:
        self._closed = True
        self.resume()
        _close(self._listener)
        self.cut_all()
        self.deliver_late()

    # The proxy's own work

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self.refuses:
                    raise ConnectionRefusedError
                server = self._connect()
            except OSError:
                _close(client)
                continue
            for sock in (client, server):
                if sock.family != socket.AF_UNIX:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {client, server}
            for direction, source, target in (("request", client, server), ("reply", server, client)):
                threading.Thread(target=self._pump, args=(direction, source, target), daemon=True).start()

    def _connect(self) -> socket.socket:
        if isinstance(self._server, str):
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.connect(self._server)
            except OSError:
                sock.close()
                raise
            return sock
        return socket.create_connection(self._server)

    def _pump(self, direction: Direction, source: socket.socket, target: socket.socket) -> None:
        messages = Messages()
        number = passed = 0
        begun = False
        fault: Fault | None = None
        try:
            while data := source.recv(65536):
                here = 0
                for piece, ends in messages.feed(data):
                    if not begun:
                        number, passed, begun = self._number(direction), 0, True
                        fault = self._drawn(direction, number)
                    self._flowing.wait()
                    if ends:
                        # Counted before the other side can receive it and the test can go on.
                        with self._lock:
                            self.lengths[direction].append(passed + len(piece))
                    happening = fault or self._fault
                    place = self._place(happening, direction, number, passed, piece, ends)
                    self._send(target, piece[:place])
                    if place is not None and happening is not None:
                        if not self._happen(happening, source, target, data[here + place :]):
                            return
                        self._send(target, piece[place:])
                    here += len(piece)
                    passed += len(piece)
                    begun = not ends
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)
        except OSError:
            _close(source)
            _close(target)
        finally:
            if direction == "reply":
                with self._lock:
                    self._open -= {source, target}
                _close(source)
                _close(target)

    def _number(self, direction: Direction) -> int:
        with self._lock:
            number = self._numbers[direction]
            self._numbers[direction] += 1
            return number

    def _drawn(self, direction: Direction, number: int) -> Fault | None:
        weather = self._weather
        if weather is None:
            return None
        with self._lock:
            dice, offset = self._random.random(), self._random.choice([None, 0, 1, self._random.randrange(2, 5000)])
            action: Action = self._random.choice(["cut", "reset"])
            seconds = self._random.random() * weather.longest_delay
        if dice < weather.cut:
            return Fault(direction, number, offset, action)
        dice -= weather.cut
        if direction == "request" and 0 <= dice < weather.late:
            return Fault(direction, number, 0, "late")
        dice -= weather.late
        if 0 <= dice < weather.delay:
            self._count("delay")
            time.sleep(seconds)
        return None

    def _place(
        self, fault: Fault | None, direction: Direction, number: int, passed: int, piece: bytes, ends: bool
    ) -> int | None:
        """Returns the place of the fault in the piece."""
        if fault is None or (fault.direction, fault.number) != (direction, number):
            return None
        if fault.offset is None or fault.offset >= passed + len(piece):
            return len(piece) if ends else None
        return max(fault.offset - passed, 0)

    def _send(self, target: socket.socket, piece: bytes) -> None:
        weather = self._weather
        bytewise = self.bytewise
        if weather is not None and len(piece) < 10_000:
            with self._lock:
                bytewise = bytewise or self._random.random() < weather.bytewise
        if not bytewise:
            target.sendall(piece)
            return
        self._count("bytewise")
        for k in range(len(piece)):
            target.sendall(piece[k : k + 1])

    def _happen(self, fault: Fault, source: socket.socket, target: socket.socket, rest: bytes) -> bool:
        """Lets a fault happen; ``rest`` arrived and was not passed on. True if the connection stays open."""
        self._count(fault.action)
        armed = fault is self._fault
        if armed:
            self._fault = None
            self.when_it_happens()
        if fault.action in ("stall", "hold"):
            gate = self._flowing if fault.action == "stall" else self._released
            gate.clear()
            if armed:
                self._happened.set()
            gate.wait()
            return True
        if fault.action == "late":
            self._keep_back(source, rest)
        elif fault.action == "reset":
            for sock in (source, target):
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        _close(source)
        _close(target)
        if armed:
            self._happened.set()
        return False

    def _keep_back(self, client: socket.socket, held: bytes) -> None:
        """Keeps what the client has sent, with all that travels with it."""
        client.settimeout(TOGETHER)
        with contextlib.suppress(OSError):
            while more := client.recv(65536):
                held += more
        weather = self._weather
        with self._lock:
            latest = self._random.random() * weather.longest_late if weather else None
        now = threading.Event()
        thread = threading.Thread(target=_deliver, args=(self._connect(), held, now, latest), daemon=True)
        thread.start()
        self._late.append((now, thread))

    def _count(self, what: str) -> None:
        with self._lock:
            self.fired[what] = self.fired.get(what, 0) + 1


def _deliver(server: socket.socket, held: bytes, now: threading.Event, latest: float | None) -> None:
    now.wait(latest)
    requests = sum(ends for _, ends in Messages().feed(held))
    replies = 0
    messages = Messages()
    with contextlib.suppress(OSError), server:
        server.settimeout(10)
        server.sendall(held)
        while replies < requests and (data := server.recv(65536)):
            replies += sum(ends for _, ends in messages.feed(data))


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


@contextlib.contextmanager
def proxy_before(server: tuple[str, int] | str, seed: int = 0) -> Iterator[Proxy]:
    """A proxy for the length of a block."""
    proxy = Proxy(server, seed)
    try:
        yield proxy
    finally:
        proxy.close()


def proxy_before_server(url: str) -> contextlib.AbstractContextManager[Proxy]:
    """A proxy for the length of a block, before the server at a URL."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    return proxy_before((address.hostname, address.port))


def all_faults(lengths: dict[Direction, list[int]]) -> Iterator[Fault]:
    """Every place and kind of fault in an exchange whose messages have these lengths."""
    for direction in ("request", "reply"):
        for number, length in enumerate(lengths[direction]):
            for offset in sorted({0, 1, length // 2, length - 1}):
                yield Fault(direction, number, offset, "cut" if offset % 2 else "reset")
            yield Fault(direction, number, None, "cut")
            if direction == "request":
                yield Fault(direction, number, 0, "late")
