"""The slots of a Redis Cluster: which slot a key is in, and which node owns it.

A key is in one of 16,384 slots, and each slot belongs to one master. If the key has braces, only the text between them
counts, so all keys of an accumulator are in one slot.
"""

from __future__ import annotations

import binascii
import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from redisacc._text import shown
from redisacc._wire.faults import BrokenError, ReplyError
from redisacc._wire.sockets import Argument, Command

SLOTS = 16_384

# The commands without a key: any node may execute them.
_KEYLESS = frozenset(
    ("ACL", "ASKING", "CLIENT", "CLUSTER", "CONFIG", "DBSIZE", "INFO", "PING", "SCAN", "SCRIPT", "TIME", "WAIT")
)
# What a node may announce: a hostname, an IPv4 address or an IPv6 address.
_HOST = re.compile(r"[0-9A-Za-z_.:%-]{1,255}")
_REDIRECTION = re.compile(r"(?:MOVED|ASK) (?P<slot>\d{1,5}) (?P<host>\S*):(?P<port>\d{1,5})")
# The most nodes that a map may name. Clusters have at most about a thousand.
_MOST_NODES = 65_536


class Address(NamedTuple):
    """Where a node is reached."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def key_slot(key: Argument) -> int:
    """Returns the slot of a key: the CRC16 of its hash tag, or of the whole key if it has none, modulo 16,384."""
    # Mostly a str. The cache makes this cheap for keys that come again.
    return _slot(key if type(key) is str or isinstance(key, bytes) else str(key))


@lru_cache(maxsize=4096)
def _slot(key: str | bytes) -> int:
    data = key.encode() if isinstance(key, str) else key
    start = data.find(b"{")
    if start >= 0:
        end = data.find(b"}", start + 1)
        # An empty tag is none.
        if end > start + 1:
            data = data[start + 1 : end]
    return binascii.crc_hqx(data, 0) % SLOTS


def slot_of(command: Command) -> int | None:
    """Returns the slot of the first key of a command, or None if it has no key.

    The server refuses a command whose keys are in different slots.
    """
    name = command[0]
    if name in ("EVALSHA", "EVAL"):
        return key_slot(command[3]) if command[2] else None
    if name in _KEYLESS:
        return None
    return key_slot(command[2 if name == "MEMORY" else 1])


def slots_of(commands: Iterable[Command]) -> set[int]:
    """Returns the slots of the keys of several commands."""
    slots = {slot_of(command) for command in commands}
    slots.discard(None)
    return slots  # type: ignore[return-value]


def redirection(error: ReplyError, asked: Address) -> Address:
    """Returns the node that a MOVED or an ASK names.

    Args:
        error: the refusal.
        asked: the node that sent it. It leaves out the host if that is its own.

    Raises:
        BrokenError: the refusal names no address.
    """
    match = _REDIRECTION.match(str(error))
    if match is None:
        raise BrokenError(f"{asked} redirects to something that is not an address: {shown(str(error))}")
    return _address(match["host"], int(match["port"]), asked)


def _address(host: str, port: object, asked: Address) -> Address:
    """Returns an address that a node announced, checked.

    Raises:
        BrokenError: it is not an address; or it is "?", by which a node says that it has no hostname.
    """
    if type(port) is not int or not 1 <= port <= 65_535:
        raise BrokenError(f"{asked} names a node with the port {shown(port)}, not 1 to 65535")
    if not host:
        # A node that does not know its own address leaves it out: it is the one where it was asked.
        return Address(asked.host, port)
    if host == "?":
        raise BrokenError(
            f"{asked} names a node at port {port} without a hostname: set cluster-announce-hostname on every node, or "
            "cluster-preferred-endpoint-type to ip"
        )
    if _HOST.fullmatch(host) is None:
        raise BrokenError(f"{asked} names a node with the host {shown(host)}, which is no host")
    return Address(host, port)


class SlotMap:
    """Which master owns which slots, as one node knew it at one moment. It never changes.

    Args:
        ranges: the first slot of each range, the last one, its master, and the replicas of that.
        asked: the node that sent them.

    Attributes:
        masters: the masters that own slots, in the order of the first slot of each.
        replicas: master → its replicas.
        uncovered: the number of slots without an owner.

    Raises:
        BrokenError: a slot has two owners.
    """

    def __init__(self, ranges: Iterable[tuple[int, int, Address, tuple[Address, ...]]], asked: Address) -> None:
        self._owners: list[Address | None] = [None] * SLOTS
        self.replicas: dict[Address, tuple[Address, ...]] = {}
        for start, end, master, replicas in sorted(ranges):
            if self._owners[start] is not None:
                raise BrokenError(f"{asked}: CLUSTER SLOTS names two owners of slot {start}")
            self._owners[start : end + 1] = [master] * (end + 1 - start)
            self.replicas[master] = replicas
        self.masters = tuple(self.replicas)
        self.uncovered = self._owners.count(None)

    def owner(self, slot: int) -> Address | None:
        """Returns the master that owns a slot, or None if none does."""
        return self._owners[slot]

    @property
    def nodes(self) -> tuple[Address, ...]:
        """All masters, and after them all replicas."""
        return tuple(dict.fromkeys(chain(self.masters, *self.replicas.values())))

    @classmethod
    def of_reply(cls, reply: Any, asked: Address, remap: Callable[[Address], Address] = lambda node: node) -> SlotMap:
        """Returns the map in a reply to CLUSTER SLOTS.

        Args:
            reply: the reply.
            asked: the node that sent it.
            remap: turns an address that it names into the one at which the node is reached from here.

        Raises:
            BrokenError: it cannot be such a reply, or it names an owner that has no address.
        """
        if not isinstance(reply, list) or len(reply) > SLOTS:
            raise BrokenError(f"{asked}: CLUSTER SLOTS replied {shown(reply)}")
        ranges, nodes = [], 0
        for entry in reply:
            match entry:
                case [int(start), int(end), list(master), *replicas] if 0 <= start <= end < SLOTS:
                    nodes += 1 + len(replicas)
                    if nodes > _MOST_NODES:
                        raise BrokenError(f"{asked}: CLUSTER SLOTS names more than {_MOST_NODES} nodes")
                    ranges.append((start, end, remap(_node(master, asked)), tuple(map(remap, _nodes(replicas, asked)))))
                case _:
                    raise BrokenError(f"{asked}: CLUSTER SLOTS replied {shown(entry)} for some slots")
        return cls(ranges, asked)


def _node(entry: object, asked: Address) -> Address:
    match entry:
        case [bytes() | str() | None as host, port, *_]:
            text = host.decode(errors="replace") if isinstance(host, bytes) else host or ""
            return _address(text, port, asked)
    raise BrokenError(f"{asked}: CLUSTER SLOTS describes a node as {shown(entry)}")


def _nodes(entries: Iterable[object], asked: Address) -> Iterator[Address]:
    """Yields the replicas that have an address. Nothing depends on the others."""
    for entry in entries:
        with contextlib.suppress(BrokenError):
            yield _node(entry, asked)
