"""Parameters: a tree of values with a version number, published by one process and read by many."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

from redisacc._arrays import validation
from redisacc._clock import durations
from redisacc._format.history_entries import PastStep
from redisacc._format.keys import ParameterKeys
from redisacc._format.parameter_record import ENCODINGS, ParameterRecord
from redisacc._handles.base import deadline_of, host_and_process
from redisacc._handles.options import checked_partitions
from redisacc._protocol.parameters.deletion import delete_parameters
from redisacc._protocol.parameters.history import read_history
from redisacc._protocol.parameters.publisher import Publisher
from redisacc._protocol.parameters.reader import ParameterReader
from redisacc._protocol.parameters.version_wait import VersionWait
from redisacc._protocol.rounds.granted_rounds import EndedRound
from redisacc._protocol.waiting.lifetime import Closing, Lifetime
from redisacc._telemetry.telemetry import observer
from redisacc._text import shown
from redisacc._wire.connect import connect, warn_if_evicting
from redisacc._wire.transport import limited
from redisacc.errors import InvalidArgumentError, NotFoundError


class Parameters(Closing):
    """A handle on a tree of values in Redis, such as the weights of a model, with a version number, the step.

    One process publishes versions, and any number of processes read them. A tree is a nested dict, list or tuple whose
    leaves are arrays; an array alone is a tree, too. The path of a leaf consists of the keys that lead to it:
    ``"layers/0/w"``; an array alone has the path ``"."``.

    Opening a handle creates nothing: parameters begin with the first ``publish``, and exist until ``delete``. All
    versions have the structure, the dtypes and the shapes of the first. Only the latest version is kept.

    A handle remembers the version that it has read last, so that the next ``wait`` or ``latest`` fetches only what has
    changed. The arrays that it returns are read-only, and never change: the next version consists of other arrays. To
    write to an array, use ``array.copy()``. Memory is reused when you no longer hold any array of a version, so a loop
    that keeps only the latest one needs the memory of two. A handle that publishes keeps a copy of the leaves that it
    uploads whole.

    Threads may share a handle, and after a fork the child may continue to use it. It cannot be pickled: another process
    opens the parameters by their name.

    Example:
        >>> import numpy as np
        >>> import redisacc
        >>> with redisacc.Parameters("docs-weights") as weights:
        ...     weights.publish({"w": np.zeros((3, 2), np.float32), "b": np.zeros(2, np.float32)}, step=0)
        ...     step, tree = weights.latest()
        ...     weights.delete()
        >>> step, sorted(tree), tree["w"].shape
        (0, ['b', 'w'], (3, 2))

    Args:
        shared_name: the name under which other processes find the parameters: 1 to 512 bytes in UTF-8, without braces
            or control characters. An accumulator may have the same name.
        redis: a redis-py or valkey-py client, a URL, or None, as for ``ConditionalAccumulator``.
        publisher: the name under which this handle publishes, which ``redisacc show`` shows. None means "host:pid".
        encoding: how this handle publishes float32 elements: "float32" (or None), as they are, or "bfloat16", rounded
            to half as many bytes, which keeps NaN and infinities. Readers get the rounded values as float32, whatever
            their own ``encoding`` is, and so does the handle that has published them. Other dtypes, and the state, are
            published as they are.
        partitions: among how many slots of a Redis Cluster the values are spread, from 1 to 1000, decided with the
            first version. Each node then has its share of the bytes, and only the record is in one slot. "auto": as
            many as there are masters, but no more than the values have MiB; 1 on a single server. None means 1, or as
            the parameters were first published.
        min_replicas: ``publish`` waits for up to 5 seconds until that many replicas of the server have the version, and
            raises NotReplicatedError otherwise, as for ``ConditionalAccumulator``. With partitions, it first waits for
            up to 5 seconds until that many replicas of each node have its parts. 0: it does not wait.
        create: whether the parameters need not exist yet. If it is False and nothing has been published, an error is
            raised, which suggests similar names.

    Raises:
        InvalidArgumentError: an argument is invalid, or the parameters exist with another number of ``partitions``.
        NotFoundError: nothing has been published under this name, and ``create`` is False.
        ServerUnavailableError: no server answers. The message says what to do about it.
    """

    def __init__(
        self,
        shared_name: str,
        *,
        redis: object = None,
        publisher: str | None = None,
        encoding: Literal["float32", "bfloat16"] | None = None,
        partitions: int | Literal["auto"] | None = None,
        min_replicas: int = 0,
        create: bool = True,
    ) -> None:
        shared_name = validation.text(shared_name, "shared_name", max_bytes=512)
        self._given_publisher = None if publisher is None else validation.text(publisher, "publisher", max_bytes=200)
        self._encoding = "float32" if encoding is None else encoding
        if not isinstance(encoding, str | None) or self._encoding not in ENCODINGS:
            raise InvalidArgumentError(
                f"encoding of parameters must be one of {', '.join(ENCODINGS)}, or None, not {shown(encoding)}"
            )
        self._partitions = checked_partitions(partitions)
        self._min_replicas = validation.integer(min_replicas, "min_replicas", low=0, high=1000)
        create = validation.flag(create, "create")
        self._transport = connect(redis)
        self._keys = keys = ParameterKeys(shared_name)
        self._observe = observer("parameters", shared_name, address=self._transport.address)
        self._lifetime = Lifetime(shared_name)
        self._attach("")
        with limited(durations.opening):
            found = self._reader.poll()
        if found is not None:
            self._publisher.check_partitions(self._reader.keys)
        elif not create:
            raise NotFoundError(
                f"nothing has been published under the name {shown(shared_name)}, and create=False requires it"
            )
        warn_if_evicting(self._transport, keys.record)
        if self._min_replicas:
            # If this user may not run WAIT, or the server lacks it, raise now and not at the first version.
            self._transport.call("WAIT", 0, 1, beside=keys.record)

    # What it is

    @property
    def shared_name(self) -> str:
        """The name under which other processes find the parameters."""
        return self._keys.name

    def __repr__(self) -> str:
        state = ", closed" if self._lifetime.closed else ""
        return f"{type(self).__name__}({self.shared_name!r}, at {self._transport.address}{state})"

    # Publishing

    def publish(
        self,
        tree: Any,
        step: int,
        *,
        changed: Mapping[str, Any] | None = None,
        state: Any = None,
        finished: bool = False,
    ) -> None:
        """Publishes a version. Readers see either all of it or the version before.

        Repeating the same call changes nothing. So if you don't know whether the last call succeeded, because the
        process was killed or the server stopped answering, repeat it. "The same" means the same step and the same
        bytes, in the tree and in the state.

        Blocks until the server has the version, for up to 30 seconds if it does not answer.

        Example:
            >>> import numpy as np
            >>> import redisacc
            >>> weights = redisacc.Parameters("docs-embedding")
            >>> table = np.zeros((1000, 4), np.float32)
            >>> weights.publish({"table": table}, step=0, state={"momentum": np.zeros(4)})
            >>> table[[3, 7]] += 1
            >>> weights.publish({"table": table}, step=1, changed={"table": [3, 7]})
            >>> weights.step(), weights.latest_state()
            (1, (1, None))
            >>> weights.delete()

        Args:
            tree: the values: anything that numpy can convert to an array, in nested dicts, lists and tuples. The dtypes
                are those of accumulators, and bool. With ``encoding="bfloat16"``, float32 is rounded.
            step: integer scalar in [-2**63, 2**63 - 1], higher than the previous version's.
            changed: path of a leaf → indices of the entries of its first dimension that differ from the version before.
                Only these rows are uploaded, and readers that hold the version before fetch only these. An empty list
                means that the leaf is unchanged. Leaves that are not mentioned are uploaded whole. The version before
                is the last one that this handle has published or returned; if another one is published by now, all
                leaves are uploaded whole.
            state: a tree of any structure that workers do not fetch, such as the optimizer's state, for a publisher
                that restarts. It belongs to this version: ``latest_state`` returns None for a version without.
            finished: True: also declares this version the last one, as ``finish()`` does. False: does not change that.

        Raises:
            InvalidArgumentError: the step, the tree, the state, an index or ``finished`` is invalid; or the structure,
                a dtype or a shape differs from the first version's, and the message names the first path that differs.
            ConflictError: something else is published for this step, or a later step is published.
            NotFoundError: the parameters were deleted since this handle has seen them.
            NotReplicatedError: the version is published, but fewer than ``min_replicas`` replicas have it so far.
                Repeat the call, which waits again.
            CancelledError: the handle is closed.
            ServerUnavailableError: no server answers. It is unknown whether the version is published. Repeat the call.
        """
        self._publish(tree, step, changed, state, finished)

    def _restore(self, tree: Any, step: int, *, state: Any = None, kept: str) -> None:
        """Publishes a version that the server has lost, with the incarnation that this handle has seen.

        Raises:
            NotFoundError: the parameters were not lost but deleted, or others were published meanwhile.
        """
        self._publish(tree, step, None, state, False, kept=kept, restores=True)

    def _forget(self, incarnation: str = "") -> None:
        """Makes this handle one on whatever is published under its name now; or on this incarnation."""
        given = self._reader.given
        self._attach(incarnation)
        self._reader.given = given

    def _attach(self, incarnation: str) -> None:
        """Makes what reads and publishes an incarnation; "": any."""
        self._reader = ParameterReader(self._transport, self._keys, incarnation)
        self._publisher = Publisher(
            self._transport, self._keys, self._reader, self._encoding, self._partitions, min_replicas=self._min_replicas
        )

    def _publish(
        self,
        tree: Any,
        step: int,
        changed: object,
        state: Any,
        finished: object,
        *,
        ended: EndedRound | None = None,
        kept: str | None = None,
        restores: bool = False,
    ) -> None:
        number = validation.integer(step, "step")
        self._lifetime.check()
        finished = validation.flag(finished, "finished")
        wanted = self._publisher.check(tree, number, changed, state, finished=finished, ended=ended, kept=kept)
        publisher = self._given_publisher or host_and_process(os.getpid())
        with self._observe("publish", publisher) as operation:
            operation.note("redisacc.step", number)
            self._publisher.publish(wanted, publisher, restores=restores)

    def check(self, tree: Any, *, state: Any = None) -> None:
        """Raises an error unless a tree has the structure, the dtypes and the shapes of what is published.

        If nothing is published, any tree of arrays is accepted. The state may be any tree of arrays, or None.

        Raises:
            InvalidArgumentError: the tree, or the state, is not a tree of arrays; or it differs, and the message names
                the first path that does.
            NotFoundError: the parameters were deleted since this handle has seen them.
        """
        self._lifetime.check()
        self._publisher.check_agrees(tree, state)

    def finish(self, finished: bool = True) -> None:
        """Declares that the latest version is the last one. A wait for a later one raises FinishedError.

        That remains so, even if further versions are published, until ``finish(False)``.

        Args:
            finished: False: takes that back, because more versions will follow.

        Raises:
            NotFoundError: nothing has been published, or the parameters were deleted.
            CancelledError: the handle is closed.
            ServerUnavailableError: no server answers. Repeat the call.
        """
        finished = validation.flag(finished, "finished")
        self._lifetime.check()
        if not self._reader.incarnation and self._reader.poll() is None:
            raise NotFoundError(f"nothing has been published under the name {shown(self._keys.name)}")
        self._publisher.finish(finished)

    # Reading

    def step(self) -> int | None:
        """Returns the step of the latest version, or None if nothing has been published. Fetches no values.

        Raises:
            NotFoundError: the parameters were deleted since this handle has seen them.
        """
        self._lifetime.check()
        record = self._reader.poll()
        return None if record is None else record.step

    def latest(self) -> tuple[int, Any] | None:
        """Returns the latest version without waiting for a newer one.

        Returns:
            The step and the tree, or None if nothing has been published. Arrays are read-only. Dicts have the order and
            named tuples the classes of a tree that this handle has published; else dicts are sorted by key, and all
            tuples plain.

        Raises:
            NotFoundError: the parameters were deleted since this handle has seen them.
            WaitTimeoutError: versions were replaced faster than they could be read, for 30 seconds.
            DataLossError: a node has lost a part of the version, in a partition. ``part`` names it.
            CorruptDataError: Redis holds data that redisacc did not write.
        """
        self._lifetime.check()
        found = self._latest()
        return None if found is None else (found[0].step, found[1])

    def _latest(self, *, state: bool = False) -> tuple[ParameterRecord, Any, Any] | None:
        """Returns the record of the latest version, its tree and, if asked for, its state."""
        found = self._reader.latest(state=state)
        if found is not None:
            self._publisher.note_caller_has(found[0].version)
        return found

    def wait(
        self,
        after: int | None = None,
        timeout: float | None = None,
        *,
        skip_last: bool = False,
        cancel: Callable[[], bool] | None = None,
        describe: Callable[[], str | None] | None = None,
    ) -> tuple[int, Any]:
        """Blocks until a version with a higher step is published, and returns it.

        If the server becomes unavailable, the wait continues when it returns. After 5 seconds, and then less and less
        often, a log record says what it is waiting for.

        Example:
            >>> import numpy as np
            >>> import redisacc
            >>> weights = redisacc.Parameters("docs-waiting")
            >>> weights.publish(np.arange(3), step=4)
            >>> step, array = weights.wait(after=3, timeout=60)
            >>> step, array.tolist()
            (4, [0, 1, 2])
            >>> weights.delete()

        Args:
            after: integer scalar: the step that you have. None means any version.
            timeout: seconds to wait at most, 0 or more. None means forever. Reading a published version may take
                longer.
            skip_last: what to do with a version that its publisher has declared the last one. False: return it, and
                raise FinishedError in a wait for a later one. True: raise FinishedError instead, without fetching the
                values. Use it in a reader that computes the next step from each version, and so does not need the last
                one.
            cancel: called at least once a second while the server answers; if it returns True, the wait is canceled.
            describe: called for a log message about the wait; returns text to add to it, or ""; None means no message.

        Returns:
            The step, higher than ``after``, and the tree, as ``latest`` does. It is the latest version, so steps may
            have been skipped.

        Raises:
            WaitTimeoutError: no such version was published in time; or versions were replaced faster than they could be
                read, for 30 seconds.
            FinishedError: no later version will be published, as the publisher has declared; or, with ``skip_last``,
                the published version is the last one.
            CancelledError: the handle was closed, or ``cancel`` returned True.
            NotFoundError: the parameters were deleted since this handle has seen them.
            DataLossError: a node has lost a part of the version, in a partition. ``part`` names it.
            CorruptDataError: Redis holds data that redisacc did not write.
        """
        wanted = None if after is None else validation.integer(after, "after")
        deadline = deadline_of(timeout)
        skip_last = validation.flag(skip_last, "skip_last")
        self._lifetime.check()
        with self._observe("wait") as operation:
            wait = VersionWait(
                self._transport,
                self._lifetime,
                self._reader,
                after=wanted,
                deadline=deadline,
                label=self._keys.name,
                skip_last=skip_last,
                cancel=cancel,
                describe=describe,
            )
            record, tree = wait.run()
            operation.note("redisacc.step", record.step)
        self._publisher.note_caller_has(record.version)
        return record.step, tree

    def finished(self) -> bool:
        """Returns whether the publisher has said that the latest version is the last. Fetches no values.

        Raises:
            NotFoundError: the parameters were deleted since this handle has seen them.
        """
        self._lifetime.check()
        record = self._reader.poll()
        return record is not None and record.finished

    def is_complete(self) -> bool:
        """Returns whether the latest version has lost no part. Fetches no values.

        With partitions, a failover to a replica that lagged behind may lose parts of a version and not the record. Then
        ``latest`` raises DataLossError, and publishing the values again replaces the version.

        Returns:
            True also if nothing has been published, or without partitions.

        Raises:
            NotFoundError: the parameters were deleted since this handle has seen them.
        """
        self._lifetime.check()
        record = self._reader.poll()
        while record is not None and not self._reader.is_complete(record):
            found = self._reader.poll()
            if found is not None and found.version == record.version:
                return False
            # It was replaced meanwhile.
            record = found
        return True

    def latest_state(self) -> tuple[int, Any] | None:
        """Returns the publisher's state of the latest version.

        Returns:
            The step, and the tree of the state, or None in its place if the version has none. You may change its
            arrays. The state of an optimizer (``Chief(optimizer=…)``) is a dict from the name of each slot, such as
            "exp_avg", to a tree like the parameters; "updates" is the number of updates that it has seen. With
            ``encoding="bfloat16"``, the state of a chief is under "state", and the exact float32 leaves are under
            "redisacc:float32". None if nothing has been published.

        Raises:
            NotFoundError, WaitTimeoutError, DataLossError, CorruptDataError: as ``latest``.
        """
        self._lifetime.check()
        found = self._reader.latest(state=True, tree=False)
        return None if found is None else (found[0].step, found[2])

    def history(self) -> list[PastStep]:
        """Returns the steps of a run in order, with their times and metrics. Fetches no values.

        A ``Chief`` or ``Training`` of this name has written each of them together with the version that follows from
        it. Steps without metrics are left out. Up to 1000 steps, all are kept; a longer run keeps about 1000 evenly
        spread ones, and the latest. They exist as long as the parameters: if the server loses its data, they are lost,
        and a run that continues elsewhere from a checkpoint begins without them.

        Returns:
            The steps; an empty list if nothing has been published, or no gradient had metrics.

        Raises:
            CorruptDataError: Redis holds data that redisacc did not write.
        """
        self._lifetime.check()
        return read_history(self._transport, self._keys)

    # Ending

    def delete(self) -> None:
        """Deletes the parameters for all processes. An accumulator of the same name stays.

        Afterwards every handle that has seen them raises ``NotFoundError``, and so do waits. If a process has begun to
        publish the first version with partitions, that attempt ends: if the process has ended, the name is free again,
        and if not, it starts over. If nothing has been published, or others have deleted and republished the
        parameters, this has no effect.
        """
        self._lifetime.check()
        try:
            if not self._reader.incarnation and self._reader.poll() is None:
                begun = self._reader.begun()
                if begun is not None:
                    delete_parameters(self._transport, self._keys, begun[0])
                return
        except NotFoundError:
            return
        delete_parameters(self._transport, self._keys, self._reader.incarnation)

    def close(self) -> None:
        """Closes this handle: waits on it raise ``CancelledError``, and so does every later call.

        The parameters stay. Closing twice does nothing.
        """
        self._lifetime.close()
