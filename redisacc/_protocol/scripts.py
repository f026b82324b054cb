"""Crosses into Lua: one typed function for each script, with the script's name.

Only this module passes keys and arguments to the scripts, by the names in their headers, and reads their replies. A
reply that refuses becomes an exception here. The header of each file in ``lua/`` describes what the script does, its
keys and arguments, and every reply.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NoReturn, Protocol

from redisacc._data.validation import shape_text
from redisacc._data.weights import CONSTANT, LEAST_WEIGHT, MOST_WEIGHT
from redisacc._format import buffered as buffered_format
from redisacc._format.buffered import STAGING_MS
from redisacc._format.in_place import PackedRows
from redisacc._format.keys import DELETING, Keys
from redisacc._format.partitions import parse_partitions, partitions_text
from redisacc._format.record import check_format
from redisacc._format.settings import SettingsChange
from redisacc._format.weights import parse_weight, weight_text
from redisacc._protocol.replication import confirmed, wait_commands
from redisacc._protocol.requirement import Requirement
from redisacc._protocol.script_replies import Deletion, corrupt, deletion_of
from redisacc._protocol.sessions import Session
from redisacc._redis.fast_socket import Argument, Command
from redisacc._redis.script_loader import load
from redisacc._redis.transport import OPENING_TIMEOUT, TIMEOUT, Hint, Transport
from redisacc._text import EVICTED, QUOTED, printable, shown
from redisacc.errors import (
    AccumulatorNotFoundError,
    CorruptDataError,
    DataLossError,
    InvalidArgumentError,
    NotPermittedError,
    StaleSequenceError,
    StepOverflowError,
)


@dataclass(frozen=True)
class Schema:
    """What an accumulator was created as, all as text (``AccumulatorSpec.schema``)."""

    format: str
    kind: str
    dtype: str
    shape: str
    reduction_type: str
    sparse_mean: str
    missing: str
    tree: str


@dataclass(frozen=True)
class Opened:
    """An accumulator as ``open`` found or created it.

    Attributes:
        now_ms: the server's clock in milliseconds since 1970; 0 if the script couldn't run.
        incarnation: the incarnation that the handle uses from now on.
        schema: what the accumulator was created as.
        chunk: elements of a row of a dense gradient.
        lease_ms: how long a private accumulator outlives its owner, in milliseconds; 0 for a shared one.
        buffer_limit: bytes that the buffered gradients of a round may have in total.
        once_per_worker: whether a round accepts one gradient of each worker only.
        max_staleness: by how many steps a gradient may be late.
        staleness_weight: what staleness does to weights, as text.
        normalize: what means are divided by, as text.
        partitions: the numbers of the slots that hold the parts of gradients; empty if that is the slot of the record.
        can_add_in_place: whether the server's Lua can add.
        takes: how many rounds it had granted.
        losses: how often it was noticed that it had gone back to older data.
    """

    now_ms: int
    incarnation: str
    schema: Schema
    chunk: int
    lease_ms: int
    buffer_limit: int
    once_per_worker: bool
    max_staleness: int
    staleness_weight: str
    normalize: str
    partitions: tuple[int, ...]
    can_add_in_place: bool
    takes: int = 0
    losses: int = 0


@dataclass(frozen=True)
class Deleting:
    """The name is being deleted, by a client that may have died."""

    incarnation: str


@dataclass(slots=True)
class Request:
    """A request to count a gradient.

    Attributes:
        session: who sends it.
        sequence: its number. The same number again changes nothing.
        worker: the name under which the gradient is counted.
        local_step: the step for which the gradient was computed.
        round_shape: the shape of a dense gradient, or of the rows of a sparse one. All gradients of a round share it.
        once: whether the gradient is dropped if the round has one of this worker.
        trace: the traceparent of the span that applies it; "" if it is not traced.
        weight: by what the gradient is multiplied, before its staleness counts.
    """

    session: Session
    sequence: int
    worker: str
    local_step: int
    round_shape: tuple[int, ...]
    once: bool = False
    trace: str = ""
    weight: float = 1.0


Outcome = Literal["applied", "stale", "repeated", "set", "lowered", "configured", "taken"]
_OUTCOMES: dict[bytes, Outcome] = {
    b"applied": "applied",
    b"stale": "stale",
    b"repeated": "repeated",
    b"set": "set",
    b"lowered": "lowered",
    b"configured": "configured",
    b"taken": "taken",
}


@dataclass(slots=True)
class Counted:
    """The outcome of a request, and the accumulator right after it.

    Attributes:
        outcome: what the request did.
        global_step: the step after it.
        num_accumulated: the gradients in the round after it.
        replicas: how many replicas have it, if the handle was opened with min_replicas.
    """

    outcome: Outcome
    global_step: int
    num_accumulated: int
    replicas: int = 0


@dataclass(frozen=True)
class Full:
    """The gradient would exceed the limit of the buffered gradients. Nothing was changed.

    Attributes:
        buffered_bytes: the size of the buffered gradients.
        buffer_limit: the limit.
        weight: the weight with which the gradient would be admitted now.
    """

    buffered_bytes: int
    buffer_limit: int
    weight: float = 1.0


@dataclass(slots=True)
class Granted:
    """A round that belongs to the taker.

    Attributes:
        token: the token that holds the round.
        global_step: the step that the round closed.
        num_accumulated: the gradients in the round.
        round_shape: the shape that they share, as text.
        staleness: how stale they were, as text; "" if the accumulator does not count that.
        given_weight: the sum of their weights; None if all are 1.
        replicas: how many replicas have the grant, if they were asked.
    """

    token: str
    global_step: int
    num_accumulated: int
    round_shape: str
    staleness: str = ""
    given_weight: float | None = None
    replicas: int = 0


@dataclass(slots=True)
class Queued:
    """A place in the queue of takers, ``ahead`` of which others come first.

    ``grace_left_ms`` is how long the grace lasts, in milliseconds, if nothing else is missing; otherwise 0.
    ``total_weight`` is the sum of the weights of the gradients.
    ``required`` is what the settings say that the take requires; None if it has said so itself.
    """

    global_step: int
    num_accumulated: int
    ahead: int
    grace_left_ms: int = 0
    total_weight: float = 0.0
    required: Requirement | None = None


@dataclass(slots=True)
class GoneBack:
    """The accumulator has gone back to older data. The take is not in the queue.

    Attributes:
        sequence: the last request of the session that the server knows; 0: none.
        takes: how many rounds the accumulator has granted, as far as it knows.
        losses: how often it was noticed that it had gone back, this time included.
    """

    sequence: int
    takes: int
    losses: int


class Take(Protocol):
    """A take that may have to be tried several times."""

    def __call__(self, *, timeout: float = TIMEOUT) -> tuple[Granted | Queued | GoneBack, list[Any]]:
        """Takes the round, or a place in the queue.

        Args:
            timeout: how long to try to reach the server, in seconds.

        Returns:
            The round, the place, or why the take needs another session; and the replies to the commands that read the
            round.

        Raises:
            StaleSequenceError: this take is over.
            InvalidArgumentError: the settings do not say what the take requires, or no longer. It has left the queue.
        """


class ForgottenError(StaleSequenceError):
    """The server has forgotten this session. This copy of the request changed nothing.

    Attributes:
        now_ms: the server's clock in milliseconds since 1970.
    """

    def __init__(self, message: str, now_ms: int) -> None:
        super().__init__(message)
        self.now_ms = now_ms


class Scripts:
    """Runs the scripts on one accumulator.

    Every function raises the errors of `Transport.run`, and those with which its script refuses:

    - AccumulatorNotFoundError: The accumulator doesn't exist, or is no longer the incarnation that was opened.
    - StaleSequenceError: The session has moved on, or resolve has fenced the request.
    - ForgottenError: The server has forgotten the session.
    - DataLossError: The server has lost an outcome that the session knows.
    - CorruptDataError: A key, a field or a reply holds what redisacc never writes.

    Args:
        transport: the server.
        keys: the accumulator.
        incarnation: the incarnation that was opened.
        min_replicas: how many replicas must confirm; 0 asks none.
    """

    def __init__(self, transport: Transport, keys: Keys, *, incarnation: str = "", min_replicas: int = 0) -> None:
        self._transport = transport
        self._keys = keys
        self.incarnation = incarnation
        self.min_replicas = min_replicas
        # WAIT must follow on the connection of its script: after a failover another one would ask another server.
        self._replicate = wait_commands(min_replicas)

    def bind(self, keys: Keys, incarnation: str) -> None:
        """Binds the scripts to the accumulator that ``open`` found.

        Args:
            keys: its keys, with its partitions.
            incarnation: its incarnation.
        """
        self._keys = keys
        self.incarnation = incarnation

    def open(
        self,
        *,
        incarnation: str,
        schema: Schema,
        chunk: int,
        lease_ms: int,
        buffer_limit: int,
        once_per_worker: bool,
        max_staleness: int,
        staleness_weight: str = CONSTANT,
        normalize: str = "weights",
        partitions: tuple[int, ...] = (),
        create: bool = True,
    ) -> Opened | Deleting:
        """Opens or creates the accumulator.

        Args:
            incarnation: a random id, which the accumulator gets if this call creates it.
            schema: what to create. An accumulator that exists keeps its own.
            chunk: elements of a row of a dense gradient.
            lease_ms: how long a private accumulator outlives its owner, in milliseconds; 0 for a shared one.
            buffer_limit: bytes that the buffered gradients of a round may have in total.
            once_per_worker: whether a round accepts one gradient of each worker only.
            max_staleness: by how many steps a gradient may be late.
            staleness_weight: what staleness does to weights, as text.
            normalize: what means are divided by: "weights" or "count".
            partitions: the numbers of the slots that hold the parts of gradients; empty: the slot of the record.
            create: whether to create the accumulator if there is none.

        Raises:
            SchemaMismatchError: the record belongs to another version of the data model.
        """
        current = self._keys.current
        try:
            reply = self._transport.run(
                *load("open").bind(
                    keys={
                        "record": self._keys.record,
                        "sums": current.sums,
                        "buffered": current.buffered,
                        "inline": current.inline,
                        "workers": current.workers,
                        "sessions": self._keys.sessions,
                    },
                    args={
                        "incarnation": incarnation,
                        "format": schema.format,
                        "kind": schema.kind,
                        "dtype": schema.dtype,
                        "shape": schema.shape,
                        "reduction_type": schema.reduction_type,
                        "sparse_mean": schema.sparse_mean,
                        "missing": schema.missing,
                        "tree": schema.tree,
                        "chunk": chunk,
                        "lease_ms": lease_ms,
                        "buffer_limit": buffer_limit,
                        "once_per_worker": int(once_per_worker),
                        "max_staleness": max_staleness,
                        "staleness_weight": staleness_weight,
                        "normalize": normalize,
                        "partitions": partitions_text(partitions),
                        "create": int(create),
                    },
                ),
                timeout=OPENING_TIMEOUT,
            )
        except NotPermittedError:
            # An observer may read but not run scripts. The server refuses everything else that it tries as well.
            found = self._open_read_only()
            if found is None:
                raise
            return found
        match reply:
            case [
                b"opened",
                struct,
                now,
                incarnation_,
                format_,
                kind,
                dtype,
                shape,
                reduction,
                mean,
                missing,
                tree,
                chunk_,
                lease,
                limit,
                once,
                staleness,
                staleness_weight_,
                normalize_,
                numbers,
                takes,
                losses,
            ]:
                return Opened(
                    now_ms=self._number(now, "TIME"),
                    incarnation=_text(incarnation_),
                    schema=Schema(*map(_text, (format_, kind, dtype, shape, reduction, mean, missing, tree))),
                    chunk=self._number(chunk_, "chunk", least=1),
                    lease_ms=self._number(lease, "lease_ms"),
                    buffer_limit=self._number(limit, "buffer_limit"),
                    once_per_worker=bool(self._number(once, "once_per_worker")),
                    max_staleness=self._number(staleness, "max_staleness"),
                    staleness_weight=_text(staleness_weight_),
                    normalize=_text(normalize_),
                    partitions=self._partitions(numbers),
                    can_add_in_place=struct == b"yes",
                    takes=self._number(takes, "takes"),
                    losses=self._number(losses, "losses"),
                )
            case [b"deleting", incarnation_]:
                return Deleting(_text(incarnation_))
            case [b"other_format", format_]:
                check_format(self._keys.name, _text(format_))
        self._refuse(reply)

    def _open_read_only(self) -> Opened | None:
        """Reads what ``open`` would find, without the script; None if there is nothing that can be used."""
        names = (
            "incarnation",
            *(field.name for field in fields(Schema)),
            "chunk",
            "lease_ms",
            "buffer_limit",
            "once_per_worker",
            "max_staleness",
            "staleness_weight",
            "normalize",
            "partitions",
        )
        reply = self._transport.call("HMGET", self._keys.record, *names, timeout=OPENING_TIMEOUT)
        if isinstance(reply, list) and len(reply) > 1 and isinstance(reply[1], bytes):
            check_format(self._keys.name, _text(reply[1]))
        match reply:
            case [
                bytes() as incarnation,
                *schema,
                bytes() as chunk,
                bytes() as lease,
                bytes() as limit,
                bytes() as once,
                staleness,
                staleness_weight,
                normalize,
                numbers,
            ] if all(isinstance(text, bytes) for text in schema) and not incarnation.startswith(DELETING.encode()):
                return Opened(
                    now_ms=0,
                    incarnation=_text(incarnation),
                    schema=Schema(*map(_text, schema)),
                    chunk=self._number(chunk, "chunk", least=1),
                    lease_ms=self._number(lease, "lease_ms"),
                    buffer_limit=self._number(limit, "buffer_limit"),
                    once_per_worker=bool(self._number(once, "once_per_worker")),
                    # A record has these fields only if the accumulator uses them.
                    max_staleness=0 if staleness is None else self._number(staleness, "max_staleness"),
                    staleness_weight=CONSTANT if staleness_weight is None else _text(staleness_weight),
                    normalize="weights" if normalize is None else _text(normalize),
                    partitions=() if numbers is None else self._partitions(numbers),
                    can_add_in_place=False,
                )
        return None

    def apply(self, request: Request, packed: Sequence[PackedRows]) -> Counted | None:
        """Adds a gradient in place.

        Args:
            request: who sends it, and what every gradient carries.
            packed: its sections.

        Returns:
            The outcome; None if a sum would lose digits, so that the gradient has to be buffered.

        Raises:
            InvalidArgumentError: the round holds gradients of another shape.
        """
        keys, current = self._keys, self._keys.current
        reply, replicas = self._transport.run_and_read(
            *load("apply").bind(
                keys={
                    "record": keys.record,
                    "sums": current.sums,
                    "workers": current.workers,
                    "sessions": keys.sessions,
                },
                args={
                    **self._of(request),
                    "trace": request.trace,
                    "labels": [section.label for section in packed],
                    "elements": [section.element for section in packed],
                    "limits": [section.limit for section in packed],
                    "row_bytes": [section.row_bytes for section in packed],
                    "indices": [section.indices for section in packed],
                    "rows": [section.rows for section in packed],
                },
            ),
            after=self._replicate,
        )
        if reply[0] == b"inexact":
            return None
        return self._counted(reply, request.round_shape, replicas)

    def buffer(
        self,
        request: Request,
        *,
        gradient: str,
        header: bytes,
        data: bytes,
        lengths: Sequence[int],
        stage: Sequence[Command],
        announced: bool = False,
        replaced: Sequence[str] = (),
        replaced_parts: Sequence[str] = (),
        summed_weight: float = 1.0,
    ) -> Counted | Full | Literal["would_accept", "changed", "unstaged"]:
        """Buffers a gradient in the round.

        Args:
            request: who sends it, and what every gradient carries.
            gradient: id of the gradient.
            header: header of the gradient; empty to ask only whether it would be accepted.
            data: all bytes of an inline gradient; empty if it has parts.
            lengths: bytes of each part.
            stage: commands that stage the parts, sent before the script in the same round trip.
            announced: whether the gradient is announced before its parts, and gets a place in the order then.
            replaced: ids of the buffered gradients whose sum is part of this one, the oldest first.
            replaced_parts: keys of their parts.
            summed_weight: the weight that the gradient of this request has in the sum that replaces them.

        Returns:
            The outcome; or, with nothing changed: `Full`; "would_accept" if the header is empty and the gradient would
            be accepted; "changed" if a gradient that this one replaces is gone, or ``summed_weight`` is not the weight
            with which the gradient would be admitted; "unstaged" if a part wasn't there when
            the script ran, so that the request has to be sent again.

        Raises:
            InvalidArgumentError: the round holds gradients of another shape.
        """
        keys, current = self._keys, self._keys.current
        if announced:
            stage = [self.stage(request, gradient=gradient, header=header), *stage]
        reply, replicas = self._transport.run_and_read(
            *load("buffer").bind(
                keys={
                    "record": keys.record,
                    "buffered": current.buffered,
                    "inline": current.inline,
                    "workers": current.workers,
                    "sessions": keys.sessions,
                    "staged": [keys.staged(gradient, part) for part in range(len(lengths))] if lengths else (),
                    "parts": [keys.part(gradient, part) for part in range(len(lengths))] if lengths else (),
                    "place": [keys.place(gradient)] if lengths and not replaced else (),
                    "replaced_parts": replaced_parts,
                },
                args={
                    **self._of(request),
                    "trace": request.trace,
                    "summed_weight": weight_text(summed_weight) if replaced else "",
                    "gradient": gradient,
                    "header": header,
                    "data": data,
                    "ahead_bytes": buffered_format.ANNOUNCED_BYTES,
                    "lengths": lengths,
                    "replaced": replaced,
                },
            ),
            before=stage,
            after=self._replicate if header else (),
        )
        match reply:
            case [b"would_accept"]:
                return "would_accept"
            case [b"changed"]:
                return "changed"
            case [b"unstaged", _]:
                return "unstaged"
            case [b"full", buffered, limit, weight]:
                return self._full(buffered, limit, weight)
        return self._counted(reply, request.round_shape, replicas)

    def stage(self, request: Request, *, gradient: str, header: bytes) -> Hint:
        """Returns the call of the script that announces a gradient. Nobody needs its reply.

        Args:
            request: who sends the gradient, and what every gradient carries.
            gradient: id of the gradient.
            header: header of the gradient.
        """
        keys = self._keys
        return Hint.running(
            *load("stage").bind(
                keys={
                    "record": keys.record,
                    "buffered": keys.current.buffered,
                    "workers": keys.current.workers,
                    "place": keys.place(gradient),
                },
                args={
                    "incarnation": self.incarnation,
                    "worker": request.worker,
                    "local_step": request.local_step,
                    "once": int(request.once),
                    "round_shape": shape_text(request.round_shape),
                    "weight": weight_text(request.weight),
                    "gradient": gradient,
                    "header": header.hex(),
                    "expiry_ms": STAGING_MS,
                },
            )
        )

    def take(
        self,
        *,
        token: str,
        session: Session,
        sequence: int,
        num_required: int | None,
        min_weight: float = 0.0,
        up_to: int | None = None,
        grace_ms: int = 0,
        lease_ms: int,
        taker: str,
        takes: int = 0,
        losses: int = 0,
        read: Sequence[Command] = (),
    ) -> Take:
        """Returns a take, to be called until it is granted.

        Args:
            token: id of the take: the session's id and the sequence number. The same one again gets the same round.
            session: who sends it.
            sequence: its number.
            num_required: the round is not granted while it has fewer gradients; at least 1. None: this, ``up_to`` and
                ``grace_ms`` are what the settings say whenever the take is tried.
            min_weight: nor while the sum of their weights is less; 0 for any.
            up_to: the round is granted at once if it has at least this many; at least num_required. None: num_required.
            grace_ms: the round is granted this long after the gradient with which it had enough, in milliseconds.
            lease_ms: the taker loses its place in the queue unless it asks again within this time, in milliseconds.
            taker: name of the taker.
            takes: the most rounds that the accumulator has granted, as far as the sender knows.
            losses: how often it has gone back to older data, as far as the sender knows.
            read: commands that read the round if it is granted. They travel along.
        """
        keys, current, taken = self._keys, self._keys.current, self._keys.taken_round(token)
        call = self._transport.prepare(
            *load("take").bind(
                keys={
                    "record": keys.record,
                    "sums": current.sums,
                    "buffered": current.buffered,
                    "inline": current.inline,
                    "workers": current.workers,
                    "sessions": keys.sessions,
                    "queue": keys.queue,
                    "takers": keys.takers,
                    "taken": keys.taken,
                    "taken_sums": taken.sums,
                    "taken_buffered": taken.buffered,
                    "taken_inline": taken.inline,
                    "taken_workers": taken.workers,
                },
                args={
                    "incarnation": self.incarnation,
                    "token": token,
                    "num_required": num_required or 0,
                    "min_weight": weight_text(min_weight),
                    "up_to": (num_required or 0) if up_to is None else up_to,
                    "grace_ms": grace_ms,
                    "lease_ms": lease_ms,
                    "taker": taker,
                    "session": session.id,
                    "sequence": sequence,
                    "acknowledged": session.acknowledged,
                    "takes": takes,
                    "losses": losses,
                },
            ),
            after=read,
        )

        def attempt(*, timeout: float = TIMEOUT) -> tuple[Granted | Queued | GoneBack, list[Any]]:
            reply, pieces = self._transport.repeat(call, timeout=timeout)
            match reply:
                case [b"waiting", step, count, ahead, grace_left, weight, required, most, grace]:
                    number = self._number(count, "num_accumulated")
                    queued = Queued(
                        self._step(step),
                        number,
                        self._number(ahead, "queue"),
                        self._number(grace_left, "grace_left_ms"),
                        # 0 is no weight, but the sum of none.
                        self._weight(weight) if number else 0.0,
                    )
                    if num_required is None:
                        queued.required = Requirement(
                            self._number(required, "num_required", least=1),
                            self._number(most, "up_to", least=1),
                            self._number(grace, "grace_ms"),
                        )
                    return queued, pieces
                case [b"gone_back", known, granted, noticed]:
                    return (
                        GoneBack(
                            self._number(known, "sessions"),
                            self._number(granted, "takes"),
                            self._number(noticed, "losses"),
                        ),
                        pieces,
                    )
                case [b"unset"]:
                    raise InvalidArgumentError(
                        f"num_required is missing, and the settings of {shown(self._keys.name)} do not say it either, "
                        "or no longer: give it, or set it by configure() or `redisacc set`"
                    )
            return self._granted(token, reply), pieces

        return attempt

    def leave(self, *, token: str, timeout: float = TIMEOUT, replicated: bool = False) -> Granted | None:
        """Leaves the queue.

        Args:
            token: id of the take.
            timeout: how long to try to reach the server, in seconds.
            replicated: whether replicas have to confirm.

        Returns:
            The round if it was granted in the meantime, else None.
        """
        keys = self._keys
        reply, replicas = self._transport.run_and_read(
            *load("leave").bind(
                keys={"record": keys.record, "queue": keys.queue, "takers": keys.takers, "taken": keys.taken},
                args={"token": token, "confirm": int(replicated)},
            ),
            after=self._replicate if replicated else (),
            timeout=timeout,
        )
        return None if reply == [b"left"] else self._granted(token, reply, replicas)

    def acknowledge(self, *, token: str, parts: Sequence[str], attempts: Sequence[str] = (), more: bool) -> bool:
        """Removes a round, or some of its parts.

        Args:
            token: token of the round.
            parts: keys of parts to remove.
            attempts: gradients in partitions, as "ATTEMPT parts": the leader lists them until their parts are removed.
            more: whether calls with further parts follow.

        Returns:
            False if there is no such round.
        """
        taken = self._keys.taken_round(token)
        reply = self._transport.run(
            *load("acknowledge").bind(
                keys={
                    "taken": self._keys.taken,
                    "taken_sums": taken.sums,
                    "taken_buffered": taken.buffered,
                    "taken_inline": taken.inline,
                    "taken_workers": taken.workers,
                    "attempts": self._keys.attempts,
                    "parts": parts,
                },
                args={"token": token, "more": int(more), "attempts": attempts},
            )
        )
        match reply:
            case [b"acknowledged"]:
                return True
            case [b"unknown"]:
                return False
        self._refuse(reply)

    def recover(self, *, old: str, token: str, taker: str) -> Granted | None:
        """Moves a granted round to a new token.

        Args:
            old: the token that holds the round now.
            token: the new token.
            taker: name of the new taker.

        Returns:
            The round; None if there is no such round.
        """
        keys, before, after = self._keys, self._keys.taken_round(old), self._keys.taken_round(token)
        reply, replicas = self._transport.run_and_read(
            *load("recover").bind(
                keys={
                    "record": keys.record,
                    "taken": keys.taken,
                    "recovered": keys.recovered,
                    "old_sums": before.sums,
                    "old_buffered": before.buffered,
                    "old_inline": before.inline,
                    "old_workers": before.workers,
                    "new_sums": after.sums,
                    "new_buffered": after.buffered,
                    "new_inline": after.inline,
                    "new_workers": after.workers,
                },
                args={"incarnation": self.incarnation, "old": old, "token": token, "taker": taker},
            ),
            after=self._replicate,
        )
        return None if reply == [b"unknown"] else self._granted(token, reply, replicas)

    def set_global_step(self, *, session: Session, sequence: int, worker: str, new_global_step: int) -> Counted:
        """Sets the global step.

        Args:
            session: who sends the request.
            sequence: its number.
            worker: name of the sender.
            new_global_step: the step to set.
        """
        reply = self._transport.run(
            *load("set_global_step").bind(
                keys={"record": self._keys.record, "sessions": self._keys.sessions},
                args={
                    **self._sender(session, sequence, worker),
                    "new_global_step": new_global_step,
                },
            )
        )
        return self._counted(reply, ())

    def configure(self, *, session: Session, sequence: int, worker: str, change: SettingsChange) -> Counted:
        """Changes the settings.

        Args:
            session: who sends the request.
            sequence: its number.
            worker: name of the sender.
            change: which settings get which values.

        Raises:
            InvalidArgumentError: the settings that stay do not go together with the new ones.
        """
        reply = self._transport.run(
            *load("configure").bind(
                keys={"record": self._keys.record, "sessions": self._keys.sessions, "queue": self._keys.queue},
                args={
                    **self._sender(session, sequence, worker),
                    "num_required": change.num_required,
                    "up_to": change.up_to,
                    "grace_ms": change.grace_ms,
                },
            )
        )
        match reply:
            case [b"conflict", number, up_to, grace]:
                raise InvalidArgumentError(
                    f"the settings of {shown(self._keys.name)} would be num_required={printable(number, QUOTED)}, "
                    f"up_to={printable(up_to, QUOTED)}, grace_ms={printable(grace, QUOTED)}: up_to must be at least "
                    "num_required and needs a grace, and both need num_required. Change them together"
                )
        return self._counted(reply, ())

    def resolve(self, *, session: Session, sequence: int, worker: str, timeout: float = TIMEOUT) -> Counted | None:
        """Learns the outcome of a request whose reply was lost, and fences the request if it was not executed.

        Args:
            session: who sent the request.
            sequence: its number.
            worker: name of the sender.
            timeout: how long to try to reach the server, in seconds.

        Returns:
            The outcome; None if the request was not executed, and no copy of it ever will be.
        """
        reply = self._transport.run(
            *load("resolve").bind(
                keys={"record": self._keys.record, "sessions": self._keys.sessions},
                args=self._sender(session, sequence, worker),
            ),
            timeout=timeout,
        )
        return None if reply[0] == b"fenced" else self._counted(reply, ())

    def forget_worker(self, *, session: str, worker: str) -> bool:
        """Forgets that a session has sent gradients for a worker.

        Args:
            session: id of the session.
            worker: name of the worker.

        Returns:
            Whether the session's last request was for this worker.
        """
        reply = self._transport.run(
            *load("forget_worker").bind(
                keys={"record": self._keys.record, "sessions": self._keys.sessions},
                args={"incarnation": self.incarnation, "session": session, "worker": worker},
            )
        )
        match reply:
            case [b"cleared"]:
                return True
            case [b"unknown"]:
                return False
        self._refuse(reply)

    def delete(self, *, finish: bool, timeout: float = TIMEOUT) -> Deletion:
        """Closes the accumulator for everybody, or removes it once it is closed.

        Args:
            finish: whether to remove the accumulator instead of closing it.
            timeout: how long to try to reach the server, in seconds.
        """
        keys, current = self._keys, self._keys.current
        reply = self._transport.run(
            *load("delete").bind(
                keys={
                    "record": keys.record,
                    "sums": current.sums,
                    "buffered": current.buffered,
                    "inline": current.inline,
                    "workers": current.workers,
                    "sessions": keys.sessions,
                    "queue": keys.queue,
                    "takers": keys.takers,
                    "taken": keys.taken,
                    "recovered": keys.recovered,
                    "compacting": keys.compacting,
                    "attempts": keys.attempts,
                    "crew": keys.crew,
                    "reducers": keys.reducers,
                },
                args={"incarnation": self.incarnation, "finish": int(finish)},
            ),
            timeout=timeout,
        )
        done = deletion_of(reply)
        if done is None:
            self._refuse(reply)
        return done

    def remove_orphans(self, *, owners: Mapping[str, str]) -> int:
        """Removes keys that have no owner. The caller has to know that no taken round holds gradients of these parts.

        Args:
            owners: key to remove → the owner that would mean it is in use, as the header of the script lists it.

        Returns:
            The number of keys that were removed; 0 if the accumulator is no longer as it was found.
        """
        keys = self._keys
        reply = self._transport.run(
            *load("remove_orphans").bind(
                keys={
                    "record": keys.record,
                    "taken": keys.taken,
                    "buffered": keys.current.buffered,
                    "garbage": list(owners),
                },
                args={"incarnation": self.incarnation, "owners": list(owners.values())},
            )
        )
        match reply:
            case [b"removed", number]:
                return self._number(number, "remove_orphans")
            case [b"changed"]:
                return 0
        self._refuse(reply)

    def _sender(self, session: Session, sequence: int, worker: str) -> dict[str, Argument]:
        """Returns the arguments of every request that is executed once."""
        return {
            "incarnation": self.incarnation,
            "session": session.id,
            "sequence": sequence,
            "acknowledged": session.acknowledged,
            "worker": worker,
        }

    def _of(self, request: Request) -> dict[str, Argument]:
        """Returns the arguments of every request that concerns a gradient."""
        return {
            **self._sender(request.session, request.sequence, request.worker),
            "local_step": request.local_step,
            "once": int(request.once),
            "round_shape": shape_text(request.round_shape),
            "weight": weight_text(request.weight),
        }

    def _counted(self, reply: list[bytes], round_shape: tuple[int, ...], replicas: Sequence[Any] = ()) -> Counted:
        match reply:
            case [outcome, step, count] if outcome in _OUTCOMES:
                return Counted(
                    _OUTCOMES[outcome],
                    self._step(step),
                    self._number(count, "num_accumulated"),
                    confirmed(self._keys.record, replicas),
                )
            case [b"shape_mismatch", bound]:
                raise InvalidArgumentError(
                    f"a gradient for {shown(self._keys.name)} must have the shape of the other gradients in the "
                    f"current round, {printable(bound, QUOTED)}, not {shape_text(round_shape)}"
                )
            case [b"unweighable", weight, total]:
                raise InvalidArgumentError(
                    f"a gradient for {shown(self._keys.name)} cannot be counted: its weight would be "
                    f"{printable(weight, QUOTED)} and that of the round {printable(total, QUOTED)}, and "
                    f"both must be in [{LEAST_WEIGHT:.3g}, {MOST_WEIGHT:.3g}]. Nothing was changed"
                )
        self._refuse(reply)

    def _granted(self, token: str, reply: list[bytes], replicas: Sequence[Any] = ()) -> Granted:
        match reply:
            case [b"granted", step, count, shape, staleness, weight]:
                return Granted(
                    token,
                    self._step(step),
                    self._number(count, "num_accumulated"),
                    _text(shape),
                    _text(staleness),
                    self._weight(weight) if weight else None,
                    confirmed(self._keys.record, replicas),
                )
        self._refuse(reply)

    def _step(self, text: bytes) -> int:
        try:
            step = int(text)
        except ValueError:
            step = 2**63
        if not -(2**63) <= step < 2**63:
            raise CorruptDataError(f"{self._keys.record}: global_step is {shown(text)}, not an int64")
        return step

    def _number(self, text: bytes, what: str, *, least: int = 0) -> int:
        if not (text.isdigit() and len(text) <= 15 and int(text) >= least):
            raise CorruptDataError(
                f"{self._keys.record}: {what} is {shown(text)}, not a number from {least} to 10^15 - 1"
            )
        return int(text)

    def _full(self, buffered: bytes, limit: bytes, weight: bytes) -> Full:
        return Full(self._number(buffered, "buffered_bytes"), self._number(limit, "buffer_limit"), self._weight(weight))

    def _weight(self, text: bytes) -> float:
        try:
            return parse_weight(_text(text))
        except ValueError as error:
            raise CorruptDataError(f"{self._keys.record}: a weight is {shown(text)}: {error}") from None

    def _partitions(self, text: bytes) -> tuple[int, ...]:
        try:
            return parse_partitions(text.decode(errors="replace"))
        except ValueError:
            raise CorruptDataError(
                f"{self._keys.record}: partitions is {shown(text)}, which redisacc did not write"
            ) from None

    def _refuse(self, reply: list[bytes]) -> NoReturn:
        name = shown(self._keys.name)
        match reply:
            case [b"missing"]:
                raise AccumulatorNotFoundError(
                    f"there is no accumulator {name}: it was deleted, its owner is gone, or the server has lost its "
                    "data"
                )
            case [b"replaced"]:
                raise AccumulatorNotFoundError(
                    f"accumulator {name} was deleted after this handle was opened. Open it again"
                )
            case [b"superseded", sequence]:
                raise StaleSequenceError(
                    f"{name}: the server has already executed request {printable(sequence, QUOTED)} of this session, "
                    "so it refuses this one, which is not newer"
                )
            case [b"fenced", _, _]:
                raise StaleSequenceError(
                    f"{name}: this request was resolved as not executed, so the server refuses every copy of it"
                )
            case [b"forgotten", now]:
                raise ForgottenError(
                    f"{name}: this session was idle for so long that the server has forgotten it, and cannot tell "
                    "whether it has executed this request before",
                    self._number(now, "TIME"),
                )
            case [b"remains", key]:
                raise CorruptDataError(
                    f"the record of {name} is gone, but {printable(key, QUOTED)} still exists: keys were {EVICTED} "
                    "or removed by hand. No sum can be formed from the rest. To start over, remove the rest: "
                    f"redisacc gc {shlex.quote(printable(self._keys.name))}"
                )
            case [b"lost", sequence]:
                raise DataLossError(
                    f"{name}: the last request of this session that the server knows is "
                    f"{printable(sequence, QUOTED)}, but it has acknowledged a later one: it was restarted from "
                    "older data, failed over to a replica that lagged behind, or evicted keys. It "
                    "did not execute this request; it will execute later ones"
                )
            case [b"overflow", step]:
                raise StepOverflowError(
                    f"{name}: the global step is {printable(step, QUOTED)}, the largest int64, and cannot grow"
                )
        raise corrupt(self._keys.record, reply)


def _text(data: bytes) -> str:
    return data.decode(errors="backslashreplace")
