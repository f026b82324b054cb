"""The chief of a run: it takes the rounds, and publishes the parameters that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Unpack

from redisacc._arrays import validation
from redisacc._arrays.metrics import Means
from redisacc._arrays.results import Round
from redisacc._arrays.trees import as_arrays
from redisacc._arrays.weights import is_nothing
from redisacc._clock import clock, durations
from redisacc._format.history_entries import PastStep, history_text
from redisacc._handles import exit_code
from redisacc._handles.environment import WORKERS, place
from redisacc._handles.options import check_names, with_options
from redisacc._protocol.parameters.announcements import conclude
from redisacc._protocol.parts.sweep import sweep_quietly
from redisacc._training.decision import Action, next_action
from redisacc._training.options import LeaderOptions, checkpoints, gradient_options
from redisacc._training.program_weights import ProgramWeights, pack_state, unpack_state
from redisacc._training.quorum import CrewQuorum
from redisacc._training.reconciliation import SURPRISES, LeadOptions, Reconciliation
from redisacc._training.updating import Updating, check_optimizer
from redisacc.errors import (
    CancelledError,
    InvalidArgumentError,
    NotReplicatedError,
    RedisAccError,
)
from redisacc.optim import Optimizer


def lead_options(
    parameters: Any,
    given: LeaderOptions,
    *,
    optimizer: Optimizer | None,
    state: Any,
    workers: int | Literal["all"] | None,
    encoding: Literal["float32", "bfloat16"] | None,
    standby: bool,
) -> LeadOptions:
    """Returns what a leader is told, checked. ``Chief`` describes the arguments.

    Raises:
        InvalidArgumentError: an argument is invalid, or they do not go together.
    """
    gradients, here, checkpoint = gradient_options(given.get("accumulator")), place(), given.get("checkpoint")
    if "finite" in gradients:
        raise InvalidArgumentError("finite is an option of Worker, because the chief applies no gradients")
    check_optimizer(optimizer, parameters, state=state, mean=gradients.get("mean"))
    return LeadOptions(
        parameters=parameters,
        state=state,
        optimizer=optimizer,
        quorum=CrewQuorum.of(workers, given.get("quorum"), here),
        gradients=gradients,
        checkpoint=None if checkpoint is None else checkpoints(checkpoint),
        encoding=encoding,
        redis=given.get("redis"),
        patience=given.get("patience"),
        standby=validation.flag(standby, "standby"),
        here=here,
    )


class Chief(Reconciliation):
    """The chief of a run: it takes the mean gradient of each step, and publishes the parameters that follow.

    There is one chief and any number of workers (``Worker``), on any machines. They share an accumulator and
    parameters, both under ``shared_name``. Each worker counts once per step. If the chief is killed and restarted, it
    continues with the last published parameters, and uses a round that it had taken but not used. No gradient is lost
    or used twice. While the server is unreachable, all processes wait.

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
        shared_name: the name of the run: 1 to 512 bytes in UTF-8, without braces or control characters.
        parameters: the parameters to begin with, a tree of arrays or an array. Gradients have the same structure,
            dtypes and shapes. If parameters were published under this name before, the published ones count, and these
            only need the same structure.
        workers: how many workers there are, at least 1. They share the data: they read this number as
            ``Worker.workers``. "all": each worker that holds its lease, so workers may join and leave (see ``rounds``).
            None means the environment variable ``REDISACC_WORKERS``, which `redisacc run` sets.
        quorum: what a step waits for: how many gradients, or a ``Quorum``. None means a gradient of each worker. With a
            number of workers, at most as many: ``workers=5, quorum=4`` has one backup worker. With ``workers="all"``, a
            step waits for all of them, and for at least as many as this; with a grace, for as many as this, and then
            until all have contributed or the grace is over. A restarted chief does not restart the grace. The chief
            sets this quorum for the accumulator when it begins. With a number of workers, `redisacc set` may then
            change it during the run, for example when a machine has failed for good.
        optimizer: an optimizer of ``redisacc.optim``, for a loop over ``updates()``: the parameters are updated where
            the sums are, by reducers if there are any, and the chief handles no dense arrays. All leaves must be
            float32 or float64. The chief itself updates ``sparse`` leaves, and touches only the rows that the step's
            gradients contain (see ``redisacc.optim.Optimizer``). The optimizer's state is stored with the parameters.
            An optimizer with other numbers, or another one whose state has the same slots, continues with the stored
            state. None: your program loops over ``rounds()`` and updates the parameters.
        state: a tree of everything else that the chief needs after a restart, such as the optimizer's state. Workers do
            not fetch it. With an ``optimizer``, its state to begin with, as ``latest_state()`` returns it: each slot as
            a tree like the parameters, and "updates". None means a new state.
        redis: a redis-py or valkey-py client, a URL, or None, as for ``ConditionalAccumulator``.
        encoding: how float32 parameters are sent to the workers: "float32" (or None), or "bfloat16", rounded to half as
            many bytes. Workers then compute with rounded parameters. The chief continues with its own, also after a
            restart, because they are published in float32 as a part of the state: see ``publish``. Each ``Worker``
            chooses the encoding of its gradients.
        patience: for how many seconds every call waits while the server does not answer. None means forever. An outage
            of more than a few seconds is logged when it is noticed and when it ends. If no server answers at the start,
            an error is raised after a few seconds.
        accumulator: options of the ``TreeAccumulator`` of the gradients, as a dict:

            - ``sparse``: the paths of leaves whose gradients are rows (``IndexedSlices``). A single array has the path
              ".".
            - ``reduction_type``: "MEAN" (or None) or "SUM".
            - ``order``: the order in which the gradients of a step are added: "worker" for ascending ``Worker.number``,
              so that a run always gives the same bits, whatever is killed, as long as its gradients are the same and
              each step has gradients of the same workers; or "arrival", which takes less memory and less time for small
              gradients. It cannot change later. None means "worker" for a new run; an existing one keeps its order.
            - ``mean`` and ``limits``: as for ``ConditionalAccumulatorBase``. ``limits.in_place`` has no effect with
              ``order="worker"``.
            - ``partitions``: among how many slots of a Redis Cluster parameters and gradients are spread, as for
              ``ConditionalAccumulatorBase`` and ``Parameters``. "auto": both as with their own "auto". Workers find out
              by themselves. If a failover loses a part of the parameters, the chief publishes them again; if it loses a
              part of a gradient, the step begins again, and its workers apply their gradients again.
            - ``min_replicas``: how many replicas must have a gradient of this handle, a taken round, and published
              parameters, as for ``ConditionalAccumulatorBase`` and ``Parameters``.
        checkpoint: the path of a folder into which checkpoints are written, or a ``redisacc.Checkpoints``, which also
            says how often: the parameters, the state and the step, in one file of the format safetensors each.
            A thread reads them from the server, so no step waits for a disk.
            The last step of ``rounds(until=…)`` always gets one. A chief continues from the newest checkpoint that can
            be read if the server has nothing, or only an earlier step; a warning says so. The folder is created,
            claimed for this run and tried at once, which raises OSError, or InvalidArgumentError if it belongs to
            another run; later, a full disk is a warning in each interval. None means no checkpoints.
        standby: if another process is the chief, waits for as long as that process extends its lease, and then takes
            over: within a second if it was closed, or was killed on this machine, else when its lease has run out,
            after 10 seconds at most. So you may start any number of processes as chiefs, and one of them leads. The
            constructor blocks for that time; a log message names the chief.

    Attributes:
        shared_name: the name of the run.
        workers: how many workers there are, as this chief last announced it.
        step: the step of the parameters, and of the next round.
        parameters: the parameters of that step, as numpy arrays in dicts, lists and tuples, whichever library your
            arrays come from: the memory of your own arrays if you have published them from host memory, else copies.
            With an ``optimizer``, the chief has none; ``latest()`` fetches them.
        state: the state that was published with them, in the same form, or None. With an ``optimizer``,
            ``latest_state()`` fetches it.

    Raises:
        InvalidArgumentError: an argument or a variable of the environment is invalid, or this process is a worker; or
            the run of this name has another model, other ``partitions`` or another ``order``. The message names the
            first leaf that differs.
        ConflictError: another process is the chief, and this one does not stand by. Its predecessor may still be: if it
            was a process of this machine and has ended, its lease is taken over at once; otherwise, this waits up to 10
            seconds for the lease to end.
        ServerUnavailableError: no server answers.
    """

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
        if here.role == "worker":
            raise InvalidArgumentError(
                f"the environment says that this process is {here}, so it cannot be the chief: start the program with "
                "`redisacc run --chief`, and open a Chief only where redisacc.place().role is chief"
            )
        given = lead_options(
            parameters,
            options,
            optimizer=optimizer,
            state=state,
            workers=workers,
            encoding=encoding,
            standby=standby,
        )
        self._take_part(shared_name, given)

    def _take_part(self, shared_name: str, options: LeadOptions) -> None:
        """Begins the run, or continues it. Blocks while another process leads."""
        super().__init__(shared_name, options)
        self._next_look = 0.0
        self._is_disturbed = self._has_warned = False
        with self._closed_on_failure():
            self._make(lambda: None, "to begin the run")
        workers, there = options.quorum.workers or options.quorum.least, options.here.workers
        if there is not None and workers > there:
            self._warn(
                "%d workers are expected, and %s says that there are only %d. Leave workers= out, and the data is "
                "shared among those",
                workers,
                WORKERS,
                there,
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shared_name!r}, step={self.step}, workers={self.workers})"

    @property
    def workers(self) -> int:
        """How many workers there are, as this chief last announced it."""
        return self._quorum.workers

    @property
    def step(self) -> int:
        """The step of the parameters, and of the next round."""
        return self._weights.step

    @property
    def parameters(self) -> Any:
        """The parameters of the step. With an ``optimizer``, the chief has none: see ``latest``."""
        return self._of_program("parameters", "latest()").tree

    @property
    def state(self) -> Any:
        """The state that was published with the parameters. With an ``optimizer``, see ``latest_state``."""
        return self._of_program("state", "latest_state()").state

    def _of_program(self, name: str, instead: str) -> ProgramWeights:
        weights = self._weights
        if isinstance(weights, Updating):
            raise InvalidArgumentError(
                f"a chief with an optimizer has no {name}, since they are updated elsewhere: {instead} fetches what is "
                "published"
            )
        return weights

    @property
    def metrics(self) -> dict[str, float]:
        """In a loop over ``updates()``: the mean of each metric of the gradients of the last update, by their weights.

        Workers pass them to ``apply``. Empty if there were none. ``rounds()`` yields them as ``Round.metrics``.
        """
        return dict(self._weights.metrics) if isinstance(self._weights, Updating) else {}

    def latest(self) -> tuple[int, Any]:
        """Returns the step and the parameters that are published, as ``Parameters.latest`` does.

        Blocks until they have been fetched. The arrays are read-only.
        """
        return self._read(self._parameters.latest, "to read the parameters")

    def latest_state(self) -> tuple[int, Any]:
        """Returns the step, and the state that is published for it, as ``Parameters.latest_state`` does.

        With an ``optimizer``, that is a dict from the name of each of its slots, such as "exp_avg", to a tree like the
        parameters, and "updates", the number of updates that it has seen. Blocks until it has been fetched.
        """
        step, found = self._read(self._parameters.latest_state, "to read the state")
        return step, unpack_state(found)[1]

    def history(self) -> list[PastStep]:
        """Returns the steps of the run until now, as ``Parameters.history`` does."""
        return self._patience.call(self._parameters.history, "to read the history")

    def rounds(self, until: int | None = None) -> Iterator[Round[Any]]:
        """Yields the round of each step, for a loop that publishes the parameters that follow from it.

        Blocks until the step has its ``quorum``, and for the grace if there is one. After 5 seconds, and then less
        often, a log message names the workers that are expected, late or gone. A round stays in Redis until you publish
        the parameters that follow from it. If the process is killed before that, its successor gets the round again.

        With ``workers="all"``, the chief checks once a second which workers hold a lease, and changes what the step
        waits for. The step waits for a killed worker until its lease ends, at most 10 seconds, and not at all if it ran
        on this machine. It waits for a worker that joins from the next check on. While there are fewer workers than the
        ``quorum``, the step waits for more to join.

        Args:
            until: the loop ends when the parameters of this step are published, and so does the run: in the same
                instant workers learn that no step follows, and their loops end without another gradient. A run
                that was finished at an earlier step is continued. None means the loop ends after
                ``publish(…, finished=True)``, and at once if the run is finished already.

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
        if isinstance(self._weights, Updating):
            raise InvalidArgumentError("this chief has an optimizer: its loop is one over updates(), and not rounds()")
        return self._rounds(None if until is None else validation.integer(until, "until"))

    def updates(self, until: int | None = None) -> Iterator[int]:
        """Yields the step after each update that the optimizer makes, for a loop that evaluates, logs or stops.

        Blocks for a round, as ``rounds()`` does, and until the update is published: weights, state and the end of the
        round become visible in the same instant. If the process is killed before that, its successor makes the same
        update from the same round. No arrays but the rows of ``sparse`` leaves pass through this process as long as
        there are reducers; without one, or if it is late, the chief computes parts by itself, with the same result bit
        for bit.

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
        if not isinstance(self._weights, Updating):
            raise InvalidArgumentError("updates() needs a chief with an optimizer: Chief(…, optimizer=…)")
        return self._updates(None if until is None else validation.integer(until, "until"))

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
            state: a tree that the chief needs after a restart, such as the optimizer's state. None means nothing. With
                ``encoding="bfloat16"``, the parameters of float32 are published with it, as they are and whole, even if
                ``changed`` names rows. Workers do not fetch them.
            finished: whether to end the run with this step, in a loop without ``until``. The loop over
                ``rounds()`` ends, and so do the workers' loops, without another gradient.

        Raises:
            InvalidArgumentError: there is no current round: publish once in the body of a loop over ``rounds()``. Or
                the parameters, the rows or the state are invalid. Nothing was changed.
            ConflictError: another process has become the chief, has recovered the round, or has published different
                parameters for this step.
            NotReplicatedError: the parameters are published, but fewer than ``min_replicas`` replicas have them so far.
                Repeat the call, which waits again; or let the error end the process, and restart it.
            ServerUnavailableError: the server did not answer for longer than ``patience``.
        """
        finished = validation.flag(finished, "finished")
        if not self._is_with_program:
            raise InvalidArgumentError("publish() needs the round of a loop over rounds(), and publishes once for each")
        weights, found, step = self._weights, self._found, self._weights.step + 1
        assert isinstance(weights, ProgramWeights)
        # In one request: between two, the workers would compute one more gradient, in vain.
        is_last = finished or step == self._last
        # As after a restart, so that no program breaks only then.
        tree, state = as_arrays(parameters, "parameters"), as_arrays(state, "state")
        stored, taken, ended = pack_state(self._parameters, tree, state), found.round, found.ended
        ended.past = history_text(step - 1, taken.num_accumulated, taken.metrics)
        kept = found.round.metrics.kept if isinstance(found.round.metrics, Means) else ""
        # If the network was away for longer than the lease, a successor may have published this step and later ones.
        self._make(
            lambda: self._parameters._publish(tree, step, changed, stored, is_last, ended=ended, kept=kept or None),
            f"to publish step {step}",
        )
        weights.keep(step, tree, state, kept or weights.kept)
        self._advance(finished=is_last)
        self._is_with_program = False
        if not ended.has_ended:
            # The server has lost the round, or the reply was lost. The next look shows what else is lost.
            self._view.may_be_left = self._must_look = True

    def finish(self) -> None:
        """Ends the run: the workers' loops end by themselves, and end at once for workers that start later.

        The loop over ``rounds()`` ends, too. Workers may have begun with the next step by now;
        ``publish(…, finished=True)`` prevents that. A chief that is restarted with a higher ``until`` continues the
        run.

        Raises:
            ConflictError: another process has become the chief.
        """
        self._make(self._declare_finished, "to finish the run")

    def delete(self) -> None:
        """Deletes the run, with its gradients and parameters, for all processes. Workers get an error."""
        if self._accumulator is not None:
            self._patience.call(self._accumulator.delete, "to delete the gradients")
        self._patience.call(self._parameters.delete, "to delete the parameters")

    # The loops

    def _rounds(self, until: int | None) -> Iterator[Round[Any]]:
        """Yields the round of each step, for a loop that publishes what follows."""
        view = self._view
        self._aim(until)
        while (found := self._round()) is not None:
            self._is_with_program = True
            try:
                if is_nothing(found.round.num_accumulated, found.round.total_weight):
                    assert isinstance(self._weights, ProgramWeights)
                    self.publish(self._weights.tree, state=self._weights.state)
                    continue
                yield found.round
                if self._is_with_program:
                    raise RedisAccError(
                        f"{self.shared_name}: the parameters that follow from the round of step {view.memory} were not "
                        "published. Call publish() once in the body of the loop"
                    )
            finally:
                if self._is_with_program:
                    # The next round may be this one.
                    self._hold(None)
                    self._is_with_program, view.may_be_left, self._must_look = False, True, True
        self._end()

    def _updates(self, until: int | None) -> Iterator[int]:
        """Yields the step after each update that the optimizer makes."""
        self._aim(until)
        while (found := self._round()) is not None:
            if self._commit(found):
                self._look_for_same_data()
                yield self._weights.step
        self._end()

    def _look_for_same_data(self) -> None:
        """Warns once if workers of ``redisacc.torch``, which send digests, have computed the same gradient."""
        if isinstance(self._weights, Updating) and self._weights.metrics.digest and not self._has_warned:
            self._has_warned = True
            self._warn(
                "in step %d, two processes have sent the same gradient, so they have computed it with the same "
                "examples, which is no faster than one process. Give the DataLoader sampler=optimizer.sampler(data, "
                "batch_size)",
                self._weights.step - 1,
            )

    def _aim(self, last: int | None) -> None:
        """Begins a loop. If the run is finished, but its last step is to be a later one, continues it."""
        self._last, self._must_look = last, True

        def begin() -> None:
            if self._is_finished and last is not None and self._weights.step < last:
                self._parameters.finish(False)
                self._is_finished = False
            self._quorum.aim(last)

        self._make(begin, "to announce the last step")

    def _round(self) -> Any:
        """Returns the round of the step. Blocks until it is complete; None means the run is finished."""
        while not self._is_finished and (self._last is None or self._weights.step < self._last):
            what = f"to take the round of step {self._weights.step}"
            self._make(self._grant, what)
            # The wait may have been long, and another process may have led, or the round may be one that was used.
            found = self._make(lambda: self._found, what)
            if found is not None:
                return found
        return None

    def _grant(self) -> None:
        """Takes a round, unless this process has one."""
        if self._found is not None:
            return
        # Whatever goes wrong from here on.
        self._view.may_be_left, self._must_look, self._is_disturbed = True, True, False
        self._next_look = clock.now() + durations.look_every
        self._quorum.follow()
        try:
            found = self._weights.grant(
                min_weight=self._options.quorum.quorum.min_weight,
                cancel=self._looks_disturbed,
                describe=self._crew.text,
            )
        except InvalidArgumentError:
            if not self._quorum.restore():
                raise
        except CancelledError:
            if not self._is_disturbed:
                raise
        else:
            self._hold(found)
            self._view.may_be_left = self._must_look = False

    def _looks_disturbed(self) -> bool:
        """Looks, once a second, whether waiting for the round still makes sense, and for how many gradients."""
        if self._options.stops():
            return True
        self._quorum.follow()
        now = clock.now()
        if now < self._next_look:
            return False
        self._next_look, self._view.may_be_left = now + durations.look_every, False
        try:
            self._look()
            self._check_that_it_leads()
            self._is_disturbed = self._is_finished or next_action(self._view) is not Action.PROCEED
        except SURPRISES as error:
            self._is_disturbed, self._error = True, error
        self._view.may_be_left = self._must_look = True
        return self._is_disturbed

    # Steps

    def _commit(self, found: Any) -> bool:
        """Updates the weights with a round. Returns False if the step has to begin again."""
        step = self._weights.step
        is_last = step + 1 == self._last

        def attempt() -> bool:
            weights = self._weights
            assert isinstance(weights, Updating)
            if self._found is found and weights.step == step:
                try:
                    is_published = weights.commit(found, finished=is_last)
                finally:
                    # Also if the server has lost the version since.
                    self._view.memory = weights.step
                self._hold(None)
                if not is_published:
                    # Somebody has published a version.
                    self._view.is_learned, self._must_look = False, True
            return weights.step == step + 1

        try:
            is_published = self._make(attempt, f"to publish step {step + 1}")
        except NotReplicatedError:
            # It is published, and another loop continues with the next step.
            assert isinstance(self._weights, Updating)
            self._patience.call(self._weights.refresh, "to read the parameters")
            self._advance(finished=is_last)
            raise
        if is_published:
            self._advance(finished=is_last)
        return is_published

    def _advance(self, *, finished: bool) -> None:
        """Notes that the next step has begun."""
        view, step = self._view, self._weights.step
        view.published = view.memory = view.gradients = step
        self._hold(None)
        self._is_finished = self._is_finished or finished
        exit_code.advanced()
        if self._checkpointer is not None:
            self._checkpointer.note(step, last=finished)

    # Endings

    def _end(self) -> None:
        """Makes sure that the server has the last step, and that it is declared the last."""
        self._view.may_be_left = self._must_look = True
        self._make(self._conclude, "to finish the run")

    def _conclude(self) -> None:
        handle = self._accumulator
        assert handle is not None
        if handle._keys.partitions:
            # A predecessor may have died before it removed what its last round had there.
            sweep_quietly(self._transport, handle._keys, min_replicas=handle._scripts.min_replicas)
        # Usually the last publication has declared it. But a loop that was to continue may have published that step, or
        # the server may have lost the declaration.
        self._declare_finished()

    def _declare_finished(self) -> None:
        if self._options.here.run_id is not None:
            # Also if it is finished already: the workers of this run, which may have begun a moment ago, cannot know
            # yet that this chief does not continue it.
            conclude(self._transport, self._keys, self._options.here.run_id)
        elif not self._parameters.finished():
            self._parameters.finish()
        self._is_finished = True

    def _read(self, read: Callable[[], tuple[int, Any] | None], what: str) -> tuple[int, Any]:
        """Returns what is published, as ``read`` does."""
        while (found := self._make(read, what)) is None:
            self._must_look = True
        return found
