"""Writes parts to partitions, on all nodes at once, and proves that they are there for good."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from redisacc._format.buffered import PART_MS
from redisacc._format.keys import PartitionedKeys
from redisacc._protocol.scripts import confirmed, wait_commands
from redisacc._wire.sockets import Command, Pieces
from redisacc._wire.transport import Hint, Transport


def write_parts(
    transport: Transport,
    keys: PartitionedKeys,
    parts_of: Mapping[str, Sequence[memoryview | Pieces] | Mapping[int, memoryview | Pieces]],
    *,
    min_replicas: int = 0,
    lease_ms: int = 0,
    hints: Mapping[int, Hint] | None = None,
) -> list[int] | None:
    """Writes the parts of an attempt that is registered.

    Args:
        transport: the way to the nodes.
        keys: the keys of the accumulator, or of the parameters, with their partitions.
        parts_of: id → the parts, all or some by their numbers, of each gradient or blob. No other attempt uses this id.
        min_replicas: how many replicas of each node have to confirm the parts; 0: none are asked.
        lease_ms: the expiry that parts keep, in milliseconds; 0: none.
        hints: number of a part → what its node does after it has stored that part; None means nothing.

    Returns:
        How many replicas of each node have the parts, if they were asked; None if a part is not there.
    """
    batches: dict[str, list[Command]] = {}
    lengths: dict[str, list[int]] = {}
    # With replicas to wait for, the length comes from a write that changes nothing. Valkey's WAIT asks for what its own
    # connection wrote last, and when a batch is sent again, SET and PERSIST find their work done and write nothing: it
    # would count replicas that lack the parts. APPEND always writes.
    measure: Command = ("APPEND", b"") if min_replicas else ("STRLEN",)
    for owner, parts in parts_of.items():
        for number, part in parts.items() if isinstance(parts, Mapping) else enumerate(parts):
            key, partition = keys.part(owner, number), keys.partition(number)
            # If a connection breaks, this is sent again, and a copy of it may arrive at any time, also after the parts
            # are in use. NX: it must not give an expiry to a part that is there.
            batch = batches.setdefault(partition, [])
            batch.append(("SET", key, part, "NX", "PX", PART_MS))
            batch += [("PEXPIRE", key, lease_ms) if lease_ms else ("PERSIST", key), (measure[0], key, *measure[1:])]
            if hints and number in hints:
                batch.append(hints[number])
            lengths.setdefault(partition, []).append(part.nbytes)
    replicate = wait_commands(min_replicas)
    found = transport.scatter(list(batches.values()), after=replicate)
    replicas: list[int] = []
    for (partition, batch), replies in zip(batches.items(), found, strict=True):
        if replicate:
            replicas.append(confirmed(partition, [replies.pop()]))
        # The length proves that the part is there. It is looked up after the expiry was removed, so it will stay.
        there = [reply for command, reply in zip(batch, replies, strict=True) if command[0] == measure[0]]
        if there != lengths[partition]:
            return None
    return replicas


def call_nodes(transport: Transport, commands: Sequence[Command]) -> list[Any]:
    """Returns the replies to commands about parts, which go to all nodes at once. Each begins with its name and key.

    Those about a part are executed in their order.
    """
    places: dict[str, list[int]] = {}
    for place, command in enumerate(commands):
        # All keys of a partition have the same text before the second brace.
        places.setdefault(str(command[1]).partition("}")[0], []).append(place)
    batches = [[commands[place] for place in of] for of in places.values()]
    replies = transport.scatter(batches) if batches else []
    found = dict(zip(chain(*places.values()), chain(*replies), strict=True))
    return [found[place] for place in range(len(commands))]
