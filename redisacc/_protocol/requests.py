"""Requests that are executed at most once, whatever breaks, and whose sender learns whether they were."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redisacc._data.results import Tally
from redisacc._protocol.ledger import Ledger, Ledgers, OpenRequest
from redisacc._protocol.scripts import Counted, ForgottenError, Scripts
from redisacc._protocol.sessions import Session, SessionPool
from redisacc._redis.transport import Transport
from redisacc.errors import DataLossError, OutcomeUnknownError, RedisAccError, ServerError, ServerUnavailableError

logger = logging.getLogger("redisacc")


@dataclass(slots=True)
class Attempt:
    """A request that may be sent any number of times.

    Attributes:
        send: sends one copy, given the session and the sequence number.
        finish: turns the outcome into the caller's result.
        worker: the name of the worker.
        what: a description of the request, for errors.
    """

    send: Callable[[Session, int], Counted]
    finish: Callable[[Counted], Any]
    worker: str
    what: str


class Requests:
    """Sends the requests of one handle."""

    def __init__(self, transport: Transport, scripts: Scripts, sessions: SessionPool) -> None:
        self._transport = transport
        self._scripts = scripts
        self._sessions = sessions
        self._ledgers = Ledgers(transport.waits)

    def execute(self, attempt: Attempt) -> Any:
        """Sends a new request, and returns its result.

        If an interrupt ends the call, the request stays open until ``settle``, or the thread's next request, learns
        its outcome.

        Raises:
            OutcomeUnknownError: the server may have executed it, or may yet. The error's ``retry()`` sends it again.
            RedisAccError: it was not executed, and no copy of it ever will be.
        """
        ledger = self._ledgers.mine()
        if ledger.open:
            self._settle(ledger, [request for request in ledger.open if request.abandoned])
        session = self._sessions.borrow()
        request = OpenRequest(session, session.next(), attempt.worker)
        try:
            value = self._run(attempt, request, ledger, self._transport.lost)
        except (OutcomeUnknownError, DataLossError):
            # Another request of this session would make the outcome unknowable, so the session stays with the error.
            # Data loss is reported once: the server has lost the session, so the next request needs a new one.
            raise
        except RedisAccError:
            self._sessions.give_back(session)
            raise
        self._sessions.give_back(session)
        return value

    def settle(self) -> Tally:
        """Learns the outcome of every open request of this thread, and returns how many of each outcome there were.

        A request that has not been executed is fenced: no copy of it ever will be.

        Raises:
            ServerError: the server does not answer, or refuses to. The requests stay open.
        """
        ledger = self._ledgers.mine()
        self._settle(ledger, ledger.open)
        return ledger.tally

    def _settle(self, ledger: Ledger, requests: Sequence[OpenRequest]) -> None:
        for request in requests:
            fate = request.fate
            if fate is None:
                try:
                    counted = self._scripts.resolve(
                        session=request.session, sequence=request.sequence, worker=request.worker
                    )
                    fate = "fenced" if counted is None else counted.outcome
                except ServerError:
                    raise
                except RedisAccError as error:
                    # The accumulator was deleted, or the server has forgotten or lost the session.
                    logger.warning("the outcome of an interrupted request cannot be learnt any more: %s", error)
                    fate = "unknown"
            ledger.close(request, fate)
            if fate != "unknown" and not request.retried:
                request.session.learn(request.sequence)
                self._sessions.give_back(request.session)

    def _run(self, attempt: Attempt, request: OpenRequest, ledger: Ledger, lost: int) -> Any:
        """Sends the request, and keeps it open in the ledger for as long as its outcome is not known.

        Args:
            attempt: the request.
            request: the same, as the ledger knows it.
            ledger: of this thread.
            lost: how many exchanges had broken off before the first copy was sent.
        """
        try:
            if request.fate is None:
                ledger.begin(request)
            counted = self._resolved(attempt, request, lost)
            # From here on, it is counted, even if an interrupt keeps the result from the caller.
            ledger.close(request, counted.outcome)
        except RedisAccError:
            ledger.drop(request)
            raise
        except BaseException:
            request.abandoned = True
            raise
        request.session.learn(request.sequence)
        return attempt.finish(counted)

    def _retry(self, attempt: Attempt, request: OpenRequest) -> Any:
        ledger = self._ledgers.mine()
        if ledger.open:
            self._settle(ledger, [other for other in ledger.open if other.abandoned])
        # No transport has this count, so the retry assumes that stray copies may still arrive.
        return self._run(attempt, request, ledger, -1)

    def _resolved(self, attempt: Attempt, request: OpenRequest, lost: int) -> Counted:
        """Sends the request until its outcome is known, and returns that.

        Args:
            attempt: the request.
            request: its session and its number.
            lost: how many exchanges had broken off before the first copy was sent.
        """
        session = request.session
        while True:
            try:
                return attempt.send(session, request.sequence)
            except DataLossError:
                raise
            except ForgottenError as error:
                if not session.was_idle():
                    raise DataLossError(
                        f"{attempt.what}: the server has acknowledged earlier requests of this session, but no longer "
                        "knows the session: it was restarted from older data, failed over to a replica that lagged "
                        "behind, or evicted keys. This request was not executed; "
                        "later ones will be"
                    ) from error
                if self._transport.lost != lost:
                    raise self._unknown(attempt, request, error) from error
                # The session was idle for so long that the server forgot it: the request goes out under a new one.
                session.begin_anew(error.now_ms)
                request.sequence = session.next()
            except ServerUnavailableError as error:
                if self._transport.lost == lost:
                    raise
                raise self._unknown(attempt, request, error) from error
            except RedisAccError as error:
                if self._transport.lost == lost:
                    raise
                # This copy was refused, but an earlier one whose connection broke may have been executed, or may still
                # be on its way and be executed once the reason for the refusal is gone.
                try:
                    resolved = self._scripts.resolve(session=session, sequence=request.sequence, worker=attempt.worker)
                except RedisAccError as failure:
                    raise self._unknown(attempt, request, failure) from error
                if resolved is None:
                    raise
                return resolved

    def _unknown(self, attempt: Attempt, request: OpenRequest, error: RedisAccError) -> OutcomeUnknownError:
        request.retried = True
        return OutcomeUnknownError(
            f"{attempt.what}: it is unknown whether the server has executed this. retry() of this error sends the same "
            f"request again, which is executed once however often it is sent ({error})",
            lambda: self._retry(attempt, request),
        )
