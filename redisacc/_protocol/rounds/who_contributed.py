"""Reads who has contributed to the current round and who has not, for messages and errors."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from redisacc._format.crew_entries import parse_crew
from redisacc._format.entries import (
    IN_THE_ROUND,
    WorkerInfo,
    WorkersByState,
    parse_known_workers,
    parse_workers,
    workers_by_state,
)
from redisacc._format.keys import Keys
from redisacc._format.stored_text import clock_ms, parse_int64, parsed, time_of
from redisacc._text import age_text
from redisacc._wire.scans import scan_command, scan_whole
from redisacc._wire.transport import Transport

# Maximum number of workers of each state listed in a message.
NAMED = 10


@dataclass(frozen=True)
class Contributors:
    """The workers that have contributed to a round, and the known ones that have not.

    Attributes:
        workers: worker's name → number of its gradients in the round.
        states: the workers that are known, by state.
        ever_applied: whether the accumulator has ever accepted or dropped a gradient.
        none_to_come: whether a round accepts one gradient of each worker, and has one of every known worker.
        read_at: the time of the server's clock when this was read.
    """

    workers: dict[str, int]
    states: WorkersByState
    ever_applied: bool
    none_to_come: bool
    read_at: datetime.datetime


def has_contributed(transport: Transport, keys: Keys, worker: str) -> bool:
    """Returns whether the current round has a gradient of a worker."""
    return transport.call("HGET", keys.current.workers, worker) is not None


def contributors_of_round(transport: Transport, keys: Keys) -> set[str]:
    """Returns the names of all workers that have contributed to the current round."""
    first = transport.call(*scan_command(keys.current.workers))
    return set(parse_workers(scan_whole(transport, keys.current.workers, first), keys.current.workers))


def read_contributors(transport: Transport, keys: Keys) -> Contributors:
    """Reads who has contributed to the current round.

    Raises:
        CorruptDataError: something under the accumulator's keys is not as redisacc writes it.
    """
    hashes = (keys.current.workers, keys.sessions, keys.crew)
    fields, clock, *firsts = transport.pipeline(
        [
            ("HMGET", keys.record, "applied", "stale", "once_per_worker", "global_step"),
            ("TIME",),
            *(scan_command(key) for key in hashes),
        ]
    )
    workers, sessions, leases = (scan_whole(transport, key, first) for key, first in zip(hashes, firsts, strict=True))
    in_round = parse_workers(workers, keys.current.workers)
    now_ms = clock_ms(clock)
    read_at = time_of(now_ms)
    known, _ = parse_known_workers(keys, sessions, in_round, parse_crew(keys.crew, leases, now_ms), read_at)
    applied, stale, once_per_worker, text = fields
    step = parsed(keys.record, "global_step", text or b"0", parse_int64)
    states = workers_by_state(known, step, read_at)
    return Contributors(
        workers=in_round,
        states=states,
        ever_applied=[applied, stale] != [b"0", b"0"],
        none_to_come=once_per_worker == b"1" and not (states.expected or states.late or states.gone),
        read_at=read_at,
    )


def states_text(found: Contributors) -> list[str]:
    """Returns a clause for a message about each state that workers have."""
    clauses = []
    for state, workers in found.states.items():
        if state != IN_THE_ROUND and workers:
            clauses.append(f"{state}: {_some([_last_seen(worker, found) for worker in workers])}")
    if found.workers:
        contributed = _some([f"{name} ({number})" for name, number in found.workers.items()])
        clauses.insert(0, f"{IN_THE_ROUND}: {contributed}")
    return clauses


def _last_seen(worker: WorkerInfo, found: Contributors) -> str:
    process = f"{worker.process}, " if worker.process else ""
    return f"{worker.name} ({process}last seen {age_text(found.read_at, worker.seen_at)} ago)"


def _some(names: Sequence[str]) -> str:
    """Returns the first of the names as a text, and how many more there are."""
    more = len(names) - NAMED
    return ", ".join([*names[:NAMED], f"{more} more"] if more > 0 else names)
