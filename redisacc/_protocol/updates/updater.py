"""Computes and writes the parts of updates, where the sums are: in a reducer.

It saves time, and decides nothing. What it writes has the name of its order, and expires unless a chief makes it stay.
As soon as a part of the sum of the expected gradients is complete, it computes that part of the update, with the
numbers that the record has for the next step. It bets that the round will hold these gradients; if it does not, nobody
looks for what was written. With a clipping, it stores the sum of the squares of its part, and waits for the order.

If the server loses parts of the version that is published, a chief asks for them, and it writes those that it has.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from redisacc._arrays.validation import Array
from redisacc._format.buffered import PartMissingError
from redisacc._format.keys import Keys, ParameterKeys
from redisacc._format.update_order import Order, parse_order, parse_wanted, updated
from redisacc._protocol.sums.cells import SumPart
from redisacc._protocol.updates.model import PartValues, store_commands
from redisacc._protocol.updates.record import UpdateRecord, read_update_record
from redisacc._protocol.updates.values import VersionValues
from redisacc._wire.transport import Hint, Transport
from redisacc.errors import CorruptDataError, NotFoundError

logger = logging.getLogger("redisacc")

# The expiry of a sum of squares, in milliseconds.
SQUARES_MS = 60_000


class PartUpdater:
    """Updates the parts of a run that one reducer adds up. One thread works; another one listens.

    Args:
        transport: the way to the nodes.
        gradients: the keys of the accumulator, with its partitions.
    """

    def __init__(self, transport: Transport, gradients: Keys) -> None:
        self._transport = transport
        self._gradients = gradients
        self._keys = ParameterKeys(gradients.name, gradients.partitions)
        self._record: UpdateRecord | None = None
        self._values = VersionValues(transport)
        # Whether the record may have changed since it was read.
        self._is_outdated = True
        # The last order that was heard, and not looked at yet; "": none. A later one takes the place of an earlier one.
        self._heard = ""
        # The id of the version whose parts a chief asks for; "": none.
        self._wanted = ""
        # Number of a part → the digest of the gradients whose sum it is, and the sum, for an order.
        self._sums: dict[int, tuple[str, Sequence[Array]]] = {}
        # The last order of the version that follows the record, with the number of its attempt: parts of the sum may be
        # complete only later.
        self._order: tuple[Order, int] | None = None
        # The numbers of the parts that are updated here.
        self._numbers: set[int] = set()

    @property
    def channel(self) -> str:
        """The channel of events that concern it."""
        return self._keys.events

    @property
    def has_work(self) -> bool:
        """Whether something was heard that is still to be used."""
        return bool(self._heard) or self.is_asked or (self._is_outdated and bool(self._numbers))

    @property
    def is_asked(self) -> bool:
        """Whether a chief asks for what may be here."""
        return bool(self._wanted)

    @property
    def has_parts(self) -> bool:
        """Whether parts of a version are here, which a server that lost them could need."""
        return bool(self._numbers) and bool(self._values.version)

    def hear(self, event: str | None) -> bool:
        """Notes an event of the parameters; None means events were missed. Returns whether there is work.

        Called by the thread that listens.
        """
        if event is not None and (version := parse_wanted(event)) is not None:
            self._wanted = version
        elif event is not None and event.startswith("order "):
            self._heard = event
        else:
            self._is_outdated = True
        return self.has_work

    def answer(self) -> None:
        """Writes the parts that a chief asks for, as far as they are here.

        Raises:
            RedisAccError: a node cannot be reached, or refuses something.
        """
        version, self._wanted = self._wanted, ""
        for number, values in self._values.of(version).items() if version else ():
            # Values that are stored already stay. The chief publishes what it has gathered under another name.
            self._transport.pipeline(store_commands(self._keys, version, number, values))

    def forget(self) -> None:
        """Drops everything that was read and computed."""
        self._numbers.clear()
        self._record, self._is_outdated = None, True
        self._values = VersionValues(self._transport)
        self._sums.clear()
        self._heard = ""
        self._order = None

    def work(self) -> None:
        """Reads what has changed, and computes what was ordered.

        Raises:
            RedisAccError: a node cannot be reached, or refuses something.
        """
        if self._numbers:
            self._refresh()
        event, self._heard = self._heard, ""
        if event:
            self._obey(event)

    def exists(self) -> bool:
        """Returns whether there is an optimizer that updates the parameters.

        Raises:
            RedisAccError: a node cannot be reached, or refuses something.
        """
        self._refresh()
        return self._record is not None

    def update(self, part: SumPart, divisor: float) -> bool:
        """Updates a part of the parameters with a part of the sum of the expected gradients.

        Args:
            part: the part of the sum. Its memory is read now, and not kept.
            divisor: what the mean divides the sum by; 0 if every worker has skipped the step.

        Returns:
            Whether there is an optimizer that updates it. If not, the sum has to be stored.

        Raises:
            RedisAccError: a node cannot be reached, or refuses something.
        """
        self._numbers.add(part.number)
        self._refresh()
        record = self._record
        if record is None or not record.model.fits(part.number, part.pieces):
            return False
        model = record.model
        ordered = self._ordered(record, part.digest)
        if ordered is None and model.optimizer.clip_norm is not None:
            squares = model.squares(part.elements, divisor)
            key = self._gradients.squares(part.digest, part.number)
            self._transport.pipeline([("SET", key, str(squares), "PX", SQUARES_MS)])
        elif ordered is None and record.scalars is not None:
            bet = Order(record.id, model.optimizer_digest, part.digest, divisor, 1.0, record.scalars)
            ordered = bet, record.number
        if ordered is not None:
            self._sums.pop(part.number, None)
            self._write(record, part.number, *ordered, part.elements)
        else:
            self._sums[part.number] = part.digest, [elements.copy() for elements in part.elements]
        return True

    def _ordered(self, record: UpdateRecord, digest: str) -> tuple[Order, int] | None:
        """Returns the order of these gradients that was heard, with the number of its attempt."""
        if self._order is not None and self._order[0].digest == digest and _follows(self._order[0], record):
            return self._order
        return None

    def _refresh(self) -> None:
        """Reads the record if it may have changed, and the parts that are updated here."""
        if not self._is_outdated:
            return
        self._is_outdated = False
        try:
            record = read_update_record(self._transport, self._keys, self._record)
            if record is not None:
                mine = [number for number in self._numbers if number < len(record.model.parts)]
                self._values.fetch(record, mine)
            self._record = record
        except (CorruptDataError, NotFoundError, PartMissingError) as error:
            # The chief reports it, if it is more than a version that was replaced meanwhile.
            logger.debug("%s: cannot update the parameters: %s", self._keys.name, error)
            self._record, self._is_outdated = None, True

    def _obey(self, event: str) -> None:
        """Computes the parts of an order whose sums are here, and writes those that were a bet on another number."""
        record = self._record
        if record is None:
            return
        try:
            found = parse_order(event, record.model.optimizer)
        except ValueError as error:
            logger.debug("%s: %s", self._keys.name, error)
            return
        if found is None:
            return
        order, number = found
        if not _follows(order, record):
            return
        self._order = found
        for part, (digest, elements) in list(self._sums.items()):
            if digest == order.digest:
                self._write(record, part, order, number, elements)
        if number != record.number:
            for part in self._numbers:
                values = self._values.computed(part, order.version(record.number))
                if values is not None:
                    self._store(part, order.version(number), values)

    def _write(self, record: UpdateRecord, part: int, order: Order, number: int, elements: Sequence[Array]) -> None:
        """Computes a part of the version that an order makes, and writes it."""
        version = order.version(number)
        if self._values.computed(part, version) is not None:
            return
        try:
            before = self._values.get(record, part)
        except PartMissingError as error:
            logger.debug("%s: cannot update the parameters: %s", self._keys.name, error)
            self._is_outdated = True
            return
        self._store(part, version, record.model.updated(part, before, elements, order))

    def _store(self, part: int, version: str, values: PartValues) -> None:
        """Writes a part of a version."""
        self._values.keep(part, version, values)
        store = store_commands(self._keys, version, part, values)
        # Readers fetch it ahead.
        self._transport.pipeline([*store, Hint(("PUBLISH", self._keys.updated_of(part), updated(version, part)))])


def _follows(order: Order, record: UpdateRecord) -> bool:
    """Returns whether an order updates the version of a record."""
    return (order.previous, order.optimizer) == (record.id, record.model.optimizer_digest)
