"""The clock of this process, by which leases, pauses and deadlines are measured, and how long it waits for others.

Tests move the clock, and change the durations.

A script on the server has a clock of its own, and so have these, which stay real:

- ``running_time``, by which a server is silent: it had no time to answer while a test moved the clock.
- Handshakes and ticks of sockets, and the clean-up of a cancelled call: they wait for bytes, and for other code.
- ``redisacc.embedded``, and the deadlines that ``_launch`` gives it: its processes start and stop in real time.
- Durations that are reported (``time.perf_counter``), and the comparison of two machines' clocks in ``doctor``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Durations:
    """How long this process waits for servers, and for other processes, in seconds.

    Attributes:
        opening: a call that opens something tries to reach a server. A wrong address shows then, so that fails soon.
        call: any other call tries to reach it, and is tried again if others get in between.
        handshake: a server may take for all replies of a handshake.
        confirmation: it may take to confirm a subscription. Without one, polling is left.
        replication: replicas have to confirm a write, if the handle was opened with ``min_replicas``.
        release: the release of a private accumulator, or of a lease, tries to reach the server. Expiry does the
            rest, and a process that ends must not wait for a server that ended before.
        poll_every: the longest pause between two polls of a wait. Messages are only hints.
        poll: a poll tries to reach the server before an outage is logged.
        last_poll: the last poll has at least this long, even if the deadline has passed.
        report: a wait is logged for the first time after this, because that shows a mistake. Each pause after that is
            twice as long.
        report_pause: the longest pause between two such messages.
        young: a server that was started less than this ago may have lost its data. 0: none has lost any.
        late: a worker that was seen less than this ago is not late.
        look_every: the pause between two looks of a chief, or a worker, that waits: whether the step is still the one
            that it waits for, how many workers there are, or whether there is a version that others have published.
        look_after: a worker looks for the first time whether its gradient is still there. Each pause after that is
            twice as long.
        claim_every: the pause in which a worker claims what it has after a loss, and a chief looks for claims.
        replaced_within: a chief that begins a step anew has replaced the accumulator.
        continued_within: a worker waits for a chief that may continue a finished run, and is started with it.
        standby_asks_every: the pause in which a process that stands by asks for the lease.
        standby_looks_every: the same for whether the holder lives, if that is a process on the same machine.
        least_patience, longest_patience: no part of an update may appear for this long, before a chief makes it itself.
        abandoned: a chief does not wait for parts whose updater did not write them at all. The lease of a reducer that
            died ends within a few seconds.
        gathering: reducers have to say which parts they hold after a loss. After a long outage, they may connect again
            after half a minute only.
        sum_patience: a take waits for the parts of a sum that are missing when its round is granted, all together.
        last_events: the last events of a deleted accumulator may still be on their way to its readers.
        kept: a reducer keeps parameters whose accumulator is gone: a chief that is started again may ask for them.
        ending: an embedded server has this long between SIGTERM and SIGKILL. It restarts while its snapshot grows.
        closing: a chief that is closed waits for a checkpoint that is being written.
        idle: a reducer leaves an accumulator without messages if others call.
        lease: a chief, or a worker, keeps its place without a sign of life.
        taker_lease: the same for a taker in the queue, which is passed over then.
        reducer_lease: the same for a reducer.
        request: a program that asks for the page of `redisacc serve` has this long for its request, and for taking each
            piece of the answer.
        trial: a trial of ``redisacc doctor`` waits for its event, and for its gradient.
        without_reducer, longest_without_reducer: a taker does without a reducer whose sum came too late. Each such
            pause is twice as long as the one before.
    """

    opening: float = 3.0
    call: float = 30.0
    handshake: float = 3.0
    confirmation: float = 1.0
    replication: float = 5.0
    release: float = 2.0
    poll_every: float = 1.0
    poll: float = 5.0
    last_poll: float = 0.5
    report: float = 5.0
    report_pause: float = 60.0
    young: float = 20.0
    late: float = 5.0
    look_every: float = 1.0
    look_after: float = 2.0
    claim_every: float = 0.5
    replaced_within: float = 2.0
    continued_within: float = 5.0
    standby_asks_every: float = 1.0
    standby_looks_every: float = 0.1
    least_patience: float = 0.2
    longest_patience: float = 5.0
    abandoned: float = 1.0
    gathering: float = 40.0
    sum_patience: float = 0.05
    last_events: float = 1.0
    kept: float = 60.0
    idle: float = 10.0
    ending: float = 10.0
    closing: float = 60.0
    lease: float = 10.0
    taker_lease: float = 3.0
    reducer_lease: float = 3.0
    request: float = 10.0
    trial: float = 5.0
    without_reducer: float = 1.0
    longest_without_reducer: float = 64.0


class Clock:
    """Time as this process sees it. Its attributes are the functions of ``time``, so that a call costs no more.

    Attributes:
        now: returns the time of a clock that never goes back, in seconds.
        time: returns the time in seconds since 1970.
        sleep: blocks the thread for some seconds.
    """

    __slots__ = ("now", "sleep", "time")

    def __init__(self) -> None:
        self.now: Callable[[], float] = time.monotonic
        self.time: Callable[[], float] = time.time
        self.sleep: Callable[[float], object] = time.sleep


clock = Clock()
durations = Durations()

# ``running_time`` advances by this much at most between two looks at it, in seconds: if more time has passed, the
# process was stopped. Everything that waits looks more often, or says how long it has waited.
LONGEST_GAP = 1.0

# When somebody looked last, on time.monotonic()'s clock, and for how long the process has been stopped. Threads replace
# both together, without a lock, which a fork could leave locked: if two of them notice the same gap, they agree.
_state = time.monotonic(), 0.0


def running_time(waited: float = 0.0) -> float:
    """Returns for how many seconds this process has been running, counted from an arbitrary moment.

    The clock stops while the process does not run: suspended by a signal, or with its virtual machine. Time limits of
    the library are measured on it. Otherwise, a process that was suspended for longer than a limit would give up when
    it continues, although the server was well all the time. Users' timeouts are measured in real time.

    Args:
        waited: for how many seconds the caller may have waited, in one go, since it looked last.
    """
    global _state  # noqa: PLW0603
    seen, stopped = _state
    now = time.monotonic()
    if now - seen > LONGEST_GAP:
        stopped += max(now - seen - max(LONGEST_GAP, waited), 0.0)
    _state = now, stopped
    return now - stopped
