"""The entries of the hashes of workers, sessions, takers and taken rounds, as typed objects."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from redisacc._arrays.metrics import Means, mean_metrics
from redisacc._clock import durations
from redisacc._format.crew_entries import Member, number_of_worker
from redisacc._format.keys import Keys
from redisacc._format.stored_text import (
    foreign,
    parse_int64,
    parse_number,
    parse_staleness,
    parse_time,
    parse_weight,
    parsed,
)
from redisacc._interrupts import suppressed
from redisacc._telemetry.traceparent import TraceParent, parse_traceparent
from redisacc._text import printable, shown
from redisacc._wire.sockets import Command
from redisacc.errors import CorruptDataError

# The largest length of an entry, of a name or of a token, in bytes. A shape and a name fit in.
LONGEST_ENTRY = 8192
# A taker that waits for up to this many gradients waits for any number: the largest count that a record holds.
ANY_NUMBER = 10**15 - 1
# Precedes the shape in the entry of a taken round if the accumulator counts the staleness of gradients.
STALENESS = b"staleness="
# The same for the sum of the weights of its gradients, if one of them differs from 1.
WEIGHT = b"weight="
# The largest length of the entry of a taken round, in bytes: with a number of gradients for each staleness.
LONGEST_ROUND = LONGEST_ENTRY + 32768


@dataclass(frozen=True)
class WaitingTaker:
    """A taker in the queue.

    Example:
        >>> import threading, time, redisacc
        >>> acc = redisacc.ConditionalAccumulator("float32", [2], worker="chief")
        >>> take = threading.Thread(target=acc.take_grad, args=(1,))
        >>> take.start()
        >>> while not (waiting := acc.info().waiting):
        ...     time.sleep(0.01)
        >>> waiting[0].taker, waiting[0].num_required
        ('chief', 1)
        >>> result = acc.apply_grad([1.0, 2.0])
        >>> take.join()

    Attributes:
        token: id of the take.
        num_required: how many gradients it requires.
        taker: name of the taker.
        lease_ends_at: when its lease ends, by the server's clock. After that, the taker loses its place, unless it
            renews the lease.
        most: with a grace, the number of gradients that ends it early; None if there is no limit, or no grace.
        grace: how long it waits for more gradients than it requires, in seconds; 0 if it does not.
        min_weight: the minimum sum of their weights; 0 if there is none.
    """

    token: str
    num_required: int
    taker: str
    lease_ends_at: datetime.datetime
    most: int | None = None
    grace: float = 0.0
    min_weight: float = 0.0


@dataclass(frozen=True)
class UnacknowledgedRound:
    """A round that was granted but has not been acknowledged.

    Example:
        >>> import redisacc
        >>> acc = redisacc.ConditionalAccumulator("float32", [2], worker="chief")
        >>> result = acc.apply_grad([1.0, 2.0])
        >>> with acc.take(1):
        ...     [(taken.taker, taken.num_accumulated) for taken in acc.info().unacknowledged]
        [('chief', 1)]

    Attributes:
        token: id of the take, for ``recover()``.
        global_step: the step that the take closed.
        num_accumulated: how many gradients the round holds.
        taker: name of the taker.
        granted_at: when it was granted, by the server's clock.
        staleness: how stale the gradients were, as in ``Round``.
        total_weight: the sum of their weights.
    """

    token: str
    global_step: int
    num_accumulated: int
    taker: str
    granted_at: datetime.datetime
    staleness: dict[int, int] = field(default_factory=dict)
    total_weight: float = 0.0


@dataclass(frozen=True)
class WorkerInfo:
    """A worker that has sent a gradient, or has a lease in a run. Handles of the same name are one worker.

    Example:
        >>> import redisacc
        >>> acc = redisacc.ConditionalAccumulator("float32", [2], worker="ann")
        >>> result = acc.apply_grad([1.0, 2.0])
        >>> (ann,) = acc.info().known_workers
        >>> ann.name, ann.in_round, ann.applied
        ('ann', 1, 1)

    Attributes:
        name: the worker's name, "host:pid" unless it was given another.
        in_round: gradients in the current round.
        applied: gradients accepted since the accumulator was created.
        stale: gradients dropped because their step had passed.
        seen_at: when its last gradient arrived, by the server's clock. A worker of a run that has sent none yet
            is seen for as long as its lease lasts.
        last_step: the global step at that time; None if it has sent no gradient.
        lease_ends_at: when the lease of a worker of a run ends, or has ended; if it gave the lease back, its
            ``seen_at``. None for a worker without a lease.
        process: the name of the process that holds the lease, in messages; "" without a lease.
        memory: how many bytes of its memory were resident when it last extended the lease, every 2.5 s. None without a
            lease, and except on Linux.
    """

    name: str
    in_round: int
    applied: int
    stale: int
    seen_at: datetime.datetime
    last_step: int | None = None
    lease_ends_at: datetime.datetime | None = None
    process: str = ""
    memory: int | None = None


@dataclass(frozen=True)
class Recovery:
    """A round that ``recover()`` moved from one token to another.

    Attributes:
        old: the token that held the round before.
        token: the token that holds it since.
        taker: the name of the new taker.
        recovered_at: when that was, by the server's clock.
    """

    old: str
    token: str
    taker: str
    recovered_at: datetime.datetime


def parse_recoveries(keys: Keys, entries: object) -> list[Recovery]:
    """Returns the latest recoveries, the first of them first, of a list that holds the last one first."""
    if not isinstance(entries, list):
        raise CorruptDataError(f"{keys.recovered}: LRANGE replied {shown(entries)}, not a list")
    return [parsed(keys.recovered, "the list", text, _recovery) for text in reversed(entries)]


def _recovery(text: bytes) -> Recovery:
    old, token, recovered_ms, taker = _fields(text, 4)
    return Recovery(old.decode(), token.decode(), taker.decode(), parse_time(recovered_ms))


def parse_workers(fields: Mapping[bytes, bytes], where: str) -> dict[str, int]:
    """Returns worker's name → number of gradients, sorted by name. Each count may be followed by notes."""
    workers = {}
    for name, text in fields.items():
        count, _, _ = text.partition(b" ")
        if not (count.isdigit() and len(count) <= 15):
            raise foreign(where, name, count, "the number of a worker's gradients was expected")
        if len(name) > LONGEST_ENTRY:
            raise foreign(where, name, count, "no name of a worker is that long")
        workers[name.decode(errors="backslashreplace")] = int(count)
    return dict(sorted(workers.items()))


def parse_notes(fields: Mapping[bytes, bytes]) -> tuple[list[TraceParent], Means]:
    """Returns what is noted of the gradients of a round, given the same fields as ``parse_workers``.

    Whatever is not a valid note is left out: notes only serve people.

    Returns:
        The spans that have applied the gradients; and the mean of each metric. It is formed in the order in which
        "worker 2" precedes "worker 10".
    """
    found = []
    for name, text in fields.items():
        # Most gradients have none.
        if b" " in text:
            found.append((len(name), name, text[:LONGEST_ENTRY].split(b" ")[1:]))
    if not found:
        return [], Means()
    notes = [note for *_, of_worker in sorted(found) for note in of_worker]
    return [trace for note in notes if (trace := parse_traceparent(note)) is not None], mean_metrics(notes)


def parse_taken(keys: Keys, token: bytes, text: bytes) -> tuple[str, UnacknowledgedRound]:
    """Returns the state of a taken round, "granted" or "acknowledged", and the round."""
    return parsed(keys.taken, token, text, _taken, token)


def _taken(text: bytes, token: bytes) -> tuple[str, UnacknowledgedRound]:
    state, step, count, granted_ms, shape, taker = _fields(text, 6, LONGEST_ROUND)
    staleness = b""
    if shape.startswith(STALENESS):
        # It comes before the shape, if the accumulator counts it.
        staleness = shape.removeprefix(STALENESS)
        shape, taker = _fields(taker, 2)
    number = parse_number(count)
    weight = float(number)
    if shape.startswith(WEIGHT):
        weight = parse_weight(shape.removeprefix(WEIGHT).decode())
        _, taker = _fields(taker, 2)
    if state not in (b"granted", b"acknowledged") or len(token) > LONGEST_ENTRY:
        raise ValueError("the state or the token is unknown")
    counts = parse_staleness(staleness.decode(), number)
    granted_at = parse_time(granted_ms)
    taken = UnacknowledgedRound(token.decode(), parse_int64(step), number, taker.decode(), granted_at, counts, weight)
    return state.decode(), taken


def parse_known_workers(
    keys: Keys,
    sessions: Mapping[bytes, bytes],
    in_round: Mapping[str, int],
    crew: Sequence[Member],
    now: datetime.datetime,
) -> tuple[list[WorkerInfo], list[datetime.datetime]]:
    """Returns the workers sorted by name, and when each session was last seen.

    Args:
        keys: the keys of the accumulator.
        sessions: the fields of the hash of sessions.
        in_round: worker's name → number of its gradients in the round.
        crew: all leases of a run.
        now: when they were read, by the server's clock.
    """
    found: dict[str, WorkerInfo] = {}
    seen = []
    for session, text in sessions.items():
        one = parsed(keys.sessions, session, text, _session)
        seen.append(one.seen_at)
        if one.applied or one.stale:
            known = found.get(one.name, one)
            # The clock has milliseconds: two sessions may have been seen in the same one.
            latest = max(one, known, key=lambda worker: (worker.seen_at, worker.last_step or 0))
            if known is not one:
                latest = replace(latest, applied=known.applied + one.applied, stale=known.stale + one.stale)
            found[one.name] = replace(latest, in_round=in_round.get(one.name, 0))
    if crew:
        for name, worker in found.items():
            if number_of_worker(name) is not None:
                # Unless its lease is found, it has given it back.
                found[name] = replace(worker, lease_ends_at=worker.seen_at)
        for member in crew:
            if member.number is not None:
                name, ends_at = member.place, member.ends_at
                known = found.get(name) or WorkerInfo(name, in_round.get(name, 0), 0, 0, min(now, ends_at))
                found[name] = replace(known, lease_ends_at=ends_at, process=member.who, memory=member.memory)
    return sorted(found.values(), key=attrgetter("name")), seen


def _session(text: bytes) -> WorkerInfo:
    _, _, step, _, seen_ms, applied, stale, worker = _fields(text, 8)
    name = worker.decode(errors="backslashreplace")
    return WorkerInfo(name, 0, parse_number(applied), parse_number(stale), parse_time(seen_ms), parse_int64(step))


def sessions_of(keys: Keys, sessions: Mapping[bytes, bytes], worker: str) -> list[str]:
    """Returns the ids of the sessions that have sent gradients for a worker.

    Raises:
        CorruptDataError: an entry does not describe a session.
    """
    every = {session: parsed(keys.sessions, session, text, _session) for session, text in sessions.items()}
    return [
        session.decode(errors="backslashreplace")
        for session, one in every.items()
        if one.name == worker and (one.applied or one.stale)
    ]


def parse_waiting(keys: Keys, token: bytes, text: bytes) -> WaitingTaker:
    """Returns the taker that an entry describes."""
    return parsed(keys.takers, token, text, _waiting, token)


def _waiting(text: bytes, token: bytes) -> WaitingTaker:
    if len(token) > LONGEST_ENTRY:
        raise ValueError("the token is too long")
    required, lease_end, taker = _fields(text, 3)
    quantity, has_grace, grace_text = required.partition(b"..")
    number, has_weight, weight_text = quantity.partition(b"*")
    most, grace = None, 0.0
    if has_grace:
        most_text, _, grace_ms = grace_text.partition(b"+")
        most, grace = parse_number(most_text), parse_number(grace_ms) / 1000
    return WaitingTaker(
        token.decode(errors="backslashreplace"),
        parse_number(number, 20),
        taker.decode(errors="backslashreplace"),
        parse_time(lease_end),
        None if most == ANY_NUMBER else most,
        grace,
        parse_weight(weight_text.decode()) if has_weight else 0.0,
    )


def _fields(text: bytes, number: int, longest: int = LONGEST_ENTRY) -> list[bytes]:
    """Returns the fields of an entry. The last one is a name and may contain spaces.

    Raises:
        ValueError: the entry is longer than any that redisacc writes, or has fewer fields.
    """
    if len(text) > longest:
        raise ValueError("the entry is too long")
    found = text.split(b" ", number - 1)
    if len(found) != number:
        raise ValueError("a field is missing")
    return found


# The state of a worker: in the round, expected, late or gone. Whatever names a state asks here.

IN_THE_ROUND, EXPECTED, LATE, GONE = "in the round", "expected", "late", "gone"

# A worker without a lease that was last seen this many seconds ago, or longer, is gone. The server knows no more about
# it than when it was seen, so a worker that computes for longer looks gone.
GONE_AFTER = 600.0


@dataclass(frozen=True)
class WorkersByState:
    """The workers that an accumulator knows, by state.

    Attributes:
        in_the_round: those with a gradient in the current round, by name.
        expected: those that are neither late nor gone. In this list and the next two, the one that was seen most
            recently comes first.
        late: the workers that the others had to wait for.
        gone: the workers that are not worth waiting for.
    """

    in_the_round: list[WorkerInfo] = field(default_factory=list)
    expected: list[WorkerInfo] = field(default_factory=list)
    late: list[WorkerInfo] = field(default_factory=list)
    gone: list[WorkerInfo] = field(default_factory=list)

    def items(self) -> list[tuple[str, list[WorkerInfo]]]:
        """Returns each state and its workers, the state that needs attention first."""
        return [(LATE, self.late), (EXPECTED, self.expected), (IN_THE_ROUND, self.in_the_round), (GONE, self.gone)]


def workers_by_state(known: Iterable[WorkerInfo], global_step: int, now: datetime.datetime) -> WorkersByState:
    """Returns the workers by their state.

    Args:
        known: the workers.
        global_step: the current step.
        now: the time of the server's clock.
    """
    known = list(known)
    latest = max((worker.seen_at for worker in known if worker.in_round), default=None)
    found = WorkersByState()
    lists = dict(found.items())
    for worker in known:
        lists[_state_of(worker, global_step, latest, now)].append(worker)
    for state in (EXPECTED, LATE, GONE):
        lists[state].sort(key=lambda worker: worker.seen_at, reverse=True)
    return found


def _state_of(worker: WorkerInfo, global_step: int, latest: datetime.datetime | None, now: datetime.datetime) -> str:
    """Returns the state of a worker, as the table in docs/explanations/concepts.md defines it.

    Args:
        worker: the worker.
        global_step: the current step.
        latest: when the workers of the round were last seen; None if the round is empty.
        now: the time of the server's clock.
    """
    if worker.in_round:
        return IN_THE_ROUND
    silent = (now - worker.seen_at).total_seconds()
    if silent >= GONE_AFTER if worker.lease_ends_at is None else worker.lease_ends_at <= now:
        return GONE
    if silent < durations.late:
        return EXPECTED
    if worker.last_step is not None and worker.last_step < global_step - 1:
        # A whole round was taken without it.
        return LATE
    # Steps may take any time, so the time that the others needed is the measure.
    if latest is not None and latest > worker.seen_at and now - latest >= latest - worker.seen_at:
        return LATE
    return EXPECTED


# The lease of a reducer that works on an accumulator, or on one of its partitions: a small hash with an expiry.

_FIELDS = ("who", "stored", "late")


@dataclass(frozen=True)
class ReducerInfo:
    """The reducer that works on an accumulator; with partitions, the reducers that work on them.

    Example:
        >>> import redisacc
        >>> with redisacc.ConditionalAccumulator("float32", [2]) as acc:
        ...     print(acc.info().reducer)
        None

    Attributes:
        who: the host and the process id of the reducer; of several, each once, with commas. Printable.
        stored: the number of rounds whose whole sum it stored before the taker needed it; of several reducers, the
            slowest one's.
        late: the number of rounds for which it was too late, or which held other gradients than it expected;
            of several reducers, the slowest one's.
        missing: the number of partitions without a reducer. While any is missing, takers rely on no reducer.
    """

    who: str
    stored: int
    late: int
    missing: int = 0

    @property
    def keeps_up(self) -> bool:
        """Whether it was in time for at least half of the rounds, and every partition has one."""
        return self.stored >= self.late and not self.missing

    @property
    def state(self) -> str:
        """A readable text: "has begun", "keeps up", "is late", or the number of partitions without a reducer."""
        if self.missing:
            return f"is missing on {self.missing} of the partitions"
        if not self.stored and not self.late:
            return "has begun"
        return "keeps up" if self.keeps_up else "is late"


def lease_commands(keys: Keys) -> list[Command]:
    """Returns the commands that read the lease; with partitions, one for each of them."""
    return [("HMGET", key, *_FIELDS) for key in keys.reducers]


def parse_leases(replies: Sequence[object]) -> ReducerInfo | None:
    """Parses the replies to ``lease_commands``; None if there is no reducer."""
    found = [lease for lease in map(_parse_lease, replies) if lease is not None]
    if not found:
        return None
    return ReducerInfo(
        printable(", ".join(dict.fromkeys(lease.who for lease in found)), 200),
        min(lease.stored for lease in found),
        max(lease.late for lease in found),
        len(replies) - len(found),
    )


def _parse_lease(reply: object) -> ReducerInfo | None:
    """Parses a lease; None if there is none, or redisacc did not write it."""
    match reply:
        case [bytes() as who, bytes() as stored, bytes() as late]:
            with suppressed(ValueError):
                name = printable(who.decode(errors="replace"), 200)
                return ReducerInfo(name, parse_number(stored), parse_number(late))
    return None
