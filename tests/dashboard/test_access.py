"""Who may see the page: requests by a name of this machine, or with the token."""

import asyncio
import base64
import contextlib
import http.client
import os
import re
import resource
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvicorn
from click.testing import CliRunner
from uvicorn.server import ServerState

from redisacc.tools.cli import main
from redisacc.tools.dashboard.access import Access
from redisacc.tools.dashboard.connections import Connection

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
        for path in ("/", "/updates", "/metrics", "/static/dashboard.js"):
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


def basic(token):
    return "Basic " + base64.b64encode(b"anybody:" + token.encode()).decode()


def test_with_a_token_nothing_is_shown_without_it(dashboard):
    served = dashboard("--host", "0.0.0.0", token=TOKEN)
    assert served.line.endswith(", which ask for the token; Ctrl-C stops\n")
    for path in ("/", "/updates", "/metrics", "/static/dashboard.js"):
        status, headers, body = ask(served, path, host="box.example")
        assert (status, headers["www-authenticate"].split()[0], TOKEN in body) == (401, "Basic", False)
        for right in (f"Bearer {TOKEN}", f"bearer  {TOKEN}", basic(TOKEN)):
            assert ask(served, path, authorization=right)[0] == 200, (path, right)
    for wrong in ("Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer", f"Bearer {TOKEN}x", "Bearer \xff", basic("x"),
                  "Basic", f"Digest {TOKEN}"):  # fmt: skip
        assert ask(served, "/updates", authorization=wrong)[0] == 401, wrong
    assert TOKEN not in served.line + served.stop()


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
    monkeypatch.setenv("REDISACC_SERVE_TOKEN", token)
    found = CliRunner().invoke(main, ["serve", *options])
    assert found.exit_code == 2
    assert said in re.sub(r"\s+", " ", found.stderr)
    assert not token or token not in found.stderr


def test_a_port_that_is_taken(real_server):
    found = CliRunner().invoke(main, ["serve", "--redis", real_server.url, "--port", str(real_server.port)])
    assert found.exit_code == 1
    assert f"cannot listen on 127.0.0.1:{real_server.port}" in found.stderr


@pytest.mark.slow
def test_without_starlette_the_command_says_what_to_install():
    code = "import sys; sys.modules['starlette'] = None; import redisacc.tools.cli as c; c.main(['serve'])"
    found = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2
    assert found.stderr == "redisacc: serve needs starlette and uvicorn: pip install 'redisacc[serve]'\n"


FORM = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\ntok"
UPDATES = f"GET /updates HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()


@pytest.mark.parametrize("token", ["correct-horse-b\udce4ttery", "correct-horse-bättery"])
def test_a_token_that_programs_send_in_different_ways(monkeypatch, token):
    monkeypatch.setenv("REDISACC_SERVE_TOKEN", token)
    found = CliRunner().invoke(main, ["serve"])
    assert (found.exit_code, "REDISACC_SERVE_TOKEN must have only ASCII characters" in found.stderr) == (2, True)


@pytest.mark.parametrize("token", ["", TOKEN])
def test_strangers_who_break_off_make_it_write_nothing(dashboard, token):
    """The fixture checks that it has written nothing, and each request here that it still answers."""
    served = dashboard(token=token)
    requests = {
        "half a line": b"GET / HT",
        "half a form": FORM,
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
            assert ask(served, "/static/dashboard.css", authorization=basic(TOKEN))[0] == 200, what


def open_socket(served, sent=b""):
    sock = socket.create_connection(("127.0.0.1", served.port), timeout=20)
    sock.sendall(sent)
    return sock


# None, half a request line, half of the headers, a body that never comes, and updates that nobody reads.
UNFINISHED = (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n", FORM, UPDATES)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("token", ["", TOKEN])
def test_connections_without_an_end_lock_nobody_out(dashboard, token):
    """More connections than it has files. Those who come later are answered at once."""
    served = dashboard(token=token)
    resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE, (300, 300))
    authorization = {"authorization": basic(TOKEN)}
    with contextlib.ExitStack() as stack:
        for number in range(400):
            # Only some read updates, because there may be so many pages.
            sent = UNFINISHED[number % (5 if number < 100 else 4)]
            stack.enter_context(open_socket(served, sent))
        started = time.monotonic()
        for path in ("/", "/metrics", "/static/dashboard.js"):
            assert ask(served, path, **authorization)[0] == 200
        assert time.monotonic() - started < 10
        used = cpu_seconds(served.process.pid)
        time.sleep(0.5)
        # It does not spin.
        assert cpu_seconds(served.process.pid) - used < 0.4


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def connection_of(loop):
    """A connection that waits for a request, and what has become of its transport."""
    config = uvicorn.Config(None, http=Connection, lifespan="off")
    config.load()
    done = []
    transport = SimpleNamespace(
        abort=lambda: done.append("aborted"), is_closing=lambda: bool(done), get_extra_info=lambda *_: None,
        set_protocol=None, pause_reading=lambda: None, resume_reading=lambda: None, write=done.append,
        close=lambda: done.append("closed"),
    )  # fmt: skip
    made = Connection(config, ServerState(), {}, loop)
    made.connection_made(transport)
    return made, done


@pytest.mark.parametrize("sent", UNFINISHED[:3])
def test_a_request_has_a_deadline(durations, sent):
    durations(request=0.01)

    async def wait():
        connection, done = connection_of(asyncio.get_running_loop())
        for byte in sent:
            connection.data_received(bytes([byte]))
        while not done:
            await asyncio.sleep(0.01)
        connection.connection_lost(None)
        return done

    assert asyncio.run(wait())[0] == "aborted"


@pytest.mark.slow
def test_a_request_that_came_with_another_one_has_its_time(dashboard):
    """The second answer has no end, and is not cut off when the first one is over."""
    served = dashboard()
    with open_socket(served, b"GET /static/icon.svg HTTP/1.1\r\nHost: localhost\r\n\r\n" + UPDATES) as sock:
        received = b""
        started = time.monotonic()
        while time.monotonic() < started + 11 or not received.rstrip().endswith(b"}"):
            received += (found := sock.recv(100_000))
            assert found
    assert received.count(b"HTTP/1.1 200 OK") == 2


def test_an_answer_that_nobody_takes_is_given_up(durations):
    durations(request=0.01)

    async def answer(_scope, _receive, send):
        await send({"type": "http.response.start", "headers": []})

    async def never(_message):
        await asyncio.sleep(60)

    scope = {"type": "http", "path": "/", "method": "GET", "headers": [(b"host", b"localhost")]}
    with pytest.raises(TimeoutError):
        asyncio.run(Access(answer, None)(scope, never, never))


def test_a_failure_of_its_own_is_logged(caplog):
    async def fail(*_):
        raise ValueError("a mistake")

    scope = {"type": "http", "path": "/", "method": "GET", "headers": [(b"host", b"localhost")]}
    with pytest.raises(ValueError, match="a mistake"):
        asyncio.run(Access(fail, None)(scope, fail, fail))
    assert [record.getMessage() for record in caplog.records] == ["the page could not be served"]
