"""Every kind of client that a user may bring, and connections that break between operations."""

import gc
import time
import traceback
import weakref
from unittest import mock

import fakeredis
import numpy as np
import pytest
import redis
import redis.asyncio
import redis.sentinel
import valkey
import valkey.asyncio
import valkey.sentinel
from support.clients import ALL as ALL_CLIENTS
from support.model import assert_same
from support.selection import thorough

import redisacc
from redisacc import embedded


def exercise(where, name=None, limit=None):
    """Uses one accumulator of each kind for every operation that sends bytes."""
    options = {"redis": where, "limits": redisacc.Limits(in_place=limit), "worker": "wörker"}
    with redisacc.ConditionalAccumulator("float32", [3], name, **options) as acc:
        acc.apply_grad(np.float32([1, 2, 3]))
        acc.apply_grad(np.float32([3, 4, 5]), local_step=-1)
        assert acc.peek().gradient.tolist() == [1, 2, 3]
        assert acc.info().workers == {"wörker": 1}
        assert_same(acc.take_grad(1), np.float32([1, 2, 3]))
        with pytest.raises(redisacc.TakeTimeoutError):
            acc.take_grad(1, timeout=0.01)
        assert acc.global_step() == 1
    with redisacc.SparseConditionalAccumulator("int64", [None, 2], **options) as acc:
        acc.apply_grad([2**60], np.array([[2**60, 1]]))
        indices, values, _ = acc.take_grad(1)
        assert indices.tolist() == [2**60]
        assert values.tolist() == [[2**60, 1]]


OPTIONS = [
    {"decode_responses": True},
    {"protocol": 3},
    {"protocol": 2},
    {"protocol": 3, "decode_responses": True},
    {"single_connection_client": True},
    {"encoding": "latin-1", "decode_responses": True},
    {"max_connections": 2},
    {"socket_timeout": 1.0},
    {"socket_timeout": None},
    {"health_check_interval": 1},
    {"client_name": "ours"},
    {"db": 3},
]


@pytest.mark.servers("valkey")
def test_clients_with_all_kinds_of_options(real_server):
    for options in OPTIONS:
        client = real_server.client(**options)
        exercise(client)
        exercise(client, limit=0)
        assert client.keys() == [], options


@pytest.mark.servers("valkey")
def test_a_client_has_no_more_connections_than_it_may(real_server, real_client, open_dense, background):
    # Its own connections are the user's, and do not count.
    client = real_server.client(max_connections=3, client_name="few")
    most = 0
    with client.pubsub() as one, client.pubsub() as other, client.pubsub() as third:
        for held in (one, other, third):
            held.subscribe("other")
        acc = open_dense("int32", [1], "w", redis=client, reduction_type="SUM")
        take = background(acc.take_grad, 80, timeout=60)

        def work():
            for _ in range(20):
                assert acc.apply_grad([1])

        for job in [background(work) for _ in range(4)]:
            while job.running:
                names = [entry["name"] for entry in real_client.client_list()]
                most = max(most, names.count("few") - 3)
            job.result()
        assert take.result().tolist() == [80]
    assert 1 <= most <= 3


def test_a_url(real_server, real_client, monkeypatch):
    exercise(real_server.url)
    exercise(real_server.url.replace("/0", "/5"))
    monkeypatch.setenv("REDISACC_URL", real_server.url)
    exercise(None)
    assert real_client.keys() == []


@pytest.mark.servers("valkey")
def test_a_unix_socket(real_server, tmp_path):
    path = tmp_path / "s"
    with embedded.Server(socket=path) as server:
        exercise(f"unix://{path}")
        exercise(server.url)


@pytest.mark.servers("valkey")
def test_a_unix_socket_with_resp3(real_server, tmp_path):
    # redis-py 7.0 to 8.0.0 itself cannot connect with these settings (its issue 4086).
    path = tmp_path / "s"
    with embedded.Server(socket=path), redis.Redis(unix_socket_path=str(path), protocol=3, db=3) as client:
        exercise(client)


@pytest.mark.servers("valkey")
@pytest.mark.parametrize("kind", [redis.ConnectionPool, redis.BlockingConnectionPool])
@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_connection_whose_handshake_was_cut_short_is_not_used(real_server, real_client, kind, failure):
    # It would be one that uses database 0.
    failures = [failure("in the middle of a handshake")]

    def connect(connection):
        if failures:
            raise failures.pop()
        connection.on_connect()

    pool = kind.from_url(real_server.url.replace("/0", "/3"), redis_connect_func=connect)
    with redis.Redis(connection_pool=pool) as client:
        if failure is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                redisacc.ConditionalAccumulator("float32", [1], "cut", redis=client)
        with redisacc.ConditionalAccumulator("float32", [1], "cut", redis=client) as acc:
            acc.apply_grad([1.0])
            assert not failures
            assert real_client.keys() == []
            assert client.exists("redisacc:{cut}")
            acc.delete()
    pool.disconnect()


# redis-py before 6 forgets to close a unix socket on which no server listens.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_no_server_is_an_error_that_says_how_to_start_one(durations):
    durations(opening=0.1)
    for where in ("redis://:hidden@127.0.0.1:1/0", "rediss://127.0.0.1:1", "unix:///nonexistent/socket"):
        with pytest.raises(redisacc.ServerUnavailableError, match="redisacc server") as failure:
            redisacc.ConditionalAccumulator("float32", [1], redis=where)
        assert isinstance(failure.value, ConnectionError)
        assert "hidden" not in str(failure.value)
        assert "".join(traceback.format_exception(failure.value)).count("Traceback") == 1
    # Collected here, where the warning is expected, and not in the next test.
    del failure
    gc.collect()


def test_another_place_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("REDISACC_URL", "http://nowhere")
    with pytest.raises(redisacc.InvalidArgumentError):
        redisacc.ConditionalAccumulator("float32", [1])


class LikeAClient:
    """Not one: it only has a method of that name."""

    connection_pool = None

    def execute_command(self, *command):
        return True


NOT_CLIENTS = [
    redis.asyncio.Redis,
    valkey.asyncio.Valkey,
    lambda: redis.Redis().pipeline(),
    lambda: valkey.Valkey().pipeline(),
    lambda: redis.Redis().pubsub(),
    redis.ConnectionPool,
    valkey.Connection,
    lambda: redis.sentinel.Sentinel([("127.0.0.1", 1)]),
    lambda: valkey.sentinel.Sentinel([("127.0.0.1", 1)]),
    lambda: redis.Redis,
    mock.MagicMock,
    lambda: mock.MagicMock(spec=redis.Redis),
    LikeAClient,
]


def test_what_is_no_client_is_refused():
    for make in NOT_CLIENTS:
        where = make()
        with pytest.raises(redisacc.InvalidArgumentError, match=r"valkey\.Valkey.*not [\w.]+") as failure:
            redisacc.ConditionalAccumulator("float32", [1], redis=where)
        assert type(where).__qualname__ in str(failure.value)


ASYNCIO = {
    redis.asyncio.RedisCluster: "redis.RedisCluster",
    redis.asyncio.Redis: "redis.Redis",
    valkey.asyncio.ValkeyCluster: "valkey.ValkeyCluster",
    valkey.asyncio.Valkey: "valkey.Valkey",
}


def test_what_to_use_instead_of_a_client_for_asyncio():
    for kind, right in ASYNCIO.items():
        where = kind(host="127.0.0.1", port=1)
        with pytest.raises(redisacc.InvalidArgumentError, match=rf"redisacc\.asyncio, or give this one a {right}$"):
            redisacc.ConditionalAccumulator("float32", [1], redis=where)


@pytest.mark.servers("valkey")
@pytest.mark.parametrize("kind", thorough(ALL_CLIENTS, usual=list(ALL_CLIENTS)[2::5]))
def test_every_kind_of_client(real_server, real_client, kind):
    with ALL_CLIENTS[kind].connected(real_server.port) as client:
        exercise(client)
        exercise(client, limit=0)
    assert real_client.keys() == []


class Subclass(valkey.Valkey):
    """A user's own."""


@pytest.mark.servers("valkey")
def test_subclasses_and_fake_clients(real_server):
    with valkey.StrictValkey.from_url(real_server.url) as client, Subclass.from_url(real_server.url) as own:
        exercise(client)
        exercise(own)
    for kind in (fakeredis.FakeRedis, fakeredis.FakeStrictRedis, fakeredis.FakeValkey):
        with kind() as client:
            exercise(client)


@pytest.mark.servers("valkey")
def test_schemes_of_valkey_py_are_synonyms(real_server, monkeypatch, durations):
    url = real_server.url.replace("redis://", "valkey://")
    exercise(url)
    monkeypatch.setenv("REDISACC_URL", url.replace("valkey", "Valkey"))
    exercise(None)
    durations(opening=0.1, handshake=0.1)
    with pytest.raises(redisacc.ServerUnavailableError, match="If it does not speak TLS"):
        redisacc.ConditionalAccumulator("float32", [1], redis=url.replace("valkey", "valkeys"))


@pytest.mark.servers("valkey")
def test_the_users_client_may_be_closed_at_any_time(real_server, open_dense, background, until):
    client = real_server.client()
    acc = open_dense("float64", [1], redis=client)
    take = background(acc.take_grad, 2, timeout=30)
    until(lambda: acc.info().waiting)
    for value in (1.0, 3.0):
        client.close()
        client.connection_pool.disconnect()
        assert acc.apply_grad([value])
    assert take.result().tolist() == [2.0]


class OwnPool(redis.ConnectionPool):
    """A pool of the user's own, which lets its client stumble now and then, as when another thread closes it."""

    calls = 0

    def get_connection(self, *args, **options):
        self.calls += 1
        if self.calls % 5 == 0:
            raise TypeError("argument must be an int, or have a fileno() method.")
        return super().get_connection(*args, **options)


@pytest.mark.servers("valkey")
def test_a_pool_of_the_users_own_class_is_used_as_it_is(real_server):
    pool = OwnPool.from_url(real_server.url)
    with redis.Redis(connection_pool=pool) as client:
        exercise(client)
        exercise(client, limit=0)
        assert pool.calls > 20
        # A take may still be listening.
        assert len(pool._in_use_connections) <= 1
    pool.disconnect()


@pytest.mark.servers("valkey")
def test_a_take_with_a_timeout_ends_in_time_without_its_server(real_server, background, until, durations):
    # The timeout outside of tests: with the tests' own, the take would end later.
    durations(last_poll=0.5)
    server = embedded.Server()
    server.start()
    try:
        acc = redisacc.ConditionalAccumulator("float32", [1], "w", redis=server.url)
        take = background(acc.take_grad, 2, timeout=3.0)
        until(lambda: acc.info().waiting)
    finally:
        server.stop()
    start = time.monotonic()
    with pytest.raises(redisacc.TakeTimeoutError):
        take.result()
    assert time.monotonic() - start < 7


@pytest.mark.servers("valkey")
def test_a_take_that_looks_ahead_when_its_server_ends_ends_in_time(proxy, open_dense, background, durations):
    durations(last_poll=0.5)

    def end():
        proxy.refuses = True
        proxy.cut_all()

    acc = open_dense("float32", [1], "w", redis=proxy.where, limits=redisacc.Limits(in_place=0, inline=0))
    acc.apply_grad([1])
    # It fetches the gradient that is there.
    proxy.before("GET", end)
    with pytest.raises(redisacc.TakeTimeoutError):
        background(acc.take_grad, 2, timeout=1.0).result()
    assert "GET" in proxy.sent
    proxy.refuses = False


@pytest.mark.servers("valkey", "redis62", "redis7")
def test_a_client_is_free_as_soon_as_its_last_handle_is_gone(real_server, until):
    """No cycle keeps it, and its connections, until a collection."""
    gc.disable()
    try:
        client = redis.Redis.from_url(real_server.url)
        acc = redisacc.ConditionalAccumulator("float32", [2], redis=client)
        parameters = redisacc.Parameters("free", redis=client)
        acc.apply_grad([1, 2])
        acc.take_grad(1)
        parameters.publish({"w": np.ones(2)}, 0)
        parameters.delete()
        acc.delete()
        alive = weakref.ref(client)
        del acc, parameters, client
        # The thread that renewed the lease of the accumulator may be about to let it go.
        until(lambda: alive() is None)
    finally:
        gc.enable()
