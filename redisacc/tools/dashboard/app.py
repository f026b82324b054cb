"""The web application: the page, its files, the stream of its updates, and the metrics."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from redisacc._wire.transport import Transport
from redisacc.tools.dashboard.access import Access
from redisacc.tools.dashboard.connections import OTHER_FILES, Connection
from redisacc.tools.dashboard.feed import Feed
from redisacc.tools.dashboard.page_data import parse_query
from redisacc.tools.monitoring.metrics import Metrics
from redisacc.tools.monitoring.monitor import Monitor

_STATIC = Path(__file__).parent / "static"
# Of the files, those that the page refers to.
_FILES = ("dashboard.css", "dashboard.js", "icon.svg")
# How many milliseconds a page waits before it connects again.
_RETRY_MS = 1000
# Number of connections that wait to be accepted.
_QUEUE = 1024
# Seconds that open pages have to go away when the command is stopped.
_LAST_SECONDS = 2


def run(
    transport: Transport, monitor: Monitor, listening: socket.socket, *, token: str | None, interval: float
) -> None:
    """Serves the page and the metrics until a signal ends it.

    Args:
        transport: the way to the server.
        monitor: reads it.
        listening: the socket that listens.
        token: what a request has to know; None for requests by a name of this machine only.
        interval: seconds between two updates of the page.
    """
    feed = Feed(monitor, interval)
    # No log of requests, nor of those that break off: the application logs its own failures. The token is in no log
    # either.
    config = uvicorn.Config(
        make_app(feed, Metrics(transport, monitor), token),
        http=Connection,
        ws="none",
        # As many are accepted in each of the three turns of the loop that pass before a connection is counted.
        backlog=OTHER_FILES // 6,
        access_log=False,
        log_level="critical",
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=_LAST_SECONDS,
    )
    _Server(config, feed).run(sockets=[listening])


class _Server(uvicorn.Server):
    """Lets connections wait in the system's queue, and ends the updates of open pages before it waits for these."""

    def __init__(self, config: uvicorn.Config, feed: Feed) -> None:
        super().__init__(config)
        self._feed = feed

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to serve."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_QUEUE)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops serving."""
        self._feed.close()
        await super().shutdown(sockets)


def make_app(feed: Feed, metrics: Metrics, token: str | None) -> ASGIApp:
    """Returns the application."""
    # Prometheus may ask again while it is being answered.
    scraping = asyncio.Lock()

    async def page(_: Request) -> Response:
        return FileResponse(_STATIC / "page.html")

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        return FileResponse(_STATIC / name) if name in _FILES else PlainTextResponse("Not found.\n", status_code=404)

    async def updates(request: Request) -> Response:
        if feed.is_full:
            return PlainTextResponse("Too many pages are open.\n", status_code=503)

        async def events() -> AsyncIterator[str]:
            yield f"retry: {_RETRY_MS}\n\n"
            async for update in feed.updates(parse_query(request.query_params)):
                yield f"data: {update}\n\n"

        # Without this header, some proxies collect updates before they pass them on.
        return StreamingResponse(events(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def scrape(_: Request) -> Response:
        async with scraping:
            text = await asyncio.to_thread(metrics.text)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    handlers = {"/": page, "/static/{name}": file, "/updates": updates, "/metrics": scrape}
    return Access(Starlette(routes=[Route(path, handler) for path, handler in handlers.items()]), token)
