"""Passwords and TLS, end to end; and no secret in logs, errors or reprs."""

import contextlib
import logging
import pickle
import socket
import ssl
import traceback
import urllib.parse

import pytest
import redis
from click.testing import CliRunner
from redis.sentinel import Sentinel

import redisacc
from redisacc._wire.connect import connect
from redisacc._wire.pubsub import pubsub_of
from redisacc.tools.cli import main

pytestmark = pytest.mark.servers("redis7", "valkey")

# With every character that has a special meaning in a URL or in quotes.
PASSWORD = "geheim/ä:@%41 \"'#?&"
QUOTED = urllib.parse.quote(PASSWORD, safe="")


@pytest.fixture
def tls(daemon, certificates, request):
    """A server that speaks TLS only and asks clients for certificates and a password."""
    return daemon(*certificates.of_server, "--requirepass", PASSWORD, tls=certificates.of_client)


def tls_url(server, certificates, password=QUOTED, authority="authority", client="client"):
    query = {"ssl_ca_certs": certificates[authority]}
    if client:
        query |= {"ssl_certfile": certificates[client], "ssl_keyfile": certificates[f"{client}-key"]}
    return f"rediss://:{password}@127.0.0.1:{server.port}/0?{urllib.parse.urlencode(query)}"


def speaks_tls(server):
    try:
        return server.start(password=PASSWORD)
    except AssertionError as error:
        if "tls" in str(error).lower():
            pytest.skip("a server without TLS")
        raise


def secrets_in(text):
    """The forms of the password that a text holds."""
    forms = {PASSWORD, QUOTED, repr(PASSWORD)[1:-1], urllib.parse.quote_plus(PASSWORD), "geheim"}
    return [form for form in forms if form in text]


class Ears(logging.Handler):
    """Collects everything that we log, at every level, with its arguments and exceptions."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.heard = []

    def emit(self, record):
        self.heard.append(self.format(record) + repr(record.__dict__))


@pytest.fixture
def ears():
    handler = Ears()
    logger = logging.getLogger("redisacc")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler.heard
    logger.removeHandler(handler)
    logger.setLevel(level)


def unread_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.slow
@pytest.mark.servers("redis7")
def test_no_secret_in_any_log_line_error_or_repr(
    daemon, open_accumulator, ears, background, until, monkeypatch, durations, tmp_path
):
    """Causes every kind of failure, and then looks for the password everywhere."""
    durations(opening=0.3, replication=0.05)
    durations(poll=0.3, report=0.1)
    server = daemon("--requirepass", PASSWORD, "--appendonly", "yes").start(password=PASSWORD)
    admin = server.client(password=PASSWORD)
    url = f"redis://:{QUOTED}@127.0.0.1:{server.port}"
    seen = []

    def fails(call, *errors):
        with pytest.raises(errors or redisacc.RedisAccError) as failure:
            call()
        # Texts that a program would print, or pass on to another process.
        seen.append("".join(traceback.format_exception(failure.value)))
        error = failure.value
        while error is not None:
            seen.extend([str(error), repr(error), repr(error.args), repr(vars(error))])
            with contextlib.suppress(Exception):
                seen.append(repr(pickle.dumps(error)))
            error = error.__cause__ or error.__context__

    def open_at(where, **options):
        return redisacc.ConditionalAccumulator("float32", [2], "w", redis=where, **options)

    handles = [open_accumulator("dense", "float32", [2], "w", redis=where) for where in (url, admin)]
    handles.append(open_accumulator("sparse", "float32", [2, 2], redis=url))
    handles.append(
        open_accumulator("dense", "float32", [2], "w", redis=url, limits=redisacc.Limits(in_place=0), min_replicas=1)
    )
    acc = handles[0]
    acc.apply_grad([1, 2])
    for what in (
        *handles,
        acc.info(),
        acc.peek(),
        connect(url),
        pubsub_of(connect(url), "redisacc:{w}:events"),
        acc._scripts,
        acc._taker,
    ):
        seen.extend([repr(what), str(what)])
    fails(lambda: handles[3].apply_grad([1, 2]), redisacc.NotReplicatedError)
    # Invalid addresses and settings.
    for where in (
        f"http://:{QUOTED}@127.0.0.1",
        f"redis://:{QUOTED}@127.0.0.1:notaport",
        f"redis://:{PASSWORD}@127.0.0.1:{server.port}",
        f"redis://:{QUOTED}@[::1",
        f"redis://:{QUOTED}@127.0.0.1:{server.port}/0?socket_timeout={QUOTED}",
        f"redis://:{QUOTED}@127.0.0.1:{server.port}/0?nonsense={QUOTED}",
        f"redis://:{QUOTED}@127.0.0.1:{server.port}/0?protocol={QUOTED}",
        f"redis://:{QUOTED}@127.0.0.1:{unread_port()}",
        f"rediss://:{QUOTED}@127.0.0.1:{server.port}?socket_timeout=0.3",
        f"redis://:wrong{QUOTED}@127.0.0.1:{server.port}",
        f"redis://nobody:{QUOTED}@127.0.0.1:{server.port}",
        f"unix://:{QUOTED}@{tmp_path}/none.sock",
    ):
        fails(lambda where=where: open_at(where))
        monkeypatch.setenv("REDISACC_URL", where)
        fails(lambda: open_at(None))
        result = CliRunner().invoke(main, ["acl", "--load", "--redis", where])
        seen.append(result.output)
        seen.append("".join(traceback.format_exception(result.exception)) if result.exception else "")
    for where in (server.client(password="wrong-" + PASSWORD), Sentinel([], password=PASSWORD), 7, PASSWORD.encode()):
        fails(lambda where=where: open_at(where), redisacc.RedisAccError)
    # Later failures.
    fails(lambda: acc.apply_grad([1, 2, 3]))
    fails(lambda: acc.take_grad(10**6, timeout=0.3))
    admin.hset("redisacc:{w}", "applied", "garbage")
    fails(lambda: acc.apply_grad([1, 2]))
    admin.hset("redisacc:{w}", "applied", "1")
    waiting = background(acc.take_grad, 10**6, timeout=3)
    until(lambda: acc.info().waiting)
    admin.config_set("requirepass", "another")
    admin.client_kill_filter(_type="normal", skipme=True)
    fails(lambda: acc.apply_grad([1, 2]))
    fails(lambda: waiting.result(30))
    admin.config_set("requirepass", PASSWORD)
    for handle in handles:
        handle.close()
    server.kill()
    fails(lambda: open_at(url))
    fails(lambda: acc._transport.call("PING"))
    fails(lambda: acc.apply_grad([1, 2]))
    seen += ears
    assert len(ears) > 10
    assert len(seen) > 100
    assert [text for text in seen if secrets_in(text)] == []


def test_a_server_that_a_program_starts_has_its_password_in_no_repr(daemon):
    # TLS clients carry the names of key files, which redis-py's own repr may show: ours doesn't.
    client = redis.Redis(host="127.0.0.1", port=1, password=PASSWORD, ssl=True, ssl_keyfile="geheim.pem")
    assert secrets_in(repr(connect(client))) == []
    context = ssl.create_default_context()
    assert secrets_in(repr(context)) == []
    client.close()
