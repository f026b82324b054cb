"""Who has contributed to the current round and who is missing from it, read within bounds, for messages and errors."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from redisacc._format.entries import WorkerInfo, absent_of, clock_ms, parse_known_workers, parse_workers, time_of
from redisacc._format.keys import Keys
from redisacc._redis.hash_scan import scan_command, scan_some, scan_whole
from redisacc._redis.transport import Transport

# About how many workers of the round, and how many sessions, are read at most. A job with more workers gets a message
# about some of them; one that reads for long would keep a caller from learning that its take has timed out.
READ = 10_000


@dataclass(frozen=True)
class Contributors:
    """Who has contributed to a round.

    Attributes:
        workers: worker's name → number of its gradients in the round.
        missing: workers without a gradient in the round, the one that was seen most recently first.
        gone: such workers that were last seen ``GONE_AFTER`` seconds ago or longer, in the same order.
        ever_applied: whether the accumulator has ever accepted or dropped a gradient.
        none_to_come: whether a round accepts one gradient of each worker, and has one of every worker that is known.
        complete: whether these are all. If not, the accumulator has more workers or sessions than are read.
        read_at: the time of the server's clock when this was read.
    """

    workers: dict[str, int]
    missing: list[WorkerInfo]
    gone: list[WorkerInfo]
    ever_applied: bool
    none_to_come: bool
    complete: bool
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
    hashes = (keys.current.workers, keys.sessions)
    totals, clock, *firsts = transport.pipeline(
        [
            ("HMGET", keys.record, "applied", "stale", "once_per_worker"),
            ("TIME",),
            *(scan_command(key) for key in hashes),
        ]
    )
    (workers, all_workers), (sessions, all_sessions) = (
        scan_some(transport, key, first, READ) for key, first in zip(hashes, firsts, strict=True)
    )
    in_round = parse_workers(workers, keys.current.workers)
    known, _ = parse_known_workers(keys, sessions, in_round)
    read_at = time_of(clock_ms(clock))
    # If not all workers of the round were read, nobody can be said to be missing from it.
    missing, gone = absent_of(known, read_at) if all_workers else ([], [])
    return Contributors(
        workers=in_round,
        missing=missing,
        gone=gone,
        ever_applied=totals[:2] != [b"0", b"0"],
        none_to_come=totals[2] == b"1" and all_workers and all_sessions and not (missing or gone),
        complete=all_workers and all_sessions,
        read_at=read_at,
    )
