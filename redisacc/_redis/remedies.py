"""What to do about a server that cannot be reached, told from how the attempts fail."""

from __future__ import annotations

import re
from typing import Any

from redisacc._redis.faults import SilentError

START = (
    "Start one with `redisacc server` (pip install 'redisacc[cli,server]'), or name another one with redis= or "
    "REDISACC_URL"
)
_SILENT = (
    "Something listens there, but sends no reply: it hangs, or speaks TLS (then use rediss://), or is no Redis server"
)
_SILENT_TLS = "Look whether a server runs there. If it does not speak TLS, use redis:// instead of rediss://"
_PLAIN = "Something listens there, but ends the connection. If it speaks TLS, use rediss:// instead of redis://"

# Texts of errors of TLS → the remedy. The first that is found counts.
_OF_TLS = tuple(
    (re.compile(pattern, re.IGNORECASE), remedy)
    for pattern, remedy in (
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
)
# How a server that speaks TLS answers what is not: it ends the connection, some after an alert, of type 0x15.
_ENDED = re.compile(r"reset by peer|closed (the )?connection|connection closed|\\x15", re.IGNORECASE)
_NO_REPLY = re.compile(r"timeout reading", re.IGNORECASE)
_REFUSED = re.compile(r"connection refused", re.IGNORECASE)


def speaks_tls(pool: Any) -> bool:
    """Returns whether the connections of a pool speak TLS."""
    return "SSL" in getattr(getattr(pool, "connection_class", None), "__name__", "")


def remedy_for(error: BaseException, reason: str, *, tls: bool) -> str:
    """Returns what to do about a server that cannot be reached.

    Args:
        error: how the last attempt failed.
        reason: its text.
        tls: whether the attempt was made over TLS.
    """
    if _REFUSED.search(reason):
        return START
    if tls:
        for pattern, remedy in _OF_TLS:
            if pattern.search(reason):
                return remedy
    elif _ENDED.search(reason):
        return _PLAIN
    elif isinstance(error, SilentError) or _NO_REPLY.search(reason):
        return _SILENT
    return START
