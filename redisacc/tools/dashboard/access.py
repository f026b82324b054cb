"""Who may see the page and the metrics.

Without a token, they are only for people on this machine. A page of somebody else's could reach them through their
browser, by a name that resolves to 127.0.0.1 (DNS rebinding), so the name in the request has to be one of this
machine's. With a token, a browser asks for it as a password and sends it to no other name. Everything is read-only, so
a request that somebody else's page forges changes nothing, and that page cannot read the answer.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redisacc._clock import durations
from redisacc.embedded.addresses import is_loopback

logger = logging.getLogger("redisacc")

# The shortest token. A shorter one can be found by guessing.
SHORTEST_TOKEN = 16
# Seconds before a wrong token is answered.
REFUSAL_PAUSE = 0.5

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def _name_in(host: str) -> str:
    """Returns the name in a header "Host", without the port."""
    name, _, port = host.rpartition(":")
    return name if name and port.isdigit() else host


class Access:
    """Lets requests through to an application that may see it, and adds the headers of ``HEADERS`` to every answer.

    Args:
        app: the application.
        token: what a request has to know, of at least ``SHORTEST_TOKEN`` ASCII characters; None for requests by a name
            of this machine only.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        is_gone = False

        async def send_with_headers(message: Message) -> None:
            nonlocal is_gone
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            try:
                # Whoever asks but reads no answer must not keep a place for ever.
                async with asyncio.timeout(durations.request):
                    await send(message)
            except Exception:
                is_gone = True
                raise

        try:
            answer = await self._refusal(Headers(scope=scope))
            await (self._app if answer is None else answer)(scope, receive, send_with_headers)
        except Exception:
            # The server logs nothing by itself, because strangers could make it write as much as they like: a request
            # may break off, or turn out not to be HTTP, while its answer is being sent.
            if not is_gone:
                logger.exception("the page could not be served")
            raise

    async def _refusal(self, headers: Headers) -> Response | None:
        """Returns the answer to a request that may not reach the application; None if it may."""
        if self._token is None:
            if is_loopback(_name_in(headers.get("host", ""))):
                return None
            return PlainTextResponse("This page is only for localhost and 127.0.0.1.\n", status_code=421)
        given = _given_token(headers.get("authorization", ""))
        if hmac.compare_digest(given, self._token):
            return None
        if given:
            await asyncio.sleep(REFUSAL_PAUSE)
        how = {"WWW-Authenticate": 'Basic realm="redisacc: the token is the password", charset="UTF-8"'}
        return PlainTextResponse("The token is missing or wrong.\n", status_code=401, headers=how)


def _given_token(header: str) -> bytes:
    """Returns the token in a header "Authorization": a bearer token, or a password, whatever the user is called."""
    kind, _, text = header.partition(" ")
    # Starlette reads every byte as a character of Latin-1.
    given = text.strip(" ").encode("latin-1")
    match kind.lower():
        case "bearer":
            return given
        case "basic":
            try:
                return base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return b""
    return b""
