"""The chief of a training: it takes the rounds, and publishes the parameters that follow from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Literal, TypeVar, Unpack

import numpy as np

from redisacc._checkpoints.file import Checkpoint
from redisacc._clock import clock, durations
from redisacc._data import validation
from redisacc._data.results import Round
from redisacc._data.tree.arrays import as_arrays
from redisacc._data.tree.structure import flatten
from redisacc._format.claims import Claim
from redisacc._format.history_entries import PastStep, history_text
from redisacc._format.keys import ParameterKeys
from redisacc._handles import exit_code
from redisacc._handles.environment import WORKERS, place
from redisacc._handles.options import check_names, with_options
from redisacc._protocol.leases.crew import Lease
from redisacc._protocol.parameters.conclusion import conclude
from redisacc._protocol.parameters.marks import deleted_incarnations, is_lost, is_over
from redisacc._protocol.parts.sweep import sweep_quietly
from redisacc._protocol.rounds.taker import GrantedRound
from redisacc._protocol.scripts import OF_PARAMETERS, StaleSequenceError, refused
from redisacc._training.checkpointer import Checkpointer
from redisacc._training.crew_text import crew_text
from redisacc._training.exact_parameters import pack_state, unpack_state, with_exact
from redisacc._training.gradients import has_no_gradients, open_gradients
from redisacc._training.loss import give_up, newest_claim, wait_for_handover
from redisacc._training.options import GradientOptions, LeaderOptions, checkpoints, gradient_options
from redisacc._training.participant import Participant
from redisacc._training.quorum import CrewQuorum, QuorumKeeper
from redisacc._training.updating import Updating, check_optimizer
from redisacc.errors import (
    CancelledError,
    ConflictError,
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    NotReplicatedError,
    RedisAccError,
    TakeTimeoutError,
)
from redisacc.optim import Optimizer

logger = logging.getLogger("redisacc")

Value = TypeVar("Value")


Taken = TypeVar("Taken")


class Chief(Participant):
    """The chief of a training: it takes the mean gradient of each step, and publishes the parameters that follow.

    There is one chief and any number of workers (``Worker``), on any machines. They share an accumulator and
    parameters, both under ``shared_name``. Each worker counts once per step. If the chief dies at any moment and is
    started again, it continues with what was published last; a round that it had taken but not used is used then. No
    gradient is lost, and none is used twice. While the server is away, everybody waits.

    Example:
        >>> import threading
        >>> import numpy as np
        >>> import redisacc
        >>> def work():
        ...     with redisacc.Worker("docs-training") as worker:
        ...         for step, weights in worker.steps():
        ...             worker.apply({"w": weights["w"] - 3})
        >>> with redisacc.Chief("docs-training", {"w": np.zeros(2)}, workers=1) as chief:
        ...     thread = threading.Thread(target=work)
        ...     thread.start()
        ...     for taken in chief.rounds(until=20):
        ...         chief.publish({"w": chief.parameters["w"] - 0.5 * taken.gradient["w"]})
        ...     thread.join()
        ...     chief.step, chief.parameters["w"].round(3).tolist()
        ...     chief.delete()
        (20, [3.0, 3.0])

    Args:
        shared_name: the name of the training: 1 to 512 bytes in UTF-8, without braces or control characters.
        parameters: the parameters to begin with, a tree of arrays or an array. Gradients have the same structure,
            dtypes and shapes. If parameters were published under this name before, the published ones count, and these
            only have to have the same structure.
        workers: how many workers there are, at least 1. They share the data: ``Worker.workers`` tells them this number.
            "all": each worker that holds its lease, so workers may come and go (see ``rounds``). None: the environment
            variable ``REDISACC_WORKERS``, which `redisacc run` sets.
        quorum: what a step waits for: how many gradients, or a ``Quorum``. None: a gradient of each worker. With a
            number of workers, at most as many: ``workers=5, quorum=4`` has one backup worker. With ``workers="all"``, a
            step waits for at least as many, and otherwise for everybody; with a grace, for as many, and then for the
            grace or until everybody has contributed. A chief that is started again does not start the grace again. The
            quorum becomes the accumulator's when the chief begins. With a number of workers, `redisacc set` may then
            change it while the training runs, for example when a machine is gone for good.
        optimizer: an optimiser of ``redisacc.optim``, for a loop over ``updates()``: the parameters are updated where
            the sums are, by reducers if there are any, and the chief handles no dense arrays. All leaves have to be
            float32 or float64. Of ``sparse`` leaves, which the chief itself updates, a step touches only the rows that
            are in its gradients (see ``redisacc.optim.Optimizer``). The optimiser's state is kept with the parameters.
            One with other numbers, or one whose state has the same slots, continues with the state that is there. None:
            the loop is one over ``rounds()``, and the program updates the parameters.
        state: a tree of whatever else the chief needs after a restart, such as the optimiser's state. Workers do not
            fetch it. With an ``optimizer``, its state to begin with, as ``latest_state()`` returns it: each slot as a
            tree like the parameters, and "updates". None: it begins at the beginning.
        redis: a client of redis-py or valkey-py, a URL, or None, as for ``ConditionalAccumulator``.
        encoding: how float32 parameters travel to the workers: "float32" (or None), or "bfloat16", rounded to half as
            many bytes. Workers then compute with rounded parameters. The chief continues with its own, also after a
            restart, because they are published in float32 as a part of the state: see ``publish``. How gradients
            travel is up to each ``Worker``.
        patience: for how many seconds every call waits while the server does not answer. None: forever. An outage that
            lasts for some seconds is logged once, and so is its end. If no server answers at the very beginning, an
            error is raised after a few seconds.
        accumulator: options of the ``TreeAccumulator`` of the gradients, as a dict:

            - ``sparse``: the paths of leaves whose gradients are rows (``IndexedSlices``). For a single array: True or
              False.
            - ``reduction_type``: "MEAN" (or None) or "SUM".
            - ``order``: the order in which the gradients of a step are added: "worker" for ascending ``Worker.number``,
              so that a training gives the same bits in every run, whatever is killed, as long as its gradients are the
              same and each step has gradients of the same workers; or "arrival", which takes less memory and less time
              for small gradients. It cannot change later. None: "worker" for a new training; an existing one keeps what
              it has.
            - ``mean`` and ``limits``: as for ``ConditionalAccumulatorBase``. ``limits.in_place`` is without effect with
              ``order="worker"``.
            - ``partitions``: among how many slots of a Redis Cluster parameters and gradients are spread, as for
              ``ConditionalAccumulatorBase`` and ``Parameters``. "auto": each of them as if it were given "auto".
              Workers find out by themselves. If a failover loses a part of the parameters, the chief publishes them
              again; if it loses a part of a gradient, ``rounds`` raises DataLossError, and the round stays (see
              ``ConditionalAccumulator.recover``).
            - ``min_replicas``: how many replicas must have a gradient of this handle, a taken round, and published
              parameters, as for ``ConditionalAccumulatorBase`` and ``Parameters``.
        checkpoint: the path of a folder into which checkpoints are written, or a ``redisacc.Checkpoints``, which also
            says how often: the parameters, the state and the step, in one file of the format safetensors each.
            A thread reads them from the server, so no step waits for a disk.
            The last step of ``rounds(until=…)`` always gets one. A chief continues from the newest checkpoint that can
            be read if the server has nothing, or only an earlier step; a warning says so. None: no checkpoints.
        standby: if another process is the chief, waits for as long as that process extends its lease, and then takes
            over: within a second if it was closed, or died on this machine, else when its lease has run out, after 10
            seconds at most. So any number of processes may be started as chiefs, and one of them leads. The constructor
            blocks for that time; a log message names the chief.

    Attributes:
        shared_name: the name of the training.
        workers: how many workers there are, as this chief last announced it.
        step: the step of the parameters, and of the next round.
        parameters: the parameters of that step, as numpy arrays in dicts, lists and tuples, whatever library's arrays
            were given: the memory of your own arrays if you have published them from host memory, else copies. With an
            ``optimizer``, the chief has none; ``latest()`` fetches them.
        state: the state that was published with them, in the same form, or None. With an ``optimizer``,
            ``latest_state()`` fetches it.

    Raises:
        InvalidArgumentError: an argument or a variable of the environment is invalid, or this process is a worker; or
            another model is trained under this name, or with other ``partitions`` or another ``order``. The message
            names the first leaf that differs.
        ConflictError: another process is the chief, and this one does not stand by. Its predecessor may still be: if
            that is a process on this machine that is dead, its lease is taken at once; else it is waited for, for up to
            10 seconds.
        ServerUnavailableError: no server answers.
    """

    # Whether a process that is a worker may be the chief as well.
    _is_beside_worker = False

    @with_options(LeaderOptions, {})
    def __init__(
        self,
        shared_name: str,
        parameters: Any,
        *,
        optimizer: Optimizer | None = None,
        state: Any = None,
        workers: int | Literal["all"] | None = None,
        encoding: Literal["float32", "bfloat16"] | None = None,
        standby: bool = False,
        **options: Unpack[LeaderOptions],
    ) -> None:
        check_names(options, LeaderOptions, type(self).__name__)
        here = place()
        if here.role == "worker" and not self._is_beside_worker:
            raise InvalidArgumentError(
                f"the environment says that this process is {here}, so it cannot be the chief: start the program with "
                "`redisacc run --chief`, and open a Chief only where redisacc.place().role is chief"
            )
        gradients = gradient_options(options.get("accumulator"))
        if "finite" in gradients:
            raise InvalidArgumentError("finite is an option of Worker, because the chief applies no gradients")
        check_optimizer(optimizer, parameters, state=state, mean=gradients.get("mean"))
        # Raises now, before anything is opened, if they are invalid.
        asked_for = CrewQuorum.of(workers, options.get("quorum"), here)
        redis, partitions = options.get("redis"), gradients.get("partitions")
        super().__init__(
            "chief",
            shared_name,
            here,
            redis=redis,
            patience=options.get("patience"),
            encoding=encoding,
            partitions=partitions,
            min_replicas=gradients.get("min_replicas", 0),
        )
        self._rounds_parameters = encoding == "bfloat16"
        self._updating: Updating | None = None
        self._checkpointer = None
        if (checkpoint := options.get("checkpoint")) is not None:
            with self._closed_on_failure():
                self._checkpointer = Checkpointer(self._transport, self.shared_name, checkpoints(checkpoint))
                self._opened.callback(self._checkpointer.close)
        # The round that the body of the loop has, and the block that acknowledges it.
        self._current: Round[Any] | None = None
        self._block: ExitStack | None = None
        # Whether another process is known to have led before, and whether a worker had what is published.
        self._follows = self._is_rescued = False
        # Whether there may be a round that was taken and not acknowledged: by a predecessor, or by this process.
        self._may_be_left = True
        self._has_to_agree = False
        self._next_look = 0.0
        # The step with which the loop ends, and whether the parameters were declared the last ones.
        self._last: int | None = None
        self._is_finished = False
        self._run_id = here.run_id
        with self._closed_on_failure():
            self._lead(
                validation.flag(standby, "standby"),
                partial(
                    self._begin,
                    parameters,
                    state,
                    asked_for,
                    optimizer,
                    gradients=gradients,
                    redis=redis,
                ),
            )
            if here.workers is not None and (asked_for.workers or asked_for.least) > here.workers:
                self._warn(
                    "%d workers are expected, and %s says that there are only %d. Leave workers= out, and the data is "
                    "shared among those",
                    asked_for.workers or asked_for.least,
                    WORKERS,
                    here.workers,
                )

    def _lead(self, standby: bool, begin: Callable[[], None]) -> None:
        """Takes the lease and begins; does so again if the server loses the training or the lease meanwhile."""
        lease: Lease | None = None
        while True:
            self._follows = self._take_lease(standby) or self._follows
            if lease is None or lease.lost:
                self._keep("chief")
                lease = self._lease
            try:
                self._patience.call(begin, "to begin the training", in_steps=True)
                return
            except ConflictError as error:
                if not standby:
                    raise
                self._warn("%s; standing by", error)
            except NotFoundError as error:
                if self._patience.call(self._was_deleted, "to look for the training"):
                    raise
                self._warn("the server has lost this training while the chief began it; beginning again: %s", error)
                # What it has lost may be in the memory of workers.
                self._follows = True

    def _begin(
        self,
        parameters: Any,
        state: Any,
        asked_for: CrewQuorum,
        optimizer: Optimizer | None,
        *,
        gradients: GradientOptions,
        redis: object,
    ) -> None:
        """Opens the accumulator, and continues with the parameters that were published last, or publishes these.

        May be repeated, from the beginning, wherever it fails.
        """
        # An outage may have lasted for longer than the lease.
        self._check_lease()
        if self._follows and not self._was_deleted():
            # While this process stood by, the server may have lost the training that it saw when it came.
            self._parameters._forget()
        self._parameters.check(parameters, state=state)
        published = self._parameters.step()
        claimed = None
        if published is None:
            claimed = newest_claim(self._transport, self._crew, self.shared_name, follows=self._follows)
        if gradients.get("order") is None and has_no_gradients(self._transport, self.shared_name):
            gradients = {**gradients, "order": "worker"}
        self._asked_for, self._gradient_options, self._where = asked_for, gradients, redis
        # The accumulator comes before the parameters: a worker that finds parameters also finds it.
        self._open_gradients(parameters)
        self._is_rescued = self._bring_back(published, claimed) or self._is_rescued
        try:
            begins = self._continue(parameters, state, optimizer)
        except DataLossError as error:
            self._is_rescued = self._fall_back(error, parameters)
            begins = self._continue(parameters, state, optimizer)
        if self._is_rescued and optimizer is None:
            # Workers have none.
            self.state = as_arrays(state, "state")
        self._quorum.store()
        if not begins:
            logger.info(
                "%s: continuing at step %d",
                self.shared_name,
                self.step,
                extra={"accumulator": self.shared_name, "step": self.step},
            )

    def _was_deleted(self) -> bool:
        """Returns whether the training that this process saw when it came was deleted."""
        deleted = deleted_incarnations(self._transport, ParameterKeys(self.shared_name))
        return self._parameters._reader.incarnation in deleted

    def _continue(self, parameters: Any, state: Any, optimizer: Optimizer | None) -> bool:
        """Continues with what is published, or publishes the parameters. Returns whether the training is new."""
        if optimizer is None:
            return self._begin_rounds(parameters, state)
        self._updating = Updating(self._parameters, self._accumulator, optimizer)
        self.step, begins = self._begin_updates(parameters, state)
        return begins

    def _begin_rounds(self, parameters: Any, state: Any) -> bool:
        """Continues with what is published, or publishes the parameters. Returns whether the training is new."""
        latest = self._parameters.latest()
        if latest is None:
            self.step, self.parameters, self.state = 0, as_arrays(parameters, "parameters"), as_arrays(state, "state")
            self._send_parameters()
            return True
        found = self._parameters.latest_state()
        assert found is not None
        self.step, self.parameters, self.state = self._unpacked(latest, found[1])
        return False

    def _begin_updates(self, parameters: Any, state: Any) -> tuple[int, bool]:
        """Does the same for updates. Returns the step, and whether the training is new."""
        assert self._updating is not None
        step = self._parameters.step()

        def whole() -> tuple[Any, Any]:
            latest, found = self._parameters.latest(), self._parameters.latest_state()
            return (parameters, state) if latest is None or found is None else self._unpacked(latest, found[1])[1:]

        self._updating.begin(parameters, 0 if step is None else step, whole)
        return self._updating.step, step is None

    def _unpacked(self, latest: tuple[int, Any], published: Any) -> tuple[int, Any, Any]:
        """Returns the step, the exact parameters and the chief's own state, given what was published."""
        exact, state = unpack_state(published)
        step, tree = latest
        return step, _own(tree) if exact is None else with_exact(tree, exact, self.shared_name), state

    @property
    def parameters(self) -> Any:
        """The parameters of the step. With an ``optimizer``, the chief has none: see ``latest``."""
        self._check_has_arrays("parameters", "latest()")
        return self._tree

    @parameters.setter
    def parameters(self, tree: Any) -> None:
        self._tree = tree

    @property
    def state(self) -> Any:
        """The state that was published with the parameters. With an ``optimizer``, see ``latest_state``."""
        self._check_has_arrays("state", "latest_state()")
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._state = state

    def _check_has_arrays(self, name: str, instead: str) -> None:
        if self._updating is not None:
            raise InvalidArgumentError(
                f"a chief with an optimizer has no {name}, since they are updated elsewhere: {instead} fetches what is "
                "published"
            )

    @property
    def metrics(self) -> dict[str, float]:
        """In a loop over ``updates()``: the mean of each metric of the gradients of the last update, by their weights.

        They are those that workers gave to ``apply``. Empty if they gave none. ``rounds()`` yields them as
        ``Round.metrics``.
        """
        return {} if self._updating is None else dict(self._updating.metrics)

    def latest(self) -> tuple[int, Any]:
        """Returns the step and the parameters that are published, as ``Parameters.latest`` does.

        Blocks until they have been fetched. The arrays are read-only.
        """
        found = self._surviving(self._parameters.latest, "to read the parameters")
        if found is None:
            raise self._lost(self.step)
        return found

    def latest_state(self) -> tuple[int, Any]:
        """Returns the step, and the state that is published for it, as ``Parameters.latest_state`` does.

        With an ``optimizer``, that is a dict from the name of each of its slots, such as "exp_avg", to a tree like the
        parameters, and "updates", the number of updates that it has seen. Blocks until it has been fetched.
        """
        found = self._surviving(self._parameters.latest_state, "to read the state")
        if found is None:
            raise self._lost(self.step)
        return found[0], unpack_state(found[1])[1]

    def history(self) -> list[PastStep]:
        """Returns the steps of the training until now, as ``Parameters.history`` does."""
        return self._patience.call(self._parameters.history, "to read the history")

    def _open_gradients(self, parameters: Any) -> None:
        self._accumulator = self._opened.enter_context(
            open_gradients(
                self.shared_name,
                parameters,
                self._gradient_options,
                redis=self._where,
                worker="chief",
                once_per_worker=True,
            )
        )
        self._quorum = QuorumKeeper(self._asked_for, self._accumulator, self._crew, self._transport, self.shared_name)
        self._quorum.until = self._last
        # This process has the chief's lease, so they are of predecessors.
        self._accumulator._end_takes()

    def _bring_back(self, published: int | None, claimed: Claim | None) -> bool:
        """Makes the server have the newest step that is known, if it has lost the training or has an older step.

        Args:
            published: the step that is published.
            claimed: the newest step that a living worker has, if nothing is published.

        Returns:
            Whether the parameters are those of a worker, without a state.
        """
        saved = next(self._checkpointer.valid(), None) if self._checkpointer is not None else None
        newest = published if claimed is None else claimed.step
        # A checkpoint has the state, which a worker lacks; what is published has both.
        if saved is not None and (newest is None or saved.step > newest or (claimed and saved.step == newest)):
            self._bring_back_saved(saved, published)
            return False
        if claimed is None:
            return False
        # Workers that find the parameters apply gradients at once.
        self._set_step(claimed.step)
        wait_for_handover(self._transport, self._crew, self.shared_name, claimed, self._check_lease)
        step = self._parameters.step()
        if step is None:
            # They are lost again, and whoever finds nothing would begin at step 0.
            raise refused(OF_PARAMETERS["missing"], ParameterKeys(self.shared_name))
        self._warn(
            "the server has lost this training; continuing at step %s with the parameters of a living worker. The "
            "state of the chief, such as the optimiser's, is lost, and begins as it was given",
            step,
        )
        return True

    def _bring_back_saved(self, saved: Checkpoint, published: int | None) -> None:
        """Publishes a checkpoint, because the server has nothing, or only an earlier step."""
        if published is not None:
            self._parameters.check(saved.parameters, state=saved.state)
        self._warn(
            "the server has %s; continuing from the checkpoint of step %d. Later steps, if there were any, are lost",
            "nothing" if published is None else f"step {published}, which is older",
            saved.step,
        )
        # Workers that find the parameters apply gradients at once.
        if published is None and self._accumulator.num_accumulated() == 0:
            self._set_step(saved.step)
        state = pack_state(saved.parameters, saved.state) if self._rounds_parameters else saved.state
        publish = self._parameters._restore if published is None else self._parameters.publish
        publish(saved.parameters, saved.step, state=state)

    def _fall_back(self, lost: DataLossError, like: Any) -> bool:
        """Continues from a checkpoint, or with what a worker has, because nobody has a part of what is published.

        Args:
            lost: the error that says so.
            like: a tree with the shapes and dtypes of the parameters.

        Returns:
            As ``_bring_back`` does.

        Raises:
            DataLossError: ``lost``, because there is neither a checkpoint nor a worker.
        """
        has_checkpoint = self._checkpointer is not None and next(self._checkpointer.valid(), None) is not None
        if not has_checkpoint and not self._crew.workers():
            raise lost
        self._check_lease()
        self._warn("%s. Continuing from what workers have, or from a checkpoint", lost)
        # The parameters go first: a worker that finds no accumulator looks for them.
        if not give_up(self._transport, ParameterKeys(self.shared_name)):
            raise lost
        with suppress(NotFoundError):
            self._accumulator.delete()
        self._accumulator.close()
        claimed = newest_claim(self._transport, self._crew, self.shared_name, follows=True)
        self._open_gradients(like)
        if claimed is None and not has_checkpoint:
            raise lost
        self._may_be_left = True
        return self._bring_back(None, claimed)

    @property
    def workers(self) -> int:
        """How many workers there are, as this chief last announced it."""
        return self._quorum.workers

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shared_name!r}, step={self.step}, workers={self.workers})"

    def rounds(self, until: int | None = None) -> Iterator[Round[Any]]:
        """Yields the round of each step, for a loop that publishes the parameters that follow from it.

        Blocks until the step has its ``quorum``, and for the grace if there is one. A message after
        5 seconds, and then less often, says who is expected, late or gone. A round stays in Redis until the parameters
        that follow from it are published. If the process dies before that, its successor gets the round again.

        With ``workers="all"``, the chief looks once a second who holds a worker's lease, and the step that waits
        follows. A worker that dies is waited for until its lease ends, 10 seconds at most, and not at all if
        it died on this machine. One that joins is waited for from the next look on. While fewer are there than the
        ``quorum``, the step waits for more to join.

        Args:
            until: the loop ends when the parameters of this step are published, and so does the training: in the same
                instant workers learn that no step follows, and their loops end without another gradient. A training
                that was finished at an earlier step is continued. None: the loop ends after
                ``publish(…, finished=True)``, and at once if the training is finished already.

        Yields:
            The round: its ``gradient``, a tree like the parameters; its ``global_step``; the ``workers`` that it is
            from.

        Raises:
            ConflictError: another process has become the chief, because this one stalled for too long.
            DataLossError: the server has lost data that this process cannot restore.
            NotReplicatedError: fewer than ``min_replicas`` replicas know that the round was taken. The round stays.
            ServerUnavailableError: the server did not answer for longer than ``patience``.
            RedisAccError: the body of the loop has not called ``publish``, and the round stays; or any other error of
                ``take``.
        """
        if self._updating is not None:
            raise InvalidArgumentError("this chief has an optimizer: its loop is one over updates(), and not rounds()")
        yield from self._loop(until, self._round)

    def updates(self, until: int | None = None) -> Iterator[int]:
        """Yields the step after each update that the optimiser makes, for a loop that evaluates, logs or stops.

        Blocks for a round, as ``rounds()`` does, and until the update is published: weights, state and the end of the
        round become visible in the same instant. If the process dies before, its successor makes the same update of
        the same round. No arrays but the rows of ``sparse`` leaves pass through this process as long as there are
        reducers; without one, or if it is late, the chief computes parts by itself, with the same result bit for bit.

        Example:
            >>> import threading
            >>> import numpy as np
            >>> import redisacc
            >>> def work():
            ...     with redisacc.Worker("docs-updates") as worker:
            ...         for step, weights in worker.steps():
            ...             worker.apply({"w": weights["w"] - 3})
            >>> optimizer = redisacc.optim.SGD(0.5)
            >>> with redisacc.Chief("docs-updates", {"w": np.zeros(2)}, workers=1, optimizer=optimizer) as chief:
            ...     thread = threading.Thread(target=work)
            ...     thread.start()
            ...     for step in chief.updates(until=20):
            ...         pass
            ...     thread.join()
            ...     step, chief.latest()[1]["w"].round(3).tolist()
            ...     chief.delete()
            (20, [3.0, 3.0])

        Args:
            until: as for ``rounds``.

        Yields:
            The step of the parameters that have just been published.

        Raises:
            InvalidArgumentError: the chief has no ``optimizer``; or its schedule has returned no learning rate.
            ConflictError, DataLossError, NotReplicatedError, ServerUnavailableError, RedisAccError: as ``rounds``.
        """
        if self._updating is None:
            raise InvalidArgumentError("updates() needs a chief with an optimizer: Chief(…, optimizer=…)")
        yield from self._loop(until, self._update)

    def _loop(self, until: int | None, advance: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yields what ``advance`` yields until the training is finished, and finishes it."""
        self._last = last = None if until is None else validation.integer(until, "until")
        self._check_lease()
        self._is_finished = self._surviving(lambda: self._ends_before(last), "to read the parameters")
        self._surviving(lambda: self._quorum.aim(last), "to announce the last step")
        while not self._is_finished and (last is None or self.step < last):
            before = self.step
            yield from advance()
            if self.step > before:
                exit_code.advanced()
        self._check_lease()
        self._surviving(self._end, "to finish the training")

    def _update(self) -> Iterator[int]:
        """Yields the step after the next update, or nothing if there was only something to be put right."""
        self._check_lease()

        def next_round() -> GrantedRound | None:
            # Another one, if the training had to be restored.
            assert self._updating is not None
            return self._next(self._updating.recover, self._updating.grant)

        found = self._surviving(next_round, f"to take the round of step {self.step}")
        updating = self._updating
        assert updating is not None
        # The wait may have been long, and another chief may have taken over.
        self._check_lease()
        if found is None:
            return
        if found.granted.global_step > self.step:
            raise self._lost(found.granted.global_step)
        if found.granted.global_step < self.step:
            # It was used in a loop over rounds() of a chief that died before it acknowledged it.
            try:
                self._patience.call(lambda: updating.discard(found), "to acknowledge a round")
            except NotFoundError as error:
                # Whether the server has lost more shows before the next round.
                self._warn("%s", error)
            return
        is_last = self.step + 1 == self._last
        try:
            is_published = self._patience.call(
                lambda: updating.commit(found, finished=is_last), f"to publish step {self.step + 1}"
            )
        except NotReplicatedError:
            # It is published, and another loop continues with the next step.
            self._patience.call(updating.refresh, "to read the parameters")
            self.step = updating.step
            raise
        except NotFoundError as error:
            step = self.step
            self._restore(error)
            if self.step == step:
                # The round is lost, and its workers apply their gradients again.
                return
            # It had been published.
            self.step, is_published = step, True
        except DataLossError as error:
            self._warn("%s. Beginning step %d again: its workers apply their gradients again", error, self.step)
            self._surviving(self._begin_step_anew, "to begin the step again")
            return
        if not is_published:
            raise self._lost(self.step + 1)
        self.step += 1
        self._is_finished = self._is_finished or is_last
        self._may_be_left = False
        if self._checkpointer is not None:
            self._checkpointer.note(self.step, last=is_last)
        yield self.step

    def _ends_before(self, last: int | None) -> bool:
        """Returns whether the training is finished. If it was, but its last step is to be a later one, continues it."""
        published = self._parameters.step()
        if published is not None and published > self.step:
            raise self._lost(published)
        if not self._parameters.finished():
            return False
        if last is None or self.step >= last:
            return True
        self._parameters.finish(False)
        return False

    def _round(self) -> Iterator[Round[Any]]:
        """Yields the next round, or nothing if there was only something to be put right."""
        self._check_lease()
        # If the loop is left before the parameters are published, the round is not acknowledged.
        with ExitStack() as stack:
            taken = self._surviving(lambda: self._enter_round(stack), f"to take the round of step {self.step}")
            # The wait may have been long, and another chief may have taken over.
            self._check_lease()
            if taken is None:
                return
            if taken.global_step > self.step:
                raise self._lost(taken.global_step)
            self._current, self._block = taken, stack.pop_all()
        try:
            if taken.global_step < self.step:
                # The parameters that follow from it have been published. It is acknowledged without being used.
                self._acknowledge()
                return
            yield taken
            if self._block is not None:
                raise RedisAccError(
                    f"{self.shared_name}: the parameters that follow from the round of step {self.step} were not "
                    "published. Call publish() once in the body of the loop"
                )
        finally:
            # The next round may be this one.
            self._current = self._block = None

    def _enter_round(self, stack: ExitStack) -> Round[Any] | None:
        """Returns a round that was left, or takes one. None: something had to be repaired first."""

        def take(**options: Any) -> Round[Any]:
            return stack.enter_context(self._accumulator.take(**options))

        return self._next(lambda: stack.enter_context(self._accumulator.recover()), take)

    def _next(self, recover: Callable[[], Taken | None], take: Callable[..., Taken]) -> Taken | None:
        """Returns a round that was left, or takes one. None: something had to be repaired first.

        Args:
            recover: returns the oldest round that was left, None if there is none.
            take: takes one, given ``min_weight``, ``cancel`` and ``describe``.
        """
        if self._may_be_left:
            left = recover()
            if left is not None:
                return left
            if self._agree():
                # The repair may have left a round, which has to be acknowledged.
                return None
        self._may_be_left = True
        self._has_to_agree = False
        self._next_look = clock.now() + durations.look_every
        self._quorum.follow()
        try:
            return take(
                min_weight=self._asked_for.quorum.min_weight,
                cancel=self._is_over,
                describe=lambda: crew_text(self._crew),
            )
        except InvalidArgumentError:
            if not self._quorum.restore():
                raise
        except DataLossError as error:
            self._warn("%s", error)
        except CancelledError:
            if not self._has_to_agree:
                raise
        return None

    def _take_lease(self, standby: bool) -> bool:
        """Takes the lease of the chief. Returns whether another process had it."""
        if not standby:
            return self._patience.call(lambda: self._crew.wait_for("chief"), "to become the chief")
        return self._patience.call(lambda: self._crew.stand_by("chief", self._is_given_up), "to stand by as the chief")

    def _is_given_up(self) -> bool:
        """Returns whether this process is to be the chief no longer."""
        return False

    def _is_over(self) -> bool:
        """Looks, once a second, whether waiting for the round still makes sense, and for how many gradients."""
        self._quorum.follow()
        now = clock.now()
        if now < self._next_look:
            return False
        self._next_look = now + durations.look_every
        if self._parameters.finished():
            # Another process has said so. The loop ends.
            self._is_finished = self._has_to_agree = True
            return True
        # The step is another one if the server was restarted from older data, or if a chief that had stalled for
        # longer than its lease has taken this round.
        self._has_to_agree = (
            self._lease.lost
            or self._accumulator.global_step() != self.step
            or self._parameters.step() != self.step
            or not self._parameters.is_complete()
        )
        return self._has_to_agree

    def _agree(self) -> bool:
        """Makes the server agree with this process about the step, after a restart or a loss of data.

        Returns:
            Whether the accumulator had to be brought to another step, or was replaced.
        """
        published = self._parameters.step()
        if published is None or published < self.step:
            self._warn(
                "the server has lost the parameters of step %d, and is at step %s; publishing them again",
                self.step,
                published,
            )
            if self._send_parameters():
                return True
            self._quorum.store()
        elif published > self.step:
            raise self._lost(published)
        elif not self._parameters.is_complete():
            self._warn("a node has lost a part of the parameters of step %d; publishing them again", self.step)
            if self._send_parameters():
                return True
        step = self._accumulator.global_step()
        if step > self.step:
            raise self._lost(step)
        if step < self.step:
            self._catch_up(step)
            return True
        return False

    def _surviving(self, attempt: Callable[[], Value], what: str) -> Value:
        """Returns the result of ``attempt``. If the server has lost the training, restores it and tries again."""
        while True:
            try:
                return self._patience.call(attempt, what, in_steps=True)
            except NotFoundError as error:
                # Bound to a name of its own, because Python unbinds the first.
                found_gone = error
            self._restore(found_gone)

    def _restore(self, found_gone: RedisAccError) -> None:
        """Restores a training that the server has lost, as often as it loses it while that goes on.

        Raises:
            RedisAccError: ``found_gone``, because the training, or its accumulator alone, was deleted; or the error
                that says that another one was published meanwhile.
        """
        keys, incarnation = ParameterKeys(self.shared_name), self._parameters._reader.incarnation
        looking, restoring = "to look for the training", "to restore the training"
        if not self._patience.call(lambda: is_lost(self._transport, keys, incarnation), looking):
            self._patience.call(self._parameters.step, looking)
            raise found_gone
        while True:
            try:
                self._patience.call(self._restore_once, restoring, in_steps=True)
                return
            except NotFoundError:
                # What this process has put there a moment ago is gone. It may be only a part of it.
                if self._patience.call(lambda: is_over(self._transport, keys, incarnation), looking):
                    raise

    def _restore_once(self) -> None:
        """Restores the training from what this process has. May be repeated, from the beginning, wherever it fails."""
        # The lease is lost as well, and another chief may have taken it since.
        self._lease.take_again()
        self._check_lease()
        source = "the chief" if self._updating is None else "the chief and of reducers"
        self._warn(
            "the server has lost this training: it was flushed, or restarted without its data. Restoring step %d from "
            "the memory of %s; workers apply their gradients of this step again",
            self.step if self._updating is None else self._updating.step,
            source,
        )
        if self._updating is None:
            held = self._tree, self._state
        else:
            held = self._updating.gathered(self._check_lease)
            self.step = self._updating.step
        self._accumulator.close()
        self._open_gradients(held[0])
        # Workers that find the parameters apply gradients at once.
        self._set_step(self.step)
        self._publish_whole(*held, restores=True)
        if self._updating is not None:
            # In parts as they were before, with the state that has just been published.
            self._updating = self._updating.reopened(self._accumulator)
            self._begin_updates(*held)
        self._quorum.store()
        self._may_be_left = True

    def _begin_step_anew(self) -> None:
        """Publishes the parameters again, and replaces an accumulator that has lost a part of a gradient."""
        assert self._updating is not None
        self._check_lease()
        # First: if nobody has what is lost of them, the round stays.
        if self._send_parameters():
            return
        with suppress(NotFoundError):
            self._accumulator.delete()
        self._accumulator.close()
        self._open_gradients(self._updating.like)
        self._set_step(self.step)
        self._updating = self._updating.reopened(self._accumulator)
        self._quorum.store()
        self._may_be_left = True

    def _send_parameters(self) -> bool:
        """Publishes the parameters and the state that this process has, whole.

        Returns:
            Whether it could not, because nobody has a part of them: the training continues from another step, with
            another accumulator.
        """
        if self._updating is None:
            self._publish_whole(self._tree, self._state)
            return False
        try:
            self._updating.publish_again(self._check_lease)
        except DataLossError as error:
            like, optimizer = self._updating.like, self._updating.optimizer
            self._fall_back(error, like)
            self._continue(like, None, optimizer)
            self._quorum.store()
            return True
        return False

    def _publish_whole(self, tree: Any, state: Any, *, restores: bool = False) -> None:
        packed = pack_state(tree, state) if self._rounds_parameters else state
        publish = self._parameters._restore if restores else self._parameters.publish
        publish(tree, self.step, state=packed)

    def _catch_up(self, step: int) -> None:
        """Brings the accumulator from an earlier step to the step of the parameters, with an empty round.

        Its gradients belong to earlier steps, and were used before. If a gradient of the current step is thrown away
        with them, its worker applies it again.
        """
        timeout = 0.0
        while True:
            if step < self.step - 1:
                self._set_step(self.step - 1)
            try:
                # Takes whatever is there and ends the step in one operation, so that nothing can be added to it.
                with self._accumulator.take(1, timeout=timeout) as taken:
                    self._warn("number of gradients that were lost with older parameters: %d", taken.num_accumulated)
                return
            except DataLossError as error:
                # It was taken. The accumulator reports the very loss that is being repaired here.
                logger.debug("%s: %s", self.shared_name, error)
                return
            except TakeTimeoutError:
                pass
            self._set_step(self.step)
            if self._accumulator.num_accumulated() == 0:
                return
            # They arrived between the two commands, so they may be of an earlier step. Or a take of this process that
            # ended long ago is back with the older data, and is the first in the queue until its lease ends.
            self._set_step(self.step - 1)
            step, timeout = self.step - 1, durations.taker_lease

    def _set_step(self, step: int) -> None:
        while True:
            try:
                self._accumulator.set_global_step(step)
            except (DataLossError, StaleSequenceError) as error:
                # The server reports once that it has lost its data about this process. It did not set the step.
                logger.debug("%s: %s", self.shared_name, error)
            else:
                return

    def _lost(self, step: int) -> RedisAccError:
        """Returns the error that says why a later step has begun than the one whose parameters this process has."""
        published = self._parameters.step()
        if published is not None and published > self.step:
            # Its lease may have been given back since, so that it is this process's again.
            return ConflictError(
                f"{self.shared_name}: another process has published step {published}, while the chief in this process "
                f"was at step {self.step}: this process or the server stood still, and another one was the chief "
                f"meanwhile. This process can no longer be the chief; one that is started again continues with step "
                f"{published}"
            )
        return DataLossError(
            f"{self.shared_name}: step {step} has begun, but the parameters are at step {self.step}: "
            "a round in between was taken by another process, or the server has lost a version of the parameters. "
            f"Publish the parameters of step {step} with Parameters.publish() if you have them, or delete the training"
        )

    def _end(self) -> None:
        """Makes sure that the server has the last step, that it is declared the last, and that no round is left."""
        self._agree()
        self._clear_away()
        keys = self._accumulator._keys
        if keys.partitions:
            # A predecessor may have died before it removed what its last round had there.
            sweep_quietly(self._transport, keys, min_replicas=self._accumulator._scripts.min_replicas)
        # Usually the last publication has declared it. But a loop that was to continue may have published that step, or
        # the server may have lost the declaration.
        self._declare_finished()

    def _declare_finished(self) -> None:
        if self._run_id is not None:
            # Also if it is finished already: the workers of this run, which may have begun a moment ago, cannot know
            # yet that this chief does not continue it.
            conclude(self._transport, ParameterKeys(self.shared_name), self._run_id)
        elif not self._parameters.finished():
            self._parameters.finish()
        self._is_finished = True

    def _clear_away(self) -> None:
        """Acknowledges rounds that were used: a predecessor had not done it, or they came back with older data."""
        self._may_be_left = True
        while self._may_be_left:
            with self._accumulator.recover() as left:
                if left is None or left.global_step >= self.step:
                    # It is raised so that the round stays.
                    self._may_be_left = False
                    if left is not None:
                        raise self._lost(left.global_step)

    def _acknowledge(self) -> None:
        """Acknowledges the current round: its parameters have been published."""
        taken, block = self._current, self._block
        if taken is None or block is None:
            return
        self._current = self._block = None
        try:
            self._patience.call(block.close, f"to acknowledge the round of step {taken.global_step}")
        except (NotFoundError, DataLossError, ConflictError) as error:
            # The round was used nevertheless. Whether the server has lost more shows before the next round.
            self._warn("%s", error)
            return
        # There may be older ones.
        self._may_be_left = taken.global_step < self.step - 1

    def publish(
        self,
        parameters: Any,
        *,
        changed: Mapping[str, Any] | None = None,
        state: Any = None,
        finished: bool = False,
    ) -> None:
        """Publishes the parameters that follow from the current round, for the next step.

        Args:
            parameters: a tree like the one that the chief began with. It must not be written to until the next
                ``publish``: if the server loses it, it is published again.
            changed: path of a leaf → indices of its rows that differ from the parameters before. Only these rows are
                sent. Leaves that are not mentioned are sent whole.
            state: a tree that the chief needs after a restart, such as the optimiser's state. None: nothing. With
                ``encoding="bfloat16"``, the parameters of float32 are published with it, as they are and whole, even if
                ``changed`` names rows. Workers do not fetch them.
            finished: whether to end the training with this step, in a loop without ``until``. The loop over
                ``rounds()`` ends, and so do the workers' loops, without another gradient.

        Raises:
            InvalidArgumentError: there is no current round: publish once in the body of a loop over ``rounds()``. Or
                the parameters, the rows or the state are invalid. Nothing was changed.
            ConflictError: another process has become the chief, or has published different parameters for this step.
            NotReplicatedError: the parameters are published, but fewer than ``min_replicas`` replicas have them so far.
                Make the same call again, which waits again; or let the error end the process, and start it again.
            ServerUnavailableError: the server did not answer for longer than ``patience``.
        """
        if self._block is None:
            raise InvalidArgumentError("publish() needs the round of a loop over rounds(), and publishes once for each")
        step = self.step + 1
        # In one request: between two, the workers would compute one more gradient, in vain.
        is_last = validation.flag(finished, "finished") or step == self._last
        self._check_lease()
        # As after a restart, so that no program breaks only then.
        parameters, state = as_arrays(parameters, "parameters"), as_arrays(state, "state")
        stored = pack_state(parameters, state) if self._rounds_parameters else state
        taken = self._current
        past = "" if taken is None else history_text(self.step, taken.num_accumulated, taken.metrics)
        # If the network was away for longer than the lease, a successor may have published this step and later ones.
        self._surviving(
            lambda: self._parameters._publish(parameters, step, changed, stored, is_last, past=past),
            f"to publish step {step}",
        )
        self.step, self.parameters, self.state = step, parameters, state
        self._is_finished = self._is_finished or is_last
        self._acknowledge()
        if self._checkpointer is not None:
            self._checkpointer.note(step, last=is_last)

    def finish(self) -> None:
        """Ends the training: the workers' loops end by themselves, and end at once for workers that start later.

        The loop over ``rounds()`` ends, too. Workers may have begun with the next step by now;
        ``publish(…, finished=True)`` spares them that. A chief that is started again with a higher ``until`` continues
        the training.

        Raises:
            ConflictError: another process has become the chief.
        """
        self._check_lease()
        self._surviving(self._declare_finished, "to finish the training")

    def delete(self) -> None:
        """Removes the training, with its gradients and parameters, for everybody. Workers get an error."""
        self._patience.call(self._accumulator.delete, "to delete the gradients")
        self._patience.call(self._parameters.delete, "to delete the parameters")


def _own(tree: Any) -> Any:
    """Returns a tree with copies of its arrays, which may be written to."""
    structure, leaves = flatten(tree, "parameters")
    return structure.build([np.array(leaf) for leaf in leaves])
