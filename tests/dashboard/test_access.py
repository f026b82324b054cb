"""Who may see the page: requests by a name of this machine, or with the token."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import socket
import struct
import subprocess
import sys
from urllib.parse import urlencode

import pytest
from click.testing import CliRunner

from redisacc._dashboard.access import Access
from redisacc.cli import main

pytestmark = pytest.mark.servers("valkey")

TOKEN = "correct-horse-battery"


def ask(dashboard, path="/", method="GET", body=None, **headers):
    """Returns the status, the headers and the body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=20)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.headers, "" if path.startswith("/updates") else answer.read().decode()
    finally:
        connection.close()


def test_on_this_machine_only_its_names_reach_the_page(dashboard):
    served = dashboard()
    assert served.url.startswith("http://127.0.0.1:")
    for host in ("127.0.0.1", "localhost:1", "LOCALHOST.", "[::1]:80", "127.9.9.9"):
        assert ask(served, host=host)[0] == 200, host
    # A name of somebody else's that resolves to 127.0.0.1.
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:9465", "10.0.0.1", ""):
        for path in ("/", "/updates", "/static/dashboard.js"):
            assert ask(served, path, host=host)[0] == 421, host


def test_every_answer_forbids_scripts_and_styles_from_elsewhere(dashboard):
    served = dashboard()
    for path, status in (("/", 200), ("/static/dashboard.css", 200), ("/static/../app.py", 404), ("/nothing", 404)):
        found, headers, body = ask(served, path)
        assert found == status
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["server"] is None
        assert "Route" not in body
    assert ask(served, "/", "POST")[0] == 405
    status, headers, _ = ask(served, "/updates")
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")


def test_with_a_token_nothing_is_shown_without_it(dashboard):
    served = dashboard("--host", "0.0.0.0", token=TOKEN)
    assert served.line.endswith(", which asks for the token, Ctrl-C stops\n")
    status, _, body = ask(served, host="box.example")
    assert status == 401
    assert 'type="password"' in body
    assert ask(served, "/updates")[0] == 401
    for wrong in ("Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer", f"Bearer {TOKEN}x", "Bearer \xff"):
        assert ask(served, "/updates", authorization=wrong)[0] == 401, wrong
    assert ask(served, "/updates", authorization=f"Bearer {TOKEN}")[0] == 200
    assert ask(served, "/static/dashboard.css")[0] == 200
    # The header "Host" must not make a page look like a file that everybody may have.
    for host in ("x/static/dashboard.css?", "x/static/dashboard.css#"):
        assert ask(served, "/updates", host=host)[0] == 401

    assert ask(served, "/login", "POST", "token=wrong")[0] == 401
    assert ask(served, "/login", "POST", "x" * 5000)[0] == 413
    status, headers, _ = ask(served, "/login", "POST", f"token={TOKEN}")
    assert (status, headers["location"]) == (303, "./")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    pair = cookie.partition(";")[0]
    assert ask(served, "/updates", cookie=pair)[0] == 200
    for wrong in (pair[:-1], pair.partition("=")[0] + "=", "x=y"):
        assert ask(served, "/updates", cookie=wrong)[0] == 401
    written = "".join(served.stop())
    assert TOKEN not in served.line + written
    assert pair.partition("=")[2] not in written


@pytest.mark.parametrize(
    ("options", "token", "said"),
    [
        (
            ["--host", "0.0.0.0"],
            "",
            "other machines could reach 0.0.0.0, so the page needs a token: set the environment variable ",
        ),
        (["--host", "box.example"], "", "needs a token"),
        ([], "too-short", "must have at least 16 characters, not 9"),
    ],
)
def test_an_address_that_others_reach_needs_a_token(monkeypatch, options, token, said):
    monkeypatch.setenv("REDISACC_DASHBOARD_TOKEN", token)
    found = CliRunner().invoke(main, ["dashboard", *options])
    assert found.exit_code == 2
    assert said in re.sub(r"\s+", " ", found.stderr)
    assert not token or token not in found.stderr


def test_a_port_that_is_taken(real_server):
    found = CliRunner().invoke(main, ["dashboard", "--redis", real_server.url, "--port", str(real_server.port)])
    assert found.exit_code == 1
    assert f"cannot listen on 127.0.0.1:{real_server.port}" in found.stderr


@pytest.mark.slow
def test_without_starlette_the_command_says_what_to_install():
    code = "import sys; sys.modules['starlette'] = None; import redisacc.cli as c; c.main(['dashboard'])"
    found = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2
    assert found.stderr == "redisacc: dashboard needs starlette and uvicorn: pip install 'redisacc[dashboard]'\n"


ACCENTED = "correct-horse-bättery-日本"
LATIN = "correct-horse-bättery"
FORM = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\ntok"
CHUNK = b"POST /login HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
UPDATES = f"GET /updates HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()


@pytest.mark.parametrize(("token", "encoding"), [(ACCENTED, "utf-8"), (LATIN, "utf-8"), (LATIN, "latin-1")])
def test_a_token_may_have_any_letters(dashboard, token, encoding):
    served = dashboard(token=token)
    assert ask(served, "/login", "POST", urlencode({"token": token}))[0] == 303
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    for sent, status in ((token, 200), (token.replace("ä", "a"), 401), (token.replace("ä", "?"), 401)):
        connection.request("GET", "/", headers={"Authorization": b"Bearer " + sent.encode(encoding)})
        answer = connection.getresponse()
        assert answer.status == status
        answer.read()
    connection.close()


def test_a_token_that_is_no_text(monkeypatch):
    monkeypatch.setenv("REDISACC_DASHBOARD_TOKEN", "correct-horse-b\udce4ttery")
    found = CliRunner().invoke(main, ["dashboard"])
    assert found.exit_code == 2
    assert "REDISACC_DASHBOARD_TOKEN must be valid UTF-8" in found.stderr


@pytest.mark.parametrize("token", [None, TOKEN])
def test_strangers_who_break_off_make_it_write_nothing(dashboard, token):
    """The fixture checks that it has written nothing, and each request here that it still answers."""
    served = dashboard(token=token)
    requests = {
        "half a line": b"GET / HT",
        "half a form": FORM,
        "a form whose answer takes a moment": FORM.replace(b"100", b"3"),
        "a chunk of no length": FORM.replace(
            b"Content-Length: 100\r\n\r\ntok", b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"
        ),
        "a huge header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000,
        "no text": b"GET /\xff%ff%00?a=\xff HTTP/1.1\r\nHost: localhost\r\nX: \xff\r\n\r\n",
        "a query of no text": UPDATES.replace(b"updates", b"updates?detail=%ff%00&sort=%ed"),
        "another protocol": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 500,
        "the updates": UPDATES,
        "many at once": UPDATES * 20,
    }
    for what, request in requests.items():
        for reset in (False, True):
            with socket.create_connection(("127.0.0.1", served.port), timeout=20) as sock:
                with contextlib.suppress(ConnectionError):
                    sock.sendall(request)
                if what in ("the updates", "a chunk of no length"):
                    # It has begun to answer.
                    sock.recv(1)
                if reset:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            assert ask(served, "/static/dashboard.css")[0] == 200, what


def test_a_form_that_never_ends_is_answered(durations):
    app = Access(None, TOKEN)
    durations(form=0.01)
    sent = []

    async def receive():
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"", "more_body": True}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": "/login", "method": "POST", "headers": [], "scheme": "http"}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 408


def test_a_failure_of_its_own_is_logged(caplog):
    async def fail(*_):
        raise ValueError("a mistake")

    scope = {"type": "http", "path": "/", "method": "GET", "headers": [(b"host", b"localhost")]}
    with pytest.raises(ValueError, match="a mistake"):
        asyncio.run(Access(fail, None)(scope, fail, fail))
    assert [record.getMessage() for record in caplog.records] == ["the dashboard could not answer"]
