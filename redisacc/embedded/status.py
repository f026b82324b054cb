"""Reads a server's own reports before a client library can use it."""

from __future__ import annotations

import dataclasses

from redisacc._interrupts import interrupt_in
from redisacc.embedded.addresses import Address

__all__ = ["Status", "ask_status"]


@dataclasses.dataclass(frozen=True)
class Status:
    """The state of the server that answers at an address.

    Attributes:
        pid: its process id; 0 if it reports none.
        ready: whether it has loaded its data.
        loaded_bytes: how much of its data it has loaded; None when it isn't loading.
    """

    pid: int
    ready: bool
    loaded_bytes: str | None


def ask_status(address: Address, timeout: float) -> Status | None:
    """Asks the server at the address for its status.

    This speaks the protocol by hand, because a client library raises on the errors of a server that is still loading.

    Args:
        address: where to ask.
        timeout: seconds to wait for the connection, and for each part of the answer.

    Returns:
        None if nothing answers in time, or something that isn't a Redis or Valkey server.
    """
    try:
        with address.connect(timeout) as connection, connection.makefile("rb") as replies:
            if address.password is not None:
                password = address.password.encode()
                connection.sendall(b"*2\r\n$4\r\nAUTH\r\n$%d\r\n%b\r\n" % (len(password), password))
                replies.readline()
            connection.sendall(b"PING\r\nINFO\r\n")
            ping = replies.readline()
            size = replies.readline()
            if not size.startswith(b"$"):
                return None
            info = replies.read(int(size[1:])).decode(errors="replace")
        fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
        return Status(
            pid=int(fields.get("process_id", 0)),
            ready=ping.strip() == b"+PONG",
            loaded_bytes=fields.get("loading_loaded_bytes"),
        )
    except (OSError, ValueError) as error:
        if interrupt_in(error) is not None:
            raise
        return None
