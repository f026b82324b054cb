"""Addresses on this machine at which a server listens: TCP ports and Unix sockets."""

from __future__ import annotations

import dataclasses
import errno
import os
import platform
import socket
import stat
from pathlib import Path
from urllib.parse import quote

from redisacc.errors import InvalidArgumentError, ServerError

__all__ = ["Address", "TCPAddress", "UnixAddress", "free_port"]

# sockaddr_un.sun_path without its final zero byte: it has 108 bytes on Linux, 104 on macOS and the BSDs.
_SOCKET_PATH_LIMIT = 107 if platform.system() == "Linux" else 103


@dataclasses.dataclass(frozen=True)
class TCPAddress:
    """A TCP port on 127.0.0.1 and, where the machine has it, ::1.

    Raises:
        InvalidArgumentError: the port isn't an int from 1 to 65535.
    """

    port: int

    def __post_init__(self) -> None:
        """Checks the port."""
        if type(self.port) is not int or not 1 <= self.port <= 65535:
            raise InvalidArgumentError(f"port must be an int from 1 to 65535, not {self.port!r}")

    @property
    def url(self) -> str:
        """The URL for redis-py, with database 0."""
        return f"redis://127.0.0.1:{self.port}/0"

    def connect(self, timeout: float) -> socket.socket:
        """Returns a connection. `timeout`, in seconds, holds for connecting and for each later operation."""
        return socket.create_connection(("127.0.0.1", self.port), timeout)


@dataclasses.dataclass(frozen=True)
class UnixAddress:
    """The absolute path of a Unix socket.

    Raises:
        InvalidArgumentError: the path is longer than the system allows.
    """

    path: Path

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

    def connect(self, timeout: float) -> socket.socket:
        """Returns a connection. `timeout`, in seconds, holds for connecting and for each later operation."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(timeout)
            connection.connect(str(self.path))
        except BaseException:
            connection.close()
            raise
        return connection

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
            self.connect(timeout=1).close()
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
