"""Who may see the page.

Without a token, it is only for people on this machine. A page of somebody else's could reach it through their browser,
by a name that resolves to 127.0.0.1 (DNS rebinding), so the name in the request has to be one of this machine's. With a
token, a browser gets a cookie, which it sends to no other name. Everything is read-only, so a request that somebody
else's page forges changes nothing, and that page cannot read the answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redisacc._clock import durations
from redisacc._dashboard.files import FILES, LOGIN

logger = logging.getLogger("redisacc")

# The shortest token. A shorter one can be found by guessing.
SHORTEST_TOKEN = 16
# Maximum size of what the form of the token sends, in bytes.
LONGEST_FORM = 4096
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


def is_loopback(host: str) -> bool:
    """Returns whether a name or an address always means this machine."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _name_in(host: str) -> str:
    """Returns the name in a header "Host", without the port."""
    name, _, port = host.rpartition(":")
    return name if name and port.isdigit() else host


class Access:
    """Lets requests through to an application that may see it, and adds the headers of ``HEADERS`` to every answer.

    Args:
        app: the application.
        token: what a request has to know, of at least ``SHORTEST_TOKEN`` characters; None for requests by a name of
            this machine only.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token.encode() if token is not None else None
        # Most programs send a header in UTF-8, and some in Latin-1, which lacks most characters.
        self._bearers = [] if self._token is None else [self._token]
        if token is not None and max(token) <= "\xff":
            self._bearers.append(token.encode("latin-1"))
        # The cookie does not hold the token, and two dashboards on one host have cookies of different names.
        proof = hmac.digest(self._token or b"", b"cookie of redisacc dashboard", "sha256").hex()
        self._cookie = f"redisacc-{hashlib.sha256(proof.encode()).hexdigest()[:8]}", proof

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
                await send(message)
            except Exception:
                is_gone = True
                raise

        try:
            answer = await self._refusal(Request(scope, receive))
            await (self._app if answer is None else answer)(scope, receive, send_with_headers)
        except ClientDisconnect:
            # The browser is gone.
            return
        except Exception:
            # The server logs nothing by itself, because strangers could make it write as much as they like: a request
            # may break off, or turn out not to be HTTP, while its answer is being sent.
            if not is_gone:
                logger.exception("the dashboard could not answer")
            raise

    async def _refusal(self, request: Request) -> Response | None:
        """Returns the answer to a request that may not reach the application; None if it may."""
        # Not request.url, which older versions of Starlette make of the header "Host", which anybody may choose.
        path: str = request.scope["path"]
        if self._token is None:
            if is_loopback(_name_in(request.headers.get("host", ""))):
                return None
            return PlainTextResponse("This page is only for localhost and 127.0.0.1.\n", status_code=421)
        if path == "/login":
            return await self._login(request)
        # The page that asks for the token needs its style.
        if self._knows_token(request.headers) or path.removeprefix("/static/") in FILES:
            return None
        if path == "/":
            return FileResponse(LOGIN, status_code=401)
        return PlainTextResponse("The token is missing or wrong.\n", status_code=401)

    def _knows_token(self, headers: Headers) -> bool:
        assert self._token is not None
        # Starlette reads every byte as a character of Latin-1.
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip(" ").encode("latin-1")
        if kind.lower() == "bearer" and any(hmac.compare_digest(given, token) for token in self._bearers):
            return True
        name, proof = self._cookie
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(name)
        except CookieError:
            return False
        return cookie is not None and hmac.compare_digest(cookie.value.encode(), proof.encode())

    async def _login(self, request: Request) -> Response:
        assert self._token is not None
        body = b""
        if request.method == "POST":
            try:
                async with asyncio.timeout(durations.form):
                    async for piece in request.stream():
                        body += piece
                        if len(body) > LONGEST_FORM:
                            return PlainTextResponse("This is too long for a token.\n", status_code=413)
            except TimeoutError:
                return PlainTextResponse("The form did not arrive in time.\n", status_code=408)
        given = parse_qs(body.decode(errors="replace")).get("token", [""])[0].strip()
        if not hmac.compare_digest(given.encode(), self._token):
            await asyncio.sleep(REFUSAL_PAUSE)
            return FileResponse(LOGIN, status_code=401)
        answer = RedirectResponse("./", status_code=303)
        name, proof = self._cookie
        is_secure = request.scope["scheme"] == "https"
        answer.set_cookie(name, proof, httponly=True, samesite="strict", secure=is_secure)
        return answer
