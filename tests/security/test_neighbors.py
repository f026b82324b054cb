"""A role for one name reaches nothing of a neighbor, however much the neighbor's name looks like it."""

import contextlib
import itertools
import shlex

import numpy as np
import pytest
import redis
from click.testing import CliRunner
from support.servers import CLUSTER

import redisacc
from redisacc.tools.cli import main

pytestmark = [pytest.mark.servers("valkey", "redis7", CLUSTER), pytest.mark.every_server]

NAME = "train"
# As one of its partitions, as if it had further ones, and as a beginning or an end of it.
NEIGHBORS = [
    "train/00000",
    "train/0",
    "train/secret",
    "train/00000/00001",
    "train:parameters",
    "train*",
    "trai",
    "rain",
]
ROLES = ["worker", "taker", "reducer", "observer", "operator"]
# By the type of the key, a command that reads it and those that change it.
ATTEMPTS = {
    b"hash": ["HGETALL {}", "HSET {} x 1", "HDEL {} x"],
    b"string": ["GET {}", "SET {} x"],
    b"zset": ["ZRANGE {} 0 -1", "ZADD {} 0 x"],
    b"list": ["LRANGE {} 0 -1", "LPUSH {} x"],
}
ANY = ["EXISTS {}", "UNLINK {}", "PEXPIRE {} 1", "PERSIST {}"]
CHANNELS = ["events", "wake", "calls", "parameters:events", "parameters:updated"]


def nodes(client):
    """The connections to all nodes that have keys."""
    if not isinstance(client, redis.RedisCluster):
        return [client]
    return [client.get_redis_connection(node) for node in client.get_primaries()]


def fill(client, name, stack):
    """Leaves keys of every kind under a name: in its slot and in partitions, of gradients, sums and parameters."""
    for partitions in (None, 3):
        options = {"limits": redisacc.Limits(in_place=0, inline=0), "partitions": partitions, "worker": "worker 0"}
        suffix = "" if partitions else "/whole"
        acc = redisacc.ConditionalAccumulator("float32", [40_000], name + suffix, redis=client, **options)
        stack.callback(acc.delete)
        acc.apply_grad(np.ones(40_000))
        with pytest.raises(ZeroDivisionError), acc.take(1):
            raise ZeroDivisionError
        acc.apply_grad(np.ones(40_000), local_step=1)
        parameters = redisacc.Parameters(name + suffix, redis=client, partitions=partitions)
        stack.callback(parameters.delete)
        parameters.publish(np.ones(40_000), 0, state=np.ones(3))
    for base in (f"redisacc:{{{name}}}", f"redisacc:{{{name}/00000}}:partition"):
        for sort in ("sum:0123:0", "squares:0123:0"):
            client.set(f"{base}:{sort}", b"x", ex=60)
    client.hset(f"redisacc:{{{name}}}:crew", "chief", "x 1 y z")


@pytest.mark.forges
@pytest.mark.parametrize("role", ROLES)
def test_no_pattern_of_one_name_matches_a_key_of_another(real_client, role):
    with contextlib.ExitStack() as stack:
        fill(real_client, NAME, stack)
        own = set(real_client.scan_iter())
        for neighbor in NEIGHBORS:
            fill(real_client, neighbor, stack)
        keys = sorted(set(real_client.scan_iter()) - own - {b"redisacc:names"})
        assert len(keys) > 20 * len(NEIGHBORS)
        printed = CliRunner().invoke(main, ["acl", role, NAME, "--user", "somebody", "--cluster", "--eval"])
        assert printed.exit_code == 0, printed.output
        rules = [rule for rule in shlex.split(printed.output) if rule != "+script|load"]
        for node in nodes(real_client):
            node.execute_command(*rules, ">secret")
            stack.callback(node.execute_command, "ACL", "DELUSER", "somebody")
        allowed = []
        for node in nodes(real_client):
            settings = {**node.connection_pool.connection_kwargs, "username": "somebody", "password": "secret"}
            user = stack.enter_context(
                redis.Redis(
                    host=settings["host"], port=settings["port"], username="somebody", password="secret", protocol=2
                )
            )
            here = set(node.scan_iter())
            for key in (key.decode() for key in keys if key in here):
                for command in [*ATTEMPTS[node.type(key)], *ANY]:
                    with contextlib.suppress(redis.exceptions.NoPermissionError):
                        user.execute_command(*command.format(key).split(" "))
                        allowed.append(command.format(key))
                with contextlib.suppress(redis.exceptions.NoPermissionError):
                    user.eval("return redis.call('EXISTS', KEYS[1])", 1, key)
                    allowed.append(f"EVAL {key}")
            for neighbor, channel in itertools.product(NEIGHBORS, CHANNELS):
                with contextlib.suppress(redis.exceptions.NoPermissionError):
                    user.publish(f"redisacc:{{{neighbor}}}:{channel}", "x")
                    if "publish" in printed.output:
                        allowed.append(f"PUBLISH {neighbor} {channel}")
        assert allowed == []


@pytest.mark.forges
def test_garbage_of_a_neighbor_is_left_alone(real_client, real_server):
    with contextlib.ExitStack() as stack:
        for name in (NAME, *NEIGHBORS):
            fill(real_client, name, stack)
            for key in (
                f"{{{name}/00000}}:partition:part:nobodys-1:0",
                f"{{{name}/00000}}:partition:blob:nobodys-1-flat:0",
            ):
                real_client.set(f"redisacc:{key}", b"x")
                stack.callback(real_client.unlink, f"redisacc:{key}")
        before = set(real_client.scan_iter())
        result = CliRunner().invoke(main, ["doctor", "--fix", NAME, "--yes", "--redis", real_server.url])
        assert result.exit_code == 0, result.output
        gone = {key.decode() for key in before - set(real_client.scan_iter())}
        assert gone == {
            "redisacc:{train/00000}:partition:part:nobodys-1:0",
            "redisacc:{train/00000}:partition:blob:nobodys-1-flat:0",
        }
