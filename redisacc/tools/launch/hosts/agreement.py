"""What the meeting host makes of what the hosts say about themselves."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace

from redisacc.tools.launch.hosts.documents import (
    CAME,
    FAILED,
    FINISHED,
    GATHERING,
    READY,
    STARTED,
    STARTING,
    WORKS,
    Agreement,
    Event,
    Host,
    Member,
    Terms,
)

__all__ = ["advance", "new_agreement"]

# How many events are kept. Every host reads them twice a second.
_EVENTS = 50


def new_agreement(own: str, terms: Terms) -> Agreement:
    """Returns the agreement of a meeting host that nobody has come to yet.

    Args:
        own: the name of the meeting host, which gets the first place.
        terms: what its command says.
    """
    return Agreement(secrets.token_hex(16), secrets.token_hex(16), 0, terms, members=(Member(own),))


def advance(agreement: Agreement, hosts: Mapping[str, Host], *, settled: bool, formed: bool) -> Agreement:
    """Returns the agreement after what the hosts say now; the same object if it has not changed.

    Args:
        agreement: what was agreed.
        hosts: what each host that is alive says about itself, by its name.
        settled: whether hosts that worked under an earlier agreement have had time to say so.
        formed: whether the nodes are a cluster.
    """
    change = _Change(agreement, hosts)
    if agreement.phase == GATHERING:
        change.gather(settled=settled)
    elif agreement.phase == STARTING:
        change.start(formed=formed)
    elif agreement.phase == READY and settled:
        change.follow()
    return change.result()


class _Change:
    def __init__(self, agreement: Agreement, hosts: Mapping[str, Host]) -> None:
        self._before = agreement
        self._hosts = hosts
        self._terms = agreement.terms
        self._phase = agreement.phase
        self._training = agreement.training
        self._members = list(agreement.members)
        self._guests = list(agreement.guests)
        self._events = list(agreement.events)

    def result(self) -> Agreement:
        after = replace(
            self._before,
            training=self._training,
            phase=self._phase,
            members=tuple(self._members),
            guests=tuple(self._guests),
            events=tuple(self._events[-_EVENTS:]),
        )
        return self._before if after == self._before else replace(after, version=self._before.version + 1)

    def _note(self, kind: str, host: str, detail: object = "") -> None:
        number = self._events[-1].number + 1 if self._events else 1
        self._events.append(Event(number, kind, host, str(detail)))

    # While hosts come

    def gather(self, *, settled: bool) -> None:
        earlier = [host.seen for host in self._hosts.values() if host.seen is not None]
        if earlier:
            self._adopt(max(earlier, key=lambda seen: seen.version))
            return
        for member in self._members[1:]:
            if member.name not in self._hosts:
                self._members.remove(member)
                self._note("gone", member.name)
        for name in sorted(self._hosts):
            host = self._hosts[name]
            known = self._before.index_of(name)
            if known == 0 and not self._members[0].run:
                self._members[0] = _told(Member(name), host)
                self._note("came", name, 1)
            has_room = len(self._members) < self._terms.hosts
            if known is None and has_room and not host.joins and host.terms == self._terms:
                self._members.append(_told(Member(name), host))
                self._note("came", name, len(self._members))
        if len(self._members) == self._terms.hosts and self._members[0].run and settled:
            self._phase = STARTING

    def _adopt(self, seen: Agreement) -> None:
        """Continues with the agreement under which the other hosts work."""
        if seen.terms != self._terms or not seen.members:
            # Its own command differs, which ends it (`attendance`).
            return
        self._training, self._phase = seen.training, seen.phase
        first, *others = seen.members
        # Another machine may have the address of the meeting point now.
        self._members = [replace(first, name=self._members[0].name, here=False), *others]
        self._guests = list(seen.guests)
        # That the meeting host has come is no news: it is back once it works.
        self._events = []

    # While nodes start

    def start(self, *, formed: bool) -> None:
        for index, member in enumerate(self._members):
            host = self._hosts.get(member.name)
            if host is not None:
                self._members[index] = _told(member, host)
        if formed or not self._terms.nodes:
            self._phase = READY
            self._members = [replace(member, here=member.name in self._hosts) for member in self._members]
            self._note("ready", self._members[0].name)

    # While processes work

    def follow(self) -> None:
        self._members = [self._followed(member) for member in self._members]
        self._guests = [self._followed(guest) for guest in self._guests]
        for name in sorted(self._hosts):
            if self._hosts[name].joins and self._hosts[name].terms == self._terms:
                self._admit(self._hosts[name])
        present = [self._hosts[member.name] for member in self._members if member.name in self._hosts]
        first = self._hosts.get(self._members[0].name)
        failed = next((host for host in present if host.stage == FAILED), None)
        chief_finished = self._terms.chief and first is not None and first.stage == FINISHED
        if failed is not None:
            self._phase = FAILED
            self._note("failed", failed.name, failed.exit_code)
        elif chief_finished or (present and all(host.stage == FINISHED for host in present)):
            self._phase = FINISHED
            self._note("finished", self._members[0].name)

    def _followed(self, member: Member) -> Member:
        host = self._hosts.get(member.name)
        # A host that is killed and comes back within the time of a look has another run.
        is_new = host is not None and host.run != member.run
        if member.here and (host is None or is_new):
            self._note("gone", member.name)
            member = replace(member, here=False)
        if host is None:
            return member
        told = _told(member, host)
        if not member.here and host.stage not in (CAME, STARTED):
            self._note("back", member.name)
            return replace(told, here=True)
        if host.node_starts > member.node_starts and not is_new:
            self._note("node", member.name)
        return told

    def _admit(self, host: Host) -> None:
        """Gives a host that joins a place, unless it has one."""
        if any(member.name == host.name for member in (*self._members, *self._guests)):
            return
        for index, member in enumerate(self._members):
            if not member.here and member.name not in self._hosts:
                self._note("replaced", host.name, member.name)
                # It becomes the same nodes.
                self._members[index] = replace(member, name=host.name, run="")
                return
        self._guests.append(_told(Member(host.name, here=True), host))
        self._note("joined", host.name, len(self._guests) - 1)


def _told(member: Member, host: Host) -> Member:
    """Returns a member with what its host says about itself."""
    told = replace(member, run=host.run, address=host.address, ports=host.ports, node_starts=host.node_starts)
    return replace(told, nodes=host.nodes) if host.nodes and host.stage in (STARTED, WORKS) else told
