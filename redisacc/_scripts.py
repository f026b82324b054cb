"""The one module that crosses into Lua: a typed function for each script, with the script's name.

Nobody else counts positions in KEYS and ARGV or knows the words of a reply. Replies that refuse become exceptions
here. What each script does, and all that it may reply, stands in the head of its file in ``lua/``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NoReturn, Protocol

from redisacc._arguments import shape_text
from redisacc._clients import Client
from redisacc._dtypes import DType
from redisacc._keys import DELETING, Keys
from redisacc._link import OPENING_PATIENCE, PATIENCE, Link
from redisacc._lua import load
from redisacc._sums import Packed
from redisacc._wire import Argument, Command
from redisacc.errors import (
    AccumulatorNotFoundError,
    CorruptDataError,
    DataLossError,
    InvalidArgumentError,
    NotPermittedError,
    StaleSequenceError,
    StepOverflowError,
)

# How long replicas get to confirm, in milliseconds, where somebody asked for that.
REPLICATION_MS = 5000


@dataclass(frozen=True)
class Schema:
    """What an accumulator was created as, as text."""

    format: str
    kind: str
    dtype: str
    shape: str
    reduction_type: str


@dataclass(frozen=True)
class Opened:
    """An accumulator as ``open`` found or made it, and when, by the server's clock."""

    now_ms: int
    incarnation: str
    schema: Schema
    chunk: int
    lease_ms: int
    parked_limit: int
    can_add_in_place: bool


@dataclass(frozen=True)
class Deleting:
    """The name is being deleted; whoever began may have died."""

    incarnation: str


@dataclass(slots=True)
class Request:
    """What every request to count a gradient carries.

    Attributes:
        client, sequence: who sends it, and its number: the same again changes nothing.
        worker: the name under which it is counted.
        local_step: the step that it was computed for.
        round_shape: dense: its shape; sparse: that of its rows. The same for all gradients of a round.
    """

    client: Client
    sequence: int
    worker: str
    local_step: int
    round_shape: tuple[int, ...]


Outcome = Literal["applied", "stale", "set", "lowered", "taken"]
_OUTCOMES: dict[bytes, Outcome] = {
    b"applied": "applied",
    b"stale": "stale",
    b"set": "set",
    b"lowered": "lowered",
    b"taken": "taken",
}


@dataclass(slots=True)
class Counted:
    """How a request ended: its outcome, and step and count right after it."""

    outcome: Outcome
    global_step: int
    num_accumulated: int
    # How many replicas have it, where somebody asked.
    replicas: int = 0


@dataclass(frozen=True)
class Full:
    """The gradient would take the parked ones past their limit. Nothing was changed."""

    parked_bytes: int
    parked_limit: int


@dataclass(slots=True)
class Granted:
    """A round that is the taker's."""

    token: str
    global_step: int
    num_accumulated: int
    round_shape: str
    # How many replicas know of it, where somebody asked.
    replicas: int = 0


@dataclass(slots=True)
class Waiting:
    """A place in the queue."""

    global_step: int
    num_accumulated: int
    ahead: int


class Take(Protocol):
    """A take that may have to be tried several times."""

    def __call__(self, *, patience: float = PATIENCE) -> tuple[Granted | Waiting, list[Any]]:
        """Takes the round, or a place in the queue; and the replies to the commands that read the round.

        Raises:
            StaleSequenceError: this take is over.
        """


class ForgottenError(StaleSequenceError):
    """The server has forgotten this client. Nothing was changed by this copy of the request."""

    def __init__(self, message: str, now_ms: int) -> None:
        super().__init__(message)
        self.now_ms = now_ms


class Scripts:
    """The scripts, run on one accumulator."""

    def __init__(self, link: Link, keys: Keys, *, incarnation: str = "", min_replicas: int = 0) -> None:
        self._link = link
        self._keys = keys
        self.incarnation = incarnation
        # On the connection of the script that it waits for: after a failover another would ask another server.
        self._replicate: list[Command] = [("WAIT", min_replicas, REPLICATION_MS)] if min_replicas else []

    def open(
        self, *, incarnation: str, schema: Schema, chunk: int, lease_ms: int, parked_limit: int
    ) -> Opened | Deleting:
        """Opens or creates the accumulator."""
        try:
            reply = self._link.run(
                load("open"),
                [
                    self._keys.record,
                    self._keys.current.sums,
                    self._keys.current.parked,
                    self._keys.current.small,
                    self._keys.current.workers,
                    self._keys.clients,
                ],
                [
                    incarnation,
                    schema.format,
                    schema.kind,
                    schema.dtype,
                    schema.shape,
                    schema.reduction_type,
                    chunk,
                    lease_ms,
                    parked_limit,
                ],
                patience=OPENING_PATIENCE,
            )
        except NotPermittedError:
            # A user who may only look. Whatever else it tries is refused as well.
            found = self._look()
            if found is None:
                raise
            return found
        match reply:
            case [b"opened", struct, now, incarnation_, format_, kind, dtype, shape, reduction, chunk_, lease, limit]:
                return Opened(
                    now_ms=self._number(now, "TIME"),
                    incarnation=_text(incarnation_),
                    schema=Schema(_text(format_), _text(kind), _text(dtype), _text(shape), _text(reduction)),
                    chunk=self._number(chunk_, "chunk", least=1),
                    lease_ms=self._number(lease, "lease_ms"),
                    parked_limit=self._number(limit, "parked_limit"),
                    can_add_in_place=struct == b"yes",
                )
            case [b"deleting", incarnation_]:
                return Deleting(_text(incarnation_))
        self._refuse(reply)

    def _look(self) -> Opened | None:
        """What ``open`` would find, read without a script; None where there is nothing to be used."""
        names = ("incarnation", *(field.name for field in fields(Schema)), "chunk", "lease_ms", "parked_limit")
        reply = self._link.call("HMGET", self._keys.record, *names, patience=OPENING_PATIENCE)
        match reply:
            case [bytes() as incarnation, *schema, bytes() as chunk, bytes() as lease, bytes() as limit] if all(
                isinstance(text, bytes) for text in schema
            ) and not incarnation.startswith(DELETING.encode()):
                return Opened(
                    now_ms=0,
                    incarnation=_text(incarnation),
                    schema=Schema(*map(_text, schema)),
                    chunk=self._number(chunk, "chunk", least=1),
                    lease_ms=self._number(lease, "lease_ms"),
                    parked_limit=self._number(limit, "parked_limit"),
                    can_add_in_place=False,
                )
        return None

    def apply(self, request: Request, packed: Packed, dtype: DType) -> Counted | None:
        """Adds a gradient in place. None if that would lose digits: then it has to be parked."""
        reply, replicas = self._link.run_and_read(
            load("apply"),
            [self._keys.record, self._keys.current.sums, self._keys.current.workers, self._keys.clients],
            [
                *self._request(request),
                dtype.in_place or "",
                packed.row_bytes,
                "" if dtype.limit is None else dtype.limit,
                packed.indices,
                packed.rows,
            ],
            after=self._replicate,
        )
        if reply[0] == b"inexact":
            return None
        return self._counted(reply, request.round_shape, replicas)

    def park(
        self,
        request: Request,
        *,
        gradient: str,
        header: bytes,
        data: bytes,
        lengths: Sequence[int],
        stage: Sequence[Command],
        replaced: Sequence[str] = (),
        replaced_parts: Sequence[str] = (),
    ) -> Counted | Full | Literal["welcome", "changed", "unstaged"]:
        """Holds a gradient whole: as ``data``, or in parts of ``lengths``, which the commands ``stage`` put in place.

        Args:
            header: empty to ask only; "welcome" says that the gradient would be held.
            replaced: ids of parked gradients that were added to this one; "changed" says that one is gone.

        Returns:
            "unstaged" if a part wasn't there when the script ran: the request has to be sent again.
        """
        keys, current = self._keys, self._keys.current
        named = [keys.record, current.parked, current.small, current.workers, keys.clients]
        if lengths:
            named += [keys.staged(gradient, part) for part in range(len(lengths))]
            named += [keys.part(gradient, part) for part in range(len(lengths))]
        named += replaced_parts
        reply, replicas = self._link.run_and_read(
            load("park"),
            named,
            [
                *self._request(request),
                gradient,
                header,
                data,
                len(lengths),
                *lengths,
                *replaced,
            ],
            before=stage,
            after=self._replicate if header else (),
        )
        match reply:
            case [b"welcome"]:
                return "welcome"
            case [b"changed"]:
                return "changed"
            case [b"unstaged", _]:
                return "unstaged"
            case [b"full", parked, limit]:
                return Full(self._number(parked, "parked_bytes"), self._number(limit, "parked_limit"))
        return self._counted(reply, request.round_shape, replicas)

    def take(
        self,
        *,
        token: str,
        client: Client,
        sequence: int,
        num_required: int,
        lease_ms: int,
        taker: str,
        read: Sequence[Command] = (),
    ) -> Take:
        """Makes a take, to be tried until it is granted.

        Args:
            read: commands that read the round if it is granted; they travel along.
        """
        keys, taken = self._keys, self._keys.taken_round(token)
        named = [
            keys.record,
            keys.current.sums,
            keys.current.parked,
            keys.current.small,
            keys.current.workers,
            keys.queue,
            keys.takers,
            keys.taken,
            taken.sums,
            taken.parked,
            taken.small,
            taken.workers,
            keys.clients,
        ]
        args = (self.incarnation, token, num_required, lease_ms, taker, client.id, f"{sequence} 0")
        call = self._link.prepare(load("take"), named, args, after=read)

        def attempt(*, patience: float = PATIENCE) -> tuple[Granted | Waiting, list[Any]]:
            reply, pieces = self._link.repeat(call, patience=patience)
            match reply:
                case [b"waiting", step, count, ahead]:
                    waiting = Waiting(
                        self._step(step), self._number(count, "num_accumulated"), self._number(ahead, "queue")
                    )
                    return waiting, pieces
            return self._granted(token, reply), pieces

        return attempt

    def leave(self, *, token: str, patience: float = PATIENCE, replicated: bool = False) -> Granted | None:
        """Leaves the queue. Returns the round if it was granted meanwhile; ``replicated``: waits for replicas."""
        keys = self._keys
        reply, replicas = self._link.run_and_read(
            load("leave"),
            [keys.record, keys.queue, keys.takers, keys.taken],
            [token],
            after=self._replicate if replicated else (),
            patience=patience,
        )
        return None if reply[0] == b"left" else self._granted(token, reply, replicas)

    def acknowledge(self, *, token: str, parts: Sequence[str], more: bool) -> bool:
        """Removes (a piece of) a round. False if there is no such round."""
        taken = self._keys.taken_round(token)
        reply = self._link.run(
            load("acknowledge"),
            [self._keys.taken, taken.sums, taken.parked, taken.small, taken.workers, *parts],
            [token, int(more)],
        )
        return reply[0] == b"acknowledged"

    def recover(self, *, old: str, token: str, taker: str) -> Granted | None:
        """Moves a granted round to a new token. None if there is no such round."""
        keys, before, after = self._keys, self._keys.taken_round(old), self._keys.taken_round(token)
        reply = self._link.run(
            load("recover"),
            [
                keys.record,
                keys.taken,
                before.sums,
                before.parked,
                before.small,
                before.workers,
                after.sums,
                after.parked,
                after.small,
                after.workers,
            ],
            [self.incarnation, old, token, taker],
        )
        return None if reply[0] == b"unknown" else self._granted(token, reply)

    def set_global_step(self, *, client: Client, sequence: int, worker: str, new_global_step: int) -> Counted:
        """Sets the step."""
        reply = self._link.run(
            load("set_global_step"),
            [self._keys.record, self._keys.clients],
            [self.incarnation, client.id, f"{sequence} {client.acknowledged}", worker, new_global_step],
        )
        return self._counted(reply, ())

    def settle(self, *, client: Client, sequence: int, worker: str, patience: float = PATIENCE) -> Counted | None:
        """What became of a request. None: it was not executed, and from now on never will be."""
        reply = self._link.run(
            load("settle"),
            [self._keys.record, self._keys.clients],
            [self.incarnation, client.id, f"{sequence} {client.acknowledged}", worker],
            patience=patience,
        )
        return None if reply[0] == b"withdrawn" else self._counted(reply, ())

    def delete(
        self, *, finish: bool, patience: float = PATIENCE
    ) -> Literal["closed", "deleted", "missing", "replaced"]:
        """Closes the accumulator for everybody, or removes it once it is closed."""
        keys = self._keys
        reply = self._link.run(
            load("delete"),
            [
                keys.record,
                keys.current.sums,
                keys.current.parked,
                keys.current.small,
                keys.current.workers,
                keys.clients,
                keys.queue,
                keys.takers,
                keys.taken,
                keys.folding,
            ],
            [self.incarnation, int(finish)],
            patience=patience,
        )
        match reply[0]:
            case b"closed":
                return "closed"
            case b"deleted":
                return "deleted"
            case b"missing":
                return "missing"
            case b"replaced":
                return "replaced"
        self._refuse(reply)

    def sweep(self, *, tokens: Sequence[str], owners: Mapping[str, str]) -> int:
        """Removes keys that nobody owns. Returns how many; 0 if the accumulator isn't as it was found (any more).

        Args:
            tokens: of all taken rounds.
            owners: key to remove → who would have to be there for it to be in use.
        """
        keys = self._keys
        reply = self._link.run(
            load("sweep"),
            [keys.record, keys.taken, keys.current.parked, *(keys.taken_round(t).parked for t in tokens), *owners],
            [self.incarnation, len(tokens), *tokens, *owners.values()],
        )
        match reply:
            case [b"swept", number]:
                return self._number(number, "sweep")
            case [b"changed"]:
                return 0
        self._refuse(reply)

    def _request(self, request: Request) -> list[Argument]:
        """ARGV[1] to ARGV[6] of the scripts that count a gradient."""
        return [
            self.incarnation,
            request.client.id,
            f"{request.sequence} {request.client.acknowledged}",
            request.worker,
            request.local_step,
            shape_text(request.round_shape),
        ]

    def _confirmed(self, replies: Sequence[Any]) -> int:
        match replies:
            case [int(replicas)]:
                return replicas
        raise CorruptDataError(f"{self._keys.record}: WAIT replied {replies!r:.100}")

    def _counted(self, reply: list[bytes], round_shape: tuple[int, ...], replicas: Sequence[Any] = ()) -> Counted:
        match reply:
            case [outcome, step, count] if outcome in _OUTCOMES:
                return Counted(
                    _OUTCOMES[outcome],
                    self._step(step),
                    self._number(count, "num_accumulated"),
                    self._confirmed(replicas) if replicas else 0,
                )
            case [b"misshapen", bound]:
                raise InvalidArgumentError(
                    f"the gradient must have the shape of those in the current round of {self._keys.name!r}, "
                    f"{_text(bound)}, not {shape_text(round_shape)}"
                )
        self._refuse(reply)

    def _granted(self, token: str, reply: list[bytes], replicas: Sequence[Any] = ()) -> Granted:
        match reply:
            case [b"granted", step, count, shape]:
                number = self._number(count, "num_accumulated")
                confirmed = self._confirmed(replicas) if replicas else 0
                return Granted(token, self._step(step), number, _text(shape), confirmed)
        self._refuse(reply)

    def _step(self, text: bytes) -> int:
        try:
            step = int(text)
        except ValueError:
            step = 2**63
        if not -(2**63) <= step < 2**63:
            raise CorruptDataError(f"{self._keys.record}: global_step is {_text(text)!r}")
        return step

    def _number(self, text: bytes, what: str, *, least: int = 0) -> int:
        if not (text.isdigit() and len(text) <= 15 and int(text) >= least):
            raise CorruptDataError(f"{self._keys.record}: {what} is {_text(text)!r}")
        return int(text)

    def _refuse(self, reply: list[bytes]) -> NoReturn:
        name = self._keys.name
        match reply:
            case [b"missing"]:
                raise AccumulatorNotFoundError(
                    f"there is no accumulator {name!r} (any more): it was deleted, its owner is gone, or the server "
                    "has lost its data"
                )
            case [b"replaced"]:
                raise AccumulatorNotFoundError(
                    f"accumulator {name!r} was deleted after this handle was opened; open it anew"
                )
            case [b"superseded", sequence]:
                raise StaleSequenceError(
                    f"{name!r}: the server has executed request {_text(sequence)} of this client, "
                    "which is later than this one"
                )
            case [b"forgotten", now]:
                raise ForgottenError(
                    f"{name!r}: the server has forgotten this client, which was idle for long, and can't say whether "
                    "it has executed the request before",
                    self._number(now, "TIME"),
                )
            case [b"remains", key]:
                raise CorruptDataError(
                    f"the record of {name!r} is gone, but {_text(key)} is there: keys were evicted (set "
                    "maxmemory-policy noeviction) or removed by hand. Nothing can be summed from what is left; to "
                    f"begin anew remove it: redis-cli --scan --pattern '{self._keys.record}*' | xargs redis-cli unlink"
                )
            case [b"lost", sequence]:
                raise DataLossError(
                    f"{name!r}: the server has acknowledged a later request of this client than {_text(sequence)}, the "
                    "last one that it knows: it was restarted from older data, failed over to a replica that lagged "
                    "behind, or evicted keys. This request was not executed; those that come now will be"
                )
            case [b"overflow", step]:
                raise StepOverflowError(f"{name!r}: the global step is {_text(step)} and can't grow")
            case [b"corrupt", where, text]:
                raise CorruptDataError(
                    f"{self._keys.record}: {_text(where)} holds {_text(text)!r}, which redisacc doesn't write there"
                )
        raise CorruptDataError(f"{self._keys.record}: a script replied {reply!r:.200}")


def _text(data: bytes) -> str:
    return data.decode(errors="backslashreplace")
