"""A Redis Cluster on an event loop."""

import asyncio

import numpy as np
import pytest

import redisacc.asyncio

pytestmark = [pytest.mark.servers("cluster"), pytest.mark.every_server]


@pytest.mark.slow
@pytest.mark.parametrize("partitions", [None, 3])
async def test_a_cluster_by_its_url(real_server, partitions):
    options = {"shared_name": "w", "redis": real_server.url, "partitions": partitions}
    async with redisacc.asyncio.ConditionalAccumulator("float32", [300_000], **options) as acc:
        taking = asyncio.create_task(acc.take_grad(4))
        gradient = np.arange(300_000, dtype=np.float32)
        await asyncio.gather(*(acc.apply_grad(gradient) for _ in range(4)))
        assert (await taking == gradient).all()
        take = asyncio.create_task(acc.take_grad(1))
        while not (await acc.info()).waiting:
            await asyncio.sleep(0.01)
        take.cancel()
        await asyncio.gather(take, return_exceptions=True)
        assert (await acc.info()).waiting == []
        await acc.delete()


@pytest.mark.parametrize("partitions", [None, 3])
async def test_parameters_on_a_cluster(real_server, partitions):
    options = {"redis": real_server.url, "partitions": partitions}
    opened = [redisacc.asyncio.Parameters("w", **options) for _ in range(2)]
    async with opened[0] as weights, opened[1] as other:
        waiting = asyncio.create_task(other.wait(timeout=20))
        await weights.publish(np.arange(300_000.0), 1, state=[np.ones(3)])
        step, values = await waiting
        assert (step, values.tolist()) == (1, list(range(300_000)))
        assert await other.is_complete()
        assert (await other.latest_state())[1][0].tolist() == [1, 1, 1]
        await weights.delete()
