"""Reads the server while somebody looks at a page, and gives each page what has changed for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from redisacc._clock import clock
from redisacc._text import printable
from redisacc.errors import RedisAccError
from redisacc.tools.dashboard.page_data import Query, id_of, sections
from redisacc.tools.monitoring.monitor import Monitor

logger = logging.getLogger("redisacc")

# Seconds after which a server that does not answer is reported.
TIMEOUT = 2.0
# Seconds of each refresh that are spent on reading accumulators in full, after those that somebody looks at.
BUDGET = 0.25
# The pause between two refreshes is this many times as long as the refresh took, or longer.
REST = 4.0
# A new page does not wait for the pause to end, but refreshes are at least this many seconds apart.
SHORTEST_PAUSE = 0.2
# Maximum number of pages at a time.
MOST_VIEWERS = 50


class _Viewer:
    """A page that is open: what it wants to see, and the sections that it gets next."""

    def __init__(self, query: Query) -> None:
        self.query = query
        self.sections: dict[str, str] = {}
        self.ready = asyncio.Event()
        # Whether no more sections will come.
        self.failed = False


class Feed:
    """The updates of all pages. It reads the server only while at least one is open.

    Args:
        monitor: reads it.
        interval: seconds between two refreshes.
    """

    def __init__(self, monitor: Monitor, interval: float) -> None:
        self._monitor = monitor
        self._interval = interval
        self._viewers: set[_Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._closed = False

    @property
    def is_full(self) -> bool:
        """Whether there are as many pages as there may be."""
        return len(self._viewers) >= MOST_VIEWERS

    async def updates(self, query: Query) -> AsyncIterator[str]:
        """Yields a JSON object after each refresh, until the feed is closed.

        ``now`` is this machine's ``clock.now()``, ``clock`` its time in milliseconds, and ``changed`` the sections
        that are not as the page has them; the first update has all.
        """
        viewer = _Viewer(query)
        self._viewers.add(viewer)
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        sent: dict[str, str] = {}
        try:
            while True:
                await viewer.ready.wait()
                viewer.ready.clear()
                if self._closed or viewer.failed:
                    return
                found = viewer.sections
                changed = [f'"{name}":{text}' for name, text in found.items() if sent.get(name) != text]
                sent = found
                wall_ms, now = int(clock.time() * 1000), round(clock.now(), 3)
                yield f'{{"clock":{wall_ms},"now":{now},"changed":{{{",".join(changed)}}}}}'
        finally:
            self._viewers.discard(viewer)

    def close(self) -> None:
        """Ends all updates."""
        self._closed = True
        for viewer in self._viewers:
            viewer.ready.set()
        self._wake.set()

    async def _run(self) -> None:
        while self._viewers and not self._closed:
            self._wake.clear()
            started = clock.now()
            queries = {viewer.query for viewer in self._viewers}
            try:
                found = await asyncio.to_thread(self._refresh, queries)
            except Exception:
                # The pages end and connect again, instead of showing old figures as live ones.
                logger.exception("the dashboard could not refresh")
                for viewer in self._viewers:
                    viewer.failed = True
                    viewer.ready.set()
                return
            for viewer in self._viewers:
                # Those who came meanwhile have woken this loop.
                if viewer.query in found:
                    viewer.sections = found[viewer.query]
                    viewer.ready.set()
            await asyncio.sleep(SHORTEST_PAUSE)
            pause = max(self._interval, REST * (clock.now() - started - SHORTEST_PAUSE)) - SHORTEST_PAUSE
            try:
                await asyncio.wait_for(self._wake.wait(), max(pause, 0.0))
            except TimeoutError:
                continue

    def _refresh(self, queries: set[Query]) -> dict[Query, dict[str, str]]:
        monitor, problem = self._monitor, ""
        looked_at = {query.detail for query in queries}
        with monitor.lock:
            try:
                first = [name for name in monitor.views if id_of(name) in looked_at]
                monitor.refresh(timeout=TIMEOUT, budget=BUDGET, first=first)
            except RedisAccError as error:
                problem = printable(str(error))
            return {query: sections(monitor, query, problem) for query in queries}
