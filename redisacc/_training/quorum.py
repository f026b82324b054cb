"""The quorum: how many gradients a step of a training needs, as set by the chief, while its crew grows or shrinks.

The chief keeps it in the settings of the accumulator, and announces it to the workers
(``redisacc._protocol.parameters.announced_quorum``).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

from redisacc._clock import clock
from redisacc._data import validation
from redisacc._format.keys import Keys, ParameterKeys
from redisacc._format.settings import Settings, milliseconds
from redisacc._handles.base import ConditionalAccumulatorBase
from redisacc._protocol.leases.crew import Crew
from redisacc._protocol.parameters.announced_quorum import announce_quorum
from redisacc._protocol.rounds.who_contributed import contributors_of_round
from redisacc._protocol.scripts.take_requirement import TakeRequirement
from redisacc._redis.transport import Transport
from redisacc._text import shown
from redisacc.errors import DataLossError, InvalidArgumentError, StaleSequenceError

logger = logging.getLogger("redisacc")

# How often a chief that waits for all workers counts them, in seconds.
LOOK_EVERY = 1.0

ALL: Literal["all"] = "all"


@dataclass(frozen=True)
class Quorum:
    """How many gradients a step needs, as the arguments of a chief say it.

    Attributes:
        workers: how many; None: as many as there are workers.
        minimum: the least number if ``workers`` is None; else the same as ``workers``.
        up_to: the number that ends the grace.
        grace: how long a step waits for more gradients, in seconds.
    """

    workers: int | None
    minimum: int
    up_to: int | None
    grace: float | None

    @classmethod
    def of(cls, workers: object, minimum: object, up_to: object, grace: object) -> Quorum:
        """Returns the quorum that the arguments of a chief ask for.

        Raises:
            InvalidArgumentError: an argument is invalid, or does not go together with the others.
        """
        if workers == ALL and isinstance(workers, str):
            if up_to is not None:
                raise InvalidArgumentError(
                    f'up_to={shown(up_to)} needs a number of workers: with workers="all", the grace ends when '
                    "everybody has contributed"
                )
            number, least = None, validation.integer(1 if minimum is None else minimum, "minimum", low=1)
        else:
            if isinstance(workers, str):
                raise InvalidArgumentError(f'workers must be an integer or "all", not {shown(workers)}')
            if minimum is not None:
                raise InvalidArgumentError(
                    f'minimum={shown(minimum)} needs workers="all": a number of workers says how many gradients a step '
                    "needs"
                )
            number = least = validation.integer(workers, "workers", low=1)
        required = TakeRequirement.of(least, up_to, grace)
        assert required is not None
        return cls(number, least, None if up_to is None else required.up_to, None if grace is None else _rounded(grace))

    def settings(self, crew: int) -> Settings:
        """Returns the settings of the accumulator for a crew of this many workers."""
        if self.workers is not None:
            return Settings(self.workers, self.up_to, self.grace)
        everybody = max(self.minimum, crew)
        if self.grace is None:
            return Settings(everybody)
        return Settings(self.minimum, everybody, self.grace)


def _rounded(grace: Any) -> float:
    """Returns a grace as the record will hold it: in whole milliseconds."""
    return milliseconds(float(grace)) / 1000


class QuorumKeeper:
    """Keeps the settings of the accumulator as the quorum demands, and announces to the workers what a step needs.

    Args:
        quorum: the quorum that the chief was told.
        accumulator: of the training.
        crew: its chief and workers.
        transport: the way to the server.
        name: the name of the training.

    Attributes:
        workers: how many gradients a step needs.
        until: the step with which the training ends, as it is announced; None if nobody knows.
    """

    def __init__(
        self, quorum: Quorum, accumulator: ConditionalAccumulatorBase[Any], crew: Crew, transport: Transport, name: str
    ) -> None:
        self._quorum = quorum
        self._accumulator = accumulator
        self._crew = crew
        self._transport = transport
        self._name = name
        self._next_look = 0.0
        self.workers = quorum.minimum
        self.until: int | None = None

    def store(self) -> None:
        """Stores the settings, even if another process has changed them. Something must have been published."""
        self._store(self._settings())
        self._announce(self.workers)

    def aim(self, until: int | None) -> None:
        """Announces the step with which the training ends, for people who watch it; None: nobody knows."""
        if until != self.until:
            announce_quorum(self._transport, ParameterKeys(self._name), self.workers, until)
            self.until = until

    def restore(self) -> bool:
        """Stores the settings again if the record has lost them. Returns whether it had."""
        if self._accumulator.settings().num_required is not None:
            return False
        logger.warning(
            "%s: the settings are gone, so they are again as this chief was told",
            self._name,
            extra={"accumulator": self._name},
        )
        self.store()
        return True

    def follow(self) -> None:
        """Checks once a second whether the crew has grown or shrunk, if the chief waits for all of it.

        With a fixed number of workers, it checks that the settings are still there: without them, a take with a minimum
        weight would require a single gradient only.
        """
        now = clock.now()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY
        if self._quorum.workers is not None:
            self.restore()
            return
        before = self.workers
        self._store(self._settings())
        if self.workers != before:
            logger.info(
                "%s: there are %d workers instead of %d",
                self._name,
                self.workers,
                before,
                extra={"accumulator": self._name},
            )
            self._announce(self.workers)

    def _settings(self) -> Settings:
        if self._quorum.workers is not None:
            self.workers = self._quorum.workers
            return self._quorum.settings(self.workers)
        # A worker that has gone counts as long as its gradient is in the round. Otherwise, the round would be complete
        # while another worker is still computing.
        everybody = self._crew.workers() | contributors_of_round(self._transport, Keys(self._name))
        self.workers = max(self._quorum.minimum, len(everybody))
        return self._quorum.settings(len(everybody))

    def _store(self, settings: Settings) -> None:
        while self._accumulator.settings() != settings:
            try:
                self._accumulator.configure(
                    num_required=settings.num_required, up_to=settings.up_to, grace=settings.grace
                )
            except (DataLossError, StaleSequenceError) as error:
                # The server has lost its data about this process and reports that once. It changed nothing.
                logger.debug("%s: %s", self._name, error)
            else:
                return

    def _announce(self, workers: int) -> None:
        announce_quorum(self._transport, ParameterKeys(self._name), workers, self.until)
