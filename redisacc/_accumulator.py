"""What dense and sparse accumulators have in common: a handle on one that lives in Redis."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

import numpy as np

from redisacc import _arguments, _deletion, _dtypes, _parked, _private, _server, _sums
from redisacc._arguments import Shape
from redisacc._clients import Client, Clients
from redisacc._events import Wake
from redisacc._info import AccumulatorInfo, Record, parse_taken, read_info
from redisacc._keys import NAMES, Keys
from redisacc._link import PATIENCE, link_to
from redisacc._observing import Events, wait_for_step
from redisacc._parked import Gradient, Parked
from redisacc._parking import PARKED_LIMIT, Parking
from redisacc._requests import Attempt, Requests
from redisacc._rounds import Contents, Reader, Round, batches, read_commands, scan
from redisacc._scripts import Counted, Deleting, Granted, Opened, Request, Schema, Scripts
from redisacc._shapes import round_shape_of
from redisacc._taking import Wait, wait_for_round
from redisacc.errors import (
    AccumulatorNotFoundError,
    CancelledError,
    CorruptDataError,
    DataLossError,
    NotPermittedError,
    NotReplicatedError,
    OutcomeUnknownError,
    PeekTimeoutError,
    SchemaMismatchError,
    ServerUnavailableError,
)

logger = logging.getLogger("redisacc")

Value = TypeVar("Value")

# The version of the data model, in every record.
FORMAT = "1"

# Elements of a row of a dense gradient. Long enough that the 2 to 3 microseconds which Redis spends on a field are
# few beside the additions, short enough to be read with HGET.
CHUNK = 256

# What the server adds up itself: gradients of so many elements, where each row counts for ROW_COST more. Such a one
# holds the server for about a quarter of a millisecond, and up to about there a round of four gradients is faster
# than if they were parked: docs/measurements.md.
IN_PLACE_LIMIT = 2048

# How long peek() goes on looking for a moment of quiet, in seconds.
PEEK_PATIENCE = 30.0


@dataclass(frozen=True)
class ApplyResult:
    """What became of a gradient. True when it was accepted.

    Attributes:
        outcome: "applied", or "stale": its step had passed and it was dropped.
        global_step: the accumulator's step right after it.
        num_accumulated: the number of gradients right after it.
    """

    outcome: Literal["applied", "stale"]
    global_step: int
    num_accumulated: int

    def __bool__(self) -> bool:
        return self.outcome == "applied"


@lru_cache(maxsize=1)
def _host_and_process(pid: int) -> str:
    """Who we are. Asked anew after a fork: a child is a worker of its own."""
    return f"{socket.gethostname()}:{pid}"


# What a take gives: an array, or IndexedSlices.
G = TypeVar("G")


class ConditionalAccumulatorBase(ABC, Generic[G]):
    """A handle on an accumulator in Redis. Threads may share it; after a fork the child may go on using it.

    Closing a handle (``close()``, or leaving its ``with`` block) leaves a shared accumulator as it is, and removes a
    private one.
    """

    _kind: str

    def __init__(
        self,
        dtype: object,
        shape: object,
        shared_name: str | None,
        name: str,
        reduction_type: str | None,
        *,
        redis: object,
        worker: str | None,
        in_place_limit: int | None,
        parked_limit: int | None,
        min_replicas: int,
    ) -> None:
        self._dtype = _dtypes.find(dtype)
        self._shape = _arguments.shape(shape)
        self._reduction_type = _arguments.reduction_type(reduction_type)
        self._name = _arguments.text(name, "name", max_bytes=512)
        self._given_worker = None if worker is None else _arguments.text(worker, "worker", max_bytes=200)
        self._in_place_limit = (
            IN_PLACE_LIMIT if in_place_limit is None else _arguments.integer(in_place_limit, "in_place_limit", low=0)
        )
        given_limit = None if parked_limit is None else _arguments.integer(parked_limit, "parked_limit", low=0)
        self._shared_name = (
            None
            if shared_name is None or (isinstance(shared_name, str) and not shared_name)
            else _arguments.text(shared_name, "shared_name", max_bytes=512)
        )
        self._min_replicas = _arguments.integer(min_replicas, "min_replicas", low=0, high=1000)
        self._link = link_to(redis)
        self._keys = Keys(self._shared_name or _private.new_name())
        # How log records and errors of an operation call it, if the caller gives it no name.
        self._own_label = f"{self._name} ({self._keys.name})"
        self._scripts = Scripts(self._link, self._keys, min_replicas=self._min_replicas)
        self._closed = threading.Event()
        self._waiting: set[Wake] = set()
        # Rounds that the accumulator had granted when this handle took its last one.
        self._takes_seen = -1
        self._finalizer: Callable[[], object] | None = None
        opened = self._open(given_limit)
        self._scripts.incarnation = opened.incarnation
        self._clients = Clients(opened.now_ms)
        self._requests = Requests(self._link, self._scripts, self._clients)
        self._chunk = opened.chunk
        self._parking = Parking(
            self._link, self._keys, self._scripts, dtype=self._dtype, sparse=self._sparse, total=self._total
        )
        self._can_add_in_place = (
            opened.can_add_in_place and self._dtype.in_place is not None and self._in_place_limit > 0
        )
        if self._shared_name is None:
            _private.owner.add(self._link, self._keys, opened.lease_ms)
            self._finalizer = weakref.finalize(
                self, _private.release, self._link, self._keys, opened.incarnation, os.getpid()
            )

    def _open(self, parked_limit: int | None) -> Opened:
        schema = Schema(FORMAT, self._kind, self._dtype.name, _arguments.shape_text(self._shape), self._reduction_type)
        while True:
            opened = self._scripts.open(
                incarnation=secrets.token_hex(16),
                schema=schema,
                chunk=CHUNK,
                lease_ms=_private.LEASE_MS if self._shared_name is None else 0,
                parked_limit=PARKED_LIMIT if parked_limit is None else parked_limit,
            )
            if isinstance(opened, Opened):
                break
            # Somebody is deleting it, or died while deleting it; finishing their work twice does no harm.
            assert isinstance(opened, Deleting)
            _deletion.delete(self._link, self._keys, opened.incarnation)
        differences = [
            f"{what} is {there}, not {here}"
            for what, there, here in (
                ("kind", opened.schema.kind, schema.kind),
                ("dtype", opened.schema.dtype, schema.dtype),
                ("shape", opened.schema.shape, schema.shape),
                ("reduction_type", opened.schema.reduction_type, schema.reduction_type),
                ("format", opened.schema.format, schema.format),
                ("parked_limit", opened.parked_limit, opened.parked_limit if parked_limit is None else parked_limit),
            )
            if there != here
        ]
        if differences:
            raise SchemaMismatchError(
                f"accumulator {self._keys.name!r} was created as something else: its {'; its '.join(differences)}"
            )
        if self._shared_name is not None:
            self._list_name()
        _server.look_at(self._link)
        if self._min_replicas:
            self._link.call("WAIT", 0, 1)
        return opened

    def _list_name(self) -> None:
        try:
            # A key of its own slot, so it can't be part of the script. Adding what is there would be refused by a
            # server that is full.
            if not self._link.call("SISMEMBER", NAMES, self._keys.name):
                self._link.call("SADD", NAMES, self._keys.name)
        except NotPermittedError as error:
            # The list is for people who look around; nothing depends on it.
            logger.debug("%s isn't listed: %s", self._keys.name, error)

    # What it is

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements. For TensorFlow's quantised types, the structured dtype TensorFlow gives them."""
        return self._dtype.public

    @property
    def shape(self) -> Shape:
        """The declared shape, which is None for an unknown rank, with None for every unknown dimension."""
        return self._shape

    @property
    def name(self) -> str:
        """The name of this handle, which labels log records."""
        return self._name

    @property
    def shared_name(self) -> str | None:
        """The name under which other processes find the accumulator; None for a private one."""
        return self._shared_name

    @property
    def reduction_type(self) -> str:
        """ "MEAN" or "SUM"."""
        return self._reduction_type

    @property
    def accumulator_ref(self) -> str:
        """The handle, which is the key of the accumulator's record in Redis; good for ``raw_ops`` and ``redis-cli``."""
        return self._keys.record

    def __repr__(self) -> str:
        state = ", closed" if self._closed.is_set() else ""
        return (
            f"{type(self).__name__}({self._dtype.name}, shape={_arguments.shape_text(self._shape)}, "
            f"shared_name={self._shared_name!r}, reduction_type={self._reduction_type!r}, "
            f"at {self._link.address}{state})"
        )

    # How it stands

    def num_accumulated(self, name: str | None = None) -> int:
        """The number of gradients in the current round."""
        self._label(name)
        return self._record().num_accumulated

    def global_step(self) -> int:
        """The current step. Gradients of an earlier one are dropped."""
        return self._record().global_step

    def info(self) -> AccumulatorInfo:
        """Everything that Redis holds about the accumulator but its gradients.

        Raises:
            AccumulatorNotFoundError: it was deleted.
        """
        self._check_open()
        info = read_info(self._link, self._keys)
        self._check_incarnation(info.incarnation)
        return info

    def events(self, *, timeout: float | None = None) -> Events:
        """What happens to the accumulator, from now on, as an iterator over typed events.

        Listening begins with this call, not with the first ``next()``. An event is a hint: where the connection was
        lost, or the reader was slow, one of kind "missed" stands for those that may be lacking. The iterator ends when
        the accumulator is deleted (the last event says so, a second late if that word itself was lost) and when this
        handle is closed.

        Args:
            timeout: ends after so many seconds without an event; None: never.
        """
        seconds = _arguments.timeout(timeout)
        self._check_open()
        return Events(
            self._link,
            self._keys,
            self._scripts.incarnation,
            timeout=seconds,
            closed=self._closed,
            register=self._register,
        )

    def wait_for_step(self, step: int, name: str | None = None, *, timeout: float | None = None) -> int:
        """Blocks until the global step is at least ``step``.

        A server that goes away meanwhile is waited for, as in a take.

        Args:
            step: integer scalar in [-2**63, 2**63 - 1].
            name: labels log records.
            timeout: seconds to wait at most, 0 or more; None: without end.

        Returns:
            The step as it was seen then, ``step`` or higher.

        Raises:
            StepTimeoutError: the step was not reached in time. It says which one was.
            CancelledError: the handle was closed.
            AccumulatorNotFoundError: the accumulator was deleted.
        """
        label = self._label(name)
        wanted = _arguments.integer(step, "step")
        seconds = _arguments.timeout(timeout)
        return wait_for_step(
            lambda patience: self._record(patience).global_step,
            self.events,
            wanted=wanted,
            deadline=math.inf if seconds is None else time.monotonic() + seconds,
            label=label,
            name=self._keys.name,
            check_open=self._check_open,
        )

    def set_global_step(self, new_global_step: int, name: str | None = None) -> None:
        """Sets the step. What has been accumulated stays, also what came for an earlier step.

        A step lower than the current one is set all the same, and a warning goes to the log (as in TensorFlow).

        Args:
            new_global_step: integer scalar in [-2**63, 2**63 - 1].
            name: labels log records.

        Raises:
            OutcomeUnknownError: the server fell silent. Setting the step again might take it back from where others
                have moved it since: call the error's ``retry()``.
        """
        label = self._label(name)
        step = _arguments.integer(new_global_step, "new_global_step")
        self._check_open()
        worker = self._worker

        def send(client: Client, sequence: int) -> Counted:
            return self._scripts.set_global_step(client=client, sequence=sequence, worker=worker, new_global_step=step)

        def finish(counted: Counted) -> None:
            if counted.outcome == "lowered":
                logger.warning(
                    "%s: the global step was lowered to %d",
                    label,
                    step,
                    extra={"accumulator": self._keys.name, "global_step": step},
                )

        self._requests.execute(Attempt(send, finish, worker, f"{label}: to set the global step to {step}"))

    def peek(self) -> Round[G | None]:
        """The aggregate as it is now, without taking it: step and count stay as they are.

        It is read in pieces, and anew from the beginning if a gradient came meanwhile; a busy accumulator may take
        several attempts.

        Returns:
            A round whose ``gradient`` is reduced as a take would reduce it now, or None if there is none.

        Raises:
            PeekTimeoutError: gradients kept coming for 30 seconds and every attempt was disturbed.
        """
        return self._look(self._result)

    def _look(self, reduce: Callable[[Any, int], Any]) -> Round[Any]:
        """The current round, of which ``reduce`` makes the gradient: it gets the total and how many are in it."""
        self._check_open()
        give_up = time.monotonic() + PEEK_PATIENCE
        while True:
            found = self._peek_once(reduce)
            if found is not None:
                return found
            if time.monotonic() >= give_up:
                raise PeekTimeoutError(
                    f"accumulator {self._keys.name!r} changed under every look at it for {PEEK_PATIENCE:.0f} s"
                )

    def _peek_once(self, reduce: Callable[[Any, int], Any]) -> Round[Any] | None:
        current = self._keys.current
        before, *pieces, after = self._link.pipeline(
            [
                Record.command(self._keys),
                *read_commands(current),
                Record.command(self._keys),
            ]
        )
        record = Record(self._keys, before)
        self._check_incarnation(record.incarnation)
        if record.state != Record(self._keys, after).state:
            return None
        if record.num_accumulated == 0:
            return Round(None, record.global_step, 0)
        if record.round_shape is None:
            raise CorruptDataError(f"{self._keys.record}: a round of {record.num_accumulated} gradients has no shape")
        try:
            reader = self._reader()
            contents = reader.contents(current, pieces, record.round_shape)
            total = self._complete(reader.add_up(contents, record.round_shape), record.num_accumulated)
            gradient = reduce(total, record.num_accumulated)
        except (CorruptDataError, _parked.PartMissing) as error:
            # Pieces of two rounds don't fit together either; only in one that stood still is it corruption.
            if self._record().state != record.state:
                return None
            raise CorruptDataError(str(error)) from error
        # What came whole between the two looks at the record is of one moment already.
        more = contents.parked or any(int(cursor) for cursor, _ in pieces)
        if more and self._record().state != record.state:
            return None
        return Round(gradient, record.global_step, record.num_accumulated, contents.workers)

    # Applying

    def _apply(self, gradient: Gradient, *, local_step: int, round_shape: tuple[int, ...], label: str) -> ApplyResult:
        self._check_open()
        worker = self._worker
        in_place = self._can_add_in_place and _sums.fits(gradient, self._dtype, self._chunk, self._in_place_limit)

        def send(client: Client, sequence: int) -> Counted:
            request = Request(client, sequence, worker, local_step, round_shape)
            if in_place:
                counted = self._scripts.apply(request, _sums.pack(gradient, self._dtype, self._chunk), self._dtype)
                if counted is not None:
                    return counted
            return self._parking.park(gradient, request)

        def finish(counted: Counted) -> ApplyResult:
            if counted.outcome == "stale":
                logger.debug(
                    "%s: dropped a gradient of step %d, the step is %d",
                    label,
                    local_step,
                    counted.global_step,
                    extra={
                        "accumulator": self._keys.name,
                        "local_step": local_step,
                        "global_step": counted.global_step,
                        "num_accumulated": counted.num_accumulated,
                    },
                )
                return ApplyResult("stale", counted.global_step, counted.num_accumulated)
            if counted.replicas < self._min_replicas:
                raise self._not_replicated("the gradient was counted", counted.replicas)
            return ApplyResult("applied", counted.global_step, counted.num_accumulated)

        result: ApplyResult = self._requests.execute(Attempt(send, finish, worker, f"{label}: to apply a gradient"))
        return result

    def _not_replicated(self, what: str, replicas: int) -> NotReplicatedError:
        return NotReplicatedError(
            f"{self._keys.name!r}: {what}, but of the {self._min_replicas} replicas that should have it only "
            f"{replicas} said so in time",
            replicas=replicas,
            min_replicas=self._min_replicas,
        )

    # Taking

    @contextlib.contextmanager
    def take(self, num_required: int, *, timeout: float | None = None) -> Iterator[Round[G]]:
        """Takes a round for the length of a ``with`` block, and acknowledges it when the block ends well.

        Blocks like ``take_grad``. If the block raises, or the process dies in it, the round stays in Redis and
        ``recover()`` hands it out again; the step has moved on and new gradients form the next round.

        Args:
            num_required: integer scalar, at least 1; granted when at least that many gradients have come.
            timeout: seconds to wait at most; None: without end.

        Yields:
            The round: the gradient, the step that it closed, how many gradients it holds, and from which workers.

        Raises:
            InvalidArgumentError, TakeTimeoutError, CancelledError, AccumulatorNotFoundError, StepOverflowError: as
                ``take_grad``.
            OutcomeUnknownError: at the end of the block, where the round could not be acknowledged. The block has ended
                well; the error's ``retry()`` acknowledges.
        """
        with self._handed_out(*self._wait(num_required, timeout, self._label(None))) as taken:
            yield taken

    @contextlib.contextmanager
    def recover(self, token: str | None = None) -> Iterator[Round[G] | None]:
        """Hands out, for the length of a ``with`` block, a round that was taken but never acknowledged.

        Its former taker can't read or acknowledge it any more, so make sure that it is dead: ``info().unacknowledged``
        names it. Acknowledges at the end like ``take``.

        Args:
            token: which round, from ``info().unacknowledged``; None: the oldest.

        Yields:
            The round, or None when there is none to recover.

        Raises:
            AccumulatorNotFoundError: the accumulator was deleted.
        """
        if token is not None:
            token = _arguments.text(token, "token", max_bytes=200)
        self._check_open()
        granted = self._claim(token)
        if granted is None:
            yield None
            return
        pieces = self._link.pipeline(read_commands(self._keys.taken_round(granted.token)))
        with self._handed_out(granted, pieces, self._reader()) as taken:
            yield taken

    def _claim(self, token: str | None) -> Granted | None:
        self._record()
        found = [parse_taken(self._keys, field, text) for field, text in scan(self._link, self._keys.taken).items()]
        for state, taken in found:
            if state == "acknowledged":
                # Its taker died while it removed the parts.
                self._finish_acknowledged(taken.token)
        rounds = sorted((taken for state, taken in found if state == "granted"), key=lambda taken: taken.granted_at)
        for taken in rounds:
            if token in (None, taken.token):
                granted = self._scripts.recover(old=taken.token, token=secrets.token_hex(16), taker=self._worker)
                if granted is not None:
                    return granted
        return None

    def _finish_acknowledged(self, token: str) -> None:
        parts: list[str] = []
        for field, entry in scan(self._link, self._keys.taken_round(token).parked).items():
            gradient = field.decode(errors="replace")
            parts += [self._keys.part(gradient, k) for k in range(_parked.number_of_parts(entry) or 0)]
        self._acknowledge_parts(token, parts)

    @contextlib.contextmanager
    def _handed_out(self, granted: Granted, pieces: list[Any], reader: Reader) -> Iterator[Round[G]]:
        gradient, contents = self._read_taken(granted, pieces, reader)
        yield Round(gradient, granted.global_step, granted.num_accumulated, contents.workers)
        self._acknowledge(granted.token, contents.parked, None)

    def _take_gradient(
        self, num_required: int, timeout: float | None, name: str | None, form: Callable[[Any], Value]
    ) -> Value:
        """Takes and acknowledges a round. ``form`` makes of its gradient what the caller returns."""
        granted, pieces, reader = self._wait(num_required, timeout, self._label(name))
        gradient, contents = self._read_taken(granted, pieces, reader)
        return self._acknowledge(granted.token, contents.parked, form(gradient))

    def _wait(self, num_required: object, timeout: object, label: str) -> tuple[Granted, list[Any], Reader]:
        required = _arguments.integer(num_required, "num_required", low=1)
        seconds = _arguments.timeout(timeout)
        self._check_open()
        client = self._clients.borrow()
        try:
            wait = Wait(
                link=self._link,
                keys=self._keys,
                scripts=self._scripts,
                client=client,
                num_required=required,
                deadline=math.inf if seconds is None else time.monotonic() + seconds,
                taker=self._worker,
                label=label,
                reader=self._reader(),
            )
            seen = self._takes_seen
            granted, (*pieces, takes) = wait_for_round(wait, closed=self._closed, register=self._register)
        finally:
            self._clients.give_back(client)
        self._check_nothing_undone(granted, seen, takes)
        if self._min_replicas:
            # A server that knows nothing of it was failed over to.
            known = self._scripts.leave(token=granted.token, replicated=True)
            if known is None or known.replicas < self._min_replicas:
                raise self._not_replicated(
                    f"the round of step {granted.global_step} was taken", known.replicas if known else 0
                )
        return granted, pieces, wait.reader

    def _check_nothing_undone(self, granted: Granted, seen: int, takes: object) -> None:
        """Compares how many rounds the accumulator has granted with what this handle knew before its take."""
        if not (isinstance(takes, bytes) and takes.isdigit() and len(takes) <= 15):
            raise CorruptDataError(f"{self._keys.record}: takes is {takes!r:.100}")
        self._takes_seen = int(takes)
        if self._takes_seen <= seen:
            raise DataLossError(
                f"{self._keys.name!r} had granted {seen} rounds before, and {self._takes_seen} now: the server was "
                "restarted from older data, or failed over to a replica that lagged behind. Gradients of this round, "
                f"of step {granted.global_step}, may have been in one that was taken before. It stays listed in "
                "info().unacknowledged, and recover() hands it out"
            )

    def _reader(self) -> Reader:
        return Reader(self._link, self._keys, dtype=self._dtype, sparse=self._sparse, total=self._total)

    def _register(self, wake: Wake) -> Callable[[], None]:
        self._waiting.add(wake)
        return lambda: self._waiting.discard(wake)

    def _read_taken(self, granted: Granted, pieces: list[Any], reader: Reader) -> tuple[G, Contents]:
        shape = round_shape_of(self._keys, granted.round_shape)
        if shape is None:
            raise CorruptDataError(f"{self._keys.taken}: round {granted.token} has no shape")
        contents = reader.contents(self._keys.taken_round(granted.token), pieces, shape)
        try:
            total = self._complete(reader.add_up(contents, shape), granted.num_accumulated)
            return self._result(total, granted.num_accumulated), contents
        except _parked.PartMissing as error:
            raise CorruptDataError(
                f"{error}, or taken over by recover(). The round stays listed in info().unacknowledged"
            ) from error

    def _acknowledge(self, token: str, parked: list[Parked], value: Value) -> Value:
        """Acknowledges a round and returns the value."""
        parts = [k for p in parked for k in _parked.part_keys(self._keys, p)] if parked else []
        lost = self._link.lost
        try:
            acknowledged = self._acknowledge_parts(token, parts)
        except ServerUnavailableError as error:
            raise OutcomeUnknownError(
                f"{self._keys.name}: round {token} is in memory, but the server fell silent before it said that it has "
                "removed it. retry() of this error acknowledges it; until then info().unacknowledged may list it, and "
                f"recover() would hand it out again ({error})",
                lambda: self._acknowledge(token, parked, value),
            ) from error
        if acknowledged:
            if parts:
                _parked.remove_large(self._link, self._keys, parked)
        elif self._link.lost == lost:
            # Else it may have been an earlier copy of ours that removed it.
            logger.warning(
                "%s: round %s was no longer there to be acknowledged: recovered by somebody else, or deleted",
                self._keys.name,
                token,
                extra={"accumulator": self._keys.name, "token": token},
            )
        return value

    def _acknowledge_parts(self, token: str, parts: list[str]) -> bool:
        *pieces, last = batches(parts)
        for piece in pieces:
            if not self._scripts.acknowledge(token=token, parts=piece, more=True):
                return False
        return self._scripts.acknowledge(token=token, parts=last, more=False)

    def _complete(self, total: Any, num_accumulated: int) -> Any:
        """The total, if everything that was counted is in it."""
        if total.number != num_accumulated:
            raise CorruptDataError(
                f"{self._keys.record}: of {num_accumulated} gradients only {total.number} were found: keys were "
                "evicted (set maxmemory-policy noeviction) or removed"
            )
        return total

    @property
    def _sparse(self) -> bool:
        return self._kind == "sparse"

    @abstractmethod
    def _total(self, shape: tuple[int, ...]) -> Any:
        """Where a round of that shape is added up."""

    @abstractmethod
    def _result(self, total: Any, num_accumulated: int) -> G:
        """The reduced round."""

    # Ending

    def delete(self) -> None:
        """Removes the accumulator and everything in it, for everybody.

        Other handles on it raise ``AccumulatorNotFoundError`` from now on, and so does this one; waiting takes end
        with it. If it is gone already, or was created anew by somebody else, nothing happens.
        """
        self._check_open()
        if self._shared_name is None:
            _private.owner.remove(self._keys)
        _deletion.delete(self._link, self._keys, self._scripts.incarnation)

    def close(self) -> None:
        """Closes this handle: takes that wait on it raise ``CancelledError``, and so does every later call.

        A shared accumulator stays for everybody else, a private one is removed. Closing twice does nothing.
        """
        self._closed.set()
        for wake in list(self._waiting):
            wake.set()
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Helpers

    @property
    def _worker(self) -> str:
        return self._given_worker or _host_and_process(os.getpid())

    def _label(self, name: object) -> str:
        given = _arguments.label(name)
        return f"{given} ({self._keys.name})" if given else self._own_label

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise CancelledError(f"this handle on {self._keys.name!r} is closed")

    def _record(self, patience: float = PATIENCE) -> Record:
        self._check_open()
        record = Record(self._keys, self._link.call(*Record.command(self._keys), patience=patience))
        self._check_incarnation(record.incarnation)
        return record

    def _check_incarnation(self, incarnation: str) -> None:
        if incarnation != self._scripts.incarnation:
            raise AccumulatorNotFoundError(
                f"accumulator {self._keys.name!r} was deleted after this handle was opened; open it anew"
            )
