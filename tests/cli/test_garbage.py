"""The command `gc`, and that it removes nothing that is in use."""

import shlex
import threading

import msgpack
import pytest
from support.servers import contents

import redisacc

pytestmark = pytest.mark.servers("valkey", "cluster")


@pytest.fixture
def busy(open_dense, open_sparse):
    """Live data of every kind: rounds held in each way, a taken round, a private accumulator."""
    private = open_dense("float32", [2], limits=redisacc.Limits(in_place=0))
    private.apply_grad([1, 2])
    dense = open_dense("float32", [3], "live", worker="ann", limits=redisacc.Limits(in_place=0, inline=5))
    dense.apply_grad([1, 2, 3])
    dense.take(1).__enter__()
    dense.apply_grad([4, 5, 6], 1)
    sparse = open_sparse("float32", [9, 1], "live2")
    sparse.apply_grad([1], [[1.0]])
    yield dense
    private.close()
    sparse.delete()
    dense.delete()


@pytest.mark.forges
def test_the_command_that_an_error_names_removes_what_a_lost_record_has_left(cli, client, open_dense):
    acc = open_dense("float32", [3], "my w")
    acc.apply_grad([1, 2, 3])
    client.delete(acc.accumulator_ref)
    with pytest.raises(redisacc.CorruptDataError, match="remove the rest: redisacc doctor --fix ") as failure:
        open_dense("float32", [3], "my w")
    assert "`redisacc doctor` tells whether this server evicts keys" in str(failure.value)
    command = str(failure.value).rpartition("remove the rest: redisacc ")[2]
    assert cli(*shlex.split(command), "--yes").exit_code == 0
    again = open_dense("float32", [3], "my w")
    assert again.num_accumulated() == 0


@pytest.mark.forges
def test_a_removal_that_fails_ends_the_progress_bar(cli, client, real_server, until):
    client.sadd("redisacc:names", "nowhere")
    client.acl_setuser("reader", enabled=True, nopass=True, keys=["*"], channels=["*"], commands=["+@all", "-srem"])
    before = threading.enumerate()
    try:
        result = cli("doctor", "--fix", "--yes", "--redis", real_server.url.replace("://", "://reader:x@"))
    finally:
        client.acl_deluser("reader")
    assert result.exit_code == 1
    assert "srem" in result.stderr.lower()
    # The error is still there, and with it what its frames hold.
    assert result.exc_info is not None
    until(lambda: [thread for thread in threading.enumerate() if thread not in before] == [])
    client.srem("redisacc:names", "nowhere")


@pytest.mark.forges
def test_gc_finds_and_removes_what_is_left_behind(cli, cli_json, busy, client, open_dense):
    alive = contents(client)
    # Parts that no round refers to, a small and a large one, and a round that is not listed, with a part of its own.
    client.set("redisacc:{live}:part:dead-1:0", b"x" * 10)
    client.set("redisacc:{live}:part:dead-1:1", b"x" * 5_000_000)
    header = msgpack.packb({"version": 1, "indices": [], "counts": [], "values": [3]})
    client.hset("redisacc:{live}:taken:lost:buffered", "dead-2", b"1 " + header)
    client.hset("redisacc:{live}:taken:lost:workers", "ann", "1")
    client.set("redisacc:{live}:part:dead-2:0", b"xyz")
    client.set("redisacc:{live}:place:dead-3", b"xyz")
    # An interrupted deletion; keys and a name without a record.
    gone = open_dense("float32", [3], "halfway", limits=redisacc.Limits(in_place=0))
    gone.apply_grad([1, 2, 3])
    client.hset("redisacc:{halfway}", "incarnation", f"deleted:{gone.info().incarnation}")
    client.hset("redisacc:{nobody}:sums", "1", b"x" * 16)
    client.set("redisacc:{nobody}:part:a-1:0", b"x")
    client.set("redisacc:{nobody}:place:a-2", b"x", px=60_000)
    client.sadd("redisacc:names", "nowhere")
    # Keys of other programs, which stay.
    client.set("redisacc:{nobody}:something:else", b"x")
    client.set("redisacc:{text}", b"x")
    client.hset("redisacc:{theirs}", "a", "b")
    client.set("redisacc:{theirs}:part:a-1:0", b"x")
    foreign = ("redisacc:{nobody}:something:else", "redisacc:{text}", "redisacc:{theirs}",
               "redisacc:{theirs}:part:a-1:0", "redisacc:{nobody}:place:a-2")  # fmt: skip

    before = contents(client)
    found = cli_json("doctor", "--fix")
    assert sorted((left["name"], left["why"], len(left["keys"])) for left in found["leftovers"]) == [
        ("halfway", "deletion", 4), ("live", "part", 4), ("live", "round", 2),
        ("nobody", "record", 2), ("nowhere", "name", 0),
    ]  # fmt: skip
    assert cli("doctor", "--fix", "--dry-run").exit_code == 0
    assert cli("doctor", "--fix").exit_code == 2
    assert contents(client) == before

    assert [left["name"] for left in cli_json("doctor", "--fix", "live")["leftovers"]] == ["live"] * 2
    said = cli("doctor", "--fix", "--yes")
    assert said.exit_code == 0
    assert said.stdout.endswith("removed 10 of 10 items\n")
    for key in foreign:
        assert client.exists(key)
        client.delete(key)
    # A large string may have got an expiry instead, as everywhere.
    assert client.pttl("redisacc:{live}:part:dead-1:1") != -1
    client.delete("redisacc:{live}:part:dead-1:1")
    assert contents(client) == alive
    assert cli_json("doctor", "--fix")["leftovers"] == []


@pytest.mark.forges
def test_gc_finishes_what_a_taker_had_acknowledged(cli_json, busy, client):
    (token,) = client.hkeys("redisacc:{live}:taken")
    text = client.hget("redisacc:{live}:taken", token)
    client.hset("redisacc:{live}:taken", token, text.replace(b"granted", b"acknowledged"))
    found = cli_json("doctor", "--fix", "--yes")
    assert [(left["why"], found["removed"]) for left in found["leftovers"]] == [("acknowledged", 1)]
    assert client.hgetall("redisacc:{live}:taken") == {}
    assert client.keys("redisacc:{live}:taken:*") == []
    assert busy.peek().gradient.tolist() == [4, 5, 6]


DRY = ("doctor", "--fix", "--dry-run")
PART, STRAY = "redisacc:{live}:part:dead-1:0", "redisacc:{live}:taken:lost:workers"
# What is left over, and what makes it no garbage any more while `gc` is about to remove it.
CHANGES = {
    "an entry": (lambda c: c.set(PART, b"x"), lambda c: c.hset("redisacc:{live}:buffered", "dead-1", b"9 x")),
    "an expiry": (lambda c: c.set(PART, b"x"), lambda c: c.pexpire(PART, 60_000)),
    "another incarnation": (lambda c: c.set(PART, b"x"), lambda c: c.hset("redisacc:{live}", "incarnation", "x")),
    "no record": (lambda c: c.set(PART, b"x"), lambda c: c.delete("redisacc:{live}")),
    "a taken round": (
        lambda c: c.hset(STRAY, "ann", "1"),
        lambda c: c.hset("redisacc:{live}:taken", "lost", "granted 0 1 1 [3] ann"),
    ),
    "a name": (
        lambda c: c.sadd("redisacc:names", "nowhere"),
        lambda c: redisacc.ConditionalAccumulator("float32", [1], "nowhere", redis=c).close(),
    ),
}


@pytest.mark.forges
@pytest.mark.servers("valkey")
@pytest.mark.parametrize("change", CHANGES)
def test_gc_checks_again_when_it_removes(cli, cli_json, busy, client, proxy, change):
    """The accumulator changes between the search and the removal: a key that is in use by then stays."""
    leave, use = CHANGES[change]
    leave(client)
    (found,) = cli_json(*DRY)["leftovers"]
    proxy.before("SREM" if change == "a name" else "remove_orphans", lambda: use(client))
    live = client.dump("redisacc:{live}")
    removed = cli_json("doctor", "--fix", "--yes", "--redis", proxy.where)["removed"]
    client.restore("redisacc:{live}", 0, live, replace=True)
    assert removed == 0
    assert all(client.exists(key) for key in found["keys"])
    assert client.sismember("redisacc:names", "nowhere") == (change == "a name")


@pytest.mark.parametrize("moves", [[0], [1], [2], [3], [4], range(1000)], ids=str)
@pytest.mark.forges
@pytest.mark.servers("valkey")
def test_gc_finds_the_owner_of_a_part_that_moves_during_the_search(cli_json, busy, client, proxy, moves):
    """A round is granted, or recovered, right after a place where its gradients may be has been read."""
    client.set(PART, b"x")
    granted = []

    def move():
        if granted:
            busy.recover(granted[-1]).__enter__()
        else:
            busy.take(1).__enter__()
        granted[:] = [key.decode() for key in client.hkeys("redisacc:{live}:taken")][-1:]

    for number in range(max(moves) + 1):
        proxy.after("HSCAN", move if number in moves else lambda: None)
    found = {left["why"]: left["keys"] for left in cli_json(*DRY, "--redis", proxy.where)["leftovers"]}
    if len(moves) > 1:
        # Which parts are garbage remains unknown, so none is.
        assert "part" not in found
    else:
        assert found["part"] == [PART]


@pytest.mark.parametrize("rounds", [0, 300])
@pytest.mark.forges
@pytest.mark.servers("valkey")
def test_gc_looks_up_few_things_at_a_time_however_many_rounds_are_taken(cli_json, busy, client, rounds):
    for n in range(120):
        client.set(f"redisacc:{{live}}:part:dead-{n}:0", b"x")
    if rounds:
        client.hset("redisacc:{live}:taken", mapping={f"t{n}": "granted 0 1 1 [3] ann" for n in range(rounds)})
    client.config_resetstat()
    assert cli_json("doctor", "--fix", "--yes")["removed"] == 120
    ran = client.info("commandstats")
    assert 3 <= ran["cmdstat_evalsha"]["calls"] <= 4
    assert ran["cmdstat_hexists"]["calls"] == 120


@pytest.mark.forges
def test_gc_removes_names_that_are_not_utf8(cli, cli_json, client, accumulator):
    # The second looks like the first one with its escapes, but is text.
    names = [b"\xff\xfe\x1b[2J", b"\\xff\\xfe\\x1b[2J", b"x" * 5000, b"", b"{}"]
    client.sadd("redisacc:names", *names)
    assert [left["name"] for left in cli_json(*DRY)["leftovers"]]
    assert cli("doctor", "--fix", "--yes").stdout.endswith("removed 5 of 5 items\n")
    assert client.smembers("redisacc:names") == {b"w"}
    assert [facts["name"] for facts in cli_json("ls")] == ["w"]
