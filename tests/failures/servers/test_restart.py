"""A server that is killed and comes back: with everything, with less, with nothing."""

import os

import numpy as np
import pytest
import redis
from support.command import run_json
from support.leaks import leftovers
from support.proxy import proxy_before_server
from support.servers import contents

import redisacc

pytestmark = pytest.mark.servers("valkey", "redis7", "redis62")

TREE = {"d": ("float32", (4,)), "s": redisacc.Sparse("float32", (9, 4))}
# Kind, what the accumulator is created with, and in_place_limit: each kind once, and each way of storage.
KINDS = {
    "dense-in_place": ("dense", ("float32", [4]), 10**9),
    "sparse-buffered": ("sparse", ("float32", [9, 4]), 0),
    "tree-buffered": ("tree", (TREE,), 0),
}


def apply(acc, value, **options):
    row = np.full(4, value, np.float32)
    if isinstance(acc, redisacc.TreeAccumulator):
        return acc.apply_grad({"d": row, "s": ([3], [row])}, **options)
    if isinstance(acc, redisacc.SparseConditionalAccumulator):
        return acc.apply_grad([3], [row], **options)
    return acc.apply_grad(row, **options)


def taken(acc, number, **options):
    return value_of(acc.take_grad(number, **{"timeout": 20, **options}))


def value_of(gradient):
    """The value that all elements of a gradient have."""
    is_tree = isinstance(gradient, dict)
    if is_tree:
        gradient = np.concatenate([gradient["d"][np.newaxis], gradient["s"].values])
    elif isinstance(gradient, redisacc.IndexedSlices):
        gradient = gradient.values
    rows = gradient[1] if isinstance(gradient, tuple) else gradient
    # Of a tree, the dense leaf and the row of the sparse one.
    assert np.size(rows) == (8 if is_tree else 4)
    (value,) = set(np.ravel(rows).tolist())
    return value


@pytest.fixture(params=KINDS)
def open_kind(request, open_accumulator):
    kind, schema, limit = KINDS[request.param]

    def make(server, **options):
        options = {"limits": redisacc.Limits(in_place=limit), "reduction_type": "SUM", **options}
        return open_accumulator(kind, *schema, "w", redis=server.url, **options)

    return make


# A large hash is read in pieces. A cursor means nothing to another server process, whose hash function is seeded anew.
@pytest.mark.slow(keep="take|info")
@pytest.mark.parametrize("operation", ["take", "peek", "info", "names"])
@pytest.mark.servers("valkey", "redis7")
def test_a_hash_that_is_read_in_pieces_is_whole_after_a_restart_in_between(daemon, open_accumulator, operation):
    server = daemon("--appendonly", "yes", "--appendfsync", "always").start()
    rows = 2000
    limits = redisacc.Limits(in_place=10**9)

    def restart():
        server.kill()
        server.start()

    with proxy_before_server(server.url) as proxy:
        options = {"redis": proxy.url, "limits": limits, "reduction_type": "SUM"}
        acc = open_accumulator("sparse", "float32", [None, 1], "w", **options)
        scan = "HSCAN"
        if operation in ("take", "peek"):
            acc.apply_grad(np.arange(rows), np.ones((rows, 1), np.float32))
        else:
            # Sessions of other workers, and the names of other accumulators.
            client = server.client()
            acc.apply_grad([1], [[1.0]])
            (entry,) = client.hvals("redisacc:{w}:sessions")
            client.hset("redisacc:{w}:sessions", mapping={f"s-{k}": entry + b"%d" % k for k in range(rows)})
            if operation == "names":
                scan = "SSCAN"
                # `ls` passes over the others.
                for k in range(0, rows, 50):
                    client.copy("redisacc:{w}", f"redisacc:{{n{k}}}")
                client.sadd("redisacc:names", *(f"n{k}" for k in range(rows)))
        proxy.listen_anew()
        # The first pieces of all hashes are read at once, and then a whole one, in eight pieces.
        proxy.before(scan, lambda: None, times=7 if scan == "HSCAN" else 3)
        proxy.before(scan, restart)
        match operation:
            case "take":
                assert acc.take_grad(1, timeout=30)[0].tolist() == list(range(rows))
            case "peek":
                assert acc.peek().gradient.indices.tolist() == list(range(rows))
            case "info":
                assert len(acc.info().known_workers) == rows + 1
            case "names":
                assert len(run_json("ls", url=proxy.url)) == rows / 50 + 1
        assert proxy.sent.count(scan) > (8 + 3 if scan == "HSCAN" else 4 + 3)


@pytest.mark.every_server(open_kind="sparse-buffered")
def test_with_appendfsync_always_nothing_is_lost(daemon, open_kind, background):
    server = daemon("--appendonly", "yes", "--appendfsync", "always").start()
    acc = open_kind(server)
    apply(acc, 1)
    assert taken(acc, 1) == 1
    for value in (1, 2, 4):
        apply(acc, value, local_step=1)
    # A round that was granted and never acknowledged.
    with pytest.raises(ZeroDivisionError), acc.take(3):
        raise ZeroDivisionError
    for value in (8, 16):
        apply(acc, value, local_step=2)
    before = contents(server.client())
    waiting = background(acc.take_grad, 3, timeout=60)
    server.kill()
    server.start()
    # Waiting takers may have reconnected already.
    now = contents(server.client())
    for key in (b"redisacc:{w}:queue", b"redisacc:{w}:takers"):
        before.pop(key, None)
        now.pop(key, None)
    tickets = (before[b"redisacc:{w}"].pop(b"tickets"), now[b"redisacc:{w}"].pop(b"tickets"))
    assert int(tickets[0]) <= int(tickets[1])
    for there in (before, now):
        there[b"redisacc:{w}"].pop(b"wanted")
    assert now == before
    apply(acc, 32, local_step=2)
    assert value_of(waiting.result(60)) == 56
    with acc.recover() as found:
        assert found.num_accumulated == 3
    assert acc.info().applied == 7
    acc.delete()
    assert leftovers(server.client()) == []


@pytest.mark.every_server(open_kind="dense-in_place")
def test_a_server_that_comes_back_empty_is_an_error_and_no_new_accumulator(daemon, open_kind, background, until):
    server = daemon().start()
    acc = open_kind(server)
    apply(acc, 1)
    waiting = background(acc.take_grad, 5)
    until(lambda: acc.info().waiting)
    server.kill()
    server.start()
    with pytest.raises(redisacc.NotFoundError, match="lost its data"):
        waiting.result(60)
    for call in (
        lambda: apply(acc, 1),
        lambda: acc.take_grad(1),
        acc.num_accumulated,
        acc.peek,
        acc.info,
        lambda: acc.set_global_step(3),
    ):
        with pytest.raises(redisacc.NotFoundError, match="accumulator"):
            call()
    client = server.client()
    # Parts that nothing counts expire.
    assert [key for key in client.scan_iter() if b":part:" not in key or client.pttl(key) < 0] == []


def answers_busy(client):
    try:
        client.ping()
    except redis.exceptions.BusyLoadingError:
        return "LOADING"
    except redis.ResponseError as error:
        return str(error)[:4]
    return ""


@pytest.fixture
def busy(daemon, background, until):
    """A server that runs another client's endless script, until the returned function is called."""
    server = daemon("--lua-time-limit", "50").start()
    # It waits for the script as long as it takes.
    client, admin = server.client(socket_timeout=60), server.client()

    def make():
        endless = background(client.eval, "while true do end", 0)
        until(lambda: answers_busy(admin) == "BUSY")

        def end():
            admin.script_kill()
            with pytest.raises(redis.ResponseError):
                endless.result()

        return end

    return server, make


def test_a_busy_server_is_waited_for(busy, open_accumulator, background, until, caplog):
    caplog.set_level("DEBUG", "redisacc")
    server, make = busy
    acc = open_accumulator("dense", "float32", [4], "w", redis=server.url, reduction_type="SUM")
    apply(acc, 1)
    end = make()
    pending = [background(apply, acc, 2), background(acc.take_grad, 2, timeout=60)]
    # Both have been refused, and try again.
    until(lambda: len({record.thread for record in caplog.records if "BUSY" in record.message}) == 2)
    end()
    assert [one.result(60) is not None for one in pending] == [True, True]
    assert acc.global_step() == 1


@pytest.mark.every_server
def test_opening_at_a_busy_server_says_what_it_is(busy, durations):
    durations(opening=0.5)
    server, make = busy
    end = make()
    with pytest.raises(redisacc.ServerUnavailableError, match=r"is busy \(BUSY"):
        redisacc.ConditionalAccumulator("float32", [4], "w", redis=server.url)
    end()


@pytest.mark.thorough
# 6.2 answers no client while it loads less than 2 MB.
@pytest.mark.servers("valkey", "redis7")
def test_a_server_that_loads_its_data_is_waited_for(daemon, open_accumulator, until, durations):
    server = daemon("--appendonly", "yes").start()
    acc = open_accumulator("dense", "float32", [4], "w", redis=server.url, reduction_type="SUM")
    apply(acc, 1)
    admin = server.client()
    for number in range(1300):
        # Not compressible: between two replies it loads some number of bytes.
        admin.set(f"filler:{number}", os.urandom(100))
    admin.bgrewriteaof()
    until(lambda: not admin.info("persistence")["aof_rewrite_in_progress"])
    server.kill()
    # Loads so slowly, in microseconds for each key, that it can be seen loading.
    server.start("--key-load-delay", "3000", "--loading-process-events-interval-bytes", "1024", loaded=False)
    assert answers_busy(server.client()) == "LOADING"
    durations(opening=0.7)
    with pytest.raises(redisacc.ServerUnavailableError, match="still loading its data"):
        redisacc.ConditionalAccumulator("float32", [4], "w", redis=server.url)
    assert answers_busy(server.client()) == "LOADING"
    assert apply(acc, 2)
    assert taken(acc, 2) == 3
