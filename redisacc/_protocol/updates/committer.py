"""Commits updates: orders one for each round, makes sure that all its parts are there, and publishes it.

The chief needs no dense arrays for it, and updates tables itself (``tables.py``). Updaters compute the parts, usually
before the round is granted, and the chief only looks whether they are there. What is missing after a while, the chief
computes with the same kernel from what the nodes store.

1. In partitions, the leader registers the attempt under the id of the version, which is a digest of the order. Updaters
   hear of the order. In the slot of the record, the last step looks for the parts itself.
2. Each node confirms that it has its parts, and that they stay.
3. The leader publishes the version and removes the round in one script. Before that, nothing has happened.

If the chief dies before the last step, its successor recovers the round, and orders the same again.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from redisacc._arrays.metrics import Means
from redisacc._arrays.sums import DenseSum, RoundSum, SparseSum
from redisacc._arrays.validation import Array
from redisacc._format.buffered import PartMissingError, digest_of
from redisacc._format.history_entries import history_text
from redisacc._format.update_order import Order
from redisacc._protocol.parameters.reader import part_lost
from redisacc._protocol.parameters.upload_plan import retire, retire_of_log
from redisacc._protocol.parameters.version_writer import Follows, Tries, Version, VersionWriter
from redisacc._protocol.parts.fetch import lacking
from redisacc._protocol.parts.sweep import sweep_quietly
from redisacc._protocol.parts.write import call_nodes
from redisacc._protocol.rounds.granted_rounds import EndedRound, ended_round
from redisacc._protocol.rounds.round_reader import RoundContents
from redisacc._protocol.rounds.taker import GrantedRound, Taker
from redisacc._protocol.scripts import OF_PARAMETERS, Reply, refused
from redisacc._protocol.sums.expected_gradients import counted
from redisacc._protocol.updates.model import FLAT, UpdateModel, added_in_order, store_commands
from redisacc._protocol.updates.patience import Patience
from redisacc._protocol.updates.record import KnownVersion, UpdateRecord, update_command, update_fields
from redisacc._protocol.updates.tables import NO_TABLES, RowSum, manifest_of
from redisacc._protocol.updates.values import VersionValues
from redisacc._wire.sockets import Command
from redisacc._wire.transport import Hint
from redisacc.optim import Optimizer

logger = logging.getLogger("redisacc")

# How long the chief pauses before it looks for parts again: at least, in seconds, and as a share of the time for which
# none has appeared, because looking costs the nodes time in which they could take parts.
PAUSE = 0.001
PAUSE_SHARE = 0.1


@dataclass(eq=False)
class _Round:
    """A round, and what is known of the update that it makes. Its sums are computed once, if they are needed here.

    Attributes:
        taker: has taken it.
        found: the round.
        model: the leaves and the optimizer.
        contents: its hashes.
        ended: what is removed when the update is published.
        digest: the digest of its gradients; if these are not all in parts, a random one.
        divisor: what the mean divides the sum by.
        is_in_parts: whether each gradient is in parts, which updaters can add up.
        clip: what the mean is multiplied by; None means not known yet.
    """

    taker: Taker[Any]
    found: GrantedRound
    model: UpdateModel
    contents: RoundContents
    ended: EndedRound
    digest: str
    divisor: float
    is_in_parts: bool
    clip: float | None = None

    @cached_property
    def sum(self) -> RoundSum:
        """Its sum."""
        return self.taker.sum_of(self.found, self.contents)

    @cached_property
    def rows(self) -> Mapping[int, RowSum]:
        """The sum of each table."""
        # Dense parts are left to updaters.
        round_sum = self.taker.rows_of(self.found, self.contents) if self.has_updaters else None
        round_sum, spec = round_sum or self.sum, self.taker.spec
        granted, (_, places) = self.found.granted, self.model.sections
        total = spec.divisor(granted.num_accumulated, granted.total_weight)
        by_index = spec.reduction_type == "MEAN" and spec.sparse_mean == "index"
        found = {}
        for leaf in self.model.tables:
            section = round_sum.sections[places[leaf]]
            assert isinstance(section, SparseSum)
            indices, values, counts = section.total(total)
            found[leaf] = RowSum(indices, values, counts if by_index else self.divisor)
        return found

    def elements(self, number: int) -> list[Array]:
        """Returns the sum of a dense part, for each of its runs."""
        sections, (places, _) = self.sum.sections, self.model.sections
        found = []
        for section, first, size in self.model.parts[number]:
            dense = sections[places[section]]
            assert isinstance(dense, DenseSum)
            found.append(dense.piece(first, size))
        return found

    @property
    def has_updaters(self) -> bool:
        """Whether updaters may compute the parts: they work on the accumulator, and can add its gradients up."""
        return self.is_in_parts and self.found.reader.has_reducer


@dataclass(frozen=True)
class _Update:
    """The update that a round makes of a version.

    Attributes:
        of: the round.
        before: the version.
        order: its order.
        number: the number of the attempt.
        version: the version that it makes.
        writer: writes it.
    """

    of: _Round
    before: UpdateRecord
    order: Order
    number: int
    version: Version
    writer: VersionWriter


class Committer:
    """Makes versions of the parameters of one run out of the rounds of its accumulator.

    Args:
        taker: takes the rounds of its accumulator.
        values: what this process has of the version that the next update begins with.
        publisher: the name of this process in the record.
        snapshot: returns the step since which mean gradients are kept; None if it is not known.
        brings: gets each part that is computed here and that workers read: its version, number, and bytes; or None.
    """

    def __init__(
        self,
        taker: Taker[Any],
        values: VersionValues,
        publisher: str,
        snapshot: Callable[[], int | None],
        brings: Callable[[str, int, Array], None] | None,
    ) -> None:
        self._snapshot = snapshot
        self._transport = taker.transport
        self._gradients = taker.keys
        self._spec = taker.spec
        self._min_replicas = taker.scripts.min_replicas
        self._taker = taker
        self._publisher, self._brings = publisher, brings
        self._values = values
        self._round: _Round | None = None
        # The means of the metrics of the round that was used last.
        self.metrics = Means()
        self._patience = Patience()

    def commit(
        self, found: GrantedRound, before: UpdateRecord, optimizer: Optimizer, *, finished: bool
    ) -> tuple[KnownVersion, object] | None:
        """Updates the parameters with a round, and removes it.

        May be called again for the same round after an error.

        Args:
            found: the round, of the step of the version before.
            before: that version.
            optimizer: the optimizer, with its schedule.
            finished: whether the version is the last one.

        Returns:
            The new version, and its record for ``parse_update_record``; None means another version than the one before
            is there, and nothing changed.

        Raises:
            NotReplicatedError: the version is published, but too few replicas have it.
            DataLossError: a part of a gradient or of the version before is lost.
            ConflictError: the round is no longer this process's.
            NotFoundError: the accumulator or the parameters were deleted.
            ServerError: parts disappear again and again.
        """
        record, step, model = before.record, before.step, before.model
        of = self._known(found, before)
        updates = before.updates + bool(of.divisor)
        writer = VersionWriter(self._transport, record.keys, self._min_replicas)
        if of.divisor:
            scalars = optimizer.scalars(step, before.updates + 1, of.contents.metrics)
        else:
            # A learning rate that is a metric came with no gradient.
            scalars = before.scalars or ((0.0,) * optimizer.scalars_per_group,) * optimizer.num_groups
        order = Order(before.id, model.optimizer_digest, of.digest, of.divisor, self._clip(of), scalars)
        # The schedule may end with the last step.
        ahead = None if finished else optimizer.scalars_ahead(step + 1, updates + 1)
        fields = update_fields(model, updates, ahead)
        number = before.number
        tries = Tries(self._transport, record.keys, step + 1)
        while True:
            version = self._version(of, before, order.version(number), order, fields=fields, finished=finished)
            reply = self._attempt(_Update(of, before, order, number, version, writer))
            if reply.outcome == "renumbered":
                number = reply.number
                continue
            if reply.outcome == "published":
                self._round = None
                self._values.begin(version.id)
                if self._min_replicas:
                    # Before anything is removed that a replica may still count on.
                    writer.confirm(record.incarnation, step + 1, version.blobs)
                of.ended.clean_up()
                if record.keys.partitions:
                    sweep_quietly(self._transport, record.keys, min_replicas=self._min_replicas)
                return KnownVersion(record.incarnation, version.id, step + 1, updates, model), reply.read[-1]
            if reply.outcome == "unknown":
                self._taker.check_listed(found.granted)
            if reply.outcome == "deleting":
                raise refused(OF_PARAMETERS["missing"], record.keys)
            if reply.outcome != "expired":
                return None
            tries.pause(reply)

    def discard(self, found: GrantedRound) -> None:
        """Removes a round that has been used."""
        buffered = self._taker.contents(found).buffered
        ended_round(self._gradients, self._taker.scripts, found.granted.token, buffered).acknowledge()

    def _version(
        self, of: _Round, before: UpdateRecord, version: str, order: Order, *, fields: Sequence[str], finished: bool
    ) -> Version:
        """Returns the version that an order makes. Its tables are computed here."""
        model, tables = before.model, NO_TABLES
        if model.tables:
            try:
                tables = self._values.new_tables(before, of.rows, order, version)
            except PartMissingError as error:
                raise part_lost(before.record, error) from None
        step, stored = before.step + 1, model.schema.stored(model.encoding)
        manifest = manifest_of(model, version, step, tables)
        return Version(
            id=version,
            follows=Follows(before.incarnation, before.id, step),
            publisher=self._publisher,
            schema=model.schema,
            encoding=model.encoding,
            change=(
                retire_of_log(manifest, before.manifest, stored, before.step, self._snapshot())
                if model.is_mean
                else retire(manifest, stored, before.manifest, stored)
            ),
            fields=fields,
            pieces=tables.pieces,
            finished=finished,
            round=of.ended,
            kept=self.metrics.kept or None,
        )

    def _attempt(self, update: _Update) -> Reply:
        """Makes one attempt to publish the version that an order makes."""
        model, pieces = update.before.model, update.version.pieces
        if update.of.has_updaters and not model.keys.partitions and model.optimizer.clip_norm is None:
            # Updaters have usually written all parts before the round was granted. The script looks whether they have.
            reply = self._publish(update)
            if reply.outcome != "expired":
                return reply
        registered = self._register(update)
        if registered.outcome != "registered":
            return registered
        # In the slot of the record, tables travel ahead of the script that publishes.
        is_written = not (pieces and model.keys.partitions) or update.writer.write_parts(pieces)
        stored = self._make(update) if is_written else None
        return Reply(outcome="expired") if stored is None else self._publish(update, stored)

    def _publish(self, update: _Update, stored: Sequence[Command] = ()) -> Reply:
        return update.writer.publish(update.version, before=stored, after=[update_command(update.before.model.keys)])

    def _known(self, found: GrantedRound, before: UpdateRecord) -> _Round:
        """Returns what is known of a round, the same object if the call is repeated."""
        known = self._round
        if known is not None and known.found is found and known.model is before.model:
            self.metrics = known.contents.metrics
            return known
        contents = self._taker.contents(found)
        self.metrics = contents.metrics
        granted, buffered = found.granted, contents.buffered
        in_parts = (
            not contents.sums
            and granted.num_accumulated == sum([gradient.number for gradient in buffered])
            and all(before.model.fits_all(gradient.cut) for gradient in buffered)
        )
        total = counted(buffered)
        # Updaters add the weights in the order of the gradients, too, and the server in that of their arrival.
        weight = total.weight if in_parts else self._spec.weight_of(total, granted.total_weight)
        divisor = self._spec.update_divisor(granted.num_accumulated, weight)
        digest = digest_of(buffered) if in_parts else secrets.token_hex(16)
        ended = ended_round(self._gradients, self._taker.scripts, granted.token, buffered)
        ended.past = history_text(granted.global_step, granted.num_accumulated, contents.metrics)
        self._round = _Round(self._taker, found, before.model, contents, ended, digest, divisor, in_parts)
        return self._round

    # Clipping

    def _clip(self, of: _Round) -> float:
        if of.clip is None:
            of.clip = 1.0
            if of.divisor and of.model.optimizer.clip_norm is not None:
                of.clip = of.model.optimizer.clip_scale(self._sum_of_squares(of))
        return of.clip

    def _sum_of_squares(self, of: _Round) -> float:
        """Returns the sum of the squares of the mean: of the parts and then the tables, added in their order."""
        of_tables = [of.rows[leaf].squares for leaf in of.model.tables]
        numbers = range(len(of.model.parts))
        if of.has_updaters:
            keys = [self._gradients.squares(of.digest, number) for number in numbers]
            found: list[float | None] = []

            def look() -> list[int]:
                found[:] = map(_square, call_nodes(self._transport, [("GET", key) for key in keys]))
                return [number for number, square in enumerate(found) if square is None]

            if not self._wait(len(keys), look):
                return added_in_order([*[square for square in found if square is not None], *of_tables])
        computed = [of.model.squares(of.elements(number), of.divisor) for number in numbers]
        return added_in_order([*computed, *of_tables])

    # Parts

    def _register(self, update: _Update) -> Reply:
        """Registers an update in partitions. In the slot of the record, it only tells updaters of the order."""
        keys, version, event = update.before.model.keys, update.version, update.order.event(update.number)
        if keys.partitions:
            return update.writer.register(version.follows, version.id, update.number, version.brought, order=event)
        if update.of.has_updaters:
            self._transport.pipeline([Hint(("PUBLISH", keys.events, event))])
        return Reply(outcome="registered")

    def _make(self, update: _Update) -> Sequence[Command] | None:
        """Makes sure that all parts of a version are there; in partitions, also that they stay.

        Returns:
            The commands that store what is missing, which travel ahead of the script; None means a part is missing.
        """
        of, model, version = update.of, update.before.model, update.version.id
        missing: Sequence[int] = range(len(model.parts))
        if of.has_updaters:

            def look() -> Sequence[int]:
                nonlocal missing
                missing = self._missing(model, version, missing)
                return missing

            if not self._wait(len(missing), look):
                self._patience.succeed()
                return ()
        elements = {number: of.elements(number) for number in missing}
        try:
            self._values.fetch(update.before, missing)
        except PartMissingError as error:
            raise part_lost(update.before.record, error) from None
        store: list[tuple[int, Command]] = []
        for number in missing:
            values = self._values.computed(number, version)
            if values is None:
                before = self._values.get(update.before, number)
                values = model.updated(number, before, elements[number], update.order)
                self._values.keep(number, version, values)
            if self._brings is not None:
                self._brings(version, number, values[FLAT])
            store += [(number, command) for command in store_commands(model.keys, version, number, values)]
        commands = [command for _, command in store]
        if not (of.has_updaters or model.keys.partitions):
            return commands
        replies = call_nodes(self._transport, commands)
        if of.has_updaters:
            late = {number for (number, _), reply in zip(store, replies, strict=True) if reply is None}
            self._patience.fail(missing, late)
        # In the slot of the record, the script that commits looks whether they are there.
        return None if model.keys.partitions and self._missing(model, version, missing) else ()

    def _wait(self, number: int, look: Callable[[], Collection[int]]) -> Collection[int]:
        """Waits until updaters have written as many parts. Returns those that are missing when the patience is over.

        Args:
            number: the number of parts.
            look: returns the numbers of those that are missing.
        """
        self._patience.begin()
        while missing := look():
            if len(missing) < number:
                number = len(missing)
                self._patience.note_appeared()
            if self._patience.is_over(missing):
                logger.debug("%s: the chief computes %d parts itself", self._gradients.name, number)
                break
            self._transport.waits.sleep(max(PAUSE, PAUSE_SHARE * self._patience.pause))
        return missing

    def _missing(self, model: UpdateModel, version: str, numbers: Iterable[int]) -> list[int]:
        """Returns which of some parts are not there. In partitions, the others stay from now on."""
        wanted = {number: model.keys_of(version, number, model.sorts) for number in numbers}
        return lacking(self._transport, wanted, stay=bool(model.keys.partitions))


def _square(reply: object) -> float | None:
    """Returns a sum of squares that an updater has stored; None if there is none."""
    if isinstance(reply, bytes) and len(reply) <= 32:
        with suppress(ValueError):
            return float(reply)
    return None
