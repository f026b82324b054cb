"""What an error about a connection advises: the remedy of this situation, and none that does not help in it."""

import contextlib
import errno
import re
import socket

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel
from support.clients import serving
from support.forging import forger

import redisacc
from redisacc._wire.connect import connect

pytestmark = [pytest.mark.servers("valkey")]

START = "Start one with `redisacc server`"
PASSWORD = "name it in the URL, as in redis://:PASSWORD@HOST:PORT"
NO_SERVER = "Something listens there that is no Redis server: check the address"
NO_WAY = "Nothing at that address answers this machine: check the address, and whether a firewall is in between"
CLUSTER = "another node has the key (MOVED 1 10.0.0.2:7001): give redis= a URL redis+cluster://HOST:PORT"


def failing(error):
    """Returns a client whose connections fail with an error of the system."""

    class Failing(redis.Connection):
        def _connect(self):
            raise error

    return redis.Redis(connection_pool=redis.ConnectionPool(connection_class=Failing, host="box"))


class Situations:
    """Ways to a server, of which each is wrong in its own way."""

    def __init__(self, server, enter):
        self._server = server
        self._enter = enter

    def answers(self, reply):
        """A server that answers everything in this way."""
        found = self._enter(forger(self._server.port))
        found.forge("*", reply)
        return f"redis://127.0.0.1:{found.port}"

    def says(self, text):
        """Something that says this to whoever connects."""

        def say(sock):
            sock.sendall(text)
            with contextlib.suppress(OSError):
                sock.settimeout(1)
                sock.recv(1 << 16)

        listener = self._enter(socket.create_server(("127.0.0.1", 0)))
        self._enter(serving(listener, say))
        return f"redis://127.0.0.1:{listener.getsockname()[1]}"

    def as_user(self, user):
        return f"redis://{user}@127.0.0.1:{self._server.port}"

    def database(self, number):
        return f"redis://127.0.0.1:{self._server.port}/{number}"

    def pool_in_use(self):
        client = self._enter(redis.Redis(host="127.0.0.1", port=self._server.port, max_connections=1))
        self._transport = connect(client)
        self._enter(self._transport.subscriber(None, 1.0))
        return client


@pytest.fixture
def situations(real_server):
    with contextlib.ExitStack() as stack:
        yield Situations(real_server, stack.enter_context)


# The situation → the way there, and what the error advises; "": nothing, because its text says all that is known.
ADVICE = {
    "nothing listens": (lambda _: "redis://127.0.0.1:1", START),
    "nothing listens, with TLS": (lambda _: "rediss://127.0.0.1:1", START),
    "no node of a cluster listens": (
        lambda _: "redis+cluster://127.0.0.1:1,127.0.0.1:2",
        "Start the nodes of the cluster, or name another one with redis= or REDISACC_URL",
    ),
    "no such socket": (lambda _: "unix:///nowhere/socket", START),
    "a socket of another user": (lambda _: failing(PermissionError(errno.EACCES, "Permission denied")), ""),
    "no such host": (
        lambda _: failing(socket.gaierror(-2, "Name or service not known")),
        "This machine cannot resolve the name of the host: check it",
    ),
    "no way to the host": (lambda _: failing(OSError(errno.EHOSTUNREACH, "No route to host")), NO_WAY),
    "no answer from the host": (lambda _: failing(TimeoutError("timed out")), NO_WAY),
    "too many open files": (lambda _: failing(OSError(errno.EMFILE, "Too many open files")), ""),
    "a wrong password": (lambda it: it.as_user("nobody:x"), ""),
    "no password": (lambda it: it.answers(b"-NOAUTH Authentication required.\r\n"), PASSWORD),
    "no password, long command": (
        lambda it: it.answers(b"-ERR Protocol error: unauthenticated multibulk length\r\n"),
        PASSWORD,
    ),
    "a database that is not there": (lambda it: it.database(99), ""),
    "a server that is full of clients": (
        lambda it: it.says(b"-ERR max number of clients reached\r\n"),
        "The server has as many clients as its maxclients allows: close some of them, or raise it",
    ),
    "a pool in use": (
        Situations.pool_in_use,
        "All connections of this client's pool are in use: give it a larger max_connections",
    ),
    "a web server": (lambda it: it.says(b"HTTP/1.1 400 Bad Request\r\n\r\n"), NO_SERVER),
    "TLS to what has none": (
        lambda it: it.says(b"-ERR no TLS here\r\n").replace("redis", "rediss"),
        "It does not speak TLS there: use redis:// instead of rediss://",
    ),
    "no Sentinel": (
        lambda _: Sentinel([("127.0.0.1", 1)], sentinel_kwargs={"retry": Retry(NoBackoff(), 0)}).master_for("w"),
        "Check the name of the master, and the addresses of the Sentinels",
    ),
    "a server that loads": (lambda it: it.answers(b"-LOADING Valkey is loading the dataset in memory\r\n"), ""),
    "a cluster that is down": (
        lambda it: it.answers(b"-CLUSTERDOWN The cluster is down\r\n"),
        "see `redisacc doctor`",
    ),
    "a node of a cluster": (lambda it: it.answers(b"-MOVED 1 10.0.0.2:7001\r\n"), CLUSTER),
    "a full server": (
        lambda it: it.answers(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"),
        "Take rounds, which still works and frees memory, or give the server more",
    ),
}
ALL = {advice for _, advice in ADVICE.values() if advice}


@pytest.mark.parametrize("situation", ADVICE)
def test_an_error_advises_what_helps_here_and_nothing_else(situations, durations, situation):
    durations(opening=0.2)
    way, advice = ADVICE[situation]
    with pytest.raises(redisacc.ServerError) as failure:
        redisacc.ConditionalAccumulator("float32", [1], "w", redis=way(situations))
    message = str(failure.value)
    assert {each for each in ALL if each in message} == ({advice} if advice else set())
    if not advice:
        # Its last words are the server's own, or the system's.
        assert re.search(r"\)$|refuses the connection: |the server refused: ", message), message


def test_a_server_with_a_password_asks_for_it(daemon, durations):
    durations(opening=0.2)
    server = daemon("--requirepass", "secret").start()
    for url in (f"redis://127.0.0.1:{server.port}", f"redis+cluster://127.0.0.1:{server.port}"):
        with pytest.raises(redisacc.ServerError, match=re.escape(PASSWORD)):
            redisacc.ConditionalAccumulator("float32", [1], "w", redis=url)
