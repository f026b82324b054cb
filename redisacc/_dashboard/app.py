"""The web application: the page, its files, and the stream of its updates."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from redisacc._dashboard.access import Access
from redisacc._dashboard.feed import Feed
from redisacc._dashboard.files import FILES, PAGE
from redisacc._dashboard.page_data import parse_query

# How many milliseconds a page waits before it connects again.
RETRY_MS = 1000


def make_app(feed: Feed, token: str | None) -> ASGIApp:
    """Returns the application.

    Args:
        feed: where the updates of the page come from.
        token: what a request has to know; None for requests by a name of this machine only.
    """

    async def page(_: Request) -> Response:
        return FileResponse(PAGE)

    async def file(request: Request) -> Response:
        found = FILES.get(request.path_params["name"])
        return PlainTextResponse("Not found.\n", status_code=404) if found is None else FileResponse(found)

    async def updates(request: Request) -> Response:
        if feed.is_full:
            return PlainTextResponse("Too many pages are open.\n", status_code=503)

        async def events() -> AsyncIterator[str]:
            yield f"retry: {RETRY_MS}\n\n"
            async for update in feed.updates(parse_query(request.query_params)):
                yield f"data: {update}\n\n"

        # Without this header, some proxies collect updates before they pass them on.
        return StreamingResponse(events(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    routes = [Route("/", page), Route("/static/{name}", file), Route("/updates", updates)]
    return Access(Starlette(routes=routes), token)
