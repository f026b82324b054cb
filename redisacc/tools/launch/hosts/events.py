"""The line for each thing that happens on any host."""

from __future__ import annotations

from redisacc.tools.launch.hosts.documents import Agreement, Event

__all__ = ["LAST", "line_of", "workers_text"]

# After these the run ends, with this exit code.
LAST = {"finished": 0, "failed": 1}

_LINES = {
    "came": "host {host} has come to {meet} ({detail} of {hosts})",
    "ready": "all {hosts} hosts have come, and {ready}: {workers}",
    "gone": "host {host} is gone; the same command on it takes its place again, and on another host with --join",
    "left": "host {host} is gone",
    "back": "host {host} is back",
    "replaced": "host {host} takes the place of host {detail}",
    "joined": "host {host} joins with {own_workers}",
    "node": "a node on host {host} has been started again",
    "failed": "a process on host {host} was given up (exit code {detail}): the run ends on all hosts",
    "finished": "the training is finished on all hosts",
}


def line_of(event: Event, agreement: Agreement, meet: str) -> str:
    """Returns the line for people.

    Args:
        event: what happened.
        agreement: the agreement that holds it.
        meet: the address of the meeting point, as the command says it.
    """
    has_place = any(event.host == member.name for member in agreement.members)
    kind = "left" if event.kind == "gone" and not has_place else event.kind
    text = _LINES.get(kind, "host {host}: {kind} {detail}")
    terms = agreement.terms
    first = agreement.first_worker_of(event.host)
    nodes = terms.hosts * (1 + terms.replicas)
    return text.format(
        host=event.host,
        kind=event.kind,
        detail=event.detail,
        meet=meet,
        hosts=terms.hosts,
        ready=f"the cluster of {nodes} nodes is ready" if terms.nodes else "every host has its numbers",
        workers=workers_text(0, terms.hosts * terms.workers),
        own_workers="workers" if first is None else workers_text(first, terms.workers),
    )


def workers_text(first: int, number: int) -> str:
    """Returns what people call these workers."""
    if number == 1:
        return f"worker {first}"
    return f"workers {first} to {first + number - 1}" if number else "no workers"
