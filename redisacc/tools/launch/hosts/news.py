"""The lines for what happens on any host: each host compares what it sees now with what it saw before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from redisacc.tools.launch.hosts.agreement import (
    CAME,
    FAILED,
    FINISHED,
    READY,
    STARTED,
    STARTING,
    Agreement,
    Host,
    Terms,
    come_by_now,
)


class Seen(NamedTuple):
    """What a host sees at the meeting point.

    Attributes:
        agreement: None as long as hosts gather.
        hosts: what each host that is alive says about itself, by its name.
    """

    agreement: Agreement | None
    hosts: Mapping[str, Host]


class News:
    """Tells what has changed.

    Args:
        meet: the address of the meeting point, as the command says it.
        terms: what the command says.

    Attributes:
        away: the names of the hosts that have a place and are gone, or not back yet.
    """

    def __init__(self, meet: str, terms: Terms) -> None:
        self.away: set[str] = set()
        self._meet = meet
        self._terms = terms
        self._before = Seen(None, {})

    def lines(self, seen: Seen, *, settled: bool) -> list[str]:
        """Returns the lines for people.

        Args:
            seen: what this host sees now.
            settled: whether hosts that live have had the time to say so to a server that has lost everything.
        """
        before, self._before = self._before, seen
        agreement = seen.agreement
        if not settled:
            # No host is missing.
            seen = self._before = Seen(agreement, {**before.hosts, **seen.hosts})
        if agreement is None or (before.agreement is None and agreement.phase == STARTING):
            return self._of_gathering(before, seen)
        phase = None if before.agreement is None else before.agreement.phase
        if agreement.phase == READY:
            lines = self._of_start(agreement) if phase == STARTING else []
            return [*lines, *self._of_members(before, seen, agreement)]
        if agreement.phase == phase:
            return []
        if agreement.phase == FAILED:
            host, code = agreement.failed.split()
            return [f"a process on host {host} was given up (exit code {code}): the run ends on all hosts"]
        return ["the run is finished on all hosts"] if agreement.phase == FINISHED else []

    def _of_gathering(self, before: Seen, seen: Seen) -> list[str]:
        earlier = [host.name for host in come_by_now(before.hosts, self._terms)]
        now = [host.name for host in come_by_now(seen.hosts, self._terms)]
        stayed = [name for name in earlier if name in now]
        new = [name for name in now if name not in earlier]
        return [
            *(f"host {name} is missing" for name in earlier if name not in now),
            *(
                f"host {name} has joined at {self._meet} ({number} of {self._terms.hosts})"
                for number, name in enumerate(new, len(stayed) + 1)
            ),
        ]

    def _of_start(self, agreement: Agreement) -> list[str]:
        terms = self._terms
        nodes = terms.hosts * (1 + terms.replicas)
        ready = f"the cluster of {nodes} nodes is ready" if terms.nodes else "every host has its numbers"
        workers = workers_text(0, terms.hosts * terms.workers)
        return [f"all {len(agreement.members)} hosts have joined, and {ready}: {workers}"]

    def _of_members(self, before: Seen, seen: Seen, agreement: Agreement) -> list[str]:
        lines = []
        earlier = before.agreement
        if earlier is None:
            # Hosts that are about to return. So is this one.
            self.away = {name for name in agreement.names if name in seen.hosts and _is_coming(seen.hosts[name])}
        else:
            for old, new in zip(earlier.members, agreement.members, strict=False):
                if old.name != new.name:
                    lines.append(f"host {new.name} takes the place of host {old.name}")
                    self.away = {*self.away, new.name} - {old.name}
            for number in range(len(earlier.names), len(agreement.names)):
                workers = workers_text(number * self._terms.workers, self._terms.workers)
                lines.append(f"host {agreement.names[number]} joins with {workers}")
        for number, name in enumerate(agreement.names):
            advice = "; the same command on it takes its place again, and on another host with --join"
            host, was = seen.hosts.get(name), before.hosts.get(name)
            # A host that is killed and comes back within the time of a look has another run.
            is_new = was is not None and host is not None and host.run != was.run
            if name not in self.away and (host is None or is_new):
                self.away.add(name)
                lines.append(f"host {name} is missing{advice if number < len(agreement.members) else ''}")
            if host is None or _is_coming(host):
                continue
            if name in self.away:
                self.away.discard(name)
                lines.append(f"host {name} has returned")
        return lines


def _is_coming(host: Host) -> bool:
    return host.stage in (CAME, STARTED)


def workers_text(first: int, number: int) -> str:
    """Returns what people call these workers."""
    if number == 1:
        return f"worker {first}"
    return f"workers {first} to {first + number - 1}" if number else "no workers"
