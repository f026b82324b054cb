"""How many gradients a step of a run needs, as set by the chief, while its crew grows or shrinks.

The chief keeps the quorum of the accumulator, and announces to the workers among how many they share the data
(``redisacc._protocol.parameters.announcements``).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from redisacc._arrays import validation
from redisacc._clock import clock, durations
from redisacc._format.keys import Keys, ParameterKeys
from redisacc._format.quorum import Quorum, milliseconds
from redisacc._handles.base import ConditionalAccumulatorBase
from redisacc._handles.environment import WORKERS, Place
from redisacc._log import inform, warn
from redisacc._protocol.leases.crew import Crew
from redisacc._protocol.parameters.announcements import announce_workers
from redisacc._protocol.rounds.who_contributed import contributors_of_round
from redisacc._protocol.scripts import StaleSequenceError
from redisacc._text import shown
from redisacc._wire.transport import Transport
from redisacc.errors import DataLossError, InvalidArgumentError

logger = logging.getLogger("redisacc")


@dataclass(frozen=True)
class CrewQuorum:
    """What a step waits for, as the arguments of a chief say it.

    Attributes:
        workers: the number of workers; None means as many as there are.
        least: how many gradients a step needs at least.
        quorum: the same, and what else it waits for.
    """

    workers: int | None
    least: int
    quorum: Quorum

    @classmethod
    def of(cls, workers: object, quorum: object, here: Place) -> CrewQuorum:
        """Returns what the arguments of a chief ask for, or the environment.

        Raises:
            InvalidArgumentError: an argument is missing or invalid, or they do not go together.
        """
        workers = here.workers if workers is None else workers
        if workers is None:
            raise InvalidArgumentError(
                f"workers is missing. A number is in the environment variable {WORKERS}, unless this host joins with "
                'more workers: say how many, or "all" for as many as there are'
            )
        if isinstance(workers, str) and workers != "all":
            raise InvalidArgumentError(f'workers must be an integer or "all", not {shown(workers)}')
        number = None if isinstance(workers, str) else validation.integer(workers, "workers", low=1)
        if not isinstance(quorum, Quorum):
            quorum = Quorum(None if quorum is None else validation.integer(quorum, "quorum", low=1))
        if number is None and quorum.most is not None:
            raise InvalidArgumentError(
                f'most={shown(quorum.most)} needs a number of workers: with workers="all", the grace ends when '
                "everybody has contributed"
            )
        asked = quorum.most or quorum.least or 1
        if number is not None and asked > number:
            raise InvalidArgumentError(
                f"{'most' if quorum.most else 'least'} must be in [1, {number}], the number of workers, not {asked}: a "
                "step has one gradient of each worker, so it would never have as many"
            )
        # In whole milliseconds, as the record will hold it.
        grace = None if quorum.grace is None else milliseconds(quorum.grace) / 1000
        least = quorum.least or number or 1
        # A step has one gradient of each worker, so nothing is left to wait for.
        most = quorum.most if grace is None or quorum.most is not None else number
        return cls(number, least, replace(quorum, least=least, most=most, grace=grace))

    def of_crew(self, workers: int) -> Quorum:
        """Returns the quorum of the accumulator while there are this many workers."""
        quorum = replace(self.quorum, min_weight=None)
        if self.workers is not None:
            return quorum
        everybody = max(self.least, workers)
        return Quorum(everybody) if quorum.grace is None else replace(quorum, most=everybody)


class QuorumKeeper:
    """Keeps the quorum of the accumulator, and announces to the workers among how many they share the data.

    Args:
        quorum: what the chief was told.
        accumulator: of the run.
        crew: its chief and workers.
        transport: the way to the server.
        name: the name of the run.

    Attributes:
        workers: the number of workers that share the data.
        until: the step with which the run ends, as it is announced; None if nobody knows.
    """

    def __init__(
        self,
        quorum: CrewQuorum,
        accumulator: ConditionalAccumulatorBase[Any],
        crew: Crew,
        transport: Transport,
        name: str,
    ) -> None:
        self._quorum = quorum
        self._accumulator = accumulator
        self._crew = crew
        self._transport = transport
        self._name = name
        self._next_look = 0.0
        self.workers = quorum.workers or quorum.least
        self.until: int | None = None

    def store(self) -> None:
        """Stores the quorum, even if another process has changed it. Something must have been published."""
        self._store()
        self._announce(self.until)

    def aim(self, until: int | None) -> None:
        """Announces the step with which the run ends, for people who watch it; None means nobody knows."""
        if until != self.until:
            self._announce(until)
            self.until = until

    def restore(self) -> bool:
        """Stores the quorum again if the record has lost it. Returns whether it had."""
        if self._accumulator.quorum().least is not None:
            return False
        warn(self._name, "the quorum is gone, so it is again as this chief was told")
        self.store()
        return True

    def follow(self) -> None:
        """Checks once a second whether the crew has grown or shrunk, if the chief waits for all of it.

        With a fixed number of workers, it checks that the quorum is still there: without it, a take with a minimum
        weight would require a single gradient only.
        """
        now = clock.now()
        if now < self._next_look:
            return
        self._next_look = now + durations.look_every
        if self._quorum.workers is not None:
            self.restore()
            return
        before = self.workers
        self._store()
        if self.workers != before:
            inform(self._name, "there are %d workers instead of %d", self.workers, before)
            self._announce(self.until)

    def _store(self) -> None:
        if self._quorum.workers is None:
            # A worker that has gone counts as long as its gradient is in the round. Otherwise, the round would be
            # complete while another worker is still computing.
            everybody = self._crew.workers() | contributors_of_round(self._transport, Keys(self._name))
            self.workers = max(self._quorum.least, len(everybody))
        quorum = self._quorum.of_crew(self.workers)
        while self._accumulator.quorum() != quorum:
            try:
                self._accumulator.set_quorum(least=quorum.least, most=quorum.most, grace=quorum.grace)
            except (DataLossError, StaleSequenceError) as error:
                # The server has lost its data about this process and reports that once. It changed nothing.
                logger.debug("%s: %s", self._name, error)
            else:
                return

    def _announce(self, until: int | None) -> None:
        announce_workers(self._transport, ParameterKeys(self._name), self.workers, until)
