"""Whose settings our own connections take over, which these are, and who opens them."""

import pytest
import redis
import redis.asyncio
import redis.sentinel
import valkey
import valkey.asyncio
import valkey.sentinel

from redisacc._wire.clients import Endpoint, endpoint_of


@pytest.mark.parametrize("client", [redis.Redis, valkey.Valkey, redis.asyncio.Redis, valkey.asyncio.Valkey])
def test_the_settings_of_a_client_are_taken_over_and_its_retries_are_not(client):
    given = {"host": "h", "port": 7, "db": 3, "username": "u", "password": "p", "client_name": "ours"}
    limits = {"socket_timeout": 7.5, "max_connections": 9, "health_check_interval": 4}
    way = endpoint_of(
        client(**given, **limits, retry_on_error=[OSError], decode_responses=True, protocol=3).connection_pool
    )
    assert isinstance(way, Endpoint)
    assert (way.most, way.freshness, way.tls) == (9, 4, False)
    assert way.address == "h:7/3"
    pooled = way.own().make_connection()
    assert type(pooled) is redis.Connection
    assert {name: getattr(pooled, name) for name in given} == given
    assert pooled.socket_timeout == 7.5
    assert pooled.retry_on_error == []
    assert not pooled.encoder.decode_responses
    assert pooled.protocol == 2


def test_tls_and_the_file_of_a_socket_are_taken_over():
    way = endpoint_of(redis.Redis(host="h", ssl=True, ssl_ca_certs="ca.pem").connection_pool)
    assert isinstance(way, Endpoint)
    pooled = way.own().make_connection()
    assert (type(pooled), way.tls, pooled.ca_certs) == (redis.SSLConnection, True, "ca.pem")
    way = endpoint_of(valkey.Valkey(unix_socket_path="/a").connection_pool)
    assert isinstance(way, Endpoint)
    pooled = way.own().make_connection()
    assert (type(pooled), pooled.path, way.address) == (redis.UnixDomainSocketConnection, "/a", "unix:///a")


def test_settings_that_change_hold_for_the_next_connection():
    client = redis.Redis(host="h", password="old")
    way = endpoint_of(client.connection_pool)
    assert isinstance(way, Endpoint)
    client.connection_pool.connection_kwargs["password"] = "new"
    assert way.own().make_connection().password == "new"


def test_a_limit_that_nobody_chose_is_none():
    for pool in (redis.ConnectionPool(), redis.BlockingConnectionPool(), valkey.ConnectionPool()):
        assert endpoint_of(pool).most is None


@pytest.mark.parametrize("library", [redis, valkey])
def test_sentinels_are_asked_over_connections_of_our_own(library):
    finder = library.sentinel.Sentinel([("a", 1), ("b", 2)], 1, {"password": "p"})
    way = endpoint_of(finder.master_for("main", password="q").connection_pool)
    assert isinstance(way, Endpoint)
    pool = way.own()
    assert (pool.service_name, pool.is_master) == ("main", True)
    assert pool.connection_kwargs["password"] == "q"
    manager = pool.sentinel_manager
    assert manager.min_other_sentinels == 1
    each = [client.connection_pool.connection_kwargs for client in manager.sentinels]
    assert [(one["host"], one["port"], one["password"]) for one in each] == [("a", 1, "p"), ("b", 2, "p")]
    assert not {*map(id, manager.sentinels)} & {*map(id, finder.sentinels)}
