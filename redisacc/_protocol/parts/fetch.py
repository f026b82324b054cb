"""Fetches parts when all of them are known from the beginning, and checks the lengths of parts on the server."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, TypeVar

import numpy as np

from redisacc._arrays.validation import Array
from redisacc._format.buffered import BufferedGradient, PartMissingError
from redisacc._format.keys import Keys, ParameterKeys
from redisacc._format.parameter_record import Blob
from redisacc._protocol.parts.write import call_nodes
from redisacc._wire.lanes import LANES
from redisacc._wire.sockets import Command
from redisacc._wire.transport import Transport
from redisacc.errors import CorruptDataError

# A gradient, or a blob of a version, to which parts belong.
Owner = TypeVar("Owner")

# The source of the stated lengths of parts of parameters, for messages.
STATED_BY = "the record"

# If headers or a record announce more bytes than this, the server is asked for the lengths before memory is allocated.
TRUSTED_BYTES = 64 * 2**20


@dataclass(slots=True, eq=False, frozen=True)
class _WholePart:
    """A part that is on its way to its place."""

    key: str
    lane: int
    place: memoryview


class WholeParts:
    """Parts that are on their way, each to its place in memory.

    Args:
        homes: the prefix of the keys of each partition; empty if there are none.
        stated_by: the source of their stated lengths, for messages: "its header" or "the record".
        lanes: how many connections to use if there are no partitions.
        parts: the key of each part; its number, counted from 0, in its gradient or blob; and its place.

    Attributes:
        lanes, homes: as ``Arrivals`` describes them.
    """

    def __init__(
        self, homes: Sequence[str], stated_by: str, lanes: int, parts: Iterable[tuple[str, int, Array]]
    ) -> None:
        self.homes = homes
        self.lanes = len(homes) or lanes
        self._stated_by = stated_by
        self._awaited = [_WholePart(key, number % self.lanes, place.data) for key, number, place in parts]

    # Arrivals of sockets:

    def wanted(self) -> list[_WholePart]:
        """Returns the parts that have not arrived."""
        return list(self._awaited)

    def more(self) -> list[_WholePart]:
        """Returns none: everything was wanted from the beginning."""
        return []

    def begin(self, part: _WholePart, length: int) -> memoryview:
        """Returns where a part goes, given its length in bytes."""
        if length != len(part.place):
            raise wrong_length(part.key, length, len(part.place), self._stated_by)
        return part.place

    def missing(self, part: _WholePart) -> None:
        """Raises PartMissingError."""
        raise PartMissingError(part.key)

    def finish(self, part: _WholePart) -> None:
        """Notes that a part has arrived."""
        self._awaited.remove(part)


def fetch_gradient(transport: Transport, keys: Keys, gradient: BufferedGradient) -> Array:
    """Returns the bytes of a gradient that has parts.

    Raises:
        PartMissingError: a part is not there.
        CorruptDataError: a part has another length than its header says.
    """
    data = np.empty(gradient.nbytes, np.uint8)
    ends = accumulate(gradient.lengths)
    parts = [
        (keys.part(gradient.id, number), number, data[end - length : end])
        for number, (length, end) in enumerate(zip(gradient.lengths, ends, strict=True))
    ]
    transport.fetch(WholeParts(keys.homes, "its header", LANES, parts))
    return data


def fetch_blobs(
    transport: Transport,
    keys: ParameterKeys,
    blobs: Sequence[Blob],
    allocate: Callable[[], Sequence[Array]],
    *,
    fetched: Mapping[str, Any] = {},
    in_place: Collection[str] = (),
) -> Sequence[Array]:
    """Fetches blobs of parameters, and returns their bytes.

    Memory is allocated only after the server has shown that it has as many bytes.

    Args:
        transport: the way to the nodes.
        keys: the keys of the parameters, with their partitions.
        blobs: the blobs.
        allocate: returns the memory of each.
        fetched: the values of some keys of parts.
        in_place: the keys of parts that are in the memory already.

    Raises:
        PartMissingError: a part is not there.
        CorruptDataError: a part has another length than the record says.
    """
    parts = [blob.parts(keys) for blob in blobs]
    check_parts(transport, list(chain.from_iterable(parts)), STATED_BY)
    memory, missing = allocate(), list[tuple[str, int, Array]]()
    for of_blob, data in zip(parts, memory, strict=True):
        start = 0
        for number, (key, length) in enumerate(of_blob):
            place = data[start : start + length]
            start += length
            if key in in_place:
                continue
            there = fetched.get(key)
            if not isinstance(there, bytes):
                missing.append((key, number, place))
            elif len(there) == length:
                place[:] = np.frombuffer(there, np.uint8)
            else:
                raise wrong_length(key, len(there), length, STATED_BY)
    if missing:
        fetch_parts(transport, keys, missing)
    return memory


def fetch_parts(transport: Transport, keys: ParameterKeys, parts: Iterable[tuple[str, int, Array]]) -> None:
    """Fetches parts of blobs, as ``WholeParts`` describes them."""
    # A reader uploads nothing meanwhile, so one connection to each node is as fast as several.
    transport.fetch(WholeParts(keys.homes, STATED_BY, 1, parts))


def fetched_blobs(transport: Transport, keys: ParameterKeys, blobs: Sequence[Blob]) -> Sequence[Array]:
    """Returns the bytes of blobs of parameters, in new memory. See ``fetch_blobs``."""
    return fetch_blobs(transport, keys, blobs, lambda: [np.empty(blob.nbytes, np.uint8) for blob in blobs])


def wrong_length(key: str, actual: int, stated: int, stated_by: str) -> CorruptDataError:
    """Returns the error for a part that has another length than what states its length says."""
    return CorruptDataError(f"{key} has {actual} bytes, and {stated_by} says {stated}")


def differing(transport: Transport, parts: Iterable[tuple[str, int]], *, stay: bool = False) -> dict[str, int]:
    """Returns the parts that do not have the stated length: key → its length in bytes, 0 if it is missing.

    Asks all nodes at once.

    Args:
        transport: the way to the nodes.
        parts: the key of each part, and its stated length in bytes.
        stay: whether those that are there stay from now on.
    """
    stated = dict(parts)
    # In this order: what is there after its expiry was removed will stay.
    commands: list[Command] = [("PERSIST", key) for key in stated] if stay else []
    lengths = call_nodes(transport, [*commands, *(("STRLEN", key) for key in stated)])[len(commands) :]
    return {key: length for key, length in zip(stated, lengths, strict=True) if length != stated[key]}


def lacking(
    transport: Transport, parts_of: Mapping[Owner, Iterable[tuple[str, int]]], *, stay: bool = False
) -> list[Owner]:
    """Returns the owners that lack a part, or have one of another length than stated. Asks all nodes at once.

    Args:
        transport: the way to the nodes.
        parts_of: the key of each part, and its stated length in bytes, by their owners.
        stay: as for ``differing``.
    """
    lost = differing(transport, chain.from_iterable(parts_of.values()), stay=stay)
    return [owner for owner, parts in parts_of.items() if any(key in lost for key, _ in parts)]


def are_there(transport: Transport, keys: ParameterKeys, blobs: Iterable[Blob]) -> bool:
    """Returns whether no part of some blobs is lost. Asks all nodes at once."""
    return not differing(transport, [part for blob in blobs for part in blob.parts(keys)])


def check_parts(transport: Transport, parts: Sequence[tuple[str, int]], stated_by: str) -> None:
    """Compares stated lengths with those on the server, so that forged ones allocate no memory.

    Args:
        transport: the way to the nodes.
        parts: the key of each part, and its stated length in bytes. Up to a total of TRUSTED_BYTES, the server is not
            asked.
        stated_by: the source of the lengths, for messages.

    Raises:
        PartMissingError: a part is not there.
        CorruptDataError: a part has another length.
    """
    stated = dict(parts)
    if sum(stated.values()) <= TRUSTED_BYTES:
        return
    for key, actual in differing(transport, parts).items():
        if not actual:
            raise PartMissingError(key)
        raise wrong_length(key, actual, stated[key], stated_by)


def check_lengths(transport: Transport, keys: Keys, gradients: Sequence[BufferedGradient]) -> None:
    """Does the same for gradients in the round, whose headers state the lengths."""
    if sum([gradient.nbytes for gradient in gradients]) > TRUSTED_BYTES:
        check_parts(transport, _parts(keys, gradients), "its header")


def lost_gradients(transport: Transport, keys: Keys, gradients: Sequence[BufferedGradient]) -> set[str]:
    """Returns the ids of the gradients that lack a part, or have one that is not as long as the header says.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        gradients: gradients in a round.
    """
    return {*lacking(transport, {gradient.id: _parts(keys, [gradient]) for gradient in gradients})}


def _parts(keys: Keys, gradients: Sequence[BufferedGradient]) -> list[tuple[str, int]]:
    """Returns the key of each part of some gradients, and how long it is by their headers."""
    return [
        (keys.part(gradient.id, number), length)
        for gradient in gradients
        for number, length in enumerate(gradient.lengths)
    ]
