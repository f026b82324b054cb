"""Connections that break and tasks that are cancelled at any moment: what was counted is known, and nothing is lost."""

import asyncio

import numpy as np
import pytest
from support.proxy import Fault, Weather

import redisacc
import redisacc.asyncio

pytestmark = pytest.mark.servers("valkey")
# The most connections of the handles of one loop to a server, and how many of them are opened at the same time.
CONNECTIONS, OPENINGS = 16, 4
# In place, and in parts.
LIMITS = [10**9, 0]


def accumulator(where, limit=None):
    return redisacc.asyncio.ConditionalAccumulator(
        "float64", [3], "w", reduction_type="SUM", redis=where, limits=redisacc.Limits(in_place=limit)
    )


@pytest.mark.parametrize("limit", LIMITS)
async def test_connections_that_break_under_many_tasks(proxy, real_server, limit, everything):
    async with accumulator(proxy.url, limit) as acc, accumulator(real_server.url) as direct:
        number = 400 if everything else 60
        proxy.weather(Weather(cut=0.03, bytewise=0.02))

        async def work(one):
            assert await acc.apply_grad([1.0, one, 0.0], local_step=2**62)

        results = await asyncio.gather(*(work(one) for one in range(number)))
        proxy.weather(None)
        assert len(results) == number
        total = await direct.take_grad(number)
        assert total.tolist() == [number, sum(range(number)), 0]
        assert proxy.fired
        await direct.delete()


async def test_an_unknown_outcome_is_awaited_again(proxy, real_server, durations):
    async with accumulator(proxy.url) as acc, accumulator(real_server.url) as direct:
        await acc.apply_grad(np.ones(3))
        proxy.arm(Fault("reply", 0, 0, "stall"))
        with durations(call=0.4), pytest.raises(redisacc.OutcomeUnknownError, match="settle") as failure:
            await acc.apply_grad(np.ones(3))
        proxy.resume()
        assert isinstance(failure.value, redisacc.asyncio.OutcomeUnknownError)
        assert (await failure.value.settle()).outcome == "applied"
        assert await direct.num_accumulated() == 2
        await direct.delete()


@pytest.mark.slow(keep="open")
@pytest.mark.parametrize("are_open", [True, False], ids=["open connections", "new connections"])
async def test_calls_that_wait_for_a_connection_to_a_silent_server_end_together(
    proxy, real_server, durations, are_open
):
    # When it ends, the take has no time left to listen.
    durations(last_poll=1.0)
    async with accumulator(proxy.url) as acc, accumulator(real_server.url) as direct:
        if are_open:
            await asyncio.gather(*(acc.num_accumulated() for _ in range(2 * CONNECTIONS)))
        proxy.stall()
        before = proxy.accepted
        takes = [asyncio.create_task(acc.take_grad(1, timeout=0.5)) for _ in range(4 * CONNECTIONS)]
        # When the first takes find the server silent, the others have time left for another attempt.
        await asyncio.sleep(0.1)
        takes += [asyncio.create_task(acc.take_grad(1, timeout=0.5)) for _ in range(4 * CONNECTIONS)]
        results = await asyncio.gather(*takes, return_exceptions=True)
        assert {type(result) for result in results} == {redisacc.TakeTimeoutError}
        # A handshake with a silent server takes seconds, after which no take has time left. If there were more of them
        # than threads, some takes would have ended after the others.
        assert proxy.accepted - before <= OPENINGS
        proxy.resume()
        await direct.delete()
