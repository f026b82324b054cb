"""What hosts say about themselves, what they have agreed, and what the meeting host makes of both: a pure function."""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from redisacc._text import printable

MOST_HOSTS = 500

# Stages of a host: it has come; its nodes have started; its processes work; they have ended with 0; one was given up.
CAME, STARTED, WORKS, FINISHED, FAILED = "came", "started", "works", "finished", "failed"
# Phases of a training: hosts start their nodes; processes work; it is FINISHED, or FAILED as a host has.
STARTING, READY = "starting", "ready"
# Roles of a host: it has the meeting point; or takes the place of one that is gone, or comes as a guest; or neither.
MEETS, JOINS, TAKES_PART = "meets", "joins", "member"

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)

Entry = TypeVar("Entry", "Host", "Member")


class MeetingError(Exception):
    """Something at the meeting point is not what a host writes. Its text says what."""


class Terms(NamedTuple):
    """What the command must say on every host.

    Attributes:
        hosts: the number of hosts.
        workers: the number of workers on each.
        replicas: the number of replicas of each node.
        chief: whether the first host runs a chief.
        nodes: whether hosts start nodes; otherwise there are servers.
        program: the names of the program and of its first argument, usually the script.
    """

    hosts: int
    workers: int
    replicas: int
    chief: bool
    nodes: bool
    program: str

    @property
    def text(self) -> str:
        """The command that they come from."""
        more = f"{' --chief' * self.chief}{' --redis URL' * (not self.nodes)}"
        options = f"--hosts {self.hosts} --workers {self.workers} --replicas {self.replicas}{more}"
        return printable(f"{options} -- {self.program}", 300)


class Member(NamedTuple):
    """A host that has a place: its name, IP address, and the ports and ids of its nodes, with commas between them."""

    name: str
    address: str
    ports: str
    nodes: str

    @property
    def node_ports(self) -> list[int]:
        """The ports of its nodes."""
        return [int(port) for port in self.ports.split(",") if port]


class Host(NamedTuple):
    """What a host says about itself.

    Attributes:
        name: its name.
        run: a random id of the command that runs there.
        role: whether it has the meeting point, or joins.
        stage: how far it is.
        address: its IP address.
        ports: those of its nodes, with commas between them.
        nodes: the ids of its nodes, once they have started, with commas between them.
        code: the exit code with which it has failed.
        terms: what its command says.
    """

    name: str
    run: str
    role: str
    stage: str
    address: str
    ports: str
    nodes: str
    code: str
    terms: str


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What the hosts know about the run, once all have come.

    Attributes:
        training: a random id.
        version: grows with each change, from 1.
        phase: how far the run is.
        terms: what every command says.
        members: the hosts that have a node, by their number.
        guests: the names of hosts that have joined with workers only. Their numbers follow.
        failed: "NAME CODE" of the host that has failed.
    """

    training: str
    version: int
    phase: str
    terms: str
    members: tuple[Member, ...]
    guests: tuple[str, ...] = ()
    failed: str = ""

    @property
    def names(self) -> list[str]:
        """The names of all hosts, by their number."""
        return [*(member.name for member in self.members), *self.guests]

    @property
    def fields(self) -> dict[str, str]:
        """Its hash."""
        facts = {name: str(getattr(self, name)) for name in _FACTS}
        members = {f"host {number}": text_of(member) for number, member in enumerate(self.members)}
        return facts | members | {f"guest {number}": name for number, name in enumerate(self.guests)}


_TEXTS = {
    "name": NAME.pattern,
    "run": "[0-9a-f]{32}",
    "role": "|".join((MEETS, JOINS, TAKES_PART)),
    "stage": "|".join((CAME, STARTED, WORKS, FINISHED, FAILED)),
    "address": "[0-9A-Fa-f:.]{2,45}",
    "ports": r"|\d{1,5}(?:,\d{1,5})?",
    "nodes": "|[0-9a-f]{40}(?:,[0-9a-f]{40})?",
    "code": r"\d{1,3}",
    "terms": ".{1,300}",
}
_FORMS: dict[type[Host | Member], re.Pattern[str]] = {
    kind: re.compile(" ".join(f"{name}=(?P<{name}>{_TEXTS[name]})" for name in kind._fields), re.ASCII)
    for kind in (Host, Member)
}
_FACTS = {
    "training": _TEXTS["run"],
    "version": r"\d{1,15}",
    "phase": "|".join((STARTING, READY, FINISHED, FAILED)),
    "terms": _TEXTS["terms"],
    "failed": rf"|{_TEXTS['name']} {_TEXTS['code']}",
}


def text_of(entry: Host | Member) -> str:
    """Returns an entry as people and other hosts read it: ``name=a run=… stage=works``."""
    return " ".join(f"{name}={value}" for name, value in entry._asdict().items())


def read(kind: type[Entry], data: bytes) -> Entry | None:
    """Reads an entry. Returns None if it is none."""
    found = _FORMS[kind].fullmatch(data.decode(errors="replace"))
    return None if found is None else kind(**found.groupdict())


def read_agreement(fields: Mapping[bytes, bytes]) -> Agreement | None:
    """Reads the hash. Returns None if it is empty.

    Raises:
        MeetingError: it holds something else.
    """
    if not fields:
        return None
    texts = {name.decode(errors="replace"): value for name, value in fields.items()}
    facts = {name: texts.pop(name, b"?").decode(errors="replace") for name in _FACTS}
    wrong = [name for name, pattern in _FACTS.items() if not re.fullmatch(pattern, facts[name], re.ASCII)]
    members: list[Member | None] = []
    guests: list[str] = []
    while data := texts.pop(f"host {len(members)}", None):
        members.append(read(Member, data))
    while data := texts.pop(f"guest {len(guests)}", None):
        guests.append(data.decode(errors="replace"))
    if wrong or texts or None in members or not all(map(NAME.fullmatch, guests)):
        raise MeetingError(f"the hash has fields that no host writes: {printable(', '.join([*wrong, *texts]), 100)}")
    return Agreement(
        facts["training"],
        int(facts["version"]),
        facts["phase"],
        facts["terms"],
        tuple(member for member in members if member is not None),
        tuple(guests),
        facts["failed"],
    )


def begin(hosts: Mapping[str, Host], terms: Terms) -> Agreement | None:
    """Returns the agreement of a run whose hosts have all come; None if some have not.

    Args:
        hosts: what each host that is alive says about itself, by its name.
        terms: what the command of the meeting host says.
    """
    come = come_by_now(hosts, terms)
    if len(come) < terms.hosts or come[0].role != MEETS:
        return None
    members = tuple(Member(host.name, host.address, host.ports, "") for host in come[: terms.hosts])
    return Agreement(secrets.token_hex(16), 1, STARTING, terms.text, members)


def come_by_now(hosts: Mapping[str, Host], terms: Terms) -> list[Host]:
    """Returns the hosts that count while hosts gather, the meeting host first."""
    counted = [host for host in hosts.values() if host.terms == terms.text and host.role != JOINS]
    return sorted(counted, key=lambda host: (host.role != MEETS, host.name))


def advance(
    agreement: Agreement, hosts: Mapping[str, Host], terms: Terms, *, formed: Sequence[Member] | None
) -> Agreement:
    """Returns the agreement after what the hosts say now; the same object if it has not changed.

    Args:
        agreement: what was agreed.
        hosts: what each host that is alive says about itself, by its name.
        terms: what the command of the meeting host says.
        formed: the members whose nodes are a cluster. None means they are none yet.
    """
    members = [_told(member, hosts.get(member.name)) for member in agreement.members]
    after = dataclasses.replace(agreement, members=tuple(members))
    if agreement.phase == STARTING and after.members == formed and nodes_started(after, hosts):
        after = dataclasses.replace(after, phase=READY)
    elif agreement.phase == READY:
        for host in sorted(hosts.values()):
            # One that works has lost its place, and is about to hear that.
            is_new = host.stage == CAME and host.name not in after.names
            if is_new and host.role != TAKES_PART and host.terms == terms.text:
                after = _admitted(after, hosts, host)
        after = _ended(after, hosts, terms)
    return agreement if after == agreement else dataclasses.replace(after, version=agreement.version + 1)


def nodes_started(agreement: Agreement, hosts: Mapping[str, Host]) -> bool:
    """Returns whether every member is there and has started its nodes."""
    return all(name in hosts and hosts[name].stage == STARTED for name in agreement.names)


def _told(member: Member, host: Host | None) -> Member:
    """Returns a member with what its host says about itself."""
    if host is None:
        return member
    told = member._replace(address=host.address, ports=host.ports)
    return told._replace(nodes=host.nodes) if host.stage in (STARTED, WORKS) else told


def _admitted(agreement: Agreement, hosts: Mapping[str, Host], host: Host) -> Agreement:
    """Gives a host that joins a place: that of one which is gone, whose nodes it becomes, or a further one."""
    members = list(agreement.members)
    # Another machine may have the address of the meeting point now.
    gone = [0] if host.role == MEETS else [n for n, member in enumerate(members) if member.name not in hosts]
    if not gone:
        return dataclasses.replace(agreement, guests=(*agreement.guests, host.name))
    members[gone[0]] = members[gone[0]]._replace(name=host.name)
    return dataclasses.replace(agreement, members=tuple(members))


def _ended(agreement: Agreement, hosts: Mapping[str, Host], terms: Terms) -> Agreement:
    present = [hosts[member.name] for member in agreement.members if member.name in hosts]
    failed = [host for host in present if host.stage == FAILED]
    if failed:
        return dataclasses.replace(agreement, phase=FAILED, failed=f"{failed[0].name} {failed[0].code}")
    first = hosts.get(agreement.members[0].name)
    chief_finished = terms.chief and first is not None and first.stage == FINISHED
    if chief_finished or (present and all(host.stage == FINISHED for host in present)):
        return dataclasses.replace(agreement, phase=FINISHED)
    return agreement
