"""Waits of an event loop follow the clock."""

from __future__ import annotations

import asyncio

from support.rows import every_row

from redisacc.asyncio._waits import LoopWaits


@every_row("way", ["sleep", "alarm", "event"])
def test_a_clock_that_moves_ends_the_waits_of_a_loop(clock, way):
    async def main():
        waits = LoopWaits()

        def wait(seconds):
            waits.sleep(seconds) if way == "sleep" else getattr(waits, way)().wait(seconds)

        waiting = [asyncio.create_task(waits.run(lambda seconds=seconds: wait(seconds))) for seconds in (3600, 7200)]
        await asyncio.sleep(0)
        await asyncio.to_thread(clock.advance, 4000.0)
        async with asyncio.timeout(30):
            await waiting[0]
        assert not waiting[1].done()
        waiting[1].cancel()
        await asyncio.wait(waiting)

    asyncio.run(main())
