"""A TCP proxy before a Redis server that breaks connections at chosen places, or at random from a seed.

It knows where requests and replies begin and end, so that a fault can be put before, inside or after any of them, and
something can be done before a request that runs a script of redisacc is passed on, or before its reply is.
"""

import contextlib
import functools
import hashlib
import importlib
import random
import re
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import redis

from redisacc._wire.script_loader import load, names

Direction = Literal["request", "reply"]
# cut: close both sides. reset: the same with a TCP reset. late (requests only): close the client's side, keep what it
# sent, and hand it to the server later, as a network may. stall: pass nothing on until resume(); hold: the same, but
# only on this connection, and only this way. pass: nothing breaks; only the proxy's ``when_it_happens`` is called.
Action = Literal["cut", "reset", "late", "stall", "hold", "pass"]

# How long a held request waits for the rest of its pipeline, in seconds.
TOGETHER = 0.05


class Messages:
    """Cuts a stream of RESP into its requests, or its replies."""

    def __init__(self):
        self._values = 1
        self._skip = 0
        self._line = bytearray()

    def feed(self, data):
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

    def _head(self, line):
        """Whether the value ends with its first line."""
        kind, rest = line[:1], line[1:].strip()
        if kind in b"$=!" and rest[:1] != b"-":
            self._skip = int(rest) + 2
            return False
        if kind in b"*~>%" and rest[:1] != b"-":
            self._values += int(rest) * (2 if kind == b"%" else 1)
        return True


# A request's command, and its first argument, in its first bytes.
_BEGIN = re.compile(rb"\*\d+\r\n\$\d+\r\n(\w+)\r\n(?:\$(\d+)\r\n)?")
# A test that has moved the clock sends the text of a script instead of its hash (support/moved_clock.py).
_AHEAD = re.compile(rb"clock_ms = -?\d+ \+ ")


@functools.cache
def scripts():
    """Returns hash -> name of all scripts."""
    return {sha: name for name in names() for sha in (load(name).sha, load(name).sharded.sha)}


def name_of(request):
    """Returns the script that a request runs, or its command, such as "take" or "SET"; None: more bytes are needed."""
    begin = _BEGIN.match(request)
    if begin is None:
        return None
    command = begin[1].decode().upper()
    if command not in ("EVAL", "EVALSHA") or begin[2] is None:
        return command if command not in ("EVAL", "EVALSHA") else None
    text = request[begin.end() : begin.end() + int(begin[2])]
    if len(text) < int(begin[2]):
        return None
    sha = text.decode() if command == "EVALSHA" else hashlib.sha1(_AHEAD.sub(b"clock_ms = ", text)).hexdigest()
    return scripts().get(sha, command)


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


# Where a server listens: a host and a port, or the path of a Unix socket.


class Proxy:
    """Listens on a port of its own until it is closed; before several servers, on one for each.

    Messages of all connections are numbered together.

    Attributes:
        ports: where it listens, on 127.0.0.1, in the order of the servers.
        bytewise: pass everything on byte by byte.
        refuses: close new connections at once.
        fired: how many faults there were of each kind.
        accepted: how many connections clients have made.
        sent: the name of each request that has begun to pass, as ``name_of`` returns it, since ``listen_anew``.
        when_it_happens: called when an armed fault happens, before its connection breaks.
    """

    def __init__(self, server, seed=0, *, more=()):
        self._random = random.Random(seed)
        self._weather = None
        self._lock = threading.Lock()
        self._numbers = {"request": 0, "reply": 0}
        self._fault = None
        self._happened = threading.Event()
        self._open = set()
        self._late = []
        self._flowing, self._released = threading.Event(), threading.Event()
        self._flowing.set()
        self._closed = False
        self.bytewise = False
        self.refuses = False
        self.when_it_happens = lambda: None
        self.fired = {}
        self.accepted = 0
        self.sent = []
        self._actions = []
        self._failed = []
        self.lengths = {"request": [], "reply": []}
        servers = [server, *more]
        self._listeners = [socket.create_server(("127.0.0.1", 0), backlog=100) for _ in servers]
        self.ports = [listener.getsockname()[1] for listener in self._listeners]
        for pair in zip(self._listeners, servers, strict=True):
            threading.Thread(target=self._accept, args=pair, daemon=True).start()

    @property
    def port(self):
        """The port that leads to the first server."""
        return self.ports[0]

    @property
    def where(self):
        """What an accumulator gets as ``redis=``."""
        return self.url

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"

    # Called by tests

    def listen_anew(self):
        """Numbers messages of all connections from 0 again, and forgets their lengths."""
        with self._lock:
            self._numbers = {"request": 0, "reply": 0}
            self.lengths = {"request": [], "reply": []}
            self.sent = []

    def before(self, name, action, times=1):
        """Does something before the next requests that run this script, or have this command, are passed on.

        It is done in a thread of the proxy, while the connection waits, and only the next ``times`` times. What it
        raises is raised by ``close``.
        """
        self._actions += [("request", name, action)] * times

    def after(self, name, action, times=1):
        """Does something before the replies to the next such requests are passed on."""
        self._actions += [("reply", name, action)] * times

    def arm(self, fault):
        """Waits for the place of a fault, numbering from 0. After the fault, everything passes again."""
        self.listen_anew()
        self._happened.clear()
        self._fault = fault

    def happened(self, timeout=10.0):
        """Whether the fault has happened. If it follows the last byte, the client may not have noticed it yet."""
        return self._happened.wait(timeout)

    def weather(self, weather):
        """Sets the random faults from now on; None ends them."""
        self._weather = weather

    def stall(self):
        """Passes nothing on until resume()."""
        self._flowing.clear()

    def resume(self):
        self._flowing.set()
        self._released.set()

    def deliver_late(self):
        """Hands the server all requests that were kept back, and waits until it has answered. Returns their number."""
        late, self._late = self._late, []
        for now, _ in late:
            now.set()
        for _, thread in late:
            thread.join(20)
            assert not thread.is_alive(), "the server does not answer late requests"
        return len(late)

    def cut_all(self):
        """Cuts every connection. Whatever its threads still have in hand is neither numbered nor disturbed."""
        with self._lock:
            for sock in self._open:
                _close(sock)
            self._open.clear()

    def close(self):
        self._closed = True
        self.resume()
        for listener in self._listeners:
            _close(listener)
        self.cut_all()
        self.deliver_late()
        if self._failed:
            raise self._failed[0]

    # The proxy's own work

    def _accept(self, listener, place):
        while not self._closed:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self.accepted += 1
            try:
                if self.refuses:
                    raise ConnectionRefusedError
                server = _connected(place)
            except OSError:
                _close(client)
                continue
            for sock in (client, server):
                if sock.family != socket.AF_UNIX:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                if self._closed:
                    # It came while everything was cut.
                    _close(client)
                    _close(server)
                    return
                self._open |= {client, server}
            asked = deque()
            for direction, source, target in (("request", client, server), ("reply", server, client)):
                args = (direction, source, target, place, asked)
                threading.Thread(target=self._pump, args=args, daemon=True).start()

    def _pump(self, direction, source, target, place, asked):
        messages, head = Messages(), b""
        number = passed = 0
        begun = False
        fault = None
        try:
            while data := source.recv(65536):
                here = 0
                for new, ends in messages.feed(data):
                    # What has been kept back of this request passes together with the piece that tells its name.
                    piece, here, head = head + new, here - len(head), b""
                    if not begun:
                        if direction == "request" and not ends and name_of(piece) is None:
                            head, here = piece, here + len(piece)
                            continue
                        self._act(direction, piece, source, asked)
                        number, passed, begun = self._number(direction, source), 0, True
                        fault = self._drawn(direction, number)
                    self._flowing.wait()
                    if ends:
                        # Counted before the other side can receive it and the test can go on.
                        with self._lock:
                            if source in self._open:
                                self.lengths[direction].append(passed + len(piece))
                    happening = fault or self._fault
                    if source not in self._open:
                        happening = None
                    at = self._place(happening, direction, number, passed, piece, ends)
                    self._send(target, piece[:at])
                    if at is not None and happening is not None:
                        if not self._happen(happening, source, target, data[here + at :], place):
                            return
                        self._send(target, piece[at:])
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

    def _act(self, direction, piece, source, asked):
        """Does what a test wants to be done before this message is passed on."""
        if direction == "request":
            name = name_of(piece) or ""
            asked.append(name)
        else:
            name = asked.popleft() if asked else ""
        with self._lock:
            if direction == "request" and source in self._open:
                self.sent.append(name)
            due = next((one for one in self._actions if one[:2] == (direction, name)), None)
            # A script that the server does not know yet is sent again.
            if due is None or piece.startswith(b"-NOSCRIPT"):
                return
            self._actions.remove(due)
        try:
            due[2]()
        except BaseException as error:
            self._failed.append(error)

    def _number(self, direction, source):
        with self._lock:
            if source not in self._open:
                return -1
            number = self._numbers[direction]
            self._numbers[direction] += 1
            return number

    def _drawn(self, direction, number):
        weather = self._weather
        if weather is None:
            return None
        with self._lock:
            dice, offset = self._random.random(), self._random.choice([None, 0, 1, self._random.randrange(2, 5000)])
            action = self._random.choice(["cut", "reset"])
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

    def _place(self, fault, direction, number, passed, piece, ends):
        """Returns the place of the fault in the piece."""
        if fault is None or (fault.direction, fault.number) != (direction, number):
            return None
        if fault.offset is None or fault.offset >= passed + len(piece):
            return len(piece) if ends else None
        return max(fault.offset - passed, 0)

    def _send(self, target, piece):
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

    def _happen(self, fault, source, target, rest, place):
        """Lets a fault happen; ``rest`` arrived and was not passed on. True if the connection stays open."""
        self._count(fault.action)
        armed = fault is self._fault
        if armed:
            self._fault = None
            self.when_it_happens()
        if fault.action == "pass":
            self._happened.set()
            return True
        if fault.action in ("stall", "hold"):
            gate = self._flowing if fault.action == "stall" else self._released
            gate.clear()
            if armed:
                self._happened.set()
            gate.wait()
            return True
        if fault.action == "late":
            self._keep_back(source, rest, place)
        elif fault.action == "reset":
            for sock in (source, target):
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        _close(source)
        _close(target)
        if armed:
            self._happened.set()
        return False

    def _keep_back(self, client, held, place):
        """Keeps what the client has sent to a server, with all that travels with it."""
        # An interrupted client may have closed its side by now.
        with contextlib.suppress(OSError):
            client.settimeout(TOGETHER)
            while more := client.recv(65536):
                held += more
        weather = self._weather
        with self._lock:
            latest = self._random.random() * weather.longest_late if weather else None
        now = threading.Event()
        thread = threading.Thread(target=_deliver, args=(_connected(place), held, now, latest), daemon=True)
        thread.start()
        self._late.append((now, thread))

    def _count(self, what):
        with self._lock:
            self.fired[what] = self.fired.get(what, 0) + 1


class ClusterProxy(Proxy):
    """A proxy before every master of a cluster.

    Args:
        ports: those of the masters, on 127.0.0.1.
    """

    def __init__(self, ports, seed=0):
        first, *more = [("127.0.0.1", port) for port in ports]
        super().__init__(first, seed, more=more)
        self._by_port = dict(zip(ports, self.ports, strict=True))

    @property
    def where(self):
        return self.client(redis)

    def client(self, library):
        """Returns a new client of redis-py or valkey-py that reaches every node through the proxy."""
        node = importlib.import_module(f"{library.__name__}.cluster").ClusterNode
        nodes = [node("127.0.0.1", port) for port in self.ports]
        kind = library.RedisCluster if library is redis else library.ValkeyCluster
        return kind(startup_nodes=nodes, address_remap=self._remapped, socket_timeout=2)

    def _remapped(self, address):
        host, port = address
        return host, self._by_port.get(port, port)


def _connected(place):
    if not isinstance(place, str):
        return socket.create_connection(place)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(place)
    except OSError:
        sock.close()
        raise
    return sock


def _deliver(server, held, now, latest):
    now.wait(latest)
    requests = sum(ends for _, ends in Messages().feed(held))
    replies = 0
    messages = Messages()
    with contextlib.suppress(OSError), server:
        server.settimeout(10)
        server.sendall(held)
        while replies < requests and (data := server.recv(65536)):
            replies += sum(ends for _, ends in messages.feed(data))


def _close(sock):
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


@contextlib.contextmanager
def proxy_before(server, seed=0):
    """A proxy for the length of a block."""
    proxy = Proxy(server, seed)
    try:
        yield proxy
    finally:
        proxy.close()


def proxy_before_server(url):
    """A proxy for the length of a block, before the server at a URL."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    return proxy_before((address.hostname, address.port))


def all_faults(lengths):
    """Every place and kind of fault in an exchange whose messages have these lengths."""
    for direction in ("request", "reply"):
        for number, length in enumerate(lengths[direction]):
            for offset in sorted({0, 1, length // 2, length - 1}):
                yield Fault(direction, number, offset, "cut" if offset % 2 else "reset")
            yield Fault(direction, number, None, "cut")
            if direction == "request":
                yield Fault(direction, number, 0, "late")
