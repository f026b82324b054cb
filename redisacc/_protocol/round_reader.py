"""Reads a round, the current one or one that was taken, and adds it up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redisacc._data.reducers import RoundReducer
from redisacc._data.spec import AccumulatorSpec
from redisacc._format import buffered as buffered_format
from redisacc._format import in_place
from redisacc._format.buffered import BufferedGradient
from redisacc._format.entries import parse_workers
from redisacc._format.keys import Keys, RoundKeys
from redisacc._format.shapes import round_shape_of
from redisacc._protocol.buffer_reader import INLINE_FIELDS, add_buffered
from redisacc._redis.fast_socket import Command
from redisacc._redis.hash_scan import Fields, scan, scan_command, scan_whole, scanned
from redisacc._redis.transport import TIMEOUT, Transport
from redisacc.errors import CorruptDataError


def all_rounds(transport: Transport, keys: Keys, *, timeout: float = TIMEOUT) -> list[RoundKeys]:
    """Returns the hashes of the current round, and of each round that was taken and is not yet acknowledged."""
    taken = scan(transport, keys.taken, timeout=timeout)
    return [keys.current, *(keys.taken_round(token.decode(errors="replace")) for token in taken)]


@dataclass(slots=True)
class RoundContents:
    """The hashes of a round.

    Attributes:
        of: their keys.
        sums: the ``sums`` hash.
        buffered: the buffered gradients, in order of arrival. Their parts are still to be fetched.
        inline: some fields of the ``inline`` hash. The others are still to be fetched.
        workers: worker's name → number of its gradients.
    """

    of: RoundKeys
    sums: Fields
    buffered: list[BufferedGradient]
    inline: Fields
    workers: dict[str, int]


def read_commands(of: RoundKeys) -> list[Command]:
    """Returns the commands that read the hashes of a round: small ones whole, of large ones the first piece."""
    return [
        scan_command(of.sums),
        scan_command(of.buffered),
        scan_command(of.workers),
        ("HSCAN", of.inline, 0, "COUNT", INLINE_FIELDS),
    ]


def read_whole(pieces: Sequence[Any]) -> bool:
    """Returns whether the replies to ``read_commands``, already checked, are all fields of these hashes."""
    return all(cursor in (b"0", 0) for cursor, _ in pieces)


class RoundReader:
    """Adds up rounds of one accumulator, and may begin with a round while it is still growing."""

    def __init__(self, transport: Transport, keys: Keys, spec: AccumulatorSpec) -> None:
        self._transport = transport
        self._keys = keys
        self._spec = spec
        self.forget()

    def forget(self) -> None:
        """Drops what was added ahead: the round that it belongs to is over."""
        self._shape: tuple[int, ...] | None = None
        self._reducer: RoundReducer | None = None
        # The ids of the buffered gradients that have been added, in order of arrival.
        self._added: dict[str, None] = {}

    def look_ahead(self, ids: Sequence[str] | None) -> None:
        """Adds gradients that are buffered in the current round, in order of arrival.

        Args:
            ids: the gradients that were announced since the last call. None: announcements may have been missed, so
                all buffered gradients are looked up.
        """
        current = self._keys.current.buffered
        get_shape = ("HGET", self._keys.record, "round_shape")
        if ids is None:
            shape, first = self._transport.pipeline([get_shape, scan_command(current)])
            entries = scan_whole(self._transport, current, first)
        else:
            shape, found = self._transport.pipeline([get_shape, ("HMGET", current, *ids)])
            entries = {name.encode(): entry for name, entry in zip(ids, found, strict=True) if entry is not None}
        round_shape = round_shape_of(self._keys, (shape or b"").decode(errors="replace"))
        if round_shape != self._shape:
            self.forget()
            self._shape = round_shape
        if round_shape is None:
            return
        new = [gradient for gradient in self._parse(entries, round_shape) if gradient.id not in self._added]
        if new:
            self._add(self._keys.current, new, round_shape)

    def contents(self, of: RoundKeys, pieces: Sequence[Any], shape: tuple[int, ...]) -> RoundContents:
        """Returns a round's hashes: what the replies to ``read_commands`` say, and the pieces still missing there."""
        return RoundContents(
            of=of,
            sums=scan_whole(self._transport, of.sums, pieces[0]),
            buffered=self._parse(scan_whole(self._transport, of.buffered, pieces[1]), shape),
            inline=scanned(of.inline, pieces[3])[1],
            workers=parse_workers(scan_whole(self._transport, of.workers, pieces[2]), of.workers),
        )

    def add_up(self, contents: RoundContents, shape: tuple[int, ...], num_accumulated: int) -> RoundReducer:
        """Adds up everything in a round: buffered gradients in order of arrival, then what was summed in place.

        Args:
            contents: the round's hashes.
            shape: the shape that binds the round.
            num_accumulated: how many gradients the round was counted to hold.

        Raises:
            PartMissingError: a part of a buffered gradient is not there, or no longer.
            CorruptDataError: gradients that were counted are missing.
        """
        left = contents.buffered
        if self._added:
            if shape != self._shape or not self._added.keys() <= {gradient.id for gradient in left}:
                # Another taker got the round that was begun, or a gradient that was added has since been compacted.
                self.forget()
            left = [gradient for gradient in left if gradient.id not in self._added]
        if left or self._reducer is None:
            reducer = self._add(contents.of, left, shape, contents.inline)
        else:
            reducer = self._reducer
        if contents.sums:
            reducer.add(in_place.unpack(contents.sums, self._spec, shape, self._keys.current.sums))
        self.forget()
        if reducer.number != num_accumulated:
            raise CorruptDataError(
                f"{self._keys.record}: of {num_accumulated} gradients only {reducer.number} were found: keys were "
                "evicted (set maxmemory-policy noeviction) or removed"
            )
        return reducer

    def _add(
        self,
        of: RoundKeys,
        gradients: list[BufferedGradient],
        shape: tuple[int, ...],
        known: Mapping[bytes, bytes] | None = None,
    ) -> RoundReducer:
        if self._reducer is None:
            self._reducer = self._spec.reducer(shape, where=self._keys.current.sums)
        if gradients:
            add_buffered(self._transport, self._keys, of, gradients, sink=self._reducer, known=known or {})
            self._added.update((gradient.id, None) for gradient in gradients)
        return self._reducer

    def _parse(self, entries: Fields, shape: tuple[int, ...]) -> list[BufferedGradient]:
        return buffered_format.parse(self._keys, entries, self._spec, shape)
