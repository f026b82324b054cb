"""`redisacc acl`: each role can do its work and nothing else, on real servers."""

import itertools
import json
import re
import shlex
import time
from pathlib import Path

import numpy as np
import pytest
import redis
from click.testing import CliRunner
from support.proxy import proxy_before_server
from support.rows import every_row
from support.selection import thorough
from support.servers import contents

import redisacc
from redisacc._wire.connect import connect
from redisacc.tools.admin import acl as _access
from redisacc.tools.cli import main
from redisacc.tools.monitoring.monitor import Monitor

pytestmark = [pytest.mark.servers("valkey", "redis7", "redis62"), pytest.mark.every_server]

ROLES = list(_access.ROLES)
INSPECT = Path(__file__).parents[2] / "lua" / "inspect"
PASSWORD = "a-password"


def printed(*arguments):
    result = CliRunner().invoke(main, ["acl", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


class Place:
    """A server with a user for each role, and an accumulator that they may use and one that they may not."""

    def __init__(self, server, name, open_accumulator, *options):
        self.server = server
        self._opened = open_accumulator
        self.admin = server.client()
        self.old = ["--redis62"] if name == "redis62" else []
        for role in ROLES:
            command = shlex.split(printed(role, "train-*", "--user", role, *self.old, *options))
            assert command[:3] == ["ACL", "SETUSER", role]
            self.admin.execute_command(*command, f">{PASSWORD}")
        assert CliRunner().invoke(main, ["acl", "--load", "--redis", server.url]).exit_code == 0
        self.shared = self.open(None, "train-1")
        self.foreign = self.open(None, "other")
        for acc in (self.shared, self.foreign):
            self.apply(acc)

    def parameters(self, role, name="train-1", **options):
        return redisacc.Parameters(name, redis=self.client(role), publisher=role, **options)

    def client(self, role):
        return self.server.client(protocol=2, **({"username": role, "password": PASSWORD} if role else {}))

    def open(self, role, name, **options):
        options = {"reduction_type": "SUM", "worker": role or "admin", **options}
        return self._opened("dense", "float32", [None], name, redis=self.client(role), **options)

    @staticmethod
    def apply(acc, size=300, **options):
        return acc.apply_grad(np.ones(size, np.float32), **options)

    def refused(self):
        """Returns the new entries of the server's log of refusals."""
        log = [(entry["username"], entry["object"]) for entry in self.admin.acl_log(1000)]
        self.admin.acl_log_reset()
        # redis-py introduces itself with CLIENT SETINFO, and continues if that is refused.
        log = [entry for entry in log if not entry[1].startswith("client")]
        # On old servers, workers and takers may not touch the list of names, and work without it.
        return [
            entry for entry in log if not (self.old and entry[0] in ("worker", "taker") and entry[1] == "sismember")
        ]


@pytest.fixture
def place(daemon, server_name, open_accumulator):
    return Place(daemon().start(), server_name, open_accumulator)


@pytest.fixture
def proxy(place):
    with proxy_before_server(place.server.url) as proxy:
        yield proxy


def following(chief, number):
    """Returns the next steps of parameters."""
    first = (chief.step() or 0) + 1
    return range(first, first + number)


def worker_works(place):
    """Does everything that a worker can do, even the rare."""
    new = place.open("worker", "train-new")
    assert place.apply(new)
    acc = place.open("worker", "train-1", limits=redisacc.Limits(buffer=None))
    assert place.apply(acc)
    place.admin.hset("redisacc:{train-1}", "global_step", 1)
    assert not place.apply(acc)
    large = place.open("worker", "train-large", limits=redisacc.Limits(in_place=0, buffer=3_000_000))
    # Inline ones, ones in parts, and more than the limit allows, so that they are compacted.
    for _ in range(6):
        assert large.apply_grad(np.ones(200_000, np.float32))
    # Too much for scripts to free it themselves.
    huge = place.open("worker", "train-huge", limits=redisacc.Limits(in_place=0, buffer=14_000_000))
    for _ in range(3):
        assert huge.apply_grad(np.ones(1_500_000, np.float32))
    for name, rows, partitions in (("train-1", 1000, None), ("train-wide", 10_000, 3)):
        chief, weights = place.parameters(None, name, partitions=partitions), place.parameters("worker", name)
        for step in following(chief, 3):
            chief.publish(np.full((rows, 4), step), step, changed={".": [1]}, state=[np.ones(3)])
            assert weights.latest()[0] == step
        with pytest.raises(redisacc.WaitTimeoutError, match="timed out waiting for parameters"):
            weights.wait(after=step, timeout=0.01)
    # More than the limit allows, in partitions.
    spread = place.open("worker", "train-spread", limits=redisacc.Limits(in_place=0, buffer=500_000), partitions=3)
    for _ in range(4):
        assert spread.apply_grad(np.ones(50_000, np.float32))
    many = place.open("worker", "train-many", limits=redisacc.Limits(in_place=0, buffer=3_000))
    for _ in range(6):
        assert many.apply_grad(np.ones(200, np.float32))
    return acc


def taker_works(place, background, until):
    worker = place.open(None, "train-1")
    acc = place.open("taker", "train-1")
    place.open("taker", "train-empty")
    assert acc.take_grad(1, timeout=20) is not None
    waiting = background(acc.take_grad, 2, timeout=60)
    # Without some commands, it never waits.
    until(lambda: worker.info().waiting, 5)
    with pytest.raises(redisacc.TakeTimeoutError):
        acc.take_grad(5, timeout=0.05)
    place.apply(worker, local_step=1)
    place.apply(worker, local_step=1)
    assert waiting.result(60).tolist() == [2] * 300
    buffered = place.open(None, "train-1", limits=redisacc.Limits(in_place=0))
    for size in (300, 200_000):
        place.apply(buffered, size, local_step=acc.global_step())
        with pytest.raises(ZeroDivisionError), acc.take(1, timeout=20):
            raise ZeroDivisionError
        with acc.recover() as found:
            assert found.gradient.tolist() == [1] * size
    spread = place.open(None, "train-spread", limits=redisacc.Limits(in_place=0), partitions=3)
    place.apply(spread, 50_000)
    assert place.open("taker", "train-spread").take_grad(1, timeout=20).tolist() == [1] * 50_000
    assert not place.admin.exists(f"{spread.accumulator_ref}:attempts")
    place.apply(worker, local_step=acc.global_step())
    # Somebody takes this taker for dead.
    recovered = pytest.raises(redisacc.ConflictError, match="Do not use its gradient")
    with recovered, acc.take(1, timeout=20), worker.recover():
        pass
    acc.set_global_step(7)
    acc.set_quorum(least=2)
    acc.set_quorum(least=None)
    acc.info()
    acc.peek()
    table = np.zeros((1000, 4))
    for name, partitions in (("train-1", None), ("train-wider", 3)):
        chief = place.parameters("taker", name, partitions=partitions)
        for step in following(chief, 4):
            for _ in range(2):
                chief.publish([table, np.zeros(3_000_000)], step, changed={"0": [1]}, state=[table])
            chief.latest()
    # Nothing is left to sweep but what slow readers may still be reading.
    attempts = place.admin.zrange("redisacc:{train-wider}:parameters:attempts", 0, -1, withscores=True)
    assert all(score > 1 for _, score in attempts)
    return acc


def observer_works(place, until):
    acc = place.open("observer", "train-1")
    acc.info()
    assert acc.num_accumulated() == 1
    assert acc.peek().gradient.tolist() == [1] * 300
    place.parameters(None).publish(np.ones(3), 0)
    assert place.parameters("observer").wait(timeout=20)[0] == 0
    place.parameters(None, "train-widest", partitions=3).publish(np.ones(30_000), 0)
    assert place.parameters("observer", "train-widest").wait(timeout=20)[0] == 0
    buffered = place.open(None, "train-buffered", limits=redisacc.Limits(in_place=0))
    for size in (200_000, 200_000):
        place.apply(buffered, size)
    assert place.open("observer", "train-buffered").peek().num_accumulated == 2
    monitor = Monitor(connect(place.client("observer")), ["train-*"])

    def hears():
        place.apply(place.shared)
        monitor.refresh()
        return monitor.views["train-1"].heard.filling.last is not None

    # Another thread listens: the event may arrive after the refresh, and the first one before the subscription.
    until(hears)
    monitor.close()
    assert list(monitor.views) == ["train-1", "train-buffered"]
    assert monitor.nodes[0].used_memory
    return acc


@pytest.mark.parametrize("role", ["observer", "operator"])
def test_the_scripts_of_lua_inspect_run(daemon, server_name, open_accumulator, background, until, role):
    """An operator, and an observer that may use EVAL, can run both scripts, wherever gradients are stored."""
    place = Place(daemon().start(), server_name, open_accumulator, "--eval")
    dense, admin, user = place.shared, place.client(None), place.client(role)
    parts = redisacc.Limits(in_place=0, inline=0)
    sparse = open_accumulator("sparse", "float32", [9, 2], "train-sparse", redis=admin, limits=parts)
    sparse.apply_grad([3], [[4, 5]])
    # A round that nobody acknowledged, and then another taker recovered, and a take that waits.
    with pytest.raises(ZeroDivisionError), dense.take(1, timeout=20):
        raise ZeroDivisionError
    with dense.recover():
        pass
    waiting = background(dense.take_grad, 2, timeout=60)
    until(lambda: dense.info().waiting)
    place.refused()

    def run(script, acc, *arguments):
        text = (INSPECT / f"{script}.lua").read_text()
        return user.eval(text, 1, acc.accumulator_ref, *arguments)

    said = run("summary", dense)
    assert b"waiting takers: 1" in said
    assert b"recovered rounds: 1" in said
    assert b"count 1" in run("index", sparse, 3)
    place.apply(dense, local_step=1)
    assert b"count 1" in run("index", dense, 3)
    assert place.refused() == []
    place.apply(dense, local_step=1)
    waiting.result()


def test_a_worker_can_do_its_work(place):
    place.refused()
    worker_works(place)
    assert place.refused() == []


@pytest.mark.slow
def test_a_taker_can_do_its_work(place, background, until):
    place.refused()
    taker_works(place, background, until)
    assert place.refused() == []


def test_an_observer_can_look(place, until):
    place.refused()
    observer_works(place, until)
    # Opening tries to create, and works without that right.
    assert {what for _, what in place.refused()} == {"evalsha"}


def test_a_training_needs_a_taker_and_workers(place, background, until, durations):
    """The chief is a taker; each worker is a worker. Neither needs more, also when something is lost."""
    durations(look_after=0.1, look_every=0.05, report=0.1)
    place.refused()
    admin = place.admin

    def work():
        with redisacc.Worker("train-loop", redis=place.client("worker")) as worker:
            assert worker.workers == 2
            for step, _ in worker.steps():
                worker.apply({"w": [step]})

    with redisacc.Chief("train-loop", {"w": np.zeros(1)}, workers=2, redis=place.client("taker")) as chief:
        crew = [background(work)]
        until(lambda: admin.hget("redisacc:{train-loop}", "num_accumulated") == b"1")
        # It is lost, and applied again.
        admin.delete("redisacc:{train-loop}:workers", "redisacc:{train-loop}:sums", "redisacc:{train-loop}:inline")
        admin.delete("redisacc:{train-loop}:buffered")
        admin.hset("redisacc:{train-loop}", "num_accumulated", 0)
        until(lambda: admin.hget("redisacc:{train-loop}", "num_accumulated") == b"1")
        crew.append(background(work))
        for taken in chief.rounds(until=3):
            chief.publish({"w": taken.gradient["w"]}, state={"m": np.zeros(2)})
            if chief.step == 1:
                # It lags behind, and is brought back.
                chief._accumulator.set_global_step(0)
                chief._must_look = True
    for one in crew:
        one.result()
    assert place.refused() == []


def test_an_operator_can_do_everything(place, background, until):
    place.refused()
    acc = place.open("operator", "train-1")
    place.apply(acc)
    assert acc.take_grad(2, timeout=20) is not None
    acc.set_global_step(3)
    for size in (300, 200_000):
        place.apply(acc, size, local_step=3)
        acc.take_grad(1, timeout=20)
        acc.set_global_step(3)
    acc.info()
    acc.peek()
    acc.delete()
    weights = place.parameters("operator")
    weights.publish(np.ones(3), 0, state=[np.ones(3)])
    assert weights.latest()[0] == 0
    weights.delete()
    # Loads scripts, by running them and by name.
    place.admin.script_flush()
    fresh = place.open("operator", "train-2")
    assert place.apply(fresh)
    url = place.server.url.replace("redis://", f"redis://operator:{PASSWORD}@")
    result = CliRunner().invoke(main, ["acl", "--load", "--redis", url])
    assert result.exit_code == 0, result.output
    assert place.apply(place.open("worker", "train-2"))
    assert place.refused() == []


# It takes one command away after the other, and some of them are needed only by a take that waits.
@pytest.mark.slow
@pytest.mark.servers("redis7")
@pytest.mark.parametrize("role", thorough(["worker", "taker"], usual=["worker"]))
def test_no_role_has_a_command_that_it_does_not_need(place, background, until, role):
    admin = place.admin
    # Some serve several purposes.
    granted = _access.commands_of(_access.ROLES[role])
    rules = _access.rules(role, "train-*")
    unused = []
    place.refused()
    for command in granted:
        without = [re.sub(rf"\+{re.escape(command)}(?![\w|]) ?", "", rule) for rule in rules]
        admin.execute_command("ACL", "SETUSER", role, *filter(None, without))
        try:
            if role == "worker":
                worker_works(place)
            else:
                taker_works(place, background, until)
        except Exception:
            pass
        # What was refused is the command, or the key that the server names if another rule permits the command.
        if not place.refused():
            unused.append(command)
        admin.execute_command("ACL", "SETUSER", role, *rules)
        for key in admin.scan_iter():
            admin.unlink(key)
        place.shared = place.open(None, "train-1")
        place.apply(place.shared)
    # They are sent when there has been no listener for some seconds, and when an upload has lasted for 15.
    assert [command for command in unused if command not in ("unsubscribe", "pttl")] == []


# What of the public API a role may not do to an accumulator of its pattern, which it has opened.
DELETE = {
    "delete": lambda place, role, acc: acc.delete(),
    "delete parameters": lambda place, role, acc: place.parameters(role).delete(),
}
PARAMETERS_OF_OTHERS = {"read others' parameters": lambda place, role, acc: place.parameters(role, "other")}
LEAD = {
    "take": lambda place, role, acc: acc.take_grad(1, timeout=0),
    "change the quorum": lambda place, role, acc: acc.set_quorum(least=3),
    "publish": lambda place, role, acc: place.parameters(role).publish(np.ones(3), 1),
}
ANOTHER = {"open another": lambda place, role, acc: place.open(role, "other")}
FORBIDDEN = {
    "worker": {
        **DELETE,
        **LEAD,
        **ANOTHER,
        **PARAMETERS_OF_OTHERS,
        "recover": lambda place, role, acc: acc.recover().__enter__(),
        "info": lambda place, role, acc: acc.info(),
        "finish": lambda place, role, acc: place.parameters(role).finish(),
    },
    "taker": {
        **DELETE,
        **ANOTHER,
        **PARAMETERS_OF_OTHERS,
        "apply in parts": lambda place, role, acc: place.apply(
            place.open(role, "train-1", limits=redisacc.Limits(in_place=0)), 200_000
        ),
    },
    "observer": {
        **DELETE,
        **LEAD,
        **ANOTHER,
        "apply": lambda place, role, acc: place.apply(acc),
        "set the step": lambda place, role, acc: acc.set_global_step(3),
        "create": lambda place, role, acc: place.open(role, "train-new"),
        "hold a lease": lambda place, role, acc: redisacc.Worker("train-1", redis=place.client(role)),
    },
    "operator": ANOTHER,
}


@pytest.mark.every_server(role="worker")
@pytest.mark.parametrize("role", FORBIDDEN)
def test_what_a_role_may_not_do(place, role):
    acc = place.open(role, "train-1")
    place.parameters(None).publish(np.zeros(3), 0)
    before = contents(place.admin)
    for what, act in FORBIDDEN[role].items():
        # Without selectors, a worker who may write the record of its accumulator may write that of parameters, too.
        if place.old and (role, what) == ("worker", "finish"):
            continue
        with pytest.raises(redisacc.ServerError, match="access control list"):
            pytest.fail(f"a {role} may {what}: {act(place, role, acc)}")
        assert contents(place.admin) == before, what


COMMANDS = [
    "FLUSHALL",
    "KEYS *",
    "CONFIG GET *",
    "CONFIG SET maxmemory 1",
    "ACL LIST",
    "ACL WHOAMI",
    "DEBUG SLEEP 0",
    "SHUTDOWN NOSAVE",
    "MONITOR",
    "CLIENT LIST",
    "CLIENT KILL TYPE normal",
    "SCRIPT FLUSH",
    "SCRIPT KILL",
    "REPLICAOF NO ONE",
    "SAVE",
    "MODULE LIST",
    "SWAPDB 0 1",
    "GET secret",
    "SET secret x",
    "HGETALL redisacc:{other}",
    "HSET redisacc:{other} global_step 9",
    "GET redisacc:{other}:part:x:0",
    "UNLINK redisacc:{other}:sums",
    "DEL redisacc:{train-1}:buffered",
    "RENAME redisacc:{train-1}:sums mine",
    "RENAME redisacc:{other}:sums redisacc:{train-1}:sums",
    "SUBSCRIBE redisacc:{other}:events",
    "PUBLISH redisacc:{other}:wake x",
    "PSUBSCRIBE *",
    "SREM redisacc:names other",
    "UNLINK redisacc:names",
    "GET redisacc:{other}:parameters:object:x:0",
    "HSET redisacc:{other}:parameters step 9",
    "GET redisacc:{other/00000}:partition:blob:x:0",
    "SET redisacc:{other/00000}:partition:blob:x:0 x",
    "ZADD redisacc:{other}:parameters:attempts 0 x",
    "SET redisacc:{other}:squares:x:0 x",
    "SET redisacc:{other/00000}:partition:squares:x:0 x",
]

# A reducer writes parts of versions, and no selector can tell what is a part of the next one.
NOT_FOR_REDUCERS = [
    "HSET redisacc:{train-1}:parameters step 9",
    "UNLINK redisacc:{train-1}:parameters",
    "UNLINK redisacc:{train-1}:parameters:object:x:0",
    "PEXPIRE redisacc:{train-1}:parameters:object:x:0 1",
    "PERSIST redisacc:{train-1}:parameters:object:x:0",
    "UNLINK redisacc:{train-1/00000}:partition:blob:x:0",
    "ZADD redisacc:{train-1}:parameters:attempts 0 x",
    "HDEL redisacc:{train-1}:taken x",
]

# What would remove an accumulator, or what is no longer a worker's to remove.
REMOVES = [
    "UNLINK redisacc:{train-1}",
    "SET redisacc:{train-1} x",
    "PEXPIRE redisacc:{train-1} 1",
    "RENAME redisacc:{train-1} redisacc:{train-1}:part:x:0",
    *(f"UNLINK redisacc:{{train-1}}:{what}" for what in ("sessions", "attempts", "taken", "takers", "queue")),
]

# On old servers, nothing can keep a worker from these.
WRITES_PARAMETERS = [
    "HSET redisacc:{train-1}:parameters step 9",
    "SET redisacc:{train-1}:parameters:object:x:0 x",
    "SET redisacc:{train-1/00000}:partition:blob:x:0 x",
    "ZADD redisacc:{train-1}:parameters:attempts 0 x",
]


@pytest.mark.parametrize("role", ROLES)
def test_commands_that_a_role_may_not_run(place, role):
    place.admin.set("secret", "x")
    user = place.client(role)
    before = contents(place.admin)
    allowed = []
    more = {"worker": WRITES_PARAMETERS, "reducer": NOT_FOR_REDUCERS}.get(role, [])
    # A taker removes a queue that nobody waits in.
    more = more + ([] if role == "operator" else REMOVES[:-2] if role == "taker" else REMOVES)
    for command in COMMANDS + ([] if place.old else more):
        if role == "operator" and command in ("SREM redisacc:names other", "UNLINK redisacc:names"):
            continue
        try:
            user.execute_command(*command.split())
        except redis.exceptions.NoPermissionError:
            continue
        except redis.ResponseError:
            # Since 7.0 this is refused unless the server's configuration allows it.
            if command.startswith("DEBUG"):
                continue
        allowed.append(command)
    assert allowed == []
    assert contents(place.admin) == before


@every_row("role", ["worker", "taker", "observer"])
def test_a_role_may_not_run_scripts_of_its_own(place, role):
    user = place.client(role)
    for command in (
        ("EVAL", "return redis.call('HGETALL', 'redisacc:{train-1}')", "0"),
        ("SCRIPT", "LOAD", "return 1"),
    ):
        with pytest.raises(redis.exceptions.NoPermissionError):
            user.execute_command(*command)
    # Nor may it reach other keys through a script that another user loaded.
    foreign = place.admin.script_load("return redis.call('HGETALL', ARGV[1])")
    with pytest.raises(redis.ResponseError, match=r"NOPERM|permission|can't"):
        user.execute_command("EVALSHA", foreign, 0, "redisacc:{other}")


def test_scripts_that_nobody_loaded_are_an_error_that_says_who_has_to(place):
    acc = place.open("worker", "train-1")
    place.admin.script_flush()
    with pytest.raises(
        redisacc.ServerError, match="this user may not load it: run `redisacc acl --load` as a user who may"
    ):
        place.apply(acc)
    result = CliRunner().invoke(main, ["acl", "--load", "--redis", place.server.url])
    assert result.exit_code == 0, result.output
    assert place.apply(acc)


def test_a_worker_may_load_the_scripts_where_that_was_asked_for(daemon, server_name, open_accumulator, durations):
    durations(replication=0.1)
    place = Place(daemon().start(), server_name, open_accumulator, "--eval", "--wait")
    acc = place.open("worker", "train-1", min_replicas=1)
    place.admin.script_flush()
    with pytest.raises(redisacc.NotReplicatedError):
        place.apply(acc)
    assert acc.num_accumulated() == 2
    spread = place.open("worker", "train-spread", limits=redisacc.Limits(in_place=0), partitions=3, min_replicas=1)
    with pytest.raises(redisacc.NotReplicatedError):
        place.apply(spread, 50_000)
    assert spread.num_accumulated() == 1
    assert place.open("operator", "train-spread", min_replicas=1).num_accumulated() == 1


def test_the_names_are_listed_where_a_role_can_be_kept_to_that(place):
    place.open("worker", "train-mine")
    assert place.admin.sismember("redisacc:names", "train-mine") == (not place.old)


def test_rules_can_be_set_again(place):
    for role in ROLES:
        command = shlex.split(printed(role, "train-*", "--user", role, *place.old))
        place.admin.execute_command(*command)
    # The password stays.
    assert place.apply(place.open("worker", "train-1"))


def test_a_file_for_the_server(daemon, server_name, tmp_path):
    old = ["--redis62"] if server_name == "redis62" else []
    lines = [printed(role, "train-*", "--user", role, "--file", *old).rstrip() + f" >{PASSWORD}\n" for role in ROLES]
    (tmp_path / "users.acl").write_text("".join(lines) + "user default on nopass ~* &* +@all\n")
    server = daemon("--aclfile", str(tmp_path / "users.acl")).start()
    for role in ROLES:
        assert server.client(username=role, password=PASSWORD).execute_command("EXISTS", "redisacc:{train-1}") == 0


def test_arguments_that_can_not_be_right():
    names = (["nobody", "x"], ["worker", "a b"], ["worker", ""], ["worker", "a}b"])
    for arguments in (*names, ["worker", "x", "--user", "a b"], ["worker"]):
        result = CliRunner().invoke(main, ["acl", *arguments])
        assert result.exit_code == 2, arguments
        assert not re.search("ACL SETUSER|Traceback", result.output), arguments


def test_a_reducer_adds_up_for_a_taker(place, background, until):
    size, name = 400_000, "train-1"
    worker, taker = place.open("worker", name), place.open("taker", name)
    admin = place.client(None)
    reducer = redisacc.Reducer("train-*", redis=place.client("reducer"))
    run = background(reducer.run)
    until(admin.pubsub_numpat)
    taker.take_grad(1)

    def play():
        take, step = background(taker.take_grad, 3), taker.global_step()
        until(lambda: taker.info().waiting)
        for k in range(3):
            worker.apply_grad(np.full(size, k + 1, np.float32), local_step=step)
        np.testing.assert_array_equal(take.result(30), np.full(size, 6, np.float32))

    # A take calls for a reducer when it hears of the first gradient, unless it is granted the round at once.
    until(lambda: play() or admin.exists(f"redisacc:{{{name}}}:reducer"))
    until(lambda: play() or list(admin.scan_iter(f"redisacc:{{{name}}}:sum:*")))
    reducer.close()
    run.result(20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "partitions"),
    thorough(
        list(itertools.product([{"encoding": "bfloat16"}, {"clip_norm": 1.0}], [None, 3])),
        usual=[({"clip_norm": 1.0}, 3)],
    ),
    ids=str,
)
def test_a_reducer_updates_the_parameters_of_a_chief(place, proxy, background, until, durations, partitions, options):
    """Its rules suffice for every part, in one slot and in partitions; and those of a taker for what it leaves."""
    # A slow machine is no reason for the chief to compute parts.
    durations(least_patience=2.0, longest_patience=2.0)
    name, admin = "train-updated", place.client(None)
    weights = {"w": np.ones(400_000, np.float32)}
    encoding = {"encoding": options["encoding"]} if "encoding" in options else {}
    optimizer = redisacc.optim.AdamW(0.1, clip_norm=options.get("clip_norm"), ema=0.5)
    reducer = redisacc.Reducer("train-*", redis=place.client("reducer"))
    run = background(reducer.run)
    until(admin.pubsub_numpat)
    place.refused()

    def work():
        with redisacc.Worker(name, redis=place.client("worker")) as worker:
            for step, _ in worker.steps():
                if worker.number == 1 and not any(by_reducer):
                    # A take that is granted at once calls for no reducer.
                    time.sleep(0.1)
                worker.apply({"w": np.full(400_000, step + worker.number, np.float32)})

    by_reducer = []
    chief = redisacc.Chief(
        name,
        weights,
        optimizer=optimizer,
        workers=2,
        accumulator={"partitions": partitions},
        redis=proxy.url.replace("://", f"://taker:{PASSWORD}@"),
        **encoding,
    )
    crew = [background(work) for _ in range(2)]
    # The reducer begins when a take has called for it.
    for _ in chief.updates(until=12):
        # Whoever computes a part stores it.
        by_reducer.append("SET" not in proxy.sent)
        proxy.listen_anew()
    for one in crew:
        one.result(60)
    assert any(by_reducer)
    assert set(chief.latest_state()[1]) >= set(optimizer.slots)
    # A predecessor had another optimizer.
    chief.close()
    optimizer = redisacc.optim.SGD(0.1)
    with redisacc.Chief(
        name, weights, optimizer=optimizer, workers=1, redis=place.client("taker"), **encoding
    ) as chief:
        crew = background(work)
        for _ in chief.updates(until=13):
            pass
        crew.result(60)
    reducer.close()
    run.result(20)
    assert place.refused() == []


@pytest.mark.slow(keep="-train-")
@pytest.mark.usefixtures("_quick_trial")
@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize("pattern", ["train-*", "*"])
def test_doctor_finds_nothing_bad_on_a_healthy_server_whatever_the_role(daemon, server_name, pattern, loaded):
    server = daemon().start()
    admin = server.client()
    old = ["--redis62"] if server_name == "redis62" else []
    for role in ROLES:
        admin.execute_command(*shlex.split(printed(role, pattern, "--user", role, *old)), f">{PASSWORD}")
        if loaded:
            assert CliRunner().invoke(main, ["acl", "--load", "--redis", server.url]).exit_code == 0
        url = server.url.replace("://", f"://{role}:{PASSWORD}@")
        said = CliRunner().invoke(main, ["doctor", "--json", "--redis", url])
        assert said.exit_code == 0, (role, said.output)
        findings = {finding["what"]: finding for finding in json.loads(said.stdout)}
        assert f"user {role}" in findings["access"]["found"]
        trial, lua = findings["trial"], findings["lua"]
        if role == "operator" and pattern == "*":
            assert (trial["status"], lua["status"]) == ("ok", "ok"), trial
        elif not loaded and "acl --load" in trial["advice"]:
            assert role in ("worker", "taker")
            assert trial["advice"] == "run `redisacc acl --load` as an operator: only the loaded scripts run"
        elif trial["status"] != "ok":
            assert "is not permitted to this user" in trial["found"]
            assert trial["advice"].startswith("run doctor once as a user who may, such as an operator of all names")
        # What the trial could not remove goes by itself.
        assert all(admin.pttl(key) > 0 for key in admin.scan_iter("*doctor*"))
        # An operator who was here has loaded the scripts.
        admin.script_flush()


@pytest.fixture
def _quick_trial(durations):
    """A user who hears no events, or who may not take, waits only for a moment."""
    durations(trial=1.0)
