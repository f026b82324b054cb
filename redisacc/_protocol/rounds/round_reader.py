"""Reads a round, the current one or one that was taken, and adds it up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from redisacc._arrays.metrics import Means
from redisacc._arrays.results import Round
from redisacc._arrays.sums import ROUNDING, RoundSum
from redisacc._format import buffered as buffered_format
from redisacc._format import in_place
from redisacc._format.buffered import BufferedGradient, PartMissingError
from redisacc._format.entries import parse_notes, parse_workers
from redisacc._format.keys import Keys, RoundKeys
from redisacc._protocol.parts.fetch import lost_gradients
from redisacc._protocol.parts.inline import INLINE_FIELDS, InlineReader
from redisacc._protocol.sums.buffered_sections import whole_gradient
from redisacc._protocol.sums.part_sums import ReducerReliance
from redisacc._protocol.sums.round_so_far import RoundSoFar
from redisacc._telemetry.traceparent import TraceParent
from redisacc._text import EVICTED
from redisacc._wire.scans import Fields, scan, scan_command, scan_whole, scanned
from redisacc._wire.sockets import Command
from redisacc._wire.transport import Transport
from redisacc.errors import CorruptDataError, DataLossError


def all_rounds(transport: Transport, keys: Keys) -> list[RoundKeys]:
    """Returns the hashes of the current round, and of each round that was taken and is not yet acknowledged."""
    taken = scan(transport, keys.taken)
    return [keys.current, *(keys.taken_round(token.decode(errors="replace")) for token in taken)]


@dataclass(slots=True)
class RoundContents:
    """The hashes of a round, and what was counted.

    Attributes:
        of: their keys.
        shape: the shape that binds the round.
        number: how many gradients the round was counted to hold.
        weight: the sum of their weights, as it was counted; None if all are 1.
        num_required: how many the taker asked for: a reducer expects the same number. 0 if it is unknown.
        sums: the ``sums`` hash.
        buffered: the buffered gradients, in the order of their places. Their parts are still to be fetched.
        inline: some fields of the ``inline`` hash. The others are still to be fetched.
        workers: worker's name → number of its gradients.
        traces: the spans that applied them, as far as they are known.
        metrics: the mean of each metric.
        lost_weight: the weight of gradients that are left out, which ``weight`` contains.
    """

    of: RoundKeys
    shape: tuple[int, ...]
    number: int
    weight: float | None
    num_required: int
    sums: Fields
    buffered: list[BufferedGradient]
    inline: Fields
    workers: dict[str, int]
    traces: list[TraceParent]
    metrics: Means
    lost_weight: float = 0.0


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
        f"{part} is lost, which is a part of gradient {error.gradient} in {where}: its node was restarted from older "
        f"data, failed over to a replica that lagged behind, or evicted the key. {remedy}",
        part=part,
        gradient=error.gradient,
    )


@dataclass(eq=False)
class RoundReader(RoundSoFar):
    """Adds up rounds of one accumulator, and may begin with a round while it is still growing.

    Attributes:
        relies: whether a take relies on a reducer; None means it never does.
        has_reducer: whether a reducer works on the accumulator, as far as is known.
        reliance: as ``relies``, as long as one does.
    """

    relies: ReducerReliance | None = None
    has_reducer: bool = False

    def note_reducer(self, *, present: bool) -> None:
        """Notes whether a reducer works on the accumulator. If so, the next round is left to it."""
        self.has_reducer = present
        self.reliance = self.relies if present and self.relies is not None and self.relies.relies else None
        if self.reliance is None and self.part_sums is not None:
            self.part_sums.do_without_reducer()

    def calls_for_reducer(self) -> bool:
        """Returns whether to call for a reducer now: none works on the accumulator, and one would save time."""
        suits = not self.has_reducer and self.part_sums is not None and self.part_sums.suits_reducer
        return suits and self.relies is not None and self.relies.calls()

    def contents(  # noqa: PLR0917
        self,
        of: RoundKeys,
        pieces: Sequence[Any],
        shape: tuple[int, ...],
        number: int,
        weight: float | None,
        num_required: int = 0,
    ) -> RoundContents:
        """Returns a round's hashes: the replies to ``read_commands``, and the pieces that these lack.

        The other arguments are attributes of ``RoundContents``.
        """
        workers = scan_whole(self.transport, of.workers, pieces[2])
        buffered = scan_whole(self.transport, of.buffered, pieces[1])
        traces, metrics = parse_notes(workers)
        return RoundContents(
            of=of,
            shape=shape,
            number=number,
            weight=weight,
            num_required=num_required,
            sums=scan_whole(self.transport, of.sums, pieces[0]),
            buffered=buffered_format.parse(self.keys, buffered, self.spec, shape) if buffered else [],
            inline=scanned(of.inline, pieces[3])[1],
            workers=parse_workers(workers, of.workers),
            traces=traces,
            metrics=metrics,
        )

    def leave_out_lost(self, contents: RoundContents) -> list[BufferedGradient]:
        """Leaves out the gradients with a part that is missing or has another length, and returns them."""
        ids = lost_gradients(self.transport, self.keys, contents.buffered)
        lost = [gradient for gradient in contents.buffered if gradient.id in ids]
        contents.buffered = [gradient for gradient in contents.buffered if gradient.id not in ids]
        contents.number -= sum(gradient.number for gradient in lost)
        if contents.weight is not None:
            contents.lost_weight = sum(gradient.total_weight for gradient in lost)
        return lost

    def add_up(self, contents: RoundContents) -> RoundSum:
        """Adds up all gradients of a round: those that are buffered, in the order of their places, then the sums.

        Raises:
            PartMissingError: a part of a buffered gradient is not there, or no longer.
            CorruptDataError: gradients that were counted are missing, or have other weights.
        """
        round_sum = self._buffered_sum(contents)
        if contents.sums:
            round_sum.add(in_place.unpack(contents.sums, self.spec, contents.shape, self.keys.current.sums))
        if round_sum.number != contents.number:
            raise CorruptDataError(
                f"{self.keys.record}: of {contents.number} gradients only {round_sum.number} were found: keys were "
                f"{EVICTED} or removed by hand"
            )
        found = round_sum.number if round_sum.weight is None else round_sum.weight
        wanted = contents.number if contents.weight is None else contents.weight
        # They may have been added in another order.
        if not math.isclose(found + contents.lost_weight, wanted, rel_tol=ROUNDING):
            raise CorruptDataError(
                f"{self.keys.record}: the weights of the gradients add up to {found:g}, but the total weight was "
                f"counted to be {wanted:g}"
            )
        return round_sum

    def reduced(
        self,
        contents: RoundContents,
        global_step: int,
        staleness: dict[int, int],
        reduce: Callable[[RoundSum, float], Any],
    ) -> Round[Any]:
        """Adds up a round, and returns it as callers get it. Its gradient is None if it holds none.

        Args:
            contents: its hashes.
            global_step: its step.
            staleness: how stale its gradients were.
            reduce: makes the gradient from the sum and the divisor of a mean.

        Raises:
            PartMissingError, CorruptDataError: as ``add_up``.
        """
        round_sum, number = self.add_up(contents), contents.number
        weight = self.spec.weight_of(round_sum, contents.weight)
        if contents.lost_weight:
            # The weight of the gradients that are left, without the rounding of a difference.
            weight = float(number) if round_sum.weight is None else round_sum.weight
        total = float(number) if weight is None else weight
        gradient = reduce(round_sum, self.spec.divisor(number, weight)) if number else None
        return Round(gradient, global_step, number, contents.workers, staleness, total, contents.metrics)

    def add_rows_up(self, contents: RoundContents) -> RoundSum | None:
        """Adds up the rows of the buffered gradients of a round, and leaves their dense parts for ``add_up``.

        The errors are those of ``add_up``.

        Returns:
            A sum with complete sparse sections. The others hold anything. None means rows cannot be added up alone.
        """
        part_sums = self.sums_of(contents.shape, contents.num_required)
        return part_sums.round_sum if part_sums.complete_rows(contents.buffered) else None

    def _buffered_sum(self, contents: RoundContents) -> RoundSum:
        """Returns the sum of the buffered gradients of a round."""
        buffered = contents.buffered
        inline = InlineReader(self.transport, contents.of, buffered, contents.inline) if buffered else None
        if self.part_sums is None and all(map(attrgetter("inline"), buffered)):
            round_sum = self.spec.empty_sum(contents.shape, where=self.keys.current.sums)
            if inline is not None:
                for gradient in buffered:
                    round_sum.add(whole_gradient(gradient, inline.read(gradient), inline.where(gradient)))
            return round_sum
        # If another taker got the round that was begun, this may be one of another shape.
        part_sums = self.sums_of(contents.shape, contents.num_required)
        part_sums.complete(buffered, inline or InlineReader(self.transport, contents.of, ()))
        self.forget()
        return part_sums.round_sum
