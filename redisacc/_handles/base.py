"""The base class of all accumulators: a handle on an accumulator in Redis."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import secrets
import socket
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import EllipsisType
from typing import Any, Generic, TypeVar

from redisacc._arrays import validation
from redisacc._arrays.results import Round, Tally
from redisacc._arrays.spec import AccumulatorSpec
from redisacc._arrays.weights import CONSTANT
from redisacc._clock import clock, durations
from redisacc._format.buffered import INLINE_BYTES
from redisacc._format.keys import Keys
from redisacc._format.quorum import Quorum, quorum_change
from redisacc._format.record import SETTINGS
from redisacc._handles.options import (
    AccumulatorOptions,
    Limits,
    checked_name,
    checked_options,
)
from redisacc._protocol.applying.applier import IN_PLACE_LIMIT, Applier
from redisacc._protocol.applying.attempts import Way
from redisacc._protocol.applying.requests import Requests
from redisacc._protocol.leases.private_leases import OWNER_LEASE_MS, PrivateLease
from redisacc._protocol.lifecycle.deletion import delete
from redisacc._protocol.lifecycle.events import Events
from redisacc._protocol.lifecycle.info import AccumulatorInfo, read_info
from redisacc._protocol.lifecycle.opening import open_accumulator
from redisacc._protocol.lifecycle.step_wait import StepWait
from redisacc._protocol.rounds.current_round import RecordReader, read_round
from redisacc._protocol.rounds.take_wait import History, demand_of
from redisacc._protocol.rounds.taker import TakenRound, Taker
from redisacc._protocol.scripts import OF_ACCUMULATORS, Scripts
from redisacc._protocol.sessions import SessionPool
from redisacc._protocol.waiting.lifetime import Closing, Lifetime
from redisacc._telemetry.operation import NOT_OBSERVED, Operation
from redisacc._telemetry.telemetry import observer
from redisacc._wire.connect import connect, warn_if_evicting
from redisacc._wire.transport import limited

# The result of a take: an array, IndexedSlices, or a tree of both.
G = TypeVar("G")


@functools.lru_cache(maxsize=1)
def host_and_process(process: int) -> str:
    """Returns the default name of a worker. A forked child has another process id, and so is a worker of its own."""
    return f"{socket.gethostname()}:{process}"


class ConditionalAccumulatorBase(Closing, Generic[G]):
    """A handle on an accumulator in Redis, dense, sparse or of a tree.

    Threads may share a handle, and after a fork the child may continue to use it. It cannot be pickled: another process
    opens the accumulator by its name. Closing a handle (``close()``, or the end of its ``with`` block) leaves a shared
    accumulator as it is, and removes a private one.

    Example:
        >>> import redisacc
        >>> with redisacc.ConditionalAccumulator("float32", [2]) as acc:
        ...     isinstance(acc, redisacc.ConditionalAccumulatorBase), acc.global_step(), acc.num_accumulated()
        (True, 0, 0)

    Each class of accumulators has the arguments below, apart from ``spec``.

    Args:
        spec: describes the accumulator; its class makes it from its own arguments.
        shared_name: the name under which other processes find the accumulator: up to 512 bytes in UTF-8, without
            braces or control characters. If there is an accumulator of that name, it is opened; otherwise it is
            created. None or "" creates a private one, which is removed when this handle is closed.
        name: labels log records.
        redis: a redis-py or valkey-py client, a URL (``redis://``, ``rediss://``, ``unix://``; ``valkey://`` and
            ``valkeys://`` are synonyms), or None for the environment variable ``REDISACC_URL``, else
            ``redis://localhost:6379/0``. While a take waits, a client's pool needs two spare connections: one for
            requests and one to listen on.
        worker: the name under which gradients of this handle are counted. None means "host:pid".
        encoding: how the float32 elements of this handle's gradients are sent if they are buffered: "float32" (or
            None), as they are; "bfloat16", rounded to half as many bytes; or "int8", in blocks of 256 with one scale
            each, a quarter of the bytes. They are added as float32, and sums and results are float32 in any case.
            Handles on one accumulator may differ. Gradients small enough to be added in place are sent as float32. For
            other dtypes: None.
        finite: True: a gradient that holds NaN or an infinity raises NotFiniteError, which names the first one, before
            anything is sent. Otherwise it would spoil the round for all processes. It applies to this handle only,
            because the server does not look into gradients; so pass it wherever you apply gradients. Elements are
            checked in the accumulator's dtype; with ``encoding="bfloat16"``, elements of 3.3961775e38 or more are
            refused as well, because they would round to infinity. Costs about as much time as copying the gradient in
            memory.
        once_per_worker: True: a round accepts one gradient of each worker, and drops further ones with the outcome
            "repeated", so that a take counts workers. The server decides, given at creation and for all handles.
            ``worker`` should then be a name that a worker keeps across restarts. None means False, or as the
            accumulator was created.
        staleness: by how many steps a gradient may be late, from 0 to 1000; or a ``redisacc.Staleness``, which also
            sets the weight of late gradients. Given at creation and for all handles: the server decides, by the step at
            which the gradient arrives. 0 is TensorFlow's rule. None means 0, or as the accumulator was created.
        mean: a ``redisacc.Mean``: the divisor of "MEAN", given at creation and for all handles. None means the sum of
            the gradients' weights, or as the accumulator was created.
        limits: ``redisacc.Limits``: the size up to which gradients are added in place, and the bytes that may be
            buffered. None means the defaults, or as the accumulator was created.
        order: the order in which the gradients of a round are added, given at creation and for all handles: "arrival",
            or "worker" for the ascending numbers of their workers, so that the same gradients give the same bits in
            whichever order they arrive. It implies ``once_per_worker``; a handle that applies gradients must be called
            "worker N" (``worker``), where N is a number below 10^12 without leading zeros. Then no gradient is added in
            place or compacted: a round needs the memory of all its gradients, one of each worker. None: "arrival", or
            as the accumulator was created.
        partitions: among how many slots of a Redis Cluster the parts of gradients are spread, from 1 to 1000, given at
            creation. Each node then has its share of the bytes; everything else, and gradients of up to 64 KiB, stay
            in one slot. "auto": as many as there are masters, but at most one for each 256 KiB of a gradient, and
            beyond 64, at most one for each MiB; 1 on a single server. None means 1, or as the accumulator was created.
        create: whether to create the accumulator if there is none of this name. Pass False in workers to notice a
            misspelled name: the error suggests similar ones.
        min_replicas: an accepted gradient and a taken round wait for up to 5 seconds until that many replicas of the
            server have them, and raise NotReplicatedError otherwise. In a cluster, these are replicas of the master
            that has the accumulator, and of each that has parts of the gradient. With partitions, a gradient of more
            than 64 KiB waits twice for up to 5 seconds: for its parts, on all nodes at once, and then for the record.
            0: they do not wait for replication. With partitions, a handle that does not wait may remove data that
            replicas have confirmed to another handle.

    Raises:
        InvalidArgumentError: an argument is invalid; or the shared name exists with another kind, dtype, shape, tree,
            reduction, buffer limit, ``once_per_worker``, ``staleness``, ``staleness.weight``, ``mean.by``,
            ``order`` or ``partitions``.
        NotFoundError: there is no accumulator of this name, and ``create`` is False.
        ServerUnavailableError: no server answers. The message says what to do about it.
    """

    def __init__(self, spec: AccumulatorSpec, shared_name: str | None, name: str, options: AccumulatorOptions) -> None:
        checked = checked_options(options, spec, type(self).__name__)
        shared_name = checked_name(shared_name, create=checked["create"])
        self._open(spec, shared_name, validation.text(name, "name", max_bytes=512), checked)

    def _open(
        self,
        spec: AccumulatorSpec,
        shared_name: str | None,
        name: str,
        options: AccumulatorOptions,
    ) -> None:
        """Opens the accumulator, or creates it, and makes the parts.

        Args:
            spec: what the caller expects the accumulator to be.
            shared_name: its name; None means a new private one.
            name: the name of this handle.
            options: valid ones.
        """
        self._shared_name, self._name, self._options = shared_name, name, options
        self._transport = transport = connect(options["redis"])
        min_replicas = options["min_replicas"]
        limits = options["limits"] or Limits()
        keys = Keys(shared_name or f"private-{secrets.token_hex(8)}")
        with limited(durations.opening):
            opened = open_accumulator(
                transport,
                keys,
                spec,
                {field.name: field.chosen(options) for field in SETTINGS},
                partitions=options["partitions"],
                create=options["create"],
                lease_ms=0 if shared_name else OWNER_LEASE_MS,
            )
        warn_if_evicting(transport, keys.record)
        if min_replicas:
            # If this user may not run WAIT, or the server lacks it, raise now and not at the first gradient.
            transport.call("WAIT", 0, 1, beside=keys.record)
        self._keys = keys = Keys(keys.name, opened.partitions)
        self._scripts = scripts = Scripts(
            transport, keys, OF_ACCUMULATORS, min_replicas=min_replicas, incarnation=opened.incarnation
        )
        self._spec = spec = replace(spec, chunk=opened.chunk, normalize=opened.normalize, order=opened.order)
        self._observe = observer(spec.kind, keys.name, is_private=shared_name is None, address=transport.address)
        self._lifetime = Lifetime(keys.name)
        sessions = SessionPool(opened.now_ms)
        self._requests = Requests(transport, scripts, sessions)
        in_place_limit = IN_PLACE_LIMIT if limits.in_place is None else limits.in_place
        way = Way(
            transport,
            keys,
            scripts,
            spec,
            self._observe,
            inline_bytes=INLINE_BYTES if limits.inline is None else limits.inline,
            min_replicas=min_replicas,
            lease_ms=opened.lease_ms,
        )
        self._applier = Applier(
            way,
            self._requests,
            encoding=options["encoding"] or "float32",
            in_place_limit=in_place_limit if opened.can_add_in_place else 0,
            staleness_weighs=opened.staleness_weight != CONSTANT,
        )
        self._taker: Taker[G] = Taker(
            transport,
            keys,
            scripts,
            spec,
            sessions=sessions,
            lifetime=self._lifetime,
            history=History(opened.takes, opened.losses),
        )
        self._records = RecordReader(transport, keys, opened.incarnation, self._lifetime)
        # The accumulator's name in log records and errors of an operation for which the caller gives none.
        self._own_label = f"{name} ({keys.name})"
        self._private: PrivateLease | None = None
        if shared_name is None:
            self._private = PrivateLease(transport.blocking, keys, opened.incarnation, opened.lease_ms)
            # First, because nothing else ends the renewals if an interrupt leaves the caller without the handle.
            self._finalizer = weakref.finalize(self, self._private.release)
            self._private.begin()

    # What it is

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
        """Either "MEAN" or "SUM"."""
        return self._spec.reduction_type

    @property
    def accumulator_ref(self) -> str:
        """The key of the accumulator's record in Redis: a handle for ``raw_ops``, and a key for ``redis-cli``."""
        return self._keys.record

    def __repr__(self) -> str:
        state = ", closed" if self._lifetime.closed else ""
        schema = self._spec.schema
        what = schema["shape"] if self._spec.kind == "tree" else f"{schema['dtype']}, shape={schema['shape']}"
        return (
            f"{type(self).__name__}({what}, shared_name={self.shared_name!r}, "
            f"reduction_type={self._spec.reduction_type!r}, at {self._transport.address}{state})"
        )

    # What it holds

    def num_accumulated(self, name: str | None = None) -> int:
        """Returns the number of gradients in the current round.

        Args:
            name: labels log records.
        """
        self._label(name)
        return self._records.read().num_accumulated

    def global_step(self) -> int:
        """Returns the current step. Gradients that are more than ``staleness`` steps earlier are dropped."""
        return self._records.read().global_step

    def info(self) -> AccumulatorInfo:
        """Returns everything that Redis holds about the accumulator, except for its gradients.

        Raises:
            NotFoundError: the accumulator was deleted.
        """
        self._lifetime.check()
        info = read_info(self._transport, self._keys)
        self._records.check(info.incarnation)
        return info

    def peek(self) -> Round[G | None]:
        """Returns the current sum or mean without taking it: step and count stay as they are.

        The round is read in pieces. If a gradient arrives meanwhile, reading starts over, so a busy accumulator may
        take several attempts.

        Example:
            >>> import redisacc
            >>> acc = redisacc.ConditionalAccumulator("float32", [2])
            >>> result = acc.apply_grad([1.0, 2.0])
            >>> acc.peek().gradient.tolist(), acc.num_accumulated()
            ([1.0, 2.0], 1)

        Returns:
            A round whose ``gradient`` is reduced as a take would reduce it now, or None if the round is empty.

        Raises:
            WaitTimeoutError: gradients kept arriving for 30 seconds and interrupted every attempt.
            DataLossError: a part of a gradient in a partition is lost. ``part`` and ``gradient`` name it.
        """
        self._lifetime.check()
        return read_round(self._records, self._spec, self._spec.result)

    def events(self, *, timeout: float | None = None) -> Events:
        """Returns an iterator over the accumulator's events from now on.

        Listening begins with this call, not with the first ``next()``. Events are hints: if the connection was lost, or
        the reader was slow, one event of kind "missed" replaces all that may be missing. The iterator ends when the
        accumulator is deleted (its last event says so, up to a second late if that message itself was lost), and when
        this handle is closed.

        Args:
            timeout: the iterator also ends after that many seconds without an event. None means never.
        """
        seconds = validation.timeout(timeout)
        self._lifetime.check()
        return Events(
            self._transport,
            self._keys,
            self._scripts.incarnation,
            timeout=seconds,
            lifetime=self._lifetime,
            owner=self,
        )

    def wait_for_step(self, step: int, name: str | None = None, *, timeout: float | None = None) -> int:
        """Blocks until the global step is at least ``step``.

        If the server becomes unavailable, the wait continues when it returns, as in a take.

        Args:
            step: integer scalar in [-2**63, 2**63 - 1].
            name: labels log records.
            timeout: seconds to wait at most, 0 or more. None means forever.

        Returns:
            The step, which is at least ``step``.

        Raises:
            WaitTimeoutError: the step was not reached in time. The message contains the current step.
            CancelledError: the handle was closed.
            NotFoundError: the accumulator was deleted.
        """
        label = self._label(name)
        wanted = validation.integer(step, "step")
        deadline = deadline_of(timeout)
        with self._observe("wait", self._worker) as operation:
            found = StepWait(self._records, wanted=wanted, deadline=deadline, label=label).run()
            operation.note("redisacc.global_step", found)
        return found

    def set_global_step(self, new_global_step: int, name: str | None = None) -> None:
        """Sets the step. Everything accumulated stays, including gradients that were applied for an earlier step.

        A step lower than the current one is set all the same, and a warning is logged, as in TensorFlow.

        Args:
            new_global_step: integer scalar in [-2**63, 2**63 - 1].
            name: labels log records.

        Raises:
            OutcomeUnknownError: the server stopped answering. Call the error's ``settle()``: setting the step again
                could undo a change that others have made since.
        """
        label = self._label(name)
        step = validation.integer(new_global_step, "new_global_step")
        self._lifetime.check()
        self._applier.set_global_step(step, worker=self._worker, label=label)

    # Quorum

    def quorum(self) -> Quorum:
        """Returns the quorum of a take without ``num_required``. At first, none is set."""
        return self._records.read().quorum

    def set_quorum(
        self,
        *,
        least: int | EllipsisType | None = ...,
        most: int | EllipsisType | None = ...,
        grace: float | EllipsisType | None = ...,
        name: str | None = None,
    ) -> None:
        """Changes how many gradients a round needs, and how long a taker waits, in all processes and at once.

        The quorum is in the record, and applies to all takes without ``num_required``. Waiting ones check again at
        once, so you can continue without a failed worker. A take with ``num_required`` is not affected. `redisacc set`
        does the same.

        Example:
            >>> import redisacc
            >>> acc = redisacc.ConditionalAccumulator("float32", [2])
            >>> acc.set_quorum(least=3)
            >>> result = acc.apply_grad([1.0, 2.0])
            >>> acc.set_quorum(least=1)
            >>> acc.take_grad()
            array([1., 2.], dtype=float32)

        Args:
            least: how many gradients such a take requires, at least 1. None removes the quorum: takes without
                ``num_required`` then raise InvalidArgumentError, waiting ones included. An argument that you leave out
                stays as it is.
            most: the number of gradients that ends the grace, at least ``least``. None means nothing ends it early.
            grace: seconds to wait for more gradients after the one with number ``least`` arrived, from 0 to a week.
                None means no grace.
            name: labels log records.

        Raises:
            InvalidArgumentError: a value is invalid, or doesn't fit the values that stay: ``most`` and ``grace`` need
                ``least``, and ``most`` needs ``grace``. Nothing was changed.
            ServerError: the access rules of this user allow a worker only.
            OutcomeUnknownError: the server stopped answering. Call the error's ``settle()``: changing the quorum
                again could undo a change that others have made since.
        """
        label = self._label(name)
        change = quorum_change(least, most, grace)
        self._lifetime.check()
        self._applier.set_quorum(change, worker=self._worker, label=label)

    def settle(self) -> Tally:
        """Settles this thread's requests, and returns how many gradients it has applied here, by outcome.

        The numbers are exact even if Ctrl-C, or another signal handler that raises, has ended a call at any moment. If
        it is then unknown whether the last gradient was counted, this method asks the server, and ensures that an
        uncounted gradient never will be counted. Otherwise, it sends nothing. An ``OutcomeUnknownError`` has its own
        ``settle()``, which sends the gradient again and returns the result of its apply.

        To learn whether a single gradient was counted, compare the numbers from before and after its apply.

        Example:
            >>> import redisacc
            >>> acc = redisacc.ConditionalAccumulator("float32", [2])
            >>> before = acc.settle().applied
            >>> try:
            ...     result = acc.apply_grad([1.0, 2.0])
            ... except KeyboardInterrupt:
            ...     pass
            >>> acc.settle().applied - before
            1

        Returns:
            The numbers. A gradient whose apply raised ``OutcomeUnknownError`` is counted when the error's
            ``settle()`` has succeeded, for the thread that called it.

        Raises:
            ServerUnavailableError: the server does not answer. Call this method again later, within an hour.
        """
        return self._requests.settle()

    # Rounds

    @contextlib.contextmanager
    def take(
        self,
        num_required: int | None = None,
        *,
        min_weight: float | None = None,
        most: int | None = None,
        grace: float | None = None,
        timeout: float | None = None,
    ) -> Iterator[Round[G]]:
        """Takes a round for the length of a ``with`` block, and acknowledges it when the block ends without an error.

        Blocks like ``take_grad``. If the block raises, or the process is killed in it, the round stays in Redis, and
        ``recover()`` returns it; the step has moved on, and new gradients form the next round.

        Example:
            >>> import redisacc
            >>> acc = redisacc.ConditionalAccumulator("float32", [2])
            >>> result = acc.apply_grad([1.0, 2.0])
            >>> with acc.take(1, timeout=60) as taken:
            ...     taken.gradient.tolist(), taken.global_step
            ([1.0, 2.0], 0)

        Args:
            num_required: as for ``take_grad``: the round is granted when it holds at least that many gradients.
            min_weight: as for ``take_grad``.
            most: as for ``take_grad``.
            grace: as for ``take_grad``.
            timeout: seconds to wait at most, 0 or more. None means forever.

        Yields:
            The round: the gradient, the step that it closed, how many gradients it holds, and from which workers.

        Raises:
            InvalidArgumentError, TakeTimeoutError, CancelledError, NotFoundError, RedisAccError: as
                ``take_grad``.
            ConflictError: at the end of the block, if another process has recovered the round meanwhile. The
                error names the new owner. If the block raises, you get the block's error instead.
            OutcomeUnknownError: at the end of the block, if the round could not be acknowledged. The block itself has
                ended without an error; the error's ``settle()`` acknowledges.
        """
        taken = self._take(demand_of(num_required, most, grace, min_weight), timeout, None)
        yield taken.round
        self._taker.acknowledge(taken, None)

    @contextlib.contextmanager
    def recover(self, token: str | None = None, *, skip_lost: bool = False) -> Iterator[Round[G] | None]:
        """Returns a round that was taken but never acknowledged, for the length of a ``with`` block.

        Its former taker can then neither read nor acknowledge it, and gets ``ConflictError`` if it is still running.
        The block of its ``take()`` may have used the gradient already, so first make sure that the process has ended:
        ``info().unacknowledged`` names it. The round is acknowledged at the end of the block, as in ``take``. If the
        server lists none, the block gets a round that this handle keeps because its ``take_grad`` was interrupted.

        Example:
            >>> import redisacc
            >>> acc = redisacc.ConditionalAccumulator("float32", [2])
            >>> result = acc.apply_grad([1.0, 2.0])
            >>> try:
            ...     with acc.take(1):
            ...         raise RuntimeError("the chief fails before it has used the gradient")
            ... except RuntimeError:
            ...     with acc.recover() as taken:
            ...         taken.gradient.tolist()
            [1.0, 2.0]

        Args:
            token: which round, from ``info().unacknowledged``. None means the oldest.
            skip_lost: True: gradients that have lost parts are left out, and a warning names them. The round's
                ``num_accumulated`` is the number of the others, and its ``gradient`` is their sum or mean, or None if
                there are none; ``workers`` and ``staleness`` cover all that were counted.

        Yields:
            The round, or None if there is none to recover.

        Raises:
            NotFoundError: the accumulator was deleted.
            DataLossError: a part of a gradient in a partition is lost. The round stays listed.
            NotReplicatedError: fewer than ``min_replicas`` replicas know that the round was recovered. It can be
                recovered again; a handle without ``min_replicas`` does not wait for them.
            ConflictError: at the end of the block, if another process has recovered the round in turn.
        """
        if token is not None:
            token = validation.text(token, "token", max_bytes=200)
        skip_lost = validation.flag(skip_lost, "skip_lost")
        taken = self._recover(token, skip_lost=skip_lost)
        if taken is None:
            with self._taker.handing_out_kept(token) as kept:
                yield kept
            return
        yield taken.round
        self._taker.acknowledge(taken, None)

    def _recover(self, token: str | None = None, *, skip_lost: bool = False) -> TakenRound[G] | None:
        self._records.read()
        with self._observe("recover", self._worker) as operation:
            taken = self._taker.recover(token, name=self._worker, skip_lost=skip_lost)
            if taken is not None:
                _note_round(operation, taken)
        return taken

    def _take(
        self,
        demand: Quorum,
        timeout: object,
        name: object,
        describe: Callable[[], str] | None = None,
        cancel: Callable[[], bool] | None = None,
    ) -> TakenRound[G]:
        label = self._own_label if name is None else self._label(name)
        deadline = math.inf if timeout is None else deadline_of(timeout)
        self._lifetime.check()
        worker = self._options["worker"] or host_and_process(os.getpid())
        take = functools.partial(
            self._taker.take, demand, deadline=deadline, name=worker, label=label, describe=describe, cancel=cancel
        )
        operation = self._observe("take", worker)
        if operation is NOT_OBSERVED:
            return take()
        with operation:
            taken = take()
            _note_round(operation, taken)
        return taken

    # Ending

    def delete(self) -> None:
        """Deletes the accumulator and everything in it, for all processes.

        Afterwards this handle and all others raise ``NotFoundError``, and so do waiting takes. If the accumulator was
        deleted already, or created again by another process, this has no effect.
        """
        self._lifetime.check()
        if self._private is not None:
            self._private.end()
        self._taker.kept = []
        delete(self._transport, self._keys, self._scripts.incarnation)

    def close(self) -> None:
        """Closes this handle: takes that wait on it raise ``CancelledError``, and so does every later call.

        A shared accumulator stays for all other handles, and a private one is removed. Closing twice has no effect.
        """
        self._lifetime.close()
        if self._private is not None:
            self._transport.waits.call(self._finalizer)

    # Helpers

    @property
    def _worker(self) -> str:
        return self._options["worker"] or host_and_process(os.getpid())

    def _label(self, name: object) -> str:
        given = validation.label(name)
        return f"{given} ({self._keys.name})" if given else self._own_label


def _note_round(operation: Operation, taken: TakenRound[Any]) -> None:
    found = taken.round
    operation.note_round(number=found.num_accumulated, global_step=found.global_step, traces=taken.traces)


def deadline_of(timeout: object) -> float:
    """Returns when a timeout in seconds ends, by ``clock.now()``; infinity for None."""
    seconds = validation.timeout(timeout)
    return math.inf if seconds is None else clock.now() + seconds
