"""RESP over a plain socket, with a peer that sends given bytes at a given speed."""

import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import redis
from support.strings import Strings

from redisacc._clock import running_time
from redisacc._wire import sockets as fast_socket
from redisacc._wire.faults import BrokenError, ReplyError, SilentError


class Connection(redis.Connection):
    """One that may do more than redis-py's own."""


@pytest.fixture
def ends():
    """A connection, its socket, and the peer's."""
    ours, theirs = socket.socketpair()
    connection = redis.Connection(socket_timeout=7.0)
    connection._sock = ours
    yield connection, ours, theirs
    connection.disconnect()
    theirs.close()


def answer(theirs, data, *, piece=10**9):
    """Sends data in pieces from a thread, and returns a function that returns what was received."""
    came = bytearray()

    def run():
        for start in range(0, len(data), piece):
            theirs.sendall(data[start : start + piece])

    def drain():
        thread.join()
        theirs.setblocking(False)
        try:
            while data := theirs.recv(1 << 20):
                came.extend(data)
        except BlockingIOError:
            pass
        return bytes(came)

    thread = threading.Thread(target=run)
    thread.start()
    return drain


def soon():
    return running_time() + 60


@pytest.mark.parametrize("piece", [1, 3, 10**9])
def test_replies_of_every_kind_in_order(ends, piece):
    connection, ours, theirs = ends
    data = b"+OK\r\n:7\r\n$-1\r\n$3\r\na\r\n\r\n*2\r\n$1\r\nx\r\n:1\r\n-WRONGTYPE no\r\n-NOSCRIPT no\r\n_\r\n"
    sent = answer(theirs, data, piece=piece)
    replies = fast_socket.SocketConnection(connection, ours).exchange([("PING",)] * 8, soon())
    assert replies[:5] == [b"OK", 7, None, b"a\r\n", [b"x", 1]]
    assert isinstance(replies[5], ReplyError)
    assert str(replies[5]) == "WRONGTYPE no"
    assert [replies[n].code for n in (5, 6)] == ["WRONGTYPE", "NOSCRIPT"]
    assert replies[7] is None
    assert sent() == b"*1\r\n$4\r\nPING\r\n" * 8


@pytest.mark.parametrize("data", [b"", b"$10\r\nabc", b"+O"])
def test_a_connection_that_ends_is_noticed(ends, data):
    connection, ours, theirs = ends
    answer(theirs, data)()
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(BrokenError):
        fast_socket.SocketConnection(connection, ours).exchange([("PING",)], soon())


def test_a_server_that_takes_long_to_receive_is_not_silent(ends, monkeypatch):
    """The time in which it received a gradient does not count when it is to reply."""
    connection, ours, theirs = ends
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    # By the clock of this server, it receives for 0.6 s and replies 0.3 s later.
    now, looks = 100.0, threading.Event()
    monkeypatch.setattr(fast_socket, "running_time", lambda: looks.set() or now)

    def receive():
        nonlocal now
        left = 60_000
        # Until the kernel has taken all that it takes at once.
        looks.wait(20)
        while left > 0:
            now += 0.02
            left -= len(theirs.recv(2000))
        now += 0.3
        # The client looks at its clock meanwhile.
        time.sleep(3 * fast_socket.TICK)
        theirs.sendall(b"+OK\r\n")

    server = threading.Thread(target=receive)
    server.start()
    exchange = fast_socket.SocketConnection(connection, ours).exchange
    assert exchange([("SET", "k", memoryview(bytes(60_000)))], 100.7) == [b"OK"]
    server.join()


def test_silence_ends_in_time_though_signals_come(ends):
    """After each, the kernel restarts its timeout."""
    connection, ours, _ = ends
    over, here = threading.Event(), threading.get_ident()

    def disturb():
        # Until the test has ended or is aborted: it must not go on forever.
        deadline = time.monotonic() + 20
        while not over.wait(0.1) and time.monotonic() < deadline:
            signal.pthread_kill(here, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    thread = threading.Thread(target=disturb)
    started = time.monotonic()
    try:
        thread.start()
        with pytest.raises(SilentError):
            fast_socket.SocketConnection(connection, ours).exchange([("PING",)], running_time() + 0.5)
        assert time.monotonic() - started < 10
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def parse_commands(data):
    """Returns what a server would read, by an independent parser of RESP."""
    commands, position = [], 0

    def line():
        nonlocal position
        stop = data.index(b"\r\n", position)
        found, position = data[position:stop], stop + 2
        return found

    while position < len(data):
        count = line()
        assert count[:1] == b"*"
        command = []
        for _ in range(int(count[1:])):
            size = line()
            assert size[:1] == b"$"
            command.append(data[position : position + int(size[1:])])
            position += int(size[1:])
            assert data[position : position + 2] == b"\r\n"
            position += 2
        commands.append(command)
    return commands


def test_commands_are_packed_as_resp_and_large_arguments_not_copied():
    large = np.arange(fast_socket.GATHER_BYTES, dtype=np.uint8)
    small = np.arange(8, dtype=np.uint8)
    commands = [("SET", "clé", large.data, "PX", 5), ("SET", b"k", small.data), ("SET", "e", b"")]
    buffers = fast_socket.pack_commands(commands)
    assert parse_commands(b"".join(buffers)) == [
        [b"SET", "clé".encode(), large.tobytes(), b"PX", b"5"],
        [b"SET", b"k", small.tobytes()],
        [b"SET", b"e", b""],
    ]
    shared = [buffer for buffer in buffers if isinstance(buffer, memoryview)]
    assert len(shared) == 1
    assert np.shares_memory(np.frombuffer(shared[0], np.uint8), large)


def test_an_argument_in_pieces_is_one_string_and_its_large_pieces_are_not_copied():
    large = np.arange(2 * fast_socket.GATHER_BYTES, dtype=np.uint8)
    small = np.arange(8, dtype=np.uint8)
    half = fast_socket.GATHER_BYTES
    whole = fast_socket.Pieces([small.data, large[:half].data, large[half:].data, small[:3].data])
    assert whole.nbytes == 2 * half + 11
    expected = small.tobytes() + large.tobytes() + small[:3].tobytes()
    command = ("SET", "k", whole, "PX", 5)
    buffers = fast_socket.pack_commands([command, ("SET", "e", fast_socket.Pieces())])
    assert parse_commands(b"".join(buffers)) == [[b"SET", b"k", expected, b"PX", b"5"], [b"SET", b"e", b""]]
    # No empty buffer lies between two that are sent from where they are.
    assert [len(buffer) == half for buffer in buffers] == [False, True, True, False]
    shared = [buffer for buffer in buffers if isinstance(buffer, memoryview)]
    assert all(np.shares_memory(np.frombuffer(buffer, np.uint8), large) for buffer in shared)
    # A client gets one string.
    assert fast_socket.plain(command) == ("SET", "k", expected, "PX", b"5")


@pytest.mark.parametrize("buffers", [1, 1401])
def test_more_than_the_kernel_takes_at_once(ends, buffers):
    connection, ours, theirs = ends
    parts = [np.full(fast_socket.GATHER_BYTES, k % 251, np.uint8) for k in range(700)]
    # bytes are packed into one buffer, views stay what they are.
    commands = [("SET", f"k{k}", part.tobytes() if buffers == 1 else part.data) for k, part in enumerate(parts)]
    commands = commands if buffers > 1 else [("MSET", *(argument for _, *two in commands for argument in two))]
    assert len(fast_socket.pack_commands(commands)) == buffers
    came = bytearray()

    def serve():
        # The kernel takes some bytes, and then none for a while.
        time.sleep(0.5)
        total = sum(map(len, fast_socket.pack_commands(commands)))
        while len(came) < total:
            came.extend(theirs.recv(100_000))
        theirs.sendall(b"+OK\r\n" * len(commands))

    thread = threading.Thread(target=serve)
    thread.start()
    assert fast_socket.SocketConnection(connection, ours).exchange(commands, soon()) == [b"OK"] * len(commands)
    thread.join()
    expected = [[b"SET", b"k%d" % k, part.tobytes()] for k, part in enumerate(parts)]
    if buffers == 1:
        expected = [[b"MSET", *(argument for _, *two in expected for argument in two)]]
    assert parse_commands(bytes(came)) == expected


@pytest.mark.parametrize("piece", [1, 5, 1000, 10**9])
def test_strings_are_received_into_their_buffers(ends, piece):
    connection, ours, theirs = ends
    wanted = [bytes(range(200)), b"", b"\r\n$5\r\n", b"x" * (2000 if piece < 1000 else 200_000)]
    data = b"".join(b"$%d\r\n%b\r\n" % (len(text), text) for text in wanted)
    sent = answer(theirs, data, piece=piece)
    strings = Strings([f"k{k}" for k in range(4)], *map(len, wanted))
    fast_socket.SocketConnection(connection, ours).fetch(strings, soon())
    assert strings.buffers == wanted
    assert parse_commands(sent()) == [[b"GET", key.encode()] for key in strings.keys]


def test_strings_are_put_where_they_go_by_other_connections_too():
    strings = Strings("ab", 3, 0)
    fast_socket.put([b"abc", b""], strings.wanted(), strings)
    assert strings.buffers == [b"abc", b""]
    strings = Strings("a", 3)
    with pytest.raises(LookupError):
        fast_socket.put([None], strings.wanted(), strings)
    with pytest.raises(ReplyError):
        fast_socket.put([ReplyError("WRONGTYPE")], strings.wanted(), strings)


def test_what_has_come_is_not_asked_for_again(ends):
    connection, ours, theirs = ends
    strings = Strings("abc", 3, 3, 3)
    answer(theirs, b"$3\r\nabc\r\n$3\r\nd")()
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(BrokenError):
        fast_socket.SocketConnection(connection, ours).fetch(strings, soon())
    assert [string.key for string in strings.wanted()] == ["b", "c"]


@pytest.mark.parametrize("reply", [b"$9\r\nforged", b"$-1\r\n"])
def test_who_wants_a_string_of_another_length_is_asked_before_it_comes(ends, reply):
    connection, ours, theirs = ends
    answer(theirs, b"$3\r\nabc\r\n" + reply)
    strings = Strings("abc", 3, 4000, 5)
    with pytest.raises(LookupError):
        # Nothing more arrives, and a tick never ends: the bytes that are there have to suffice.
        fast_socket.SocketConnection(connection, ours, tick=10**6).fetch(strings, soon())
    assert strings.lengths == [3, 9 if b"9" in reply else -1]
    assert strings.buffers[0] == b"abc"


def test_a_string_that_comes_in_pieces_with_pauses(ends):
    connection, ours, theirs = ends
    sent = [b"$5", b"\r\nab", b"cde\r", b"\n$3\r\nxyz\r\n$-", b"1\r\n"]

    def serve():
        for piece in sent:
            # Longer than a tick, so that each is received by itself.
            time.sleep(fast_socket.TICK * 1.5)
            theirs.sendall(piece)

    thread = threading.Thread(target=serve)
    thread.start()
    strings = Strings("abc", 5, 3, 4)
    with pytest.raises(LookupError, match="-1"):
        fast_socket.SocketConnection(connection, ours).fetch(strings, soon())
    thread.join()
    assert strings.buffers[:2] == [b"abcde", b"xyz"]


# A signal handler that raises, mostly while a command with a number is packed.
PACKS = """
import signal
from redisacc._wire.sockets import pack_commands

class Interrupt(Exception):
    pass

def interrupt(*_):
    raise Interrupt

signal.signal(signal.SIGALRM, interrupt)
command = ("HSCAN", "key", *range(10**9, 10**9 + 400))
for _ in range(150):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0004)
        while True:
            pack_commands([command])
    except Interrupt:
        pass
"""


def test_an_interrupt_while_a_command_is_packed_does_not_crash_the_process():
    """hiredis does not expect that converting a number may fail."""
    result = subprocess.run([sys.executable, "-c", PACKS], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
