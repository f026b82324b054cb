"""Requests that are executed at most once, whatever breaks, and whose sender learns whether they were.

A signal handler may raise between any two instructions of the main thread: while a reply is on its way, or after it has
arrived and before the caller has seen it. So every change of ``Outcomes`` is a single assignment, and a request stays
open until its outcome is known.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from redisacc._arrays.results import Tally
from redisacc._protocol.scripts import ForgottenError, Reply, Scripts
from redisacc._protocol.sessions import Request, SessionPool
from redisacc._wire.transport import Transport
from redisacc.errors import (
    DataLossError,
    NotFoundError,
    OutcomeUnknownError,
    RedisAccError,
    ServerError,
    ServerUnavailableError,
)

_NOTHING: Mapping[str, int] = MappingProxyType({})


class Outcomes:
    """The outcomes of the requests of one thread on one handle.

    Attributes:
        pid: the process that they belong to. After a fork, a child ignores its parent's.
        state: the requests whose outcome is not known, the oldest first; and how many requests had each outcome.
    """

    __slots__ = ("pid", "state")

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.state: tuple[tuple[Request, ...], Mapping[str, int]] = (), _NOTHING

    @property
    def tally(self) -> Tally:
        """How many requests of each outcome there were."""
        counts = self.state[1]
        return Tally(*(counts.get(outcome, 0) for outcome in ("applied", "stale", "repeated", "unknown")))

    def begin(self, request: Request) -> None:
        """Notes that a request may be sent from now on."""
        under_way, counts = self.state
        self.state = (*under_way, request), counts

    def close(self, request: Request, fate: str) -> None:
        """Notes the outcome of a request. A request is counted once, however often it is closed."""
        request.fate = fate
        under_way, counts = self.state
        if request in under_way:
            self.state = _without(request, under_way), {**counts, fate: counts.get(fate, 0) + 1}

    def drop(self, request: Request) -> None:
        """Forgets a request that was not executed, or whose outcome the caller learns by an error's ``settle()``."""
        under_way, counts = self.state
        if request in under_way:
            self.state = _without(request, under_way), counts


def _without(request: Request, under_way: tuple[Request, ...]) -> tuple[Request, ...]:
    place = under_way.index(request)
    return under_way[:place] + under_way[place + 1 :]


logger = logging.getLogger("redisacc")

Value = TypeVar("Value")
# Sends one copy of a request, and returns its outcome.
Send = Callable[[], Reply]
# Turns the outcome into the caller's result.
Finish = Callable[[Reply], Value]
# A request, what sends a copy of it, what makes the result, and a description of the request, for errors.
Call = tuple[Request, Send, Finish[Value], str]


class Requests:
    """Sends the requests of one handle.

    Attributes:
        sessions: lends a session to each request.
    """

    def __init__(self, transport: Transport, scripts: Scripts, sessions: SessionPool) -> None:
        self._transport = transport
        self._scripts = scripts
        self.sessions = sessions
        # The outcomes of each thread, or task.
        self._local = transport.waits.local()

    def execute(self, request: Request, send: Send, finish: Finish[Value], what: str) -> Value:
        """Sends a new request, and returns its result.

        If an interrupt ends the call, the request stays open until ``settle``, or the thread's next request, learns
        its outcome.

        Args:
            request: the request, with a session of ``sessions``.
            send: sends one copy of it. It may be called any number of times.
            finish: turns the outcome into the caller's result.
            what: a description of the request, for errors.

        Raises:
            OutcomeUnknownError: the server may have executed it, or may yet. The error's ``settle()`` sends it again.
            RedisAccError: it was not executed, and no copy of it ever will be.
        """
        outcomes, session = self._mine(), request.session
        try:
            if outcomes.state[0]:
                self._settle_abandoned(outcomes)
            value = self._run((request, send, finish, what), outcomes, self._transport.losses.count)
        except (OutcomeUnknownError, DataLossError):
            # Another request of this session would make the outcome unknowable, so the session stays with the error.
            # Data loss is reported once: the server has lost the session, so the next request needs a new one.
            raise
        except RedisAccError:
            self.sessions.give_back(session)
            raise
        self.sessions.give_back(session)
        return value

    def settle(self) -> Tally:
        """Learns the outcome of every open request of this thread, and returns how many of each outcome there were.

        A request that has not been executed is fenced: no copy of it ever will be.

        Raises:
            ServerError: the server does not answer, or refuses to. The requests stay open.
        """
        outcomes = self._mine()
        self._settle(outcomes, outcomes.state[0])
        return outcomes.tally

    def _mine(self) -> Outcomes:
        """Returns the outcomes of the calling thread or task."""
        found: Outcomes | None = getattr(self._local, "outcomes", None)
        if found is None or found.pid != os.getpid():
            found = self._local.outcomes = Outcomes()
        return found

    def _settle_abandoned(self, outcomes: Outcomes) -> None:
        self._settle(outcomes, [request for request in outcomes.state[0] if request.abandoned])

    def _settle(self, outcomes: Outcomes, requests: Sequence[Request]) -> None:
        for request in requests:
            fate = request.fate
            if fate is None:
                try:
                    fate = self._scripts.resolve(**Request.arguments(request), allowed=("fenced",)).outcome
                except ServerError:
                    raise
                except RedisAccError as error:
                    # The accumulator was deleted, or the server has forgotten or lost the session.
                    logger.warning("the outcome of an interrupted request can no longer be determined: %s", error)
                    fate = "unknown"
            outcomes.close(request, fate)
            if fate != "unknown" and not request.retried:
                request.session.learn(request.sequence)
                self.sessions.give_back(request.session)

    def _run(self, call: Call[Value], outcomes: Outcomes, lost: int) -> Value:
        """Sends a request, and keeps it open for as long as its outcome is not known.

        Args:
            call: the request, and what belongs to it.
            outcomes: of this thread.
            lost: how many exchanges had broken off before the first copy was sent.
        """
        request, _, finish, _ = call
        try:
            if request.fate is None:
                outcomes.begin(request)
            counted = self._resolved(call, lost)
            # From here on, it is counted, even if an interrupt keeps the result from the caller.
            outcomes.close(request, counted.outcome)
        except RedisAccError:
            outcomes.drop(request)
            raise
        except BaseException:
            request.abandoned = True
            raise
        request.session.learn(request.sequence)
        return finish(counted)

    def _settle_unknown(self, call: Call[Value]) -> Value:
        outcomes = self._mine()
        self._settle_abandoned(outcomes)
        # No transport has this count, so this assumes that stray copies may still arrive.
        return self._run(call, outcomes, -1)

    def _resolved(self, call: Call[Any], lost: int) -> Reply:
        """Sends a request until its outcome is known, and returns that."""
        request, send, _, what = call
        session = request.session
        while True:
            try:
                return send()
            except DataLossError:
                raise
            except ForgottenError as error:
                if not session.was_idle():
                    raise DataLossError(
                        f"{what}: the server has acknowledged earlier requests of this session, but no longer knows "
                        "the session: it was restarted from older data, failed over to a replica that lagged behind, "
                        "or evicted keys. This request was not executed; later ones will be"
                    ) from error
                if self._transport.lost != lost:
                    raise self._unknown(call, error) from error
                # The session was idle for so long that the server forgot it: the request goes out under a new one.
                session.begin_anew(error.now_ms)
                request.sequence = session.next()
            except ServerUnavailableError as error:
                if self._transport.lost == lost:
                    raise
                raise self._unknown(call, error) from error
            except RedisAccError as error:
                if self._transport.lost == lost:
                    raise
                # This copy was refused, but an earlier one whose connection broke may have been executed, or may still
                # be on its way and be executed once the reason for the refusal is gone.
                try:
                    resolved = self._scripts.resolve(**Request.arguments(request), allowed=("fenced",))
                except NotFoundError:
                    # Its incarnation never comes back, so the outcome would stay unknown forever, and matters no more.
                    raise
                except RedisAccError as failure:
                    raise self._unknown(call, failure) from error
                if resolved.outcome == "fenced":
                    raise
                return resolved

    def _unknown(self, call: Call[Any], error: RedisAccError) -> OutcomeUnknownError:
        request, _, _, what = call
        request.retried = True
        return OutcomeUnknownError(
            f"{what}: it is unknown whether the server has executed this. settle() of this error sends the same "
            f"request again, which is executed once however often it is sent ({error})",
            partial(self._settle_unknown, call),
        )
