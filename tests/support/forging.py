"""A server that answers chosen commands with replies of another form than they have, and passes on all others."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from support.clients import serving
from support.proxy import Messages

# What another form may be, by name: each is a whole reply.
FORMS = {
    "nil": b"$-1\r\n",
    "nil list": b"*-1\r\n",
    "zero": b":0\r\n",
    "one": b":1\r\n",
    "negative": b":-1\r\n",
    "huge number": b":9223372036854775807\r\n",
    "status": b"+OK\r\n",
    "error": b"-ERR what is that?\r\n",
    "error without text": b"-\r\n",
    "empty text": b"$0\r\n\r\n",
    "text": b"$3\r\nabc\r\n",
    "bytes": b"$4\r\n\xff\x1b\x00\x80\r\n",
    "digits": b"$1\r\n7\r\n",
    "many digits": b"$5000\r\n" + b"9" * 5000 + b"\r\n",
    "empty list": b"*0\r\n",
    "short list": b"*1\r\n$1\r\n7\r\n",
    "list of nil": b"*1\r\n$-1\r\n",
    "list of a number": b"*1\r\n:7\r\n",
    "pair of texts": b"*2\r\n$1\r\na\r\n$1\r\nb\r\n",
    "pair of huge texts": b"*2\r\n$20\r\n" + b"9" * 20 + b"\r\n$20\r\n" + b"9" * 20 + b"\r\n",
    "end of a scan": b"*2\r\n$1\r\n0\r\n*0\r\n",
    "odd piece of a scan": b"*2\r\n$1\r\n0\r\n*1\r\n$1\r\na\r\n",
    "piece of numbers": b"*2\r\n$1\r\n0\r\n*2\r\n:1\r\n:2\r\n",
    "nested": b"*2\r\n*1\r\n$1\r\na\r\n*1\r\n*0\r\n",
    "error in a list": b"*2\r\n-ERR no\r\n$1\r\na\r\n",
    "long list": b"*40\r\n" + b"$1\r\n7\r\n" * 40,
    "long list of numbers": b"*40\r\n" + b":7\r\n" * 40,
    "long list of nil": b"*40\r\n" + b"$-1\r\n" * 40,
    "map": b"%1\r\n$1\r\na\r\n:1\r\n",
    "set": b"~1\r\n$1\r\na\r\n",
    "double": b",1.5\r\n",
    "not a number": b",nan\r\n",
    "true": b"#t\r\n",
    "nothing": b"_\r\n",
    "big number": b"(3492890328409238509324850943850943825024385\r\n",
    "verbatim": b"=7\r\ntxt:abc\r\n",
}


def once(data):
    """Returns what sends this and then no more, as if the rest were on its way."""
    return lambda: iter((data,))


def drip():
    """A byte every few milliseconds: data keeps coming, so that nothing ever waits for long."""
    yield b"$100000\r\n"
    while True:
        time.sleep(0.005)
        yield b"x"


# Replies that never end, or promise more than any memory holds.
ENDLESS = {
    # hiredis allocates these at once, fills all but the first, and frees them element by element.
    **{f"a huge {kind.decode()}": once(kind + b"100000000\r\n") for kind in (b"*", b">", b"~", b"|")},
    "a number without end": lambda: itertools.chain((b"*",), itertools.repeat(b"9" * 1000)),
    "huge arrays in arrays": once(b"*999999\r\n" * 1000),
    "deep arrays": once(b"*1\r\n" * 2000),
    "arrays of arrays": lambda: itertools.chain((b"*100\r\n",), itertools.repeat(b"*900\r\n" + b"*0\r\n" * 900)),
    "a string without end": lambda: itertools.chain((b"$500000000\r\n",), itertools.repeat(bytes(1 << 16))),
    "a line without end": lambda: itertools.chain((b"+",), itertools.repeat(b"x" * (1 << 16))),
    "pushes without end": lambda: itertools.repeat(b">1\r\n+x\r\n" * 5000),
    "replies without end": lambda: itertools.repeat(b"+OK\r\n" * 5000),
    "a byte now and then": drip,
    "another protocol": once(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "silence": once(b""),
}

# What a client sends by itself when it connects.
_GREETINGS = ("CLIENT", "SELECT", "HELLO", "AUTH")
_SUBSCRIPTIONS = ("SUBSCRIBE", "PSUBSCRIBE", "SSUBSCRIBE")


@dataclass
class Forger:
    """Passes commands on to a server, but for one that it answers itself, once; or for all of them.

    Attributes:
        port: where it listens.
        command: the command that it answers; for a script, its SHA-1; "": none; "*": every command, always.
        reply: what with, or what makes the bytes of a reply, perhaps without end.
        greets: whether it passes on what a client sends by itself when it connects.
        after: how many times it passes that command on before.
        forged: set when it has answered.
        seen: the commands that have come, but for greetings, each once.
    """

    port: int = 0
    command: str = ""
    reply: bytes | Callable[[], Iterator[bytes]] = b""
    greets: bool = True
    after: int = 0
    forged: threading.Event = field(default_factory=threading.Event)
    seen: dict[str, int] = field(default_factory=dict)

    def forge(self, command, reply, after=0):
        """Begins to answer a command."""
        self.command, self.reply, self.after = command, reply, after
        self.forged.clear()
        self.seen.clear()

    def passes(self):
        """Passes everything on again."""
        self.forge("", b"")

    def _answer(self, words):
        name = words[0].decode().upper()
        if name in _GREETINGS and self.greets:
            return None
        name = words[1].decode() if name == "EVALSHA" else name
        self.seen[name] = self.seen.get(name, 0) + 1
        if self.command != "*" and (name != self.command or self.seen[name] != self.after + 1):
            return None
        self.forged.set()
        return (self.reply,) if isinstance(self.reply, bytes) else self.reply()

    def _serve(self, sock, port):
        with socket.create_connection(("127.0.0.1", port)) as server, sock.makefile("rb") as lines:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            messages = Messages()
            while head := lines.readline():
                raw, words = [head], []
                for _ in range(int(head[1:])):
                    raw.append(lines.readline())
                    raw.append(lines.read(int(raw[-1][1:]) + 2))
                    words.append(raw[-1][:-2])
                answer = self._answer(words)
                if answer is not None:
                    for data in answer:
                        sock.sendall(data)
                    continue
                server.sendall(b"".join(raw))
                if words[0].upper().decode() in _SUBSCRIPTIONS:
                    # From here on, messages come by themselves.
                    _relay_rest(sock, lines, server)
                    return
                ended = False
                while not ended:
                    data = server.recv(1 << 18)
                    if not data:
                        return
                    ended = any(end for _, end in messages.feed(data))
                    sock.sendall(data)


def _relay_rest(sock, lines, server):
    def back():
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                sock.sendall(data)

    thread = threading.Thread(target=back, daemon=True)
    thread.start()
    with contextlib.suppress(OSError, ValueError):
        while data := lines.read1(1 << 16):
            server.sendall(data)
    with contextlib.suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


@contextlib.contextmanager
def forger(port):
    """Yields a forger before the server at a port."""
    found = Forger()
    serve = lambda sock: found._serve(sock, port)  # noqa: E731
    with socket.create_server(("127.0.0.1", 0)) as listener, serving(listener, serve):
        found.port = listener.getsockname()[1]
        yield found
