"""The meeting host's part: it reads what the hosts say, and writes what is agreed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from redisacc._clock import clock
from redisacc.errors import ServerError
from redisacc.tools.launch.hosts.agreement import advance, new_agreement
from redisacc.tools.launch.hosts.documents import STARTED, STARTING, Agreement, Terms
from redisacc.tools.launch.hosts.meeting_point import LEASE, MeetingPoint

__all__ = ["Coordinator", "TermsError"]

# Within this many seconds, hosts that live have told an empty meeting point so.
_SETTLED = 1.5
# Hosts whose command has ended have read the end of the training within this time.
_FAREWELL = LEASE


class TermsError(Exception):
    """The training that runs was started by another command. Its text says how they differ."""


class Coordinator:
    """Keeps the agreement.

    Args:
        name: the name of the meeting host.
        terms: what its command says.
        form: makes the nodes of all hosts a cluster.
    """

    def __init__(self, name: str, terms: Terms, form: Callable[[Agreement], None]) -> None:
        self._name = name
        self._terms = terms
        self._form = form
        self._agreement = new_agreement(name, terms)
        self._empty_at = clock.now()
        self._forming: threading.Thread | None = None
        self._formed = False
        self._error: ServerError | None = None

    def beat(self, point: MeetingPoint, *, is_empty: bool) -> Agreement:
        """Reads what hosts say, writes what is agreed, and returns it.

        Args:
            point: the meeting point.
            is_empty: whether it has no agreement, because it has just been started, perhaps again.

        Raises:
            redis.RedisError: the meeting point does not answer.
            ServerError: the nodes did not become a cluster.
            TermsError: the hosts that work were started by another command.
        """
        if is_empty:
            self._empty_at = clock.now()
        hosts = point.hosts()
        for host in hosts.values():
            if host.seen is not None and host.seen.terms != self._terms:
                raise TermsError(difference(self._terms, host.seen.terms))
        settled = clock.now() - self._empty_at >= _SETTLED
        self._agreement = advance(self._agreement, hosts, settled=settled, formed=self._formed)
        if self._error is not None:
            raise self._error
        members = [hosts.get(member.name) for member in self._agreement.members]
        started = all(host is not None and host.stage == STARTED for host in members)
        if self._agreement.phase == STARTING and self._terms.nodes and started and self._forming is None:
            self._forming = threading.Thread(target=self._run_form, args=(self._agreement,), daemon=True)
            self._forming.start()
        # Each time, because the server may have been started again.
        point.write(self._agreement)
        return self._agreement

    def _run_form(self, agreement: Agreement) -> None:
        try:
            self._form(agreement)
            self._formed = True
        except ServerError as error:
            self._error = error

    def say_farewell(self, point: MeetingPoint) -> None:
        """Blocks until the other hosts have left, or must have read the end of the training.

        Raises:
            redis.RedisError: the meeting point does not answer.
        """
        deadline = clock.now() + _FAREWELL
        while set(point.hosts()) - {self._name} and clock.now() < deadline:
            clock.sleep(0.1)


def difference(ours: Terms, theirs: Terms) -> str:
    """Returns a clause that says how a command differs from the one that the training was started with."""
    options = [
        ("--hosts", ours.hosts, theirs.hosts),
        ("--workers", ours.workers, theirs.workers),
        ("--replicas", ours.replicas, theirs.replicas),
        ("--chief", ours.chief, theirs.chief),
        ("--redis", not ours.nodes, not theirs.nodes),
        ("the program", ours.program, theirs.program),
    ]
    texts = []
    for name, our, their in options:
        if our == their:
            continue
        if isinstance(our, bool):
            texts.append(f"it was started {'without' if our else 'with'} {name}, and this command is not")
        else:
            texts.append(f"{name} is {their} there and {our} here")
    return "; ".join(texts)
