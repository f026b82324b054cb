"""Whatever listens at an address may answer anything, and go on forever: an error in time, and flat memory."""

from __future__ import annotations

import contextlib
import itertools
import resource
import socket
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import redis
import valkey
from support.clients import serving
from support.selection import thorough
from support.timeouts import short_timeouts

import redisacc

# Seconds that a call has, and by how much it may be late on a busy machine.
SHORT, LATE = 0.3, 8.0
# The second, if the answer is not what the script returns, but arrives as a whole before the time is up.
REFUSALS = (redisacc.ServerUnavailableError, redisacc.CorruptDataError)
# What a process may grow by, in bytes: some replies of the largest size that is read.
GROWTH = 250 * 2**20


def once(data: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: iter((data,))


def drip() -> Iterator[bytes]:
    """A byte every few milliseconds: data keeps coming, so that nothing ever waits for long."""
    yield b"$100000\r\n"
    while True:
        time.sleep(0.005)
        yield b"x"


ANSWERS: dict[str, Callable[[], Iterator[bytes]]] = {
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


@contextlib.contextmanager
def peer(answer: Callable[[], Iterator[bytes]], *, polite: bool) -> Iterator[int]:
    """Yields a port where something listens. If it is polite, it answers the handshake as a server does."""

    def serve(sock: socket.socket) -> None:
        with sock.makefile("rb") as lines:
            while head := lines.readline():
                words = [lines.read(int(lines.readline()[1:]) + 2) for _ in range(int(head[1:]))]
                if polite and words[0].strip() in (b"CLIENT", b"SELECT"):
                    sock.sendall(b"+OK\r\n")
                    continue
                for data in answer():
                    sock.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener, serving(listener, serve):
        yield listener.getsockname()[1]


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Checks that the block takes neither much longer than a call may, nor much memory."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    yield
    assert time.monotonic() - started < SHORT + LATE
    # Of Linux in KiB, of macOS in bytes, which makes this check weaker there.
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < GROWTH


@pytest.fixture
def short_opening(durations: Callable[..., None]) -> None:
    durations(opening=SHORT, handshake=SHORT)


USUAL = [("a huge >", True), ("a huge *", False), ("a string without end", True), ("a byte now and then", False)]


@pytest.mark.usefixtures("short_opening")
@pytest.mark.parametrize(("answer", "polite"), thorough(itertools.product(ANSWERS, (True, False)), usual=USUAL))
def test_an_opening_ends_in_time_whatever_answers(answer, polite):
    with peer(ANSWERS[answer], polite=polite) as port, bounded():
        # The timeout of a handshake is part of what redisacc sets, and too long for a test of silence.
        where = f"redis://127.0.0.1:{port}/0?socket_timeout={SHORT}"
        with pytest.raises(REFUSALS, match=rf"127.0.0.1:{port}|script open replied") as failure:
            redisacc.ConditionalAccumulator("float32", [1], "w", redis=where)
    assert len(str(failure.value)) < 1000


@pytest.mark.usefixtures("short_opening")
@pytest.mark.parametrize("answer", thorough(ANSWERS, usual=["a huge ~"]))
@pytest.mark.parametrize("client", [redis.Redis, valkey.Valkey])
def test_a_client_of_the_users_is_no_way_around(answer, client):
    """But for the handshake, which is the client's own affair."""
    with (
        peer(ANSWERS[answer], polite=True) as port,
        client(port=port, socket_timeout=5, protocol=2) as where,
        bounded(),
        pytest.raises(REFUSALS),
    ):
        redisacc.ConditionalAccumulator("float32", [1], "w", redis=where)


@pytest.mark.servers("valkey")
@pytest.mark.parametrize("answer", thorough(ANSWERS, usual=["a byte now and then"]))
def test_calls_end_in_time_whatever_answers(durations, real_server, open_accumulator, answer, monkeypatch):
    acc = open_accumulator("dense", "float32", [1], "w", redis=f"{real_server.url}?socket_timeout={SHORT}")
    acc.apply_grad(np.ones(1))
    transport = acc._transport
    pool = transport.where.connection_pool

    def lead_to(port):
        pool.connection_kwargs["port"] = port
        transport._server._kept.clear()
        pool.disconnect()
        pool.reset()

    calls = [lambda: acc.apply_grad(np.ones(1)), acc.num_accumulated]
    if "without end" not in answer:
        # Gradients may be large: such an answer is cut off too, but not before 1 GiB.
        calls.append(acc.peek)
    try:
        with peer(ANSWERS[answer], polite=True) as port, durations(handshake=SHORT):
            lead_to(port)
            for call in calls:
                with bounded(), short_timeouts(transport, SHORT), pytest.raises(REFUSALS):
                    call()
    finally:
        lead_to(real_server.port)
    assert acc.num_accumulated() == 1
    acc.delete()


def test_an_error_says_what_came_and_where(durations):
    durations(opening=SHORT)
    message = "127.0.0.1:[0-9]+/0 .*an array of 123456789 elements in reply to EVALSHA"
    with (
        peer(once(b"*123456789\r\n"), polite=True) as port,
        pytest.raises(redisacc.ServerUnavailableError, match=message),
    ):
        redisacc.ConditionalAccumulator("float32", [1], "w", redis=f"redis://127.0.0.1:{port}")
