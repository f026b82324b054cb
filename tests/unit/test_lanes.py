"""Strings over several connections at once, with peers that send given bytes; and when such connections are opened."""

import socket
import threading

import pytest
import redis
from support.strings import Strings

from redisacc._clock import running_time
from redisacc._wire import lanes
from redisacc._wire import node as node_module
from redisacc._wire.faults import BrokenError, ReplyError, SilentError
from redisacc._wire.node import LANES_PAUSE, LEAST_CONNECTIONS, Node
from redisacc._wire.sockets import SocketConnection


class Peers:
    """Connections, and the other ends of their sockets."""

    def __init__(self, number):
        pairs = [socket.socketpair() for _ in range(number)]
        self.theirs = [theirs for _, theirs in pairs]
        self.connections = [SocketConnection(redis.Connection(), ours) for ours, _ in pairs]

    def close(self):
        for connection, theirs in zip(self.connections, self.theirs, strict=True):
            connection.sock.close()
            theirs.close()


@pytest.fixture
def peers():
    """Makes connections."""
    made = []

    def make(number):
        made.append(Peers(number))
        return made[-1]

    yield make
    for one in made:
        one.close()


def soon():
    return running_time() + 60


def fetch(connections, strings, deadline):
    connections[0].fetch(strings, deadline, connections[1:])


def reply(data):
    return b"$%d\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize("connections", [1, 2, 3, 4])
@pytest.mark.parametrize("piece", [1, 7, 10**9])
def test_strings_arrive_in_their_memory_whatever_comes_first(peers, connections, piece):
    made = peers(connections)
    wanted = [bytes([65 + number]) * (number * 97 % 400) for number in range(11)]
    strings = Strings([f"k{number}" for number in range(11)], *map(len, wanted), lanes=4)
    sent = [
        b"".join(reply(wanted[string.number]) for string in strings.wanted() if string.lane % connections == number)
        for number in range(connections)
    ]

    def serve():
        # The last lane first: what is requested last may arrive first.
        for start in range(0, max(map(len, sent)), piece):
            for theirs, data in reversed(list(zip(made.theirs, sent, strict=True))):
                theirs.sendall(data[start : start + piece])

    thread = threading.Thread(target=serve)
    thread.start()
    fetch(made.connections, strings, soon())
    thread.join()
    assert strings.buffers == wanted
    for lane in range(4):
        assert [n for n in strings.finished if n % 4 == lane] == list(range(lane, 11, 4))


def test_a_string_that_is_wanted_later_is_requested_while_nothing_arrives(peers):
    made = peers(2)
    asked = []

    class Growing(Strings):
        def wanted(self):
            return super().wanted()[:1]

        def more(self):
            asked.append(1)
            return super().wanted()[1:] if len(asked) == 2 else []

    strings = Growing("ab", 3, 3, lanes=2)

    def serve():
        # The second one is answered first, so it was requested although the first one had not arrived.
        made.theirs[1].recv(100)
        made.theirs[1].sendall(reply(b"xyz"))
        made.theirs[0].sendall(reply(b"abc"))

    thread = threading.Thread(target=serve)
    thread.start()
    fetch(made.connections, strings, soon())
    thread.join()
    assert strings.buffers == [b"abc", b"xyz"]


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (b"", BrokenError, "closed"),
        (b"$3\r\na", BrokenError, "closed"),
        (b"$3\r\nabc", BrokenError, "closed"),
        (b"$3\r\nabcde\r\n", BrokenError, "does not end"),
        (b"$3\r\nabc\n\n", BrokenError, "does not end"),
        (b"*1\r\n$1\r\nx\r\n", BrokenError, "unexpected"),
        (b"$-2\r\n", BrokenError, "unexpected"),
        (b"$x\r\n", BrokenError, "unexpected"),
        (b"?" * 100_000, BrokenError, "not RESP"),
        (b"-WRONGTYPE it is a list\r\n", ReplyError, "it is a list"),
        (b"$-1\r\n", LookupError, "-1"),
        (b"_\r\n", BrokenError, "unexpected"),
        (b"$9\r\nforged", LookupError, "9"),
        (reply(b"abc") * 2, BrokenError, "more replies"),
    ],
)
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_reply_that_is_wrong_ends_the_fetch(peers, data, error, text, lanes):
    made, strings = peers(2), Strings("ab", 3, 3, lanes=2)
    if lanes == 1:
        # Over one connection, as to a server on the same machine.
        strings, text = Strings("a", 3), text if error is BrokenError else None
        if text == "more replies":
            # Nobody reads on.
            return
    thread = threading.Thread(target=made.theirs[1].sendall, args=[data])
    thread.start()
    if text == "closed":
        thread.join()
        made.theirs[1].shutdown(socket.SHUT_WR)
    with pytest.raises(error, match=text):
        fetch(made.connections[1:] if lanes == 1 else made.connections, strings, soon())
    made.close()
    thread.join()


def test_a_silent_server_is_noticed(peers):
    made = peers(2)
    made.theirs[0].sendall(reply(b"abc"))
    with pytest.raises(SilentError):
        fetch(made.connections, Strings("ab", 3, 3, lanes=2), running_time() + 0.05)


# Opening.


@pytest.fixture
def remote(monkeypatch):
    """Every server counts as one on another machine."""
    monkeypatch.setattr(node_module, "is_remote", lambda _: True)


class Server:
    """Where connections lead to peers. It may refuse some."""

    address, tls, is_own, is_local, freshness = "peers", False, True, False, float("inf")

    def __init__(self, peers, refuses_after=100, most=None):
        self.made = []
        self.most = most
        self._peers, self._refuses_after = peers, refuses_after

    def open(self):
        if len(self.made) >= self._refuses_after:
            raise BrokenError("too many clients")
        pooled = redis.Connection()
        pooled._sock = self._peers.connections[len(self.made)].sock
        self.made.append(pooled)
        return pooled

    def discard(self, pooled):
        pooled.disconnect()


@pytest.fixture
def first(peers):
    """The connection that a fetch has already."""
    return peers(1).connections[0]


@pytest.mark.usefixtures("remote")
def test_lanes_are_opened_in_the_background_and_used_again(peers, first, until, clock):
    made = peers(8)
    server = Server(made)
    node = Node(server)
    assert node._more(first) == []
    until(lambda: len(node._idle) == 3)
    more = node._more(first)
    assert len(more) == 3
    # Another thread that fetches meanwhile gets none, and none is opened for it soon.
    assert node._more(first) == []
    assert len(server.made) == 3
    node._idle.extend(more)
    # One that ended while it was idle is replaced later.
    made.theirs[1].close()
    assert len(node._more(first)) == 2
    assert server.made[1]._sock is None
    clock.advance(LANES_PAUSE)
    node._more(first)
    until(lambda: len(node._idle) == 3)


@pytest.mark.usefixtures("remote")
def test_lanes_that_the_server_refuses_are_done_without(peers, first, until):
    server = Server(peers(8), refuses_after=1)
    node = Node(server)
    node._more(first)
    until(lambda: len(node._idle) == 1)
    assert len(node._more(first)) == 1
    assert len(server.made) == 1


@pytest.mark.usefixtures("remote")
def test_a_client_with_few_connections_has_none_for_lanes(peers):
    server = Server(peers(1), most=LEAST_CONNECTIONS - 1)
    assert not Node(server)._has_lanes


def test_only_a_server_on_another_machine_is_remote(first):
    assert not lanes.is_remote(first.sock)

    class Socket:
        def __init__(self, here, there, family=socket.AF_INET):
            self.family, self._here, self._there = family, here, there

        def getsockname(self):
            return self._here, 1

        def getpeername(self):
            return self._there, 2

    def is_remote(*given):
        return lanes.is_remote(Socket(*given))

    assert not is_remote("127.0.0.1", "127.0.0.1")
    assert not is_remote("127.0.0.1", "127.0.0.2")
    assert not is_remote("10.0.0.1", "10.0.0.1")
    assert not is_remote("::1", "::1", socket.AF_INET6)
    assert not is_remote("::ffff:127.0.0.1", "::ffff:127.0.0.3", socket.AF_INET6)
    assert is_remote("10.0.0.1", "10.0.0.2")
    assert is_remote("fe80::1%eth0", "fe80::2%eth0", socket.AF_INET6)
