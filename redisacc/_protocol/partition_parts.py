"""Writes parts to partitions, on all nodes at once, and proves that they are there for good."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from redisacc._format.buffered import STAGING_MS
from redisacc._format.keys import PartitionedKeys
from redisacc._redis.fast_socket import Command, Pieces
from redisacc._redis.transport import Transport
from redisacc._text import shown
from redisacc.errors import CorruptDataError

# The commands whose reply is the length of a part.
_MEASURES = ("STRLEN", "APPEND")

# Returns the messages that follow a part, given the position of the partition and the number of the part.
Messages = Callable[[int, int], Sequence[Command]]


def write_parts(
    transport: Transport,
    keys: PartitionedKeys,
    parts_of: Mapping[str, Sequence[memoryview | Pieces]],
    *,
    lease_ms: int = 0,
    replicate: Sequence[Command] = (),
    messages: Messages | None = None,
) -> list[int] | None:
    """Writes the parts of attempts that are registered.

    Args:
        transport: the way to the nodes.
        keys: the keys of the accumulator, or of the parameters, with their partitions.
        parts_of: id → the parts, of each gradient or blob. No other attempt uses this id.
        lease_ms: the expiry that parts keep, in milliseconds; 0: none.
        replicate: the command that waits until replicas of a node have its parts; empty: none are asked.
        messages: what each node is to tell takers and reducers; None: nothing.

    Returns:
        How many replicas of each node have the parts, if they were asked; None if a part is not there.
    """
    # By the position of the partition. There may be fewer parts than there are partitions.
    batches: dict[int, list[Command]] = {}
    lengths: dict[int, list[int]] = {}
    for owner, parts in parts_of.items():
        for number, part in enumerate(parts):
            key, position = keys.part(owner, number), number % len(keys.partitions)
            lasting: Command = ("PEXPIRE", key, lease_ms) if lease_ms else ("PERSIST", key)
            batch = batches.setdefault(position, [])
            # If a connection breaks, this is sent again, and a copy of it may arrive at any time, also after the parts
            # are in use. NX: it must not give an expiry to a part that is there.
            batch += [("SET", key, part, "NX", "PX", STAGING_MS), lasting, _measure(key, confirmed=bool(replicate))]
            lengths.setdefault(position, []).append(part.nbytes)
            if messages is not None:
                batch += messages(position, number)
    found = transport.scatter([[*batch, *replicate] for batch in batches.values()])
    replicas: list[int] = []
    for (position, batch), replies in zip(batches.items(), found, strict=True):
        if replicate:
            confirmed = replies.pop()
            if not isinstance(confirmed, int):
                where = keys.partition(position)
                raise CorruptDataError(f"{where}: WAIT replied {shown(confirmed)}, not a number of replicas")
            replicas.append(confirmed)
        # The length proves that the part is there. It is looked up after the expiry was removed, so it will stay.
        there = [reply for command, reply in zip(batch, replies, strict=True) if command[0] in _MEASURES]
        if there != lengths[position]:
            return None
    return replicas


def _measure(key: str, *, confirmed: bool) -> Command:
    """Returns the command that replies with the length of a part, 0 if it is not there.

    With replicas to wait for, it is a write that changes nothing: Valkey's WAIT asks for what its own connection wrote
    last. When a batch is sent again, SET and PERSIST find their work done and write nothing, so WAIT would count
    replicas that lack the parts. APPEND always writes.
    """
    return ("APPEND", key, b"") if confirmed else ("STRLEN", key)


def are_there(transport: Transport, parts: Sequence[tuple[str, int]]) -> bool:
    """Returns whether all of these parts are there, given the key of each and its length in bytes.

    Asks all nodes at once, as long as part K of everything lies in the same partition.
    """
    if not parts:
        return True
    batches: dict[str, list[tuple[str, int]]] = {}
    for key, length in parts:
        # What comes before the closing brace is the same for all keys of a partition.
        batches.setdefault(key.partition("}")[0], []).append((key, length))
    found = transport.scatter([[("STRLEN", key) for key, _ in batch] for batch in batches.values()])
    return found == [[length for _, length in batch] for batch in batches.values()]
