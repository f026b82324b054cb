"""What hosts tell each other at the meeting point, as JSON. Whatever is read is checked."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from redisacc._handles.environment import MAX_WORKERS

__all__ = [
    "CAME",
    "FAILED",
    "FINISHED",
    "GATHERING",
    "LARGEST",
    "MOST_HOSTS",
    "NAME",
    "READY",
    "STARTED",
    "STARTING",
    "WORKS",
    "Agreement",
    "DocumentError",
    "Event",
    "Host",
    "Member",
    "Terms",
    "decode_agreement",
    "decode_host",
    "encode",
]

MOST_HOSTS = 500

# Stages of a host: it has come; its nodes have started; its processes work; they have ended with 0; one was given up.
CAME, STARTED, WORKS, FINISHED, FAILED = "came", "started", "works", "finished", "failed"
# Phases of a training: hosts come; they start their nodes; processes work; it is FINISHED, or FAILED as a host has.
GATHERING, STARTING, READY = "gathering", "starting", "ready"

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_RANDOM = re.compile(r"[0-9a-f]{32}")
_NODE = re.compile(r"[0-9a-f]{40}")
_KIND = re.compile(r"[a-z]{1,20}")

# Bytes of the largest document: an agreement of the largest number of hosts has a third of it.
LARGEST = 1 << 19
_MOST_EVENTS = 100
_MOST_GUESTS = 1000


T = TypeVar("T")


class DocumentError(Exception):
    """Something at the meeting point is not what a host writes. Its text says what."""


@dataclasses.dataclass(frozen=True)
class Terms:
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


@dataclasses.dataclass(frozen=True)
class Member:
    """A host that has a place.

    Attributes:
        name: its name.
        run: the id of the command that runs there; "" before the first one has started.
        here: whether it takes part at the moment.
        address: its IP address.
        ports: those of its nodes.
        nodes: the ids of its nodes.
        node_starts: how often nodes of this run have been started again.
    """

    name: str
    run: str = ""
    here: bool = False
    address: str = ""
    ports: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    node_starts: int = 0


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened on a host.

    Attributes:
        number: events of one agreement are numbered from 1.
        kind: what happened, as `events` knows it.
        host: the name of the host.
        detail: a number or another host's name.
    """

    number: int
    kind: str
    host: str
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What the meeting host says about the training.

    Attributes:
        meeting: a random id of the meeting host's command.
        training: a random id of the training.
        version: grows with each change.
        terms: what the command must say.
        phase: how far the training is.
        members: the hosts, by their index, the meeting host first.
        guests: hosts that have joined with workers only.
        events: the latest ones.
    """

    meeting: str
    training: str
    version: int
    terms: Terms
    phase: str = GATHERING
    members: tuple[Member, ...] = ()
    guests: tuple[Member, ...] = ()
    events: tuple[Event, ...] = ()

    def index_of(self, name: str) -> int | None:
        """Returns the index of a host among the members, or None."""
        return next((index for index, member in enumerate(self.members) if member.name == name), None)

    def first_worker_of(self, name: str) -> int | None:
        """Returns the number of a host's first worker; None if it has no place."""
        every = [member.name for member in (*self.members, *self.guests)]
        if name not in every:
            return None
        index = every.index(name)
        if index >= len(self.members):
            index += self.terms.hosts - len(self.members)
        return index * self.terms.workers


@dataclasses.dataclass(frozen=True)
class Host:
    """What a host says about itself.

    Attributes:
        name: its name.
        run: a random id of the command that runs there.
        terms: what its command says.
        joins: whether it takes the place of a host that is gone, or comes as a guest.
        stage: how far it is.
        address: its IP address.
        ports: those of its nodes.
        nodes: the ids of its nodes, once they have started.
        node_starts: how often its nodes have been started again.
        exit_code: with which it has failed.
        seen: the agreement under which it works, if the meeting point has lost it.
    """

    name: str
    run: str
    terms: Terms
    joins: bool
    stage: str
    address: str
    ports: tuple[int, ...]
    nodes: tuple[str, ...] = ()
    node_starts: int = 0
    exit_code: int = 0
    seen: Agreement | None = None


def encode(document: Host | Agreement) -> bytes:
    """Returns a document as bytes."""
    return json.dumps(dataclasses.asdict(document), separators=(",", ":")).encode()


def decode_host(data: bytes) -> Host:
    """Reads what a host says about itself.

    Raises:
        DocumentError: it is not that.
    """
    fields = _fields(_parsed(data), Host)
    return Host(
        name=_text(fields["name"], NAME),
        run=_text(fields["run"], _RANDOM),
        terms=_terms(fields["terms"]),
        joins=_flag(fields["joins"]),
        stage=_one_of(fields["stage"], (CAME, STARTED, WORKS, FINISHED, FAILED)),
        address=_address(fields["address"]),
        ports=_several(fields["ports"], _port, 2),
        nodes=_several(fields["nodes"], _node, 2),
        node_starts=_number(fields["node_starts"]),
        exit_code=_number(fields["exit_code"], most=255),
        seen=None if fields["seen"] is None else _agreement(fields["seen"]),
    )


def decode_agreement(data: bytes) -> Agreement:
    """Reads what the meeting host says.

    Raises:
        DocumentError: it is not that.
    """
    return _agreement(_parsed(data))


def _agreement(value: Any) -> Agreement:
    fields = _fields(value, Agreement)
    terms = _terms(fields["terms"])
    return Agreement(
        meeting=_text(fields["meeting"], _RANDOM),
        training=_text(fields["training"], _RANDOM),
        version=_number(fields["version"]),
        terms=terms,
        phase=_one_of(fields["phase"], (GATHERING, STARTING, READY, FINISHED, FAILED)),
        members=_several(fields["members"], _member, terms.hosts),
        guests=_several(fields["guests"], _member, _MOST_GUESTS),
        events=_several(fields["events"], _event, _MOST_EVENTS),
    )


def _terms(value: Any) -> Terms:
    fields = _fields(value, Terms)
    return Terms(
        hosts=_number(fields["hosts"], least=1, most=MOST_HOSTS),
        workers=_number(fields["workers"], most=MAX_WORKERS),
        replicas=_number(fields["replicas"], most=1),
        chief=_flag(fields["chief"]),
        nodes=_flag(fields["nodes"]),
        program=_text(fields["program"]),
    )


def _member(value: Any) -> Member:
    fields = _fields(value, Member)
    return Member(
        name=_text(fields["name"], NAME),
        run=_text(fields["run"], _RANDOM) if fields["run"] else "",
        here=_flag(fields["here"]),
        address=_address(fields["address"]) if fields["address"] else "",
        ports=_several(fields["ports"], _port, 2),
        nodes=_several(fields["nodes"], _node, 2),
        node_starts=_number(fields["node_starts"]),
    )


def _event(value: Any) -> Event:
    fields = _fields(value, Event)
    return Event(
        _number(fields["number"]),
        _text(fields["kind"], _KIND),
        _text(fields["host"], NAME),
        _text(fields["detail"]),
    )


# Parts


def _parsed(data: bytes) -> Any:
    if len(data) > LARGEST:
        raise DocumentError(f"a document has {len(data)} bytes, more than {LARGEST}")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise DocumentError("a document is not JSON") from None


def _fields(value: Any, kind: type) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(value, dict) or set(value) != names:
        raise DocumentError(f"a document does not have the fields {', '.join(sorted(names))}")
    return value


def _text(value: Any, pattern: re.Pattern[str] | None = None) -> str:
    if not isinstance(value, str) or len(value) > 200 or (pattern is not None and not pattern.fullmatch(value)):
        raise DocumentError(f"a document has a text that does not match {pattern.pattern if pattern else 'its limit'}")
    return value


def _one_of(value: Any, words: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in words:
        raise DocumentError(f"a document lacks one of {', '.join(words)}")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise DocumentError("a document has something else where true or false is expected")
    return value


def _number(value: Any, least: int = 0, most: int = 1 << 53) -> int:
    if type(value) is not int or not least <= value <= most:
        raise DocumentError(f"a document lacks a whole number from {least} to {most}")
    return value


def _port(value: Any) -> int:
    return _number(value, 1, 65535)


def _node(value: Any) -> str:
    return _text(value, _NODE)


def _address(value: Any) -> str:
    try:
        return str(ipaddress.ip_address(_text(value)))
    except ValueError:
        raise DocumentError("a document lacks an IP address") from None


def _several(value: Any, read: Callable[[Any], T], most: int) -> tuple[T, ...]:
    if not isinstance(value, list) or len(value) > most:
        raise DocumentError(f"a document lacks a list of at most {most}")
    return tuple(read(item) for item in value)
