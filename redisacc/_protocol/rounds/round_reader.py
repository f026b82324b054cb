"""Reads a round, the current one or one that was taken, and adds it up."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from redisacc._data.spec import AccumulatorSpec
from redisacc._data.sums import ROUNDING, RoundSum
from redisacc._format import buffered as buffered_format
from redisacc._format import in_place
from redisacc._format.buffered import BufferedGradient, PartMissingError
from redisacc._format.entries import parse_notes, parse_workers
from redisacc._format.keys import Keys, RoundKeys
from redisacc._protocol.parts.fetch import lost_gradients
from redisacc._protocol.parts.inline import INLINE_FIELDS, InlineReader
from redisacc._protocol.sums.buffered_sections import whole_gradient
from redisacc._protocol.sums.reducer_reliance import ReducerReliance
from redisacc._protocol.sums.round_so_far import Heard, RoundSoFar
from redisacc._redis.scans import Fields, scan, scan_command, scan_whole, scanned
from redisacc._redis.sockets import Command
from redisacc._redis.transport import TIMEOUT, Transport
from redisacc._telemetry.traceparent import TraceParent
from redisacc._text import EVICTED
from redisacc.errors import CorruptDataError, DataLossError


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
        buffered: the buffered gradients, in the order of their places. Their parts are still to be fetched.
        inline: some fields of the ``inline`` hash. The others are still to be fetched.
        workers: worker's name → number of its gradients.
        traces: the spans that applied them, as far as they are known.
        metrics: the mean of each metric.
    """

    of: RoundKeys
    sums: Fields
    buffered: list[BufferedGradient]
    inline: Fields
    workers: dict[str, int]
    traces: list[TraceParent]
    metrics: dict[str, float]


def read_commands(of: RoundKeys) -> list[Command]:
    """Returns the commands that read the hashes of a round: small ones whole, of large ones the first piece."""
    return [
        scan_command(of.sums),
        scan_command(of.buffered),
        scan_command(of.workers),
        ("HSCAN", of.inline, "0", "COUNT", str(INLINE_FIELDS)),
    ]


def read_whole(pieces: Sequence[Any]) -> bool:
    """Returns whether the replies to ``read_commands``, already checked, contain all fields of the hashes."""
    return all(cursor in (b"0", 0) for cursor, _ in pieces)


def part_lost(keys: Keys, error: PartMissingError, where: str, remedy: str) -> DataLossError | None:
    """Returns the error for a part that a node of the partitions has lost; None if it is in the slot of the record.

    The record counts the gradient, so its own node has lost no data: there, a part was evicted or removed.

    Args:
        keys: the keys of the accumulator.
        error: the error that names the missing part.
        where: the round that has the gradient.
        remedy: advice for the user.
    """
    part = str(error.args[0])
    if not part.startswith(keys.homes):
        return None
    return DataLossError(
        f"{part} is gone, which is a part of gradient {error.gradient} in {where}: its node was restarted from older "
        f"data, failed over to a replica that lagged behind, or evicted the key. {remedy}",
        part=part,
        gradient=error.gradient,
    )


class RoundReader:
    """Adds up rounds of one accumulator, and may begin with a round while it is still growing.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        spec: the specification of the accumulator.
        reliance: whether a take relies on a reducer; None: it never does.
        is_updated: whether reducers update the parameters with the sum, which the take does without.

    Attributes:
        has_reducer: whether a reducer works on the accumulator, as far as is known.
    """

    def __init__(
        self,
        transport: Transport,
        keys: Keys,
        spec: AccumulatorSpec,
        *,
        reliance: ReducerReliance | None = None,
        is_updated: bool = False,
    ) -> None:
        self._transport = transport
        self._keys = keys
        self._spec = spec
        self._reliance = reliance
        self._is_updated = is_updated
        self.has_reducer = False
        # The sums of a round that was begun, or that has gradients in parts; None: there is no such round.
        self._begun: RoundSoFar | None = None

    def note_reducer(self, *, present: bool) -> None:
        """Notes whether a reducer works on the accumulator."""
        self.has_reducer = present
        relies = present and self._reliance is not None and self._reliance.relies
        if relies or self._begun is not None:
            self._growing.rely_on_reducer(self._reliance if relies else None)

    def calls_for_reducer(self) -> bool:
        """Returns whether to call for a reducer now: none works on the accumulator, and one would save time."""
        part_sums = None if self._begun is None else self._begun.part_sums
        suits = not self.has_reducer and part_sums is not None and part_sums.suits_reducer
        return suits and self._reliance is not None and self._reliance.calls()

    def call_no_more(self) -> None:
        """Notes that the server refuses calls."""
        if self._reliance is not None:
            self._reliance.call_no_more()

    def forget(self) -> None:
        """Drops the sums of the round that was begun."""
        if self._begun is not None:
            self._begun.forget()

    @property
    def _growing(self) -> RoundSoFar:
        """The round that was begun. Most takes find their round complete, and do without."""
        if self._begun is None:
            self._begun = RoundSoFar(self._transport, self._keys, self._spec, is_updated=self._is_updated)
        return self._begun

    def look_ahead(self, heard: deque[Heard], num_required: int, interrupted: Callable[[], bool]) -> bool:
        """Adds gradients of the current round as far as they have arrived, as ``RoundSoFar`` does."""
        return self._growing.look_ahead(heard, num_required, interrupted)

    def contents(self, of: RoundKeys, pieces: Sequence[Any], shape: tuple[int, ...]) -> RoundContents:
        """Returns a round's hashes: the replies to ``read_commands``, and the pieces that these lack."""
        workers = scan_whole(self._transport, of.workers, pieces[2])
        buffered = scan_whole(self._transport, of.buffered, pieces[1])
        traces, metrics = parse_notes(workers)
        return RoundContents(
            of=of,
            sums=scan_whole(self._transport, of.sums, pieces[0]),
            buffered=buffered_format.parse(self._keys, buffered, self._spec, shape) if buffered else [],
            inline=scanned(of.inline, pieces[3])[1],
            workers=parse_workers(workers, of.workers),
            traces=traces,
            metrics=metrics,
        )

    def leave_out_lost(self, contents: RoundContents) -> list[BufferedGradient]:
        """Leaves out the gradients with a part that is missing or has another length, and returns them."""
        lost = lost_gradients(self._transport, self._keys, contents.buffered)
        ids = {gradient.id for gradient in lost}
        contents.buffered = [gradient for gradient in contents.buffered if gradient.id not in ids]
        return lost

    def add_up(
        self,
        contents: RoundContents,
        shape: tuple[int, ...],
        num_accumulated: int,
        total_weight: float | None,
        num_required: int = 0,
        *,
        lost_weight: float = 0.0,
    ) -> RoundSum:
        """Adds up all gradients of a round: those that are buffered, in the order of their places, then the sums.

        Args:
            contents: the round's hashes.
            shape: the shape that binds the round.
            num_accumulated: how many gradients the round was counted to hold.
            total_weight: the sum of their weights, as it was counted; None if all are 1.
            num_required: how many the taker asked for: a reducer expects the same number.
            lost_weight: the weight of gradients that are left out, which ``total_weight`` contains.

        Raises:
            PartMissingError: a part of a buffered gradient is not there, or no longer.
            CorruptDataError: gradients that were counted are missing, or have other weights.
        """
        round_sum = self._buffered_sum(contents, shape, num_required)
        if contents.sums:
            round_sum.add(in_place.unpack(contents.sums, self._spec, shape, self._keys.current.sums))
        if round_sum.number != num_accumulated:
            raise CorruptDataError(
                f"{self._keys.record}: of {num_accumulated} gradients only {round_sum.number} were found: keys were "
                f"{EVICTED} or removed by hand"
            )
        found = round_sum.number if round_sum.weight is None else round_sum.weight
        wanted = num_accumulated if total_weight is None else total_weight
        # They may have been added in another order.
        if not math.isclose(found + lost_weight, wanted, rel_tol=ROUNDING):
            raise CorruptDataError(
                f"{self._keys.record}: the weights of the gradients add up to {found:g}, but the total weight was "
                f"counted to be {wanted:g}"
            )
        return round_sum

    def add_rows_up(self, contents: RoundContents, shape: tuple[int, ...], num_required: int) -> RoundSum | None:
        """Adds up the rows of the buffered gradients of a round, and leaves their dense parts for ``add_up``.

        The arguments and the errors are those of ``add_up``.

        Returns:
            A sum with complete sparse sections. The others hold anything. None: rows cannot be added up alone.
        """
        part_sums, round_sum = self._growing.sums_of(shape, num_required)
        return round_sum if part_sums.complete_rows(contents.buffered) else None

    def _buffered_sum(self, contents: RoundContents, shape: tuple[int, ...], num_required: int) -> RoundSum:
        """Returns the sum of the buffered gradients of a round."""
        buffered = contents.buffered
        inline = InlineReader(self._transport, contents.of, buffered, contents.inline) if buffered else None
        if self._begun is None and all(map(attrgetter("inline"), buffered)):
            round_sum = self._spec.empty_sum(shape, where=self._keys.current.sums)
            if inline is not None:
                for gradient in buffered:
                    round_sum.add(whole_gradient(gradient, inline.read(gradient), inline.where(gradient)))
            return round_sum
        # If another taker got the round that was begun, this may be one of another shape.
        part_sums, round_sum = self._growing.sums_of(shape, num_required)
        part_sums.complete(buffered, inline or InlineReader(self._transport, contents.of, ()))
        self._begun = None
        return round_sum
