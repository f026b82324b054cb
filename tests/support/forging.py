"""A server that answers chosen commands with replies of another form than they have, and passes on all others."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from support.clients import serving
from support.proxy import Messages

# What another form may be, by name: each is a whole reply.
FORMS: dict[str, bytes] = {
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

# What a client sends by itself when it connects.
_GREETINGS = ("CLIENT", "SELECT", "HELLO", "AUTH")
_SUBSCRIPTIONS = ("SUBSCRIBE", "PSUBSCRIBE", "SSUBSCRIBE")


@dataclass
class Forger:
    """Passes commands on to a server, but for one that it answers itself, once; or for all of them.

    Attributes:
        port: where it listens.
        command: the command that it answers; for a script, its SHA-1; "": none; "*": every command, always.
        reply: what with.
        after: how many times it passes that command on before.
        forged: set when it has answered.
        seen: the commands that have come, but for greetings, each once.
    """

    port: int = 0
    command: str = ""
    reply: bytes = b""
    after: int = 0
    forged: threading.Event = field(default_factory=threading.Event)
    seen: dict[str, int] = field(default_factory=dict)

    def forge(self, command: str, reply: bytes, after: int = 0) -> None:
        """Begins to answer a command."""
        self.command, self.reply, self.after = command, reply, after
        self.forged.clear()
        self.seen.clear()

    def passes(self) -> None:
        """Passes everything on again."""
        self.forge("", b"")

    def _answer(self, words: list[bytes]) -> bytes | None:
        name = words[0].decode().upper()
        if name in _GREETINGS:
            return None
        name = words[1].decode() if name == "EVALSHA" else name
        self.seen[name] = self.seen.get(name, 0) + 1
        if self.command != "*" and (name != self.command or self.seen[name] != self.after + 1):
            return None
        self.forged.set()
        return self.reply

    def _serve(self, sock: socket.socket, port: int) -> None:
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
                    sock.sendall(answer)
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


def _relay_rest(sock: socket.socket, lines: object, server: socket.socket) -> None:
    def back() -> None:
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
def forger(port: int) -> Iterator[Forger]:
    """Yields a forger before the server at a port."""
    found = Forger()
    serve: Callable[[socket.socket], None] = lambda sock: found._serve(sock, port)  # noqa: E731
    with socket.create_server(("127.0.0.1", 0)) as listener, serving(listener, serve):
        found.port = listener.getsockname()[1]
        yield found
