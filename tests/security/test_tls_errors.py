"""A way to a server that is wrong about TLS: the error says what is wrong, and what to do about it."""

import re
import socket
import ssl
import traceback

import pytest
from click.testing import CliRunner
from support.clients import tls_gateway

import redisacc
from redisacc.tools.cli import main

pytestmark = [pytest.mark.servers("valkey")]


def gateway(port, certificates, *, asks=False, name="server"):
    """Yields a port that speaks TLS and leads to another one.

    Args:
        port: the other one.
        certificates: as the fixture has them.
        asks: whether clients need a certificate.
        name: which certificate it has.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates[name], certificates[f"{name}-key"])
    context.load_verify_locations(certificates["authority"])
    context.verify_mode = ssl.CERT_REQUIRED if asks else ssl.CERT_NONE
    return tls_gateway(port, context)


AUTHORITY = "name the file of that authority's certificate in the URL, as in rediss://HOST:PORT?ssl_ca_certs=FILE"
FILES = "Check the files that ssl_ca_certs=, ssl_certfile= and ssl_keyfile= name"
# A server that waits for the rest of what it takes for a command is silent.
NO_TLS = "Look whether a server runs there. If it does not speak TLS, use redis:// instead of rediss://"
# How the way is wrong → the URL, and what the error says. {asking} is a port where clients need a certificate, and
# {elsewhere} one whose server has a certificate for another name, {late} one whose certificate has expired.
WRONG = {
    "an authority that this machine lacks": ("rediss://localhost:{tls}", AUTHORITY),
    "another authority": ("rediss://localhost:{tls}?ssl_ca_certs={stranger}", AUTHORITY),
    "another name": (
        "rediss://localhost:{elsewhere}?ssl_ca_certs={authority}",
        "made out to another name: connect to that name",
    ),
    "a certificate of last year": (
        "rediss://localhost:{late}?ssl_ca_certs={authority}",
        "Renew the server's certificate, or set this machine's clock",
    ),
    "no certificate of its own": (
        "rediss://localhost:{asking}?ssl_ca_certs={authority}",
        "name its files in the URL with ssl_certfile=FILE and ssl_keyfile=FILE",
    ),
    "a certificate of a stranger": (
        "rediss://localhost:{asking}?ssl_ca_certs={authority}&ssl_certfile={impostor}&ssl_keyfile={impostor-key}",
        "does not trust this client's certificate: use one that an authority of the server has signed",
    ),
    "no such file": ("rediss://localhost:{tls}?ssl_ca_certs=/nowhere.pem", FILES),
    "no certificate in the file": ("rediss://localhost:{tls}?ssl_ca_certs={server-key}", FILES),
    "no key": ("rediss://localhost:{tls}?ssl_ca_certs={authority}&ssl_certfile={client}", FILES),
    "no TLS to a server with TLS": ("redis://localhost:{tls}", "If it speaks TLS, use rediss:// instead of redis://"),
    "TLS to a server without": ("rediss://localhost:{plain}", NO_TLS),
}


@pytest.fixture
def ports(real_server, certificates):
    with (
        gateway(real_server.port, certificates) as tls,
        gateway(real_server.port, certificates, asks=True) as asking,
        gateway(real_server.port, certificates, name="client") as elsewhere,
        gateway(real_server.port, certificates, name="expired") as late,
    ):
        of = {"plain": real_server.port, "tls": tls, "asking": asking, "elsewhere": elsewhere, "late": late}
        yield {**certificates, **of}


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("wrong", WRONG)
def test_an_error_says_what_is_wrong_about_tls_and_no_secret(ports, wrong, cluster, durations):
    durations(opening=0.2, handshake=1.0)
    url, said = WRONG[wrong]
    url = url.format(**ports).replace("://", f"{'+cluster' if cluster else ''}://:geheim@")
    message = f"^no Redis server answers at .*{re.escape(said)}"
    with pytest.raises(redisacc.ServerUnavailableError, match=message) as failure:
        redisacc.ConditionalAccumulator("float32", [1], "w", redis=url)
    assert "Start one" not in str(failure.value)
    assert "geheim" not in "".join(traceback.format_exception(failure.value))


def test_doctor_says_what_is_wrong_about_tls(durations, ports):
    durations(opening=0.2)
    said = CliRunner().invoke(main, ["doctor", "--redis", f"rediss://localhost:{ports['tls']}"])
    assert said.exit_code == 6
    assert AUTHORITY in " ".join(said.stderr.split())


def test_the_right_way_works(ports):
    own = "ssl_certfile={client}&ssl_keyfile={client-key}".format(**ports)
    for port, more in ((ports["tls"], ""), (ports["asking"], f"&{own}")):
        url = f"rediss://localhost:{port}?ssl_ca_certs={ports['authority']}{more}"
        with redisacc.ConditionalAccumulator("float32", [1], redis=url) as acc:
            assert acc.num_accumulated() == 0


def test_a_single_server_with_tls_is_named_as_such(ports):
    url = f"rediss+cluster://localhost:{ports['tls']}?ssl_ca_certs={ports['authority']}"
    with pytest.raises(redisacc.ServerError, match="is not a node of a Redis Cluster: give redis= a URL rediss://"):
        redisacc.ConditionalAccumulator("float32", [1], redis=url)


def test_where_something_is_silent_the_error_says_so(durations):
    durations(opening=0.2, handshake=0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(redisacc.ServerUnavailableError, match="Something listens there, but sends no reply"):
            redisacc.ConditionalAccumulator("float32", [1], redis=url)
