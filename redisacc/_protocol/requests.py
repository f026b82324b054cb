"""Requests that are executed at most once, whatever breaks, and whose sender learns whether they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redisacc._protocol.scripts import Counted, ForgottenError, Scripts
from redisacc._protocol.sessions import Session, SessionPool
from redisacc._redis.transport import Transport
from redisacc.errors import DataLossError, OutcomeUnknownError, RedisAccError, ServerUnavailableError


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

    def execute(self, attempt: Attempt) -> Any:
        """Sends a new request, and returns its result.

        Raises:
            OutcomeUnknownError: the server may have executed it, or may yet. The error's ``retry()`` sends it again.
            RedisAccError: it was not executed, and no copy of it ever will be.
        """
        session = self._sessions.borrow()
        try:
            value = self._resolved(attempt, session, session.next(), self._transport.lost)
        except (OutcomeUnknownError, DataLossError):
            # Another request of this session would make the outcome unknowable, so the session stays with the error.
            # Data loss is reported once: the server has lost the session, so the next request needs a new one.
            raise
        except BaseException:
            self._sessions.give_back(session)
            raise
        self._sessions.give_back(session)
        return value

    def _resolved(self, attempt: Attempt, session: Session, sequence: int, lost: int) -> Any:
        """Sends the request until its outcome is known.

        Args:
            attempt: the request.
            session: the session that it belongs to.
            sequence: its number.
            lost: how many exchanges had broken off before the first copy was sent.
        """
        while True:
            try:
                counted = attempt.send(session, sequence)
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
                    raise self._unknown(attempt, session, sequence, error) from error
                # The session was idle for so long that the server forgot it: the request goes out under a new one.
                session.begin_anew(error.now_ms)
                sequence = session.next()
            except ServerUnavailableError as error:
                if self._transport.lost == lost:
                    raise
                raise self._unknown(attempt, session, sequence, error) from error
            except RedisAccError as error:
                if self._transport.lost == lost:
                    raise
                # This copy was refused, but an earlier one whose connection broke may have been executed, or may still
                # be on its way and be executed once the reason for the refusal is gone.
                try:
                    resolved = self._scripts.resolve(session=session, sequence=sequence, worker=attempt.worker)
                except RedisAccError as failure:
                    raise self._unknown(attempt, session, sequence, failure) from error
                if resolved is None:
                    raise
                counted = resolved
                break
            else:
                break
        session.learn(sequence)
        return attempt.finish(counted)

    def _unknown(self, attempt: Attempt, session: Session, sequence: int, error: RedisAccError) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"{attempt.what}: it is unknown whether the server has executed this. retry() of this error sends the same "
            f"request again, which is executed once however often it is sent ({error})",
            # No transport has this count, so the retry assumes that stray copies may still arrive.
            lambda: self._resolved(attempt, session, sequence, -1),
        )
