"""What to do about a server that cannot be reached, told from how the attempts fail."""

from __future__ import annotations

import re
from typing import Any

from redisacc._redis.faults import SilentError

START = (
    "Start one with `redisacc server` (pip install 'redisacc[server]'), or name another one with redis= or REDISACC_URL"
)
START_NODES = "Start the nodes of the cluster, or name another one with redis= or REDISACC_URL"
_SILENT = (
    "Something listens there, but sends no reply: it hangs, or speaks TLS (then use rediss://), or is no Redis server"
)
_SILENT_TLS = "Look whether a server runs there. If it does not speak TLS, use redis:// instead of rediss://"
_NO_WAY = "Nothing at that address answers this machine: check the address, and whether a firewall is in between"
_PLAIN = "Something listens there, but ends the connection. If it speaks TLS, use rediss:// instead of redis://"


def _table(*rows: tuple[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    """Returns texts of errors, each with the remedy. The first that is found counts."""
    return tuple((re.compile(pattern, re.IGNORECASE), remedy) for pattern, remedy in rows)


# With TLS and without it.
_ALWAYS = _table(
    ("connection refused", START),
    (
        "name or service not known|nodename nor servname|name resolution|no address associated",
        "This machine cannot resolve the name of the host: check it",
    ),
    ("no route to host|unreachable", _NO_WAY),
    (
        "too many connections|no connection available",
        "All connections of this client's pool are in use: give it a larger max_connections",
    ),
    (
        "max number of clients",
        "The server has as many clients as its maxclients allows: close some of them, or raise it",
    ),
    ("no master found", "Check the name of the master, and the addresses of the Sentinels"),
)
_OF_TLS = _table(
    (
        "certificate verify failed.*mismatch",
        "The certificate is made out to another name: connect to that name",
    ),
    ("certificate verify failed.*expired", "Renew the server's certificate, or set this machine's clock"),
    (
        "certificate verify failed",
        "This machine trusts no authority that signed the server's certificate: name the file of that authority's "
        "certificate in the URL, as in rediss://HOST:PORT?ssl_ca_certs=FILE",
    ),
    (
        "alert certificate required|alert handshake failure",
        "The server asks for a certificate: name its files in the URL with ssl_certfile=FILE and ssl_keyfile=FILE",
    ),
    (
        "alert unknown ca|alert bad certificate|alert certificate",
        "The server does not trust this client's certificate: use one that an authority of the server has signed",
    ),
    (
        "no such file|PEM lib|X509|key values mismatch",
        "Check the files that ssl_ca_certs=, ssl_certfile= and ssl_keyfile= name: one is missing or cannot be used",
    ),
    (
        "wrong version number|record layer failure|unexpected eof|eof occurred|unknown protocol",
        "It does not speak TLS there: use redis:// instead of rediss://",
    ),
    ("timed? ?out|reset by peer|closed", _SILENT_TLS),
)
_WITHOUT_TLS = _table(
    # A server that speaks TLS ends a connection that does not, some after an alert, of type 0x15.
    (r"reset by peer|closed (the )?connection|connection closed|\\x15", _PLAIN),
    ("timeout reading", _SILENT),
    ("timeout connecting", _NO_WAY),
    # The file of a Unix socket.
    ("no such file", START),
    ("protocol error|not RESP", "Something listens there that is no Redis server: check the address"),
)


def speaks_tls(pool: Any) -> bool:
    """Returns whether the connections of a pool speak TLS."""
    return "SSL" in getattr(getattr(pool, "connection_class", None), "__name__", "")


def remedy_for(error: BaseException, reason: str, *, tls: bool, cluster: bool) -> str:
    """Returns what to do about a server that cannot be reached; "" if that is unknown.

    Args:
        error: how the last attempt failed.
        reason: its text.
        tls: whether the attempt was made over TLS.
        cluster: whether the way leads to a cluster.
    """
    for pattern, remedy in (*_ALWAYS, *(_OF_TLS if tls else _WITHOUT_TLS)):
        if pattern.search(reason):
            return START_NODES if cluster and remedy is START else remedy
    return _SILENT if isinstance(error, SilentError) and not tls else ""
