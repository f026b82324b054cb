"""The meeting point: a server on the meeting host, at which each host has a key, and the agreement has one."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from redisacc.embedded.addresses import TLS
from redisacc.tools.launch.hosts.documents import (
    LARGEST,
    MOST_HOSTS,
    Agreement,
    DocumentError,
    Host,
    decode_agreement,
    decode_host,
    encode,
)

__all__ = ["LEASE", "Meet", "MeetingPoint", "can_listen_at", "own_address_towards"]

# A host that has not shown for this many seconds that it lives is gone.
LEASE = 5.0

_TIMEOUT = 2.0

_AGREEMENT = "redisacc:meeting:agreement"
_HOST = "redisacc:meeting:host:"


class Meet:
    """The address at which the hosts meet.

    Args:
        host: a name or an IP address.
        port: a TCP port.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port

    def __str__(self) -> str:
        """Returns HOST:PORT, as the command says it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def resolve(self) -> str:
        """Returns its IP address.

        Raises:
            OSError: the name has no address at the moment.
        """
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        # IPv4 first, because a name often has both and the nodes announce one.
        return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def can_listen_at(host: str, port: int) -> bool | None:
    """Returns whether a server can listen at an address: None if it is another machine's, False if it is taken.

    Raises:
        OSError: it can't, for another reason.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # Connections that have ended shortly before do not count, as for a server.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # With SO_REUSEADDR, two may bind, but only one may listen.
            probe.listen()
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return None
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def own_address_towards(host: str, port: int) -> str:
    """Returns the address by which this machine reaches another one. Nothing is sent.

    Raises:
        OSError: there is no way to it.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


class MeetingPoint:
    """A client of the meeting point. Its methods block for two seconds at most, and raise redis.RedisError.

    Args:
        meet: its address. A name may have another IP address with each connection.
        password: what it asks for.
        tls: the files for TLS.
    """

    def __init__(self, meet: Meet, password: str | None, tls: TLS | None) -> None:
        settings: dict[str, Any] = {} if tls is None else {"ssl": True, **tls.settings}
        self._client = redis.Redis(
            meet.host,
            meet.port,
            password=password,
            socket_timeout=_TIMEOUT,
            socket_connect_timeout=_TIMEOUT,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **settings,
        )

    def come(self, host: Host) -> bool:
        """Writes what a new command says about its host. False: another command of this host lives."""
        return bool(self._client.set(_HOST + host.name, encode(host), nx=True, px=_ms(LEASE)))

    def renew(self, host: Host) -> bool:
        """Writes what a host says about itself. False: another command has its name, and nothing is written."""
        key = _HOST + host.name
        before = self._read([key])[0]
        if before:
            with contextlib.suppress(DocumentError):
                if decode_host(before).run != host.run:
                    return False
        self._client.set(key, encode(host), px=_ms(LEASE))
        return True

    def leave(self, name: str) -> None:
        """Removes what a host said about itself."""
        self._client.delete(_HOST + name)

    def hosts(self) -> dict[str, Host]:
        """Returns what each host that lives says about itself, by its name. What is no such document is left out."""
        names = []
        for key in self._client.scan_iter(match=_HOST + "*", count=1000):
            names.append(key)
            if len(names) >= 4 * MOST_HOSTS:
                break
        found = {}
        for key, data in zip(names, self._read(names), strict=True):
            # One that is empty has just expired.
            with contextlib.suppress(DocumentError):
                host = decode_host(data)
                if key == (_HOST + host.name).encode():
                    found[host.name] = host
        return found

    def _read(self, keys: Sequence[str | bytes]) -> list[bytes]:
        """Returns the documents at these keys, and no more of each than a document may have; b"" if there is none."""
        with self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.getrange(key, 0, LARGEST)
            found: list[bytes] = pipeline.execute()
        return found

    def write(self, agreement: Agreement) -> None:
        """Writes the agreement. Only the meeting host does."""
        self._client.set(_AGREEMENT, encode(agreement))

    def agreement(self) -> Agreement | None:
        """Returns the agreement; None if the meeting host has not written one yet.

        Raises:
            DocumentError: something else is in its place.
        """
        data = self._read([_AGREEMENT])[0]
        return decode_agreement(data) if data else None

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
