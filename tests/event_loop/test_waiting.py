"""Waits on an event loop: they cost no thread and little memory, and end in every way without a trace in the queue."""

import asyncio
import gc
import inspect
import signal
import threading
import time
import tracemalloc

import numpy as np
import pytest

import redisacc
import redisacc.asyncio

pytestmark = pytest.mark.servers("valkey")
# How long the clean-up of a cancelled call may last, in seconds.
CLEAN_UP = 3.0


def accumulator(where, name="w", **options):
    return redisacc.asyncio.ConditionalAccumulator("float32", [2], name, redis=where, **options)


async def queued(acc, number):
    async with asyncio.timeout(30):
        while len((await acc.info()).waiting) != number:
            await asyncio.sleep(0.01)


async def next_event(where):
    async with accumulator(where) as acc, acc.events() as events:
        async for _ in events:
            pass


async def wait_for_step(where):
    async with accumulator(where) as acc:
        await acc.wait_for_step(5)


async def take(where):
    async with accumulator(where) as acc, acc.take(1):
        pass


async def wait_for_parameters(where):
    async with redisacc.asyncio.Parameters("p", redis=where) as parameters:
        await parameters.wait()


async def wait_for_rounds(where):
    async with redisacc.asyncio.Chief("t", {"w": np.zeros(2)}, workers=1, redis=where) as chief:
        async for _ in chief.rounds():
            pass


async def wait_for_parameters_of_a_chief(where):
    async with redisacc.asyncio.Worker("u", redis=where) as worker:
        async for _ in worker.steps():
            pass


async def wait_for_a_chief(where):
    async with redisacc.asyncio.Worker("u", redis=where) as worker:
        await worker.workers()


WAITS = [next_event, wait_for_step, take, wait_for_parameters, wait_for_rounds, wait_for_parameters_of_a_chief]


@pytest.mark.parametrize("wait", [*WAITS, wait_for_a_chief], ids=lambda wait: wait.__name__)
async def test_a_wait_that_is_cancelled_leaves_nothing_behind(real_server, real_client, wait):
    task = asyncio.create_task(wait(real_server.url))
    await asyncio.sleep(0.3)
    assert not task.done()
    task.cancel()
    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < 10
    assert real_client.keys("*:takers") == []
    async with asyncio.timeout(5):
        while any(thread.name == "redisacc-leases" for thread in threading.enumerate()):
            await asyncio.sleep(0.01)
    # What it opened is still there, and nobody else owns it.
    real_client.flushall()


async def test_a_second_cancellation_does_not_disturb_the_first(real_server):
    async with accumulator(real_server.url) as acc:
        task = asyncio.create_task(acc.take_grad(1))
        await queued(acc, 1)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await acc.info()).waiting == []
        await acc.delete()


async def test_closing_the_handle_ends_its_waits(real_server):
    async with accumulator(real_server.url) as other:
        async with accumulator(real_server.url) as acc:
            take, cancelled = (asyncio.create_task(acc.take_grad(1)) for _ in range(2))
            await queued(acc, 2)
            # It is still leaving the queue when the handle is closed.
            cancelled.cancel()
            await asyncio.sleep(0)
        with pytest.raises(redisacc.CancelledError):
            await take
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert (await other.info()).waiting == []
        await other.delete()


def test_ctrl_c_leaves_the_queue(real_server, real_client):
    async def main():
        async with accumulator(real_server.url) as acc:
            asyncio.get_running_loop().call_later(0.3, signal.raise_signal, signal.SIGINT)
            await acc.take_grad(1)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert not real_client.exists("redisacc:{w}:takers")
    redisacc.ConditionalAccumulator("float32", [2], "w", redis=real_client).delete()


def test_a_loop_that_ends_in_the_middle_of_a_wait(real_server, real_client):
    loop = asyncio.new_event_loop()
    acc = loop.run_until_complete(opened(accumulator(real_server.url)))
    task = loop.create_task(acc.take_grad(1))
    loop.run_until_complete(queued(acc, 1))
    for one in asyncio.all_tasks(loop):
        one.cancel()
    loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(loop), return_exceptions=True))
    assert task.cancelled()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.run_until_complete(acc.delete())
    loop.run_until_complete(acc.close())
    loop.close()


async def opened(handle):
    return await handle


@pytest.mark.slow
def test_a_coroutine_that_is_dropped_in_the_middle_of_a_wait(real_server):
    async def main():
        async with accumulator(real_server.url) as acc:
            take = acc.take_grad(1)
            take.send(None)
            # Its clean-up must not wait, because nobody awaits it any more.
            take.close()
            assert inspect.getcoroutinestate(take) == inspect.CORO_CLOSED
            # The handle works. A place in the queue that could not be left runs out.
            assert await acc.apply_grad([1.0, 2.0])
            assert (await acc.take_grad(1, timeout=30)).tolist() == [1.0, 2.0]
            info = await acc.info()
            assert (info.takes, info.num_accumulated, info.unacknowledged) == (1, 0, [])
            await acc.delete()

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("accumulators", [1, pytest.param(100, marks=pytest.mark.thorough)])
async def test_a_thousand_waits_need_no_thread_each_and_little_memory(real_server, real_client, accumulators):
    number = 1000
    async with asyncio.timeout(100):
        handles = [await accumulator(real_server.url, f"w{one}") for one in range(accumulators)]
        await handles[0].apply_grad([1.0, 2.0])
        await handles[0].take_grad(1)
        gc.collect()
        threads = threading.active_count()
        tracemalloc.start()
        takes = [asyncio.create_task(handles[one % accumulators].take_grad(1)) for one in range(number)]
        while sum(real_client.hlen(f"redisacc:{{w{one}}}:takers") for one in range(accumulators)) < number:
            await asyncio.sleep(0.1)
        used = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert used < 50e6
        # Those that open connections are the loop's own, and few.
        assert threading.active_count() - threads <= 8
        for take in takes:
            take.cancel()
        await asyncio.gather(*takes, return_exceptions=True)
        for handle in handles:
            assert (await handle.info()).waiting == []
            await handle.delete()
            await handle.close()


async def test_the_loop_runs_other_tasks_while_a_large_round_arrives(real_server):
    number, size = 8, 1_000_000
    gaps = []

    async def tick():
        last = time.monotonic()
        while True:
            await asyncio.sleep(0)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    async with redisacc.asyncio.ConditionalAccumulator("float32", [size], "w", redis=real_server.url) as acc:
        for _ in range(number):
            await acc.apply_grad(np.ones(size, np.float32))
        ticking = asyncio.create_task(tick())
        await acc.take_grad(number)
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        # The loop gets a turn for every part, and not only when everything is there.
        assert len(gaps) > number
        await acc.delete()


async def test_a_server_that_is_killed_during_waits(daemon):
    server = daemon("--appendonly", "yes", "--appendfsync", "always").start()
    async with accumulator(server.url) as acc, redisacc.asyncio.Parameters("p", redis=server.url) as parameters:
        takes = [asyncio.create_task(acc.take_grad(1)) for _ in range(5)]
        wait = asyncio.create_task(parameters.wait())
        await queued(acc, 5)
        await asyncio.to_thread(server.kill)
        # To cancel one does not wait for the server for longer than the clean-up may last.
        began = time.monotonic()
        takes[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await takes[0]
        assert time.monotonic() - began < CLEAN_UP + 2
        await asyncio.to_thread(server.start)
        for step in range(4):
            await acc.apply_grad([1.0, 2.0], local_step=step)
            await acc.wait_for_step(step + 1)
        await asyncio.gather(*takes[1:])
        await parameters.publish(np.ones(2), 3)
        assert (await wait)[0] == 3
