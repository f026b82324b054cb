"""Takes rounds: waits for one, reads, reduces and acknowledges it; recovers the rounds of takers that died."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from redisacc._data.metrics import metrics_text
from redisacc._data.results import Round
from redisacc._data.spec import AccumulatorSpec
from redisacc._data.sums import RoundSum
from redisacc._format.buffered import BufferedGradient, PartMissingError
from redisacc._format.keys import Keys
from redisacc._format.quorum import Quorum
from redisacc._format.shapes import round_shape_of
from redisacc._format.staleness import parse_staleness
from redisacc._protocol.rounds.acknowledgement import acknowledge, ended_round
from redisacc._protocol.rounds.recovery import take_over
from redisacc._protocol.rounds.round_owner import REMEMBERED, still_listed
from redisacc._protocol.rounds.round_reader import RoundContents, RoundReader, part_lost, read_commands
from redisacc._protocol.rounds.take_requirement import TakeRequirement
from redisacc._protocol.rounds.take_wait import History, TakeWait, leave
from redisacc._protocol.scripts import Reply, Scripts, StaleSequenceError, check_replicated
from redisacc._protocol.sessions import Request, Session, SessionPool
from redisacc._protocol.sums.reducer_reliance import ReducerReliance
from redisacc._protocol.waiting.lifetime import Lifetime
from redisacc._redis.transport import Transport
from redisacc._telemetry.traceparent import TraceParent
from redisacc._text import shown
from redisacc.errors import (
    ConflictError,
    CorruptDataError,
    DataLossError,
    NotFoundError,
    OutcomeUnknownError,
    RedisAccError,
    ServerUnavailableError,
)

logger = logging.getLogger("redisacc")

# The result of a take: an array, or IndexedSlices.
G = TypeVar("G")
Value = TypeVar("Value")


@dataclass(slots=True)
class GrantedRound:
    """A round that was granted, and of which nothing but its hashes was read.

    Attributes:
        granted: what the server said of it.
        pieces: the replies to ``read_commands``.
        reader: reads the rest, and may have begun with it.
        num_required: how many gradients the take required; 0 if it was recovered.
    """

    granted: Reply
    pieces: Sequence[Any]
    reader: RoundReader
    num_required: int


@dataclass(slots=True)
class TakenRound(Generic[G]):
    """A round that is in memory and not yet acknowledged.

    Attributes:
        token: the id of the take.
        round: the round, as the caller gets it.
        buffered: the buffered gradients whose parts the acknowledgement removes.
        traces: the spans that applied its gradients, as far as they are known.
        pid: the process that took it. After a fork, a child must not deliver its parent's round.
    """

    token: str
    round: Round[G]
    buffered: list[BufferedGradient]
    traces: list[TraceParent]
    pid: int = field(default_factory=os.getpid)


class Taker(Generic[G]):
    """Takes the rounds of one accumulator for one handle.

    Attributes:
        kept: rounds that are in memory and whose takes were interrupted, the oldest first. The server may have removed
            them already, so the next calls deliver them.
        is_updated: whether reducers update the parameters with the sums. Rounds are then granted, and not read.
    """

    def __init__(
        self,
        transport: Transport,
        keys: Keys,
        scripts: Scripts,
        spec: AccumulatorSpec,
        *,
        sessions: SessionPool,
        lifetime: Lifetime,
        min_replicas: int,
        history: History,
    ) -> None:
        self._transport = transport
        self._keys = keys
        self._scripts = scripts
        self._spec = spec
        self._sessions = sessions
        self._lifetime = lifetime
        self._min_replicas = min_replicas
        self.kept: list[TakenRound[G]] = []
        self._history = history
        # How it turned out that the accumulator has gone back to older data, if the caller has not heard of it.
        self._loss: str | None = None
        self._reliance = ReducerReliance()
        self.is_updated = False

    def take(
        self,
        demand: Quorum,
        *,
        deadline: float,
        name: str,
        label: str,
        describe: Callable[[], str] | None = None,
        cancel: Callable[[], bool] | None = None,
    ) -> TakenRound[G]:
        """Blocks until a round of enough gradients is granted, then reads and reduces it.

        Args:
            demand: the gradients that the take requires.
            deadline: when to stop waiting, by ``clock.now()``; infinity: never.
            name: the name of the taker.
            label: the accumulator's name in log records and errors.
            describe: returns a further clause for messages about the wait, or "".
            cancel: cancels the wait if it returns True; it is asked after every poll that was answered.
        """
        return self._read(
            self.grant(demand, deadline=deadline, name=name, label=label, describe=describe, cancel=cancel)
        )

    def grant(
        self,
        demand: Quorum,
        *,
        deadline: float,
        name: str,
        label: str,
        describe: Callable[[], str] | None = None,
        cancel: Callable[[], bool] | None = None,
    ) -> GrantedRound:
        """Blocks until a round of enough gradients is granted. The arguments are those of ``take``."""
        session = self._sessions.borrow()
        try:
            reader = RoundReader(
                self._transport, self._keys, self._spec, reliance=self._reliance, is_updated=self.is_updated
            )
            pending = TakeWait(
                self._transport,
                self._lifetime,
                self._keys,
                self._scripts,
                session,
                required=TakeRequirement.of(demand),
                min_weight=demand.min_weight or 0.0,
                deadline=deadline,
                taker=name,
                label=label,
                reader=reader,
                history=self._history,
                describe=describe,
                cancel=cancel,
            )
            try:
                granted, (*pieces, takes) = pending.run()
            finally:
                self._loss = pending.loss or self._loss
        finally:
            self._sessions.give_back(session)
        self._check_nothing_undone(granted, takes)
        if self._min_replicas:
            # The round is unknown to a server that took over in a failover.
            known = leave(self._scripts, granted.token, replicated=True)
            if known is None:
                # This raises if the round was deleted or recovered. Otherwise, the server does not know it.
                self._still_listed(granted.token, granted.global_step)
            self._check_replicated(granted.global_step, "taken", known.replicas if known else 0)
        # If the server has not said how many were required, they were probably as many as there are.
        return GrantedRound(granted, pieces, reader, pending.num_required or granted.num_accumulated)

    def recover(self, token: str | None, *, name: str, skip_lost: bool = False) -> TakenRound[Any] | None:
        """Takes over a round that was granted and not acknowledged, and reads and reduces it.

        Args:
            token: the token of the round; None: the oldest round.
            name: the name of the new taker.
            skip_lost: whether to leave out gradients that have lost parts.

        Returns:
            The round, or None if there is none to recover.

        Raises:
            NotReplicatedError: the round has a new token, but too few replicas know it. It can be recovered again.
        """
        found = self.grant_again(token, name=name)
        return None if found is None else self._read(found, skip_lost=skip_lost)

    def grant_again(self, token: str | None, *, name: str) -> GrantedRound | None:
        """Takes over a round that was granted and not acknowledged. The arguments are those of ``recover``."""
        granted = take_over(self._transport, self._keys, self._scripts, token, name=name)
        if granted is None:
            return None
        self._check_replicated(granted.global_step, "recovered", granted.replicas)
        pieces = self._transport.pipeline(read_commands(self._keys.taken_round(granted.token)))
        return GrantedRound(granted, pieces, RoundReader(self._transport, self._keys, self._spec), 0)

    def _check_replicated(self, global_step: int, done: str, replicas: int) -> None:
        check_replicated(
            self._keys.name,
            f"the round of step {global_step} was {done}",
            replicas=replicas,
            min_replicas=self._min_replicas,
        )

    def acknowledge(self, taken: TakenRound[G], value: Value, *, again: bool = False) -> Value:
        """Removes a round from Redis, and returns ``value``.

        Args:
            taken: the round.
            value: the value that the call and the ``settle()`` of its error return.
            again: whether an earlier call may have removed the round.

        Raises:
            ConflictError: another taker has recovered the round.
            NotFoundError: the accumulator was deleted.
            DataLossError: the server has lost the round.
            OutcomeUnknownError: the server stopped answering before it confirmed. The error's ``settle()`` acknowledges
                again and returns ``value``.
        """
        lost = self._transport.lost
        metrics = metrics_text(taken.round.metrics) if taken.round.metrics else ""
        try:
            ended = ended_round(self._keys, taken.token, taken.buffered)
            if not acknowledge(self._transport, self._scripts, ended, metrics=metrics):
                # If an exchange broke off, an earlier copy of this request may have removed the round.
                self._check_not_lost(taken, perhaps_done=again or self._transport.lost != lost)
        except ServerUnavailableError as error:
            raise OutcomeUnknownError(
                f"{self._keys.name}: round {taken.token} has been read, but the server stopped answering before it "
                "confirmed that it has removed the round. settle() of this error acknowledges it; until then "
                f"info().unacknowledged may list it, and recover() would hand it out again ({error})",
                lambda: self.acknowledge(taken, value, again=True),
            ) from error
        return value

    def finish(self, taken: TakenRound[G], value: object) -> bool:
        """Acknowledges a round that was kept. Returns False if it is not, or no longer, this process's to deliver.

        Raises:
            DataLossError, OutcomeUnknownError: as ``acknowledge``.
        """
        if taken.pid != os.getpid():
            return False
        try:
            self.acknowledge(taken, value, again=True)
        except ConflictError as error:
            logger.info("%s", error)
            return False
        return True

    def _check_not_lost(self, taken: TakenRound[G], *, perhaps_done: bool) -> None:
        """Raises unless a round that is gone may have been removed by an earlier copy of our own acknowledgement.

        A trace of a recovery is certain: a round that was acknowledged cannot be recovered any more.
        """
        try:
            listed = self._still_listed(taken.token, taken.round.global_step)
        except NotFoundError:
            if not perhaps_done:
                raise
            logger.warning(
                "%s: the accumulator was deleted before it was known whether round %s had been acknowledged",
                self._keys.name,
                taken.token,
                extra={"accumulator": self._keys.name, "token": taken.token},
            )
            return
        if not listed and (not perhaps_done or self._is_undone(taken.token)):
            raise self._unlisted(taken.token, taken.round.global_step)

    def _is_undone(self, token: str) -> bool:
        """Returns whether the server knows less than the take of a token. Nothing changes."""
        session = Session.of_take(token)
        if session is None:
            return False
        try:
            self._scripts.resolve(**Request(session, session.sequence, "").arguments(), allowed=("fenced",))
        except DataLossError:
            return True
        except StaleSequenceError:
            # It was idle for an hour, or has sent further requests since.
            return False
        return False

    def _still_listed(self, token: str, global_step: int) -> bool:
        return still_listed(self._transport, self._keys, self._scripts.incarnation, token, global_step)

    def check_listed(self, granted: Reply) -> None:
        """Raises unless a round that was granted to this process is still its own.

        Raises:
            ConflictError: another taker has recovered it.
            NotFoundError: the accumulator was deleted.
            DataLossError: the server has lost it.
        """
        if not self._still_listed(granted.token, granted.global_step):
            raise self._unlisted(granted.token, granted.global_step)

    def _unlisted(self, token: str, global_step: int) -> DataLossError:
        return DataLossError(
            f"{self._keys.name}: the server no longer lists the round of step {global_step}, which it had granted to "
            f"the take {token}: it was restarted from older data, failed over to a replica that lagged behind, or keys "
            "were evicted or removed by hand. Or the round was recovered, and so many others since that no trace of it "
            f"is left ({REMEMBERED} are remembered)"
        )

    def _read(self, found: GrantedRound, *, skip_lost: bool = False) -> TakenRound[Any]:
        try:
            return self._read_whole(found, skip_lost=skip_lost)
        except (PartMissingError, CorruptDataError) as error:
            raise self._explained(found.granted, error) from error

    def _explained(self, granted: Reply, error: PartMissingError | CorruptDataError) -> RedisAccError:
        """Returns the error that says why a round cannot be read."""
        # Deleting or recovering the round also removes the keys that were to be read.
        if not self._still_listed(granted.token, granted.global_step):
            return self._unlisted(granted.token, granted.global_step)
        if isinstance(error, PartMissingError):
            lost = part_lost(
                self._keys,
                error,
                f"the round of step {granted.global_step}",
                f"The round stays listed in info().unacknowledged as {granted.token}; recover(skip_lost=True) "
                "hands it out without that gradient",
            )
            if lost is not None:
                return lost
        return CorruptDataError(f"{error}. The round stays listed in info().unacknowledged")

    def contents(self, found: GrantedRound) -> tuple[RoundContents, tuple[int, ...]]:
        """Returns the hashes of a round, and the shape that binds it.

        Raises:
            DataLossError, CorruptDataError: as ``take``.
        """
        try:
            return self._contents(found)
        except (PartMissingError, CorruptDataError) as error:
            raise self._explained(found.granted, error) from error

    def _contents(self, found: GrantedRound) -> tuple[RoundContents, tuple[int, ...]]:
        granted = found.granted
        shape = round_shape_of(self._keys, granted.round_shape)
        if shape is None:
            raise CorruptDataError(f"{self._keys.taken}: round {granted.token} has no shape")
        return found.reader.contents(self._keys.taken_round(granted.token), found.pieces, shape), shape

    def sum_of(self, found: GrantedRound, contents: RoundContents, shape: tuple[int, ...]) -> RoundSum:
        """Returns the sum of a round, which is not divided.

        Args:
            found: the round.
            contents: its hashes, from ``contents``.
            shape: the shape that binds it.

        Raises:
            DataLossError, CorruptDataError: as ``take``.
        """
        granted = found.granted
        try:
            return found.reader.add_up(
                contents, shape, granted.num_accumulated, granted.total_weight, found.num_required
            )
        except (PartMissingError, CorruptDataError) as error:
            raise self._explained(granted, error) from error

    def rows_of(self, found: GrantedRound, contents: RoundContents, shape: tuple[int, ...]) -> RoundSum | None:
        """Returns a sum with only the rows of a round whose gradients are all in parts. ``sum_of`` may follow.

        The arguments and the errors are those of ``sum_of``. None: rows cannot be added up alone.
        """
        try:
            return found.reader.add_rows_up(contents, shape, found.num_required)
        except (PartMissingError, CorruptDataError) as error:
            raise self._explained(found.granted, error) from error

    def _read_whole(self, found: GrantedRound, *, skip_lost: bool) -> TakenRound[Any]:
        granted, reader = found.granted, found.reader
        contents, shape = self._contents(found)
        try:
            staleness = parse_staleness(granted.staleness, granted.num_accumulated)
        except ValueError as error:
            raise CorruptDataError(f"{self._keys.taken}: round {granted.token}: {error}") from error
        # The acknowledgement also removes the rest of the gradients that are left out.
        buffered, number, weight = contents.buffered, granted.num_accumulated, granted.total_weight
        lost_weight = 0.0
        if skip_lost:
            lost = reader.leave_out_lost(contents)
            number -= sum(gradient.number for gradient in lost)
            if weight is not None:
                lost_weight = sum(gradient.total_weight for gradient in lost)
            if lost:
                logger.warning(
                    "%s: the round of step %d is handed out without the gradients that have lost parts: %s",
                    self._keys.name,
                    granted.global_step,
                    ", ".join(gradient.id for gradient in lost),
                    extra={"accumulator": self._keys.name, "global_step": granted.global_step, "token": granted.token},
                )
        round_sum = reader.add_up(contents, shape, number, weight, found.num_required, lost_weight=lost_weight)
        if lost_weight:
            # The weight of the gradients that are left, without the rounding of a difference.
            weight = float(round_sum.number) if round_sum.weight is None else round_sum.weight
        else:
            weight = self._spec.weight_of(round_sum, weight)
        gradient: G | None = self._spec.result(round_sum, self._spec.divisor(number, weight)) if number else None
        total = float(number) if weight is None else weight
        taken = Round(gradient, granted.global_step, number, contents.workers, staleness, total, contents.metrics)
        return TakenRound(granted.token, taken, buffered, contents.traces)

    def _check_nothing_undone(self, granted: Reply, takes: object) -> None:
        """Raises if it turned out, since the last take, that the accumulator has gone back to older data."""
        if not self._history.note(takes):
            # This raises if the accumulator was deleted since the round was granted.
            self._still_listed(granted.token, granted.global_step)
            raise CorruptDataError(f"{self._keys.record}: takes is {shown(takes)}")
        loss, self._loss = self._loss, None
        if loss is not None:
            raise DataLossError(
                f"{shown(self._keys.name)} {loss}: the server was restarted from older data, failed over to a replica "
                "that lagged behind, or evicted keys. Gradients of this round, of step "
                f"{granted.global_step}, and of rounds that were taken since then, may also have been in a round that "
                "was taken before. It stays listed in info().unacknowledged, and recover() hands it out"
            )
