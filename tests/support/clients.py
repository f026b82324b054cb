"""Every kind of client that a user may bring: of both libraries, with each option, over each way to the server.

Kinds are chosen so that any two values of different options meet in one of them (pairwise), because the product has
192. Ways other than TCP are gateways to a TCP port, so they also lead to a server without TLS, and to a proxy.
"""

import contextlib
import functools
import importlib
import itertools
import socket
import ssl
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import trustme

OPTIONS = {
    "wire": ("tcp", "tls", "unix", "sentinel"),
    "pool": ("plain", "blocking", "two"),
    "decode": (False, True),
    "retries": (False, True),
}
LIBRARIES = {"redis-py": "redis", "valkey-py": "valkey"}
# While a take waits, a client needs one connection to work with and one to listen on.
SMALLEST_POOL = 2


@dataclass(frozen=True)
class ClientKind:
    """A way to make a client.

    Attributes:
        library: "redis-py" or "valkey-py".
        wire: what carries the bytes.
        pool: the class's own pool, one that blocks while all of its two connections are in use, or one that refuses.
        decode: whether replies are decoded.
        retries: whether the client repeats what fails.
    """

    library: str
    wire: str = "tcp"
    pool: str = "plain"
    decode: bool = False
    retries: bool = False

    def __str__(self):
        flags = [name for name in ("decode", "retries") if getattr(self, name)]
        return "-".join([self.library, self.wire, f"{self.pool}_pool", *flags])

    @contextlib.contextmanager
    def connected(self, port, **more):
        """Yields a client of what listens at a port of this host.

        Args:
            port: where.
            more: other options of the client.
        """
        library = importlib.import_module(LIBRARIES[self.library])
        options = {
            "decode_responses": self.decode,
            # docs/guides/fault-tolerance.md asks users for it: without it, some versions wait forever for the first
            # replies of a silent server. Those with retries wait for as long six times.
            "socket_timeout": 2,
            **self._options(library),
            **more,
        }
        with contextlib.ExitStack() as stack:
            if self.wire == "sentinel":
                client = self._by_sentinel(library, stack.enter_context(sentinel(port)), options)
            else:
                kind = "Connection"
                if self.wire == "unix":
                    options["path"] = stack.enter_context(unix_gateway(port))
                    kind = "UnixDomainSocketConnection"
                elif self.wire == "tls":
                    kind = "SSLConnection"
                    options |= {"host": "localhost", "port": stack.enter_context(tls_gateway(port))}
                    options["ssl_ca_data"] = authority().cert_pem.bytes().decode()
                else:
                    options |= {"host": "127.0.0.1", "port": port}
                client = self._by_pool(library, getattr(library, kind), options)
            yield client
            client.close()
            client.connection_pool.disconnect()

    def _options(self, library):
        backoff, retry = (importlib.import_module(f"{library.__name__}.{name}") for name in ("backoff", "retry"))
        if not self.retries:
            return {"retry": retry.Retry(backoff.NoBackoff(), 0)}
        return {
            "retry": retry.Retry(backoff.ExponentialBackoff(cap=0.05, base=0.01), 5),
            "retry_on_error": [library.ConnectionError, library.TimeoutError],
        }

    def _by_pool(self, library, connection, options):
        options["connection_class"] = connection
        if self.pool == "blocking":
            pool = library.BlockingConnectionPool(max_connections=SMALLEST_POOL, timeout=5, **options)
        elif self.pool == "two":
            pool = library.ConnectionPool(max_connections=SMALLEST_POOL, **options)
        else:
            pool = library.ConnectionPool(**options)
        # As a user's own call would make it: the class of the client is that of the library.
        return (library.Redis if library.__name__ == "redis" else library.Valkey)(connection_pool=pool)

    def _by_sentinel(self, library, port, options):
        # Its pool is of a class of its own, which does not block.
        if self.pool != "plain":
            options["max_connections"] = SMALLEST_POOL
        finder = importlib.import_module(f"{library.__name__}.sentinel").Sentinel([("127.0.0.1", port)])
        return finder.master_for("main", **options)


def kinds(library):
    """Returns kinds of clients in which any two values of different options meet."""
    names = list(OPTIONS)

    def pairs(values):
        return set(itertools.combinations(zip(names, values, strict=True), 2))

    left = set().union(*map(pairs, itertools.product(*OPTIONS.values())))
    found = []
    while left:
        best = max(itertools.product(*OPTIONS.values()), key=lambda values: len(pairs(values) & left))
        left -= pairs(best)
        found.append(ClientKind(library, **dict(zip(names, best, strict=True))))
    return found


ALL = {str(kind): kind for library in LIBRARIES for kind in kinds(library)}


# Gateways


@functools.cache
def authority():
    """Returns the authority whose certificate the gateways for TLS have."""
    return trustme.CA()


@functools.cache
def _server_side():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority().issue_cert("localhost").configure_cert(context)
    return context


@contextlib.contextmanager
def tls_gateway(port, context=None):
    """Yields a port that speaks TLS and leads to another one. A context says how it speaks TLS."""
    context = context or _server_side()
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        serving(listener, lambda sock: _relay(context.wrap_socket(sock, server_side=True), port)),
    ):
        yield listener.getsockname()[1]


@contextlib.contextmanager
def unix_gateway(port):
    """Yields the path of a Unix socket that leads to a port."""
    with tempfile.TemporaryDirectory(prefix="gate") as folder:
        path = str(Path(folder, "s"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(128)
            with serving(listener, lambda sock: _relay(sock, port)):
                yield path


@contextlib.contextmanager
def sentinel(port):
    """Yields the port of a Sentinel that knows one master, "main"."""
    facts = {"name": "main", "ip": "127.0.0.1", "port": port, "flags": "master", "num-other-sentinels": 0}
    body = b"".join(b"$%d\r\n%b\r\n" % (len(item), item) for pair in facts.items() for item in _encoded(pair))
    masters = {2: b"*1\r\n*%d\r\n" % (2 * len(facts)) + body, 3: b"*1\r\n%%%d\r\n" % len(facts) + body}

    def answer(sock):
        protocol = 2
        with sock.makefile("rb") as lines:
            while head := lines.readline():
                words = [lines.read(int(lines.readline()[1:]) + 2)[:-2].upper() for _ in range(int(head[1:]))]
                if words[0] == b"HELLO":
                    protocol = int(words[1])
                    sock.sendall(b"%%1\r\n$5\r\nproto\r\n:%d\r\n" % protocol)
                else:
                    sock.sendall(masters[protocol] if words[0] == b"SENTINEL" else b"+OK\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener, serving(listener, answer):
        yield listener.getsockname()[1]


def _encoded(pair):
    return [str(item).encode() for item in pair]


@contextlib.contextmanager
def serving(listener, serve):
    """Serves each connection in a thread of its own; at the end, all are closed and all threads have ended."""
    threads = []
    connections = []

    def one(sock, same):
        with contextlib.suppress(OSError, ValueError), sock:
            serve(sock)
        # Otherwise, the duplicate keeps it open.
        _end(same)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                if sock.family != socket.AF_UNIX:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # A duplicate, because TLS takes the socket over.
                connections.append(sock.dup())
                threads.append(threading.Thread(target=one, args=(sock, connections[-1]), daemon=True))
                threads[-1].start()

    threads.append(threading.Thread(target=accept, daemon=True))
    threads[0].start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        threads[0].join(20)
        for sock in connections:
            _end(sock)
            sock.close()
        for thread in threads:
            thread.join(20)


def _relay(sock, port):
    """Copies what arrives to a port, and what comes from there back, until one of them closes."""
    with sock, socket.create_connection(("127.0.0.1", port)) as other:
        other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=_copy, args=(other, sock), daemon=True)
        back.start()
        _copy(sock, other)
        back.join()


def _copy(source, target):
    with contextlib.suppress(OSError, ValueError):
        while data := source.recv(1 << 18):
            target.sendall(data)
    _end(source)
    _end(target)


def _end(sock):
    # Of the socket below TLS, too: a farewell in TLS could wait for the peer.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
