"""Takes rounds: waits for one, reads, reduces and acknowledges it; recovers the rounds of takers that died."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, Unpack

from redisacc._arrays.metrics import metrics_text
from redisacc._arrays.results import Round
from redisacc._arrays.spec import AccumulatorSpec
from redisacc._arrays.sums import RoundSum
from redisacc._format.buffered import PartMissingError
from redisacc._format.keys import Keys
from redisacc._format.quorum import Quorum
from redisacc._format.stored_text import parse_staleness, round_shape_of
from redisacc._log import warn
from redisacc._protocol.rounds.granted_rounds import REMEMBERED, EndedRound, ended_round, still_listed, take_over
from redisacc._protocol.rounds.round_reader import RoundContents, RoundReader, part_lost, read_commands
from redisacc._protocol.rounds.take_wait import History, TakeWait, leave
from redisacc._protocol.scripts import Reply, Scripts, StaleSequenceError
from redisacc._protocol.sessions import Request, Session, SessionPool
from redisacc._protocol.sums.part_sums import ReducerReliance
from redisacc._protocol.waiting.lifetime import Lifetime
from redisacc._protocol.waiting.wait import WaitOptions
from redisacc._telemetry.traceparent import TraceParent
from redisacc._text import shown
from redisacc._wire.transport import Transport
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
        ended: what its acknowledgement removes.
        round: the round, as the caller gets it.
        traces: the spans that applied its gradients, as far as they are known.
        pid: the process that took it. After a fork, a child must not deliver its parent's round.
    """

    ended: EndedRound
    round: Round[G]
    traces: list[TraceParent]
    pid: int = field(default_factory=os.getpid)

    @property
    def token(self) -> str:
        """The id of the take."""
        return self.ended.token


@dataclass(eq=False)
class Taker(Generic[G]):
    """Takes the rounds of one accumulator for one handle.

    Attributes:
        transport: the way to the server.
        keys: the keys of the accumulator.
        scripts: its scripts.
        spec: its specification.
        sessions: the sessions of the handle.
        lifetime: the lifetime of the handle.
        history: the handle's knowledge of the accumulator's past.
        kept: rounds that are in memory and whose takes were interrupted, the oldest first. The server may have removed
            them already, so the next calls deliver them.
        is_updated: whether reducers update the parameters with the sums. Rounds are then granted, and not read.
    """

    transport: Transport
    keys: Keys
    scripts: Scripts
    spec: AccumulatorSpec
    sessions: SessionPool
    lifetime: Lifetime
    history: History
    kept: list[TakenRound[G]] = field(default_factory=list)
    is_updated: bool = False
    # How it turned out that the accumulator has gone back to older data, if the caller has not heard of it.
    _loss: str | None = None
    _reliance: ReducerReliance = field(default_factory=ReducerReliance)

    def take(self, demand: Quorum, *, name: str, **how: Unpack[WaitOptions]) -> TakenRound[G]:
        """Blocks until a round of enough gradients is granted, then reads and reduces it.

        Args:
            demand: the gradients that the take requires.
            name: the name of the taker.
            how: of the wait.
        """
        return self._read(self.grant(demand, name=name, **how))

    def grant(self, demand: Quorum, *, name: str, **how: Unpack[WaitOptions]) -> GrantedRound:
        """Blocks until a round of enough gradients is granted. The arguments are those of ``take``."""
        session = self.sessions.borrow()
        try:
            reader = RoundReader(
                self.transport, self.keys, self.spec, is_updated=self.is_updated, relies=self._reliance
            )
            pending = TakeWait(reader, self.lifetime, self.scripts, session, self.history, demand, taker=name, **how)
            try:
                granted, (*pieces, takes) = pending.run()
            finally:
                self._loss = pending.loss or self._loss
        finally:
            self.sessions.give_back(session)
        self._check_nothing_undone(granted, takes)
        if self.scripts.min_replicas:
            # The round is unknown to a server that took over in a failover.
            known = leave(self.scripts, granted.token, replicated=True)
            if known is None:
                # This raises if the round was deleted or recovered. Otherwise, the server does not know it.
                self._still_listed(granted.token, granted.global_step)
            done = f"the round of step {granted.global_step} was taken"
            self.scripts.check_replicated(known.replicas if known else 0, done)
        # If the server has not said how many were required, they were probably as many as there are.
        return GrantedRound(granted, pieces, reader, pending.num_required or granted.num_accumulated)

    def recover(self, token: str | None, *, name: str, skip_lost: bool = False) -> TakenRound[Any] | None:
        """Takes over a round that was granted and not acknowledged, and reads and reduces it.

        Args:
            token: the token of the round; None means the oldest round.
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
        granted = take_over(self.keys, self.scripts, token, name=name)
        if granted is None:
            return None
        self.scripts.check_replicated(granted.replicas, f"the round of step {granted.global_step} was recovered")
        pieces = self.transport.pipeline(read_commands(self.keys.taken_round(granted.token)))
        return GrantedRound(granted, pieces, RoundReader(self.transport, self.keys, self.spec), 0)

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
        lost = self.transport.lost
        metrics = metrics_text(taken.round.metrics) if taken.round.metrics else ""
        try:
            if not taken.ended.acknowledge(metrics=metrics):
                # If an exchange broke off, an earlier copy of this request may have removed the round.
                self._check_not_lost(taken, perhaps_done=again or self.transport.lost != lost)
        except ServerUnavailableError as error:
            raise OutcomeUnknownError(
                f"{self.keys.name}: round {taken.token} has been read, but the server stopped answering before it "
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

    @contextmanager
    def handing_out_kept(self, token: str | None) -> Iterator[Round[G] | None]:
        """Hands out a round that the server has removed and an interrupted take has not returned.

        If the block raises, the handle keeps it.

        Args:
            token: which round; None means the oldest.
        """
        kept = next((kept for kept in self.kept if token in (None, kept.token)), None)
        if kept is None:
            yield None
            return
        try:
            # From here on, no other thread has it.
            self.kept.remove(kept)
            yield kept.round if self.finish(kept, None) else None
        except BaseException:
            if kept not in self.kept:
                self.kept = [kept, *self.kept]
            raise

    def _check_not_lost(self, taken: TakenRound[G], *, perhaps_done: bool) -> None:
        """Raises unless a round that is gone may have been removed by an earlier copy of our own acknowledgement.

        A trace of a recovery is certain: a round that was acknowledged cannot be recovered any more.
        """
        try:
            listed = self._still_listed(taken.token, taken.round.global_step)
        except NotFoundError:
            if not perhaps_done:
                raise
            warn(
                self.keys.name,
                "the accumulator was deleted before it was known whether round %s had been acknowledged",
                taken.token,
                token=taken.token,
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
            self.scripts.resolve(**Request(session, session.sequence, "").arguments(), allowed=("fenced",))
        except DataLossError:
            return True
        except StaleSequenceError:
            # It was idle for an hour, or has sent further requests since.
            return False
        return False

    def _still_listed(self, token: str, global_step: int) -> bool:
        return still_listed(self.keys, self.scripts, token, global_step)

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
            f"{self.keys.name}: the server no longer lists the round of step {global_step}, which it had granted to "
            f"the take {token}: it was restarted from older data, failed over to a replica that lagged behind, or keys "
            f"were evicted or removed by hand. Or the round was recovered, and more than {REMEMBERED} others since"
        )

    def _read(self, found: GrantedRound, *, skip_lost: bool = False) -> TakenRound[Any]:
        return self._guarded(found, self._read_whole, found, skip_lost=skip_lost)

    def _explained(self, granted: Reply, error: PartMissingError | CorruptDataError) -> RedisAccError:
        """Returns the error that says why a round cannot be read."""
        # Deleting or recovering the round also removes the keys that were to be read.
        self.check_listed(granted)
        if isinstance(error, PartMissingError):
            lost = part_lost(
                self.keys,
                error,
                f"the round of step {granted.global_step}",
                f"The round stays listed in info().unacknowledged as {granted.token}; recover(skip_lost=True) "
                "hands it out without that gradient",
            )
            if lost is not None:
                return lost
        return CorruptDataError(f"{error}. The round stays listed in info().unacknowledged")

    def contents(self, found: GrantedRound) -> RoundContents:
        """Returns the hashes of a round.

        Raises:
            DataLossError, CorruptDataError: as ``take``.
        """
        return self._guarded(found, self._contents, found)

    def sum_of(self, found: GrantedRound, contents: RoundContents) -> RoundSum:
        """Returns the sum of a round, which is not divided.

        Args:
            found: the round.
            contents: its hashes, from ``contents``.

        Raises:
            DataLossError, CorruptDataError: as ``take``.
        """
        return self._guarded(found, found.reader.add_up, contents)

    def rows_of(self, found: GrantedRound, contents: RoundContents) -> RoundSum | None:
        """Returns a sum with only the rows of a round whose gradients are all in parts. ``sum_of`` may follow.

        The arguments and the errors are those of ``sum_of``. None means rows cannot be added up alone.
        """
        return self._guarded(found, found.reader.add_rows_up, contents)

    def _guarded(self, found: GrantedRound, read: Callable[..., Value], *of: object, **how: object) -> Value:
        try:
            return read(*of, **how)
        except (PartMissingError, CorruptDataError) as error:
            raise self._explained(found.granted, error) from error

    def _contents(self, found: GrantedRound) -> RoundContents:
        granted, number = found.granted, found.granted.num_accumulated
        shape = round_shape_of(self.keys.record, granted.round_shape)
        if shape is None:
            raise CorruptDataError(f"{self.keys.taken}: round {granted.token} has no shape")
        of = self.keys.taken_round(granted.token)
        return found.reader.contents(of, found.pieces, shape, number, granted.total_weight, found.num_required)

    def _read_whole(self, found: GrantedRound, *, skip_lost: bool) -> TakenRound[Any]:
        granted, reader = found.granted, found.reader
        contents = self._contents(found)
        try:
            staleness = parse_staleness(granted.staleness, granted.num_accumulated)
        except ValueError as error:
            raise CorruptDataError(f"{self.keys.taken}: round {granted.token}: {error}") from error
        # The acknowledgement also removes the rest of the gradients that are left out.
        ended = ended_round(self.keys, self.scripts, granted.token, contents.buffered)
        lost = reader.leave_out_lost(contents) if skip_lost else ()
        if lost:
            warn(
                self.keys.name,
                "the round of step %d is handed out without the gradients that have lost parts: %s",
                granted.global_step,
                ", ".join(gradient.id for gradient in lost),
                global_step=granted.global_step,
                token=granted.token,
            )
        taken: Round[G] = reader.reduced(contents, granted.global_step, staleness, self.spec.result)
        return TakenRound(ended, taken, contents.traces)

    def _check_nothing_undone(self, granted: Reply, takes: object) -> None:
        """Raises if it turned out, since the last take, that the accumulator has gone back to older data."""
        if not self.history.note(takes):
            # This raises if the accumulator was deleted since the round was granted.
            self._still_listed(granted.token, granted.global_step)
            raise CorruptDataError(f"{self.keys.record}: takes is {shown(takes)}")
        loss, self._loss = self._loss, None
        if loss is not None:
            raise DataLossError(
                f"{shown(self.keys.name)} {loss}: the server was restarted from older data, failed over to a replica "
                "that lagged behind, or evicted keys. Gradients of this round, of step "
                f"{granted.global_step}, and of rounds that were taken since then, may also have been in a round that "
                "was taken before. It stays listed in info().unacknowledged, and recover() hands it out"
            )
