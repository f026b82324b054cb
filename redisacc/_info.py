"""What stands in Redis about an accumulator, as typed objects."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field

from redisacc._arguments import Shape
from redisacc._keys import Keys
from redisacc._link import Link
from redisacc._rounds import Fields, parse_workers, scan_command, scan_rest
from redisacc._shapes import parse_shape, round_shape_of
from redisacc.errors import AccumulatorNotFoundError, CorruptDataError


@dataclass(frozen=True)
class Waiting:
    """A taker in the queue.

    Attributes:
        token: id of the take.
        num_required: for how many gradients it waits.
        taker: name of who waits.
        lease_ends_at: when it is passed over unless it says again that it waits, by the server's clock.
    """

    token: str
    num_required: int
    taker: str
    lease_ends_at: datetime.datetime


@dataclass(frozen=True)
class Unacknowledged:
    """A round that was granted and that its taker has not (yet) acknowledged.

    Attributes:
        token: id of the take, for ``recover()``.
        global_step: the step that it closed.
        num_accumulated: how many gradients it holds.
        taker: name of who took it.
        granted_at: when, by the server's clock.
    """

    token: str
    global_step: int
    num_accumulated: int
    taker: str
    granted_at: datetime.datetime


@dataclass(frozen=True)
class Worker:
    """Who has sent a gradient, by name. Handles and processes of the same name are one worker.

    Attributes:
        name: the worker's name, "host:pid" unless it was given another.
        in_round: gradients in the current round; 0: it is missing there.
        applied: gradients accepted since the accumulator was created.
        stale: gradients dropped because their step had passed.
        seen_at: when its last request came, by the server's clock.
    """

    name: str
    in_round: int
    applied: int
    stale: int
    seen_at: datetime.datetime


@dataclass(frozen=True)
class AccumulatorInfo:
    """An accumulator at one moment.

    Attributes:
        name: its name in Redis: the shared name, or the generated one of a private accumulator.
        kind: "dense" or "sparse".
        dtype: name of the element type.
        shape: as declared; None: unknown rank, None in it: unknown dimension.
        reduction_type: "MEAN" or "SUM".
        incarnation: random id given at creation.
        global_step: the current step.
        num_accumulated: gradients in the current round.
        round_shape: dense: the shape, sparse: the row shape that binds the current round; None while it is empty.
        applied: gradients accepted since creation.
        stale: gradients dropped because their step had passed.
        duplicates: requests that came again and were recognised.
        takes: rounds granted.
        parked: gradients of the current round that are held whole; several that were added up to make room are one.
        parked_bytes: how much memory those take.
        parked_limit: how much they may take.
        workers: who contributed to the current round: worker's name → number of gradients.
        waiting: takers in the queue, in order of arrival.
        unacknowledged: rounds that were granted and not yet acknowledged, oldest first.
        created_at: when it was created, by the server's clock.
        known_workers: everybody who sent a gradient, by name; who was idle for an hour may have been forgotten.
        last_activity: when the last request came that counted a gradient, set the step or was granted a round.
        read_at: the server's clock when all this was read.
    """

    name: str
    kind: str
    dtype: str
    shape: Shape
    reduction_type: str
    incarnation: str
    global_step: int
    num_accumulated: int
    round_shape: tuple[int, ...] | None
    applied: int
    stale: int
    duplicates: int
    takes: int
    parked: int
    parked_bytes: int
    parked_limit: int
    workers: dict[str, int]
    waiting: list[Waiting]
    unacknowledged: list[Unacknowledged]
    created_at: datetime.datetime
    known_workers: list[Worker]
    last_activity: datetime.datetime
    # Two looks at the same state are equal.
    read_at: datetime.datetime = field(compare=False)

    @property
    def missing(self) -> list[Worker]:
        """Workers without a gradient in the current round, who was seen last first."""
        absent = [worker for worker in self.known_workers if not worker.in_round]
        return sorted(absent, key=lambda worker: worker.seen_at, reverse=True)


_TEXTS = ("kind", "dtype", "shape", "reduction_type", "incarnation", "round_shape")
_NUMBERS = ("num_accumulated", "applied", "stale", "duplicates", "takes", "created_ms", "parked_bytes", "parked_limit")


class Record:
    """The plain-text hash of an accumulator, checked."""

    FIELDS = ("global_step", *_TEXTS, *_NUMBERS)

    def __init__(self, keys: Keys, reply: object) -> None:
        if not isinstance(reply, list) or len(reply) != len(self.FIELDS):
            raise CorruptDataError(f"{keys.record}: HMGET replied {reply!r:.100}")
        if reply == [None] * len(reply):
            raise AccumulatorNotFoundError(f"there is no accumulator {keys.name!r} (any more)")
        fields = dict(zip(self.FIELDS, reply, strict=True))
        for name, value in fields.items():
            if not isinstance(value, bytes) or not _right(name, value):
                raise CorruptDataError(
                    f"{keys.record}: {name} holds {value!r:.100}, which redisacc doesn't write there"
                )
        texts = {name: value.decode() for name, value in fields.items()}
        self.global_step = int(texts["global_step"])
        self.kind, self.dtype, shape, self.reduction_type, self.incarnation, round_shape = (texts[f] for f in _TEXTS)
        self.num_accumulated, self.applied, self.stale, self.duplicates, self.takes, self.created_ms = (
            int(texts[f]) for f in _NUMBERS[:6]
        )
        self.parked_bytes, self.parked_limit = (int(texts[f]) for f in _NUMBERS[6:])
        self.shape = parse_shape(keys, shape)
        self.round_shape = round_shape_of(keys, round_shape)

    @classmethod
    def command(cls, keys: Keys) -> tuple[str, ...]:
        """The command that reads it."""
        return ("HMGET", keys.record, *cls.FIELDS)

    @property
    def state(self) -> tuple[object, ...]:
        """What changes when the aggregate does."""
        return (self.incarnation, self.global_step, self.num_accumulated, self.applied, self.takes)


def _right(name: str, value: bytes) -> bool:
    if name == "global_step":
        digits = value.removeprefix(b"-")
        return digits.isdigit() and len(digits) <= 19 and -(2**63) <= int(value) < 2**63
    if name in _NUMBERS:
        return value.isdigit() and len(value) <= 15
    return len(value) <= 4096 and value.isascii()


def parse_taken(keys: Keys, token: bytes, text: bytes) -> tuple[str, Unacknowledged]:
    """The state of a taken round, "granted" or "acknowledged", and what else is known of it."""
    try:
        state, step, count, granted_ms, _, taker = text.decode().split(" ", 5)
        if state not in ("granted", "acknowledged"):
            raise ValueError(state)
        return state, Unacknowledged(token.decode(), int(step), int(count), taker, _time(int(granted_ms)))
    except (ValueError, OverflowError, OSError) as error:
        raise CorruptDataError(f"{keys.taken}: {text[:64]!r} is no taken round") from error


def _time(ms: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC)


def _created_at(keys: Keys, ms: int) -> datetime.datetime:
    try:
        return _time(ms)
    except (ValueError, OverflowError, OSError) as error:
        raise CorruptDataError(f"{keys.record}: created_ms holds {ms}, which is no time") from error


def read_info(link: Link, keys: Keys) -> AccumulatorInfo:
    """Reads everything but the gradients."""
    hashes = (keys.current.workers, keys.takers, keys.taken, keys.clients)
    record, parked, queue, clock, *firsts = link.pipeline(
        [
            Record.command(keys),
            ("HLEN", keys.current.parked),
            ("ZRANGE", keys.queue, 0, -1),
            ("TIME",),
            *(scan_command(key) for key in hashes),
        ]
    )
    fields = Record(keys, record)
    workers, takers, taken, clients = (scan_rest(link, key, first) for key, first in zip(hashes, firsts, strict=True))
    # A taker that joined or left between two reads is in only one of them.
    waiting = [_waiting(keys, token, takers[token]) for token in queue if token in takers]
    rounds = [parse_taken(keys, token, text) for token, text in taken.items()]
    created_at = _created_at(keys, fields.created_ms)
    in_round = parse_workers(workers, keys.current.workers)
    known_workers, seen = _known_workers(keys, clients, in_round)
    return AccumulatorInfo(
        name=keys.name,
        kind=fields.kind,
        dtype=fields.dtype,
        shape=fields.shape,
        reduction_type=fields.reduction_type,
        incarnation=fields.incarnation,
        global_step=fields.global_step,
        num_accumulated=fields.num_accumulated,
        round_shape=fields.round_shape,
        applied=fields.applied,
        stale=fields.stale,
        duplicates=fields.duplicates,
        takes=fields.takes,
        parked=int(parked),
        parked_bytes=fields.parked_bytes,
        parked_limit=fields.parked_limit,
        workers=in_round,
        waiting=waiting,
        unacknowledged=sorted((found for state, found in rounds if state == "granted"), key=lambda r: r.granted_at),
        created_at=created_at,
        known_workers=known_workers,
        last_activity=max([created_at, *seen, *(found.granted_at for _, found in rounds)]),
        read_at=_time(int(clock[0]) * 1000 + int(clock[1]) // 1000),
    )


def _known_workers(
    keys: Keys, clients: Fields, in_round: dict[str, int]
) -> tuple[list[Worker], list[datetime.datetime]]:
    """Workers by name, and when each client was seen last."""
    found: dict[str, Worker] = {}
    seen = []
    for client, text in clients.items():
        try:
            _, _, _, _, seen_ms, applied_text, stale_text, name = text.decode(errors="backslashreplace").split(" ", 7)
            seen_at, applied, stale = _time(int(seen_ms)), int(applied_text), int(stale_text)
        except (ValueError, OverflowError, OSError) as error:
            raise CorruptDataError(
                f"{keys.clients}: {client[:64]!r} holds {text[:64]!r}, which is no client"
            ) from error
        seen.append(seen_at)
        if applied or stale:
            known = found.get(name)
            if known is not None:
                applied, stale, seen_at = known.applied + applied, known.stale + stale, max(known.seen_at, seen_at)
            found[name] = Worker(name, in_round.get(name, 0), applied, stale, seen_at)
    return sorted(found.values(), key=lambda worker: worker.name), seen


def _waiting(keys: Keys, token: bytes, text: bytes) -> Waiting:
    number, _, rest = text.decode(errors="backslashreplace").partition(" ")
    lease_end, _, taker = rest.partition(" ")
    if not (number.isdigit() and len(number) <= 20 and lease_end.isdigit() and len(lease_end) <= 15):
        raise CorruptDataError(f"{keys.takers}: {text[:64]!r} is no taker")
    try:
        lease_ends_at = _time(int(lease_end))
    except (ValueError, OverflowError, OSError) as error:
        raise CorruptDataError(f"{keys.takers}: {text[:64]!r} is no taker") from error
    return Waiting(token.decode(errors="backslashreplace"), int(number), taker, lease_ends_at)
