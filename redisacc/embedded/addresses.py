"""Addresses on this machine at which a server listens, and what it asks for there: TCP ports and Unix sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import os
import platform
import socket
import stat
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import quote

import redis

from redisacc.errors import InvalidArgumentError, ServerError

__all__ = ["LOOPBACK", "TLS", "Address", "TCPAddress", "UnixAddress", "facts_in", "free_port", "is_loopback"]

LOOPBACK = "127.0.0.1"

# sockaddr_un.sun_path without its final zero byte: it has 108 bytes on Linux, 104 on macOS and the BSDs.
_SOCKET_PATH_LIMIT = 107 if platform.system() == "Linux" else 103


def is_loopback(host: str) -> bool:
    """Returns whether a name or an address always means this machine."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclasses.dataclass(frozen=True)
class TLS:
    """The files, in PEM format, with which servers and clients authenticate each other.

    Both sides must show certificates that the authority has signed. Names in certificates are not compared with
    addresses, because hosts join and leave; so the authority should sign for these hosts only.

    Attributes:
        certificate: the certificate of this host.
        key: its private key, without a passphrase.
        authority: the certificates of the authority.
    """

    certificate: Path
    key: Path
    authority: Path

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of a client of redis-py."""
        return {
            "ssl_certfile": str(self.certificate),
            "ssl_keyfile": str(self.key),
            "ssl_ca_certs": str(self.authority),
            "ssl_check_hostname": False,
        }

    def options(self) -> list[str]:
        """Returns the arguments of a server, but for its port."""
        files = ["--tls-cert-file", str(self.certificate), "--tls-key-file", str(self.key)]
        # Also between nodes, and from a replica to its master.
        return [*files, "--tls-ca-cert-file", str(self.authority), "--tls-cluster", "yes", "--tls-replication", "yes"]


class _Place(Protocol):
    """Where a server answers."""

    @property
    def url(self) -> str:
        """The URL for redis-py."""

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that a client of redis-py needs besides the URL."""

    def ask(self, *command: str | int, timeout: float = 5.0) -> Any:
        """Returns the reply of the server to a command as it is, its strings decoded.

        Raises:
            redis.RedisError: the server does not answer in time, or refuses the command.
        """
        # Each time a new connection: a server that was killed and started again would break an old one.
        options: dict[str, Any] = {**self.settings, "socket_timeout": timeout, "socket_connect_timeout": timeout}
        options |= {"decode_responses": True, "encoding_errors": "replace"}
        with contextlib.closing(redis.Redis.from_url(self.url, **options)) as client:
            # redis-py would make a dict of some replies.
            client.response_callbacks.clear()
            return client.execute_command(*command)  # type: ignore[no-untyped-call]


def facts_in(reply: object) -> dict[str, str]:
    """Returns the lines NAME:VALUE of a reply."""
    return dict(line.split(":", 1) for line in str(reply).splitlines() if ":" in line)


@dataclasses.dataclass(frozen=True)
class TCPAddress(_Place):
    """A TCP port on 127.0.0.1 and, where the machine has it, ::1; or on another address of this machine.

    Attributes:
        port: its number.
        host: the IP address at which the server listens.
        password: what a client needs. None means nothing.
        tls: the files for TLS. None means the server speaks plain TCP.

    Raises:
        InvalidArgumentError: the port isn't an int from 1 to 65535, the host isn't an IP address, or a server that
            other machines reach would have no password.
    """

    port: int
    host: str = LOOPBACK
    password: str | None = dataclasses.field(default=None, repr=False)
    tls: TLS | None = None

    def __post_init__(self) -> None:
        """Checks the port and the host."""
        if type(self.port) is not int or not 1 <= self.port <= 65535:
            raise InvalidArgumentError(f"port must be an int from 1 to 65535, not {self.port!r}")
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            raise InvalidArgumentError(f"host must be an IP address, not {self.host!r}") from None
        if self.password is None and not address.is_loopback:
            raise InvalidArgumentError(f"a server at {self.host} needs a password, because other machines reach it")

    def __str__(self) -> str:
        """Returns HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL for redis-py, with database 0 and without the password."""
        return f"{'redis' if self.tls is None else 'rediss'}://{self}/0"

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that a client of redis-py needs besides the URL."""
        settings = {} if self.tls is None else self.tls.settings
        return settings if self.password is None else {**settings, "password": self.password}


@dataclasses.dataclass(frozen=True)
class UnixAddress(_Place):
    """The absolute path of a Unix socket.

    Raises:
        InvalidArgumentError: the path is longer than the system allows.
    """

    path: Path

    # A Unix socket has mode 700 instead of a password.
    password: ClassVar[None] = None

    def __post_init__(self) -> None:
        """Checks the length of the path."""
        if len(os.fsencode(self.path)) > _SOCKET_PATH_LIMIT:
            raise InvalidArgumentError(
                f"the path of the socket is longer than the system's limit of {_SOCKET_PATH_LIMIT} bytes: {self.path}"
            )

    @property
    def url(self) -> str:
        """The URL for redis-py."""
        return f"unix://{quote(str(self.path))}"

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that a client of redis-py needs besides the URL: none."""
        return {}

    def check_unused(self) -> None:
        """Checks that a server may create its socket at the path. A starting server deletes whatever is there.

        Raises:
            ServerError: the path is a file, or a socket that is in use.
        """
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        except OSError as error:
            raise ServerError(f"cannot use the socket {self.path}: {error}") from error
        if not stat.S_ISSOCK(mode):
            raise ServerError(f"{self.path} exists and is not a socket")
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1)
                probe.connect(str(self.path))
        except ConnectionRefusedError:
            return  # left behind by a server that was killed
        except OSError as error:
            raise ServerError(f"cannot use the socket {self.path}: {error}") from error
        raise ServerError(f"the socket {self.path} is already in use: choose another path")


Address = TCPAddress | UnixAddress


def free_port() -> int:
    """Returns a TCP port that is unused on 127.0.0.1 and ::1 at this moment.

    Raises:
        ServerError: every port that was tried is in use.
    """
    for _ in range(100):
        with socket.socket(socket.AF_INET) as ipv4:
            ipv4.bind(("127.0.0.1", 0))
            port = int(ipv4.getsockname()[1])
            try:
                with socket.socket(socket.AF_INET6) as ipv6:
                    ipv6.bind(("::1", port))
            except OSError as error:
                # Any other error means that this machine has no ::1.
                if error.errno == errno.EADDRINUSE:
                    continue
            return port
    raise ServerError("no free TCP port was found on 127.0.0.1")
