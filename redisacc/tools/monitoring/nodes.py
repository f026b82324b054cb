"""What servers say about themselves (INFO)."""

from __future__ import annotations

from dataclasses import dataclass

from redisacc._wire.replies import info_number, parse_info
from redisacc._wire.transport import Transport
from redisacc.errors import ServerError, ServerUnavailableError


@dataclass(frozen=True)
class Node:
    """A server, or a master of a cluster. A number is None if the server does not tell it.

    Attributes:
        address: where it is.
        version: its name and version, for example "Valkey 9.1.2"; "" if this user may not ask.
        used_memory: the bytes that it uses.
        maxmemory: the bytes that it may use; 0 if there is no limit.
        evicts: whether it removes keys when it is full, and gradients with them.
        clients: the number of connections.
        commands_per_second: the number of commands that it executes.
        received_per_second: the bytes that it receives.
        sent_per_second: the bytes that it sends.
    """

    address: str
    version: str = ""
    used_memory: int | None = None
    maxmemory: int | None = None
    evicts: bool = False
    clients: int | None = None
    commands_per_second: int | None = None
    received_per_second: float | None = None
    sent_per_second: float | None = None


def version_of(info: dict[str, str]) -> tuple[str, str]:
    """Returns "Redis" or "Valkey", and its version."""
    name = "Valkey" if "valkey_version" in info else "Redis"
    return name, info.get(f"{name.lower()}_version", "")


def read_nodes(transport: Transport) -> list[Node]:
    """Returns the server, or all masters of a cluster.

    Raises:
        ServerUnavailableError: a server does not answer.
    """
    try:
        replies, _ = transport.on_masters([("INFO",)])
    except ServerUnavailableError:
        raise
    except ServerError:
        # This user may not run INFO.
        return [Node(transport.address)]
    return [_node(address, parse_info(reply)) for address, [reply] in replies.items()]


def _node(address: str, info: dict[str, str]) -> Node:
    received, sent = (info_number(info, f"instantaneous_{way}_kbps") for way in ("input", "output"))
    maxmemory = _integer(info, "maxmemory")
    return Node(
        address,
        " ".join(version_of(info)).strip(),
        _integer(info, "used_memory"),
        maxmemory,
        bool(maxmemory) and info.get("maxmemory_policy") not in (None, "noeviction"),
        _integer(info, "connected_clients"),
        _integer(info, "instantaneous_ops_per_sec"),
        None if received is None else received * 1024,
        None if sent is None else sent * 1024,
    )


def _integer(info: dict[str, str], name: str) -> int | None:
    number = info_number(info, name)
    return None if number is None else int(number)
