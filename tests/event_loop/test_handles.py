"""The classes of redisacc.asyncio: what they have in common with the blocking ones, and where they belong."""

import asyncio
import contextlib
import gc
import inspect
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import redis.asyncio
import redis.asyncio.sentinel
import valkey.asyncio
from support.clients import authority, sentinel, tls_gateway, unix_gateway

import redisacc
import redisacc.asyncio

pytestmark = pytest.mark.servers("valkey")
# The most connections of the handles of one loop.
CONNECTIONS = 16
CLASSES = [name for name in redisacc.asyncio.__all__ if name not in ("Events", "OutcomeUnknownError")]


def accumulator(where, name="w", **options):
    return redisacc.asyncio.ConditionalAccumulator("float32", [2], name, redis=where, **options)


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_everything_that_the_blocking_one_has(name):
    blocking, ours = getattr(redisacc.types if name == "Upload" else redisacc, name), getattr(redisacc.asyncio, name)
    public = {one for one in dir(blocking) if not one.startswith("_")}
    if name == "Chief":
        # Attributes of its objects.
        public |= {"shared_name", "workers", "step", "parameters", "state"}
    assert public - set(dir(ours)) - ({"take", "recover", "peek"} if name.endswith("Base") else set()) == set()
    for one in public & set(dir(blocking)) & set(vars(ours)):
        method, its = getattr(blocking, one), getattr(ours, one)
        if inspect.isfunction(method) and one not in ("close", "events"):
            assert inspect.signature(its) == inspect.signature(method)
        assert inspect.getdoc(its)


async def test_every_kind_of_accumulator(real_server):
    where = real_server.url
    async with accumulator(where) as dense:
        assert (await dense.apply_grad([1.0, 3.0])).num_accumulated == 1
        assert (await dense.peek()).gradient.tolist() == [1, 3]
        assert (await dense.take_grad(1)).tolist() == [1, 3]
        assert await dense.global_step() == await dense.wait_for_step(1) == 1
        await dense.delete()
    async with redisacc.asyncio.SparseConditionalAccumulator("float32", [9, 1], "w", redis=where) as sparse:
        await sparse.apply_grad([7], [[2.0]])
        async with sparse.take(1) as taken:
            assert taken.gradient.indices.tolist() == [7]
        await sparse.delete()
    model = {"w": np.zeros(3, np.float32), "t": np.zeros((5, 2), np.float32)}
    async with redisacc.asyncio.TreeAccumulator.like(model, "w", sparse=["t"], redis=where) as tree:
        await tree.apply_grad({"w": np.ones(3), "t": ([1], np.ones((1, 2)))})
        assert (await tree.take_grad(1))["w"].tolist() == [1, 1, 1]
        await tree.delete()


async def test_a_training(real_server):
    where = real_server.url

    async def work():
        async with redisacc.asyncio.Worker("train", redis=where) as worker:
            assert await worker.workers() == 2
            async for _, weights in worker.steps():
                await worker.apply({"w": weights["w"] - worker.number})

    async with redisacc.asyncio.Chief("train", {"w": np.zeros(2)}, workers=2, redis=where) as chief:
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(work())
            async for taken in chief.rounds(until=5):
                await chief.publish({"w": chief.parameters["w"] - taken.gradient["w"]})
        assert (chief.step, chief.parameters["w"].tolist()) == (5, [0.5, 0.5])
        await chief.delete()


async def test_what_a_training_keeps(real_server):
    options = {"optimizer": redisacc.optim.SGD(0.1), "workers": 1, "redis": real_server.url}
    async with redisacc.asyncio.Training("train", {"w": np.zeros(2)}, **options) as training:
        async for step, weights in training.steps(until=3):
            assert await training.kept() == (step or None)
            await training.keep(step + 1)
            await training.apply(weights)
        assert await training.kept() == 3
        await training.delete()


async def test_a_handle_is_opened_by_await_as_well(real_server):
    handle = accumulator(real_server.url)
    with pytest.raises(
        redisacc.InvalidArgumentError,
        match="this ConditionalAccumulator is not open yet: use it in async with, or await it before its methods",
    ):
        await handle.num_accumulated()
    assert "not open" in repr(handle)
    opened = await handle
    assert opened is handle
    async with opened:
        assert await handle.num_accumulated() == 0
        await handle.delete()
    await handle.close()
    with pytest.raises(redisacc.CancelledError):
        await handle.num_accumulated()


def test_an_argument_that_does_not_exist_is_noticed_at_once():
    with pytest.raises(TypeError, match="unexpected keyword argument 'shapes'"):
        redisacc.asyncio.ConditionalAccumulator("float32", shapes=[2])


def test_what_is_missing_says_how_to_get_it():
    program = "import sys; sys.modules['greenlet'] = None; import redisacc.asyncio"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ImportError: redisacc.asyncio needs greenlet: pip install 'redisacc[asyncio]'" in done.stderr


async def test_handles_of_one_server_share_their_connections(real_server, real_client):
    before, threads = len(real_client.client_list()), set(threading.enumerate())
    async with contextlib.AsyncExitStack() as stack:
        handles = [await stack.enter_async_context(accumulator(real_server.url, "w")) for _ in range(8)]
        await asyncio.gather(*(handle.apply_grad([1.0, 2.0]) for handle in handles for _ in range(30)))
        assert await handles[0].num_accumulated() == 240
        assert len(real_client.client_list()) - before <= CONNECTIONS
        await handles[0].delete()
    # The last one that is closed closes them.
    async with asyncio.timeout(5):
        while len(real_client.client_list()) > before:
            await asyncio.sleep(0.01)
    # The loop looks up names of hosts in threads of its own.
    assert [thread for thread in {*threading.enumerate()} - threads if not thread.name.startswith("asyncio_")] == []


def test_loops_of_several_threads_open_handles_at_once(real_server):
    """Loops that are still open make the list of all loops long, and threads that change places often meet over it."""
    before = sys.getswitchinterval()
    runners = [asyncio.Runner() for _ in range(120)]

    def open_handles(some):
        async def open_one():
            async with accumulator(real_server.url, "w"):
                pass

        for runner in some:
            runner.run(open_one())

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(6) as threads:
            # Each raises what its handles have raised.
            assert list(threads.map(open_handles, [runners[n::6] for n in range(6)])) == [None] * 6
    finally:
        sys.setswitchinterval(before)
        for runner in runners:
            runner.close()
    redisacc.ConditionalAccumulator("float32", [2], "w", redis=real_server.url).delete()


async def test_tasks_may_publish_through_one_handle(real_server):
    async with redisacc.asyncio.Parameters("w", redis=real_server.url) as weights:
        await weights.publish(np.zeros(4), 0)
        results = await asyncio.gather(
            *(weights.publish(np.full(4, float(step)), step) for step in (1, 2, 3)), return_exceptions=True
        )
        *before, last = results
        assert all(result is None or isinstance(result, redisacc.ConflictError) for result in before)
        # Nothing can be in the way of the highest step.
        assert last is None
        step, array = await weights.latest()
        assert (step, array.tolist()) == (3, [3] * 4)
        await weights.delete()


@pytest.mark.slow
@pytest.mark.parametrize("library", [redis.asyncio.Redis, valkey.asyncio.Valkey])
@pytest.mark.parametrize("wire", ["tcp", "tls", "unix", "url of tls"])
async def test_ways_to_the_server(real_server, library, wire, tmp_path):
    port = real_server.port
    with contextlib.ExitStack() as stack:
        if wire == "unix":
            where = library(unix_socket_path=stack.enter_context(unix_gateway(port)))
        elif wire == "tcp":
            where = library(host="127.0.0.1", port=port, socket_timeout=0.1, decode_responses=True)
        else:
            port = stack.enter_context(tls_gateway(port))
            certificate = tmp_path / "ca.pem"
            authority().cert_pem.write_to_path(certificate)
            where = library(host="localhost", port=port, ssl=True, ssl_ca_certs=str(certificate))
            if wire == "url of tls":
                where = f"rediss://localhost:{port}?ssl_ca_certs={certificate}"
        async with (
            accumulator(where) as small,
            redisacc.asyncio.ConditionalAccumulator("float32", [300_000], "large", redis=where) as large,
        ):
            waiting = asyncio.create_task(small.take_grad(1))
            gradient = np.arange(300_000, dtype=np.float32)
            await asyncio.gather(large.apply_grad(gradient), large.apply_grad(gradient))
            assert (await large.take_grad(2) == gradient).all()
            await small.apply_grad([1.0, 2.0])
            assert (await waiting).tolist() == [1, 2]
            await small.delete()
            await large.delete()
        if not isinstance(where, str):
            await where.aclose()


class OwnConnection(redis.asyncio.Connection):
    """It may do something of its own with what it sends and receives."""


async def test_a_client_of_the_wrong_kind_is_refused_with_the_right_one(real_server):
    client = redis.asyncio.Redis.from_url(real_server.url)
    with pytest.raises(
        redisacc.InvalidArgumentError,
        match=r"use the class of the same name in redisacc\.asyncio, or give this one a redis\.Redis",
    ):
        redisacc.ConditionalAccumulator("float32", [2], redis=client)
    with pytest.raises(redisacc.InvalidArgumentError, match=r"blocks: use the class of the same name in redisacc"):
        await accumulator(real_server.client())
    with pytest.raises(redisacc.InvalidArgumentError, match=r"redis\+cluster://HOST:PORT"):
        await accumulator(redis.asyncio.RedisCluster(host="127.0.0.1", port=1))
    unknown = redis.asyncio.Redis(connection_pool=redis.asyncio.ConnectionPool(connection_class=OwnConnection))
    with pytest.raises(redisacc.InvalidArgumentError, match="connections are of an unknown class"):
        await accumulator(unknown)
    own = redis.asyncio.Redis(redis_connect_func=lambda connection: connection.on_connect())
    with pytest.raises(redisacc.InvalidArgumentError, match="cannot await its connect function: give it a URL"):
        await accumulator(own)
    with pytest.raises(redisacc.InvalidArgumentError, match=r"a client for asyncio .*, not builtins\.int"):
        await accumulator(7)
    await client.aclose()


async def test_a_client_that_sentinels_lead(real_server):
    with sentinel(real_server.port) as port:
        client = redis.asyncio.sentinel.Sentinel([("127.0.0.1", port)]).master_for("main", db=3)
        async with accumulator(client) as acc:
            assert await acc.apply_grad([1.0, 2.0])
            assert (await acc.take_grad(1)).tolist() == [1.0, 2.0]
            await acc.delete()


async def test_a_server_that_is_not_there():
    with pytest.raises(redisacc.ServerUnavailableError, match="redisacc server"):
        await accumulator("redis://127.0.0.1:1")


def test_another_event_loop_is_refused(real_server):
    with asyncio.Runner() as first, asyncio.Runner() as second:
        handle = first.run(opened(accumulator(real_server.url)))
        with pytest.raises(redisacc.RedisAccError, match=r"belongs to another event loop, .*: open one on this loop"):
            second.run(handle.num_accumulated())
        first.run(handle.delete())
        first.run(handle.close())


async def opened(handle):
    return await handle


async def test_a_handle_cannot_be_pickled(real_server):
    async with accumulator(real_server.url) as acc:
        with pytest.raises(
            TypeError, match="belongs to an event loop: open another one by its name in the other process"
        ):
            pickle.dumps(acc)
        await acc.delete()


def test_a_private_accumulator_of_a_handle_that_was_dropped(real_server, real_client):
    async def forget():
        acc = await accumulator(real_server.url, None)
        await acc.apply_grad([1.0, 2.0])

    asyncio.run(forget())
    gc.collect()
    assert not real_client.keys()


async def test_events(real_server):
    async with accumulator(real_server.url) as acc:
        async with acc.events(timeout=20) as events:
            await acc.apply_grad([1.0, 2.0])
            await acc.delete()
            assert [event.kind async for event in events] == ["applied", "deleted"]
        async for _ in acc.events(timeout=0.01):
            pytest.fail("there is none")


async def test_tasks_settle_each_for_itself(real_server):
    async with accumulator(real_server.url) as acc:
        await acc.apply_grad([1.0, 2.0])

        async def other():
            return await acc.settle()

        assert (await asyncio.create_task(other())).applied == 0
        assert (await acc.settle()).applied == 1
        await acc.delete()
