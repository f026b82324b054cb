"""A run in which every process is the same: each works, and one of them leads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Literal, SupportsFloat, Unpack

from redisacc._arrays import validation
from redisacc._arrays.metrics import kept_text, parse_kept
from redisacc._arrays.results import ApplyResult, Round
from redisacc._format.history_entries import PastStep
from redisacc._format.keys import REST, SNAPSHOT, Keys
from redisacc._handles import exit_code
from redisacc._handles.environment import place
from redisacc._handles.existing import open_existing
from redisacc._handles.options import check_names, with_options
from redisacc._handles.parameters import Parameters
from redisacc._protocol.parameters.publisher import schema_of
from redisacc._protocol.waiting.lifetime import Closing
from redisacc._text import shown
from redisacc._training.checkpointer import folder_of
from redisacc._training.chief import Chief, lead_options
from redisacc._training.local_steps import OUTER, InnerModel, LocalLoop, LocalModel, LocalSteps
from redisacc._training.options import (
    SKIP,
    Finite,
    GradientOptions,
    TrainingOptions,
    checked_finite,
    checkpoints,
    gradient_options,
)
from redisacc._training.participant import Patience
from redisacc._training.program_weights import ProgramWeights, unpack_state
from redisacc._training.quorum import CrewQuorum
from redisacc._training.upload import Upload
from redisacc._training.worker import ASK_EVERY, FollowOptions, Worker
from redisacc._wire.connect import connect
from redisacc.errors import (
    CancelledError,
    ConflictError,
    InvalidArgumentError,
    NotFoundError,
    NotReplicatedError,
)
from redisacc.optim import Optimizer

logger = logging.getLogger("redisacc")

Update = Callable[[Round[Any], Any, Any], tuple[Any, Any]]

# How long closing waits for the thread that leads, in seconds. It may be in the middle of a request.
CLOSING = 10.0


class Training(Closing):
    """A training run in which all processes run the same program: each is a worker, and one of them leads.

    Every process competes for the lease of the chief. The one that has it orders the updates, in a thread next to its
    own work; the others stand by. If that process is killed, another one leads: within a second if it ran on the same
    machine or was closed, else when its lease has run out, after 10 seconds at most. No gradient is lost or used twice,
    and the result has the same bits. The promises of ``Chief`` and ``Worker`` hold here as well.

    Example:
        >>> import numpy as np
        >>> import redisacc
        >>> optimizer = redisacc.optim.SGD(0.5)
        >>> with redisacc.Training("docs-one-program", {"w": np.zeros(2)}, optimizer=optimizer, workers=1) as training:
        ...     for step, weights in training.steps(until=20):
        ...         result = training.apply({"w": weights["w"] - 3})
        ...     step, weights = training.latest()
        ...     step, weights["w"].round(3).tolist()
        ...     training.delete()
        (20, [3.0, 3.0])

    Args:
        shared_name: the name of the run.
        parameters: the parameters to begin with, as for ``Chief``. If some are published under this name, those count.
        optimizer: an optimizer of ``redisacc.optim``, as for ``Chief``; or ``redisacc.LocalSteps``, with which each
            worker makes several steps alone. ``step`` counts all of them everywhere in this class. The weights are
            published after each ``every`` of them, so ``until`` must be a multiple of that.
        update: what to do instead of an ``optimizer``: a function that gets the round, the parameters and the state,
            and returns the next parameters and the next state. It runs in the process that leads, in a thread, and any
            process may lead next, so it must depend on its arguments only.
        state: the state to begin with, as for ``Chief``.
        workers: the number of processes that share the data, as for ``Chief``.
        number: the number of this worker, as for ``Worker``.
        quorum: what a step waits for, as for ``Chief``. None means a gradient of each worker.
        checkpoint: as for ``Chief``.
        redis: a redis-py or valkey-py client, a URL, or None, as for ``ConditionalAccumulator``.
        patience: as for ``Worker``.
        accumulator: as for ``Chief``, and ``finite`` as for ``Worker``; ``partitions`` is "auto" here, so a large model
            is spread over all nodes of a cluster. Every process should give the same options, because each may lead.
        encoding: how float32 elements are sent in both directions: "float32" (or None); "bfloat16"; or "int8", which
            encodes gradients only: parameters stay float32.
        log: called with each step and the means of its metrics, in the thread that leads, for example
            ``lambda step, metrics: wandb.log(metrics, step=step)`` in a program whose processes all call ``init``. If
            the process that leads is killed, the next one logs the steps that follow; a step may be missing, or logged
            twice. An error that it raises ends this process, as in ``update``.

    Attributes:
        shared_name: the name of the run.
        number: the number of this worker. None in a process that only leads.
        workers: how many workers there are, as for ``Worker``.
        leads: whether this process leads at the moment.
        finished: whether the run is finished.

    Raises:
        InvalidArgumentError: an argument or a variable of the environment is invalid, or another model has this name.
        ConflictError: another process has this number.
        ServerUnavailableError: no server answers.
    """

    # The chief in this process, while this process leads.
    _leader: Chief | None = None

    @with_options(TrainingOptions, {})
    def __init__(
        self,
        /,
        shared_name: str,
        parameters: Any,
        *,
        optimizer: Optimizer | LocalSteps | None = None,
        update: Update | None = None,
        state: Any = None,
        workers: int | Literal["all"] | None = None,
        number: int | None = None,
        **options: Unpack[TrainingOptions],
    ) -> None:
        check_names(options, TrainingOptions, type(self).__name__)
        if (optimizer is None) == (update is None):
            raise InvalidArgumentError("a run needs either an optimizer or an update, a function")
        log, redis, patience = options.get("log"), options.get("redis"), options.get("patience")
        for name, function in (("update", update), ("log", log)):
            if function is not None and not callable(function):
                raise InvalidArgumentError(f"{name} must be a function, not {type(function).__name__}")
        gradients = gradient_options(options.get("accumulator"))
        finite = checked_finite(gradients.pop("finite", SKIP))
        encoding, quorum = options.get("encoding"), options.get("quorum")
        seconds = validation.timeout(patience, "patience")
        self._local, optimizer = _local_loop(optimizer, parameters, gradients, finite=finite)
        here = place()
        self._workers = CrewQuorum.of(workers, quorum, here).workers
        self._redis = redis
        self._update = update and exit_code.noting_its_first_call(update)
        self._log = log and exit_code.noting_its_first_call(log)
        self._stops = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        # Whether its weights may be those that a new run begins with.
        self._begins = True
        self._until: int | None = None
        # For weights that each process updates itself: the step of the last snapshot, and what looks after it.
        self.snapshot: int | None = None
        self.meanwhile: Callable[[], None] = lambda: None
        self._worker: Worker | None = None
        self._opened = ExitStack()
        with ExitStack() as on_failure:
            on_failure.callback(self._opened.close)
            shared_name = validation.text(shared_name, "shared_name", max_bytes=512)
            first = Patience(seconds, shared_name, connect(redis).waits)
            self._parameters = self._opened.enter_context(
                first.opening(lambda: Parameters(shared_name, redis=redis), "to open the run")
            )
            self.shared_name = self._parameters.shared_name
            transport, name = self._parameters._transport, self.shared_name
            if here.role != "chief":
                told = FollowOptions(number, redis, encoding, finite, patience, here, self)
                self._worker = first.call(lambda: Worker._of_training(name, told), "to begin to work", in_steps=True)
                self._opened.enter_context(self._worker)
            self._patience = Patience(seconds, name, transport.blocking.waits)
            # Each process may lead, also after it has changed its working directory.
            if (checkpoint := options.get("checkpoint")) is not None:
                checkpoint = checkpoints(checkpoint)
                options["checkpoint"] = replace(checkpoint, folder=folder_of(checkpoint, name).path)
            # What the program gets has the form of what it has given.
            if self._worker is not None:
                self._worker._parameters._reader.given = self._parameters._reader.given
            if state is not None:
                self._parameters._reader.note_given("state", schema_of(state, "state")[0].structure)
            self._model = schema_of(parameters, "parameters")[0].stand_in()
            first.call(self._check_model, "to open the run")
            on_failure.pop_all()
        # On an event loop, the worker is not to be reached from another thread.
        is_reached = transport is transport.blocking
        brings = self._worker._ahead.bring if self._worker is not None and is_reached else None
        # Each process may lead, and gives what it has been given.
        self._options = replace(
            lead_options(
                parameters,
                {**options, "accumulator": {"partitions": "auto", **gradients}},  # type: ignore[typeddict-unknown-key]
                optimizer=optimizer,
                state=state,
                workers=workers,
                encoding="bfloat16" if encoding == "bfloat16" else None,
                standby=True,
            ),
            # A thread of its own leads, also beside an event loop, which a step may keep for itself for long.
            redis=transport.blocking,
            stops=self._stops.is_set,
            own=lambda: None if self._worker is None else self._worker._latest,
            has_seen=lambda: bool(self._published._reader.incarnation),
            snapshot=lambda: self.snapshot,
            brings=brings,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shared_name!r}, number={self.number})"

    @property
    def number(self) -> int | None:
        """The number of this worker. None in a process that only leads."""
        return None if self._worker is None else self._worker.number

    @property
    def workers(self) -> int:
        """How many workers there are: as given, and in a loop over ``steps()`` as ``Worker.workers`` says.

        Use it to choose the worker's share of the data: ``data[training.number :: training.workers]``.

        Raises:
            InvalidArgumentError: ``workers`` is "all", so the number is known in the loop only.
            RedisAccError: as ``Worker.workers``.
        """
        if self._worker is not None and self._worker._step is not None:
            return self._worker.workers
        if self._workers is None:
            # To wait for it would be to wait for this process itself, which leads in the loop only.
            raise InvalidArgumentError(
                'with workers="all", each step has as many as there are: ask how many in the loop over steps()'
            )
        return self._workers

    @property
    def _published(self) -> Parameters:
        """A handle on what is published. After a loss, the loop may have continued with another run of this name."""
        followed = None if self._worker is None else self._worker._parameters._reader.incarnation
        if followed and followed != self._parameters._reader.incarnation:
            self._parameters._forget(followed)
        return self._parameters

    @property
    def leads(self) -> bool:
        """Whether this process leads at the moment."""
        return self._leader is not None

    @property
    def finished(self) -> bool:
        """Whether the run is finished: ``until`` was reached, or a process has called ``finish``.

        Asks the server, so it blocks for a round trip. It is the same as ``Parameters.finished``: False before the run
        has begun, and again once a process continues it up to a later step.

        Raises:
            NotFoundError: the run was deleted.
            ServerUnavailableError: no server answers.
        """
        return self._published.finished()

    def steps(self, until: int | None = None) -> Iterator[tuple[int, Any]]:
        """Yields each step and its parameters, for a loop that computes a gradient and applies it.

        Blocks as ``Worker.steps`` does. In a process that `redisacc run` has started as the chief, it yields nothing,
        leads, and returns when the run is finished.

        Args:
            until: the last step: the run ends when its parameters are published. Give the same in every process. A run
                that was finished at an earlier step is continued. None means the loop ends after ``finish()`` in any
                process.

        Yields:
            The step, and the parameters as a tree of read-only arrays.

        Raises:
            ConflictError: another process has this worker's number now, because this one stalled for too long.
            NotFoundError: the run was deleted.
            ServerUnavailableError: the server did not answer for longer than ``patience``.
            RedisAccError: any other error of ``Chief``, of its loop, or of ``update``, if this process leads.
        """
        until = None if until is None else validation.integer(until, "until")
        self._until = until if self._local is None else self._local.versions(until)
        if self._worker is None:
            self._lead()
            self._raise_failure()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._lead, name="redisacc-chief", daemon=True)
            self._thread.start()
        found = None
        try:
            steps = self._worker.steps()
            if self._local is not None:
                steps = self._local.steps(steps, self._worker.apply, self._published)
            for found in steps:
                self._raise_failure()
                if self._model is not None:
                    # It may have been published since this process has opened the training.
                    self._patience.call(self._check_model, "to look at the parameters")
                    self._model = None
                yield found
        except GeneratorExit:
            # The interpreter may end: by then, the names of this module are gone.
            raise
        except CancelledError:
            self._raise_failure()
            raise
        # If this process leads, it may not have ended the training yet.
        self._stops.set()
        self._join(None)
        self._raise_failure()
        if found is None and self.number == 0:
            logger.warning(
                "%s: step %d had been reached before, so nothing was left to do. Continue with a larger until, or "
                "begin again with another name or after `redisacc rm`",
                self.shared_name,
                self._step_of(self._published.step() or 0),
            )

    def _check_model(self) -> None:
        """Raises InvalidArgumentError if another model is trained under this name."""
        # Others restore what is lost.
        with suppress(NotFoundError):
            self._published.check(self._model)

    def _is_claimed(self) -> bool:
        """Returns whether a process has weights of this run that the server has lost."""
        published = self._published
        return bool(published._transport.call("EXISTS", published._keys.claims))

    def _lead(self) -> None:
        """Stands by and leads, until the run is finished or this is closed."""
        try:
            while not (self._begins or self._stops.is_set()):
                self._begins = self._patience.call(self._has_begun, "to wait for the first weights")
                self._stops.wait(0 if self._begins else ASK_EVERY)
            while not self._stops.is_set():
                try:
                    with self._patience.call(
                        lambda: Chief._of_training(self.shared_name, self._options), "to stand by", in_steps=True
                    ) as lead:
                        self._leader = lead
                        self._update_each(lead)
                        return
                except ConflictError as error:
                    # This process stood still, and another one leads now. Its worker goes on.
                    logger.warning("%s: %s; standing by", self.shared_name, error)
                except NotReplicatedError as error:
                    # The step is published.
                    logger.warning("%s: %s", self.shared_name, error)
                finally:
                    self._leader = None
        except CancelledError:
            # It stops.
            pass
        except BaseException as error:  # noqa: BLE001 - it is raised where the program is
            self._failure = error

    def _has_begun(self) -> bool:
        """Returns whether this process has weights that another one has begun with, or can read them."""
        if self._worker is not None and self._worker._latest is not None:
            return True
        try:
            return self._published.step() is not None
        except NotFoundError:
            # The server has lost the first ones, and others publish them again.
            self._published._forget()
            return False

    def _update_each(self, lead: Chief) -> None:
        if self._update is None:
            for step in lead.updates(self._until):
                if self._log is not None:
                    self._call(self._log, self._step_of(step) - 1, lead.metrics)
            return
        for taken in lead.rounds(self._until):
            weights = lead._weights
            assert isinstance(weights, ProgramWeights)
            updated = self._call(self._update, taken, weights.tree, weights.state)
            if not (isinstance(updated, tuple) and len(updated) == 2):
                raise InvalidArgumentError(
                    f"update must return the parameters and the state, a tuple of two, not {type(updated).__name__}"
                )
            lead.publish(updated[0], state=updated[1])
            if self._log is not None:
                self._call(self._log, taken.global_step, taken.metrics)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function of the program, whose errors end this process, also those that a leader itself handles."""
        try:
            return function(*args)
        except BaseException as error:
            self._failure = error
            raise CancelledError(f"the program of {shown(self.shared_name)} has failed") from error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            context = failure.__context__
            try:
                raise failure
            finally:
                # Not the end of a wait that it has cancelled.
                failure.__context__ = context

    def _restores(self, step: int) -> bool:
        leader = self._leader
        return leader is not None and (leader._view.memory or 0) > step

    def _join(self, timeout: float | None) -> None:
        thread = self._thread
        if thread is not None:
            self._published._transport.waits.call(lambda: thread.join(timeout))

    def apply(
        self, gradient: Any, *, weight: float = 1.0, metrics: Mapping[str, SupportsFloat] | None = None
    ) -> ApplyResult:
        """Applies the gradient of this worker for the current step, as ``Worker.apply`` does.

        Args:
            gradient: as for ``Worker.apply``.
            weight: as for ``Worker.apply``.
            metrics: as for ``Worker.apply``. ``log`` gets their means, in the process that leads.

        Raises:
            InvalidArgumentError: the gradient or the weight is invalid, or there is no step.
            RedisAccError: as ``Worker.apply``; or, if this process leads, any error of leading.
        """
        self._raise_failure()
        if self._worker is None:
            raise InvalidArgumentError("apply() needs the step of a loop over steps()")
        if self._local is not None:
            return self._local.apply(gradient, weight, metrics)
        return self._worker.apply(gradient, weight=weight, metrics=metrics)

    def skip(self) -> ApplyResult:
        """Ends the current step without a gradient of this worker, as ``Worker.skip`` does.

        The others do not wait for it. If every worker skips, the weights stay, the step counts, and ``update`` is not
        called.

        Raises:
            InvalidArgumentError: there is no step; or each gradient counts, in a mean of integers.
            RedisAccError: as ``Worker.apply``; or, if this process leads, any error of leading.
        """
        return self.apply(None, weight=0)

    def begin(self) -> Upload:
        """Begins the upload of this worker's gradient for the current step, as ``Worker.begin`` does.

        Raises:
            InvalidArgumentError: there is no step.
            RedisAccError: as ``Worker.begin``; or, if this process leads, any error of leading.
        """
        self._raise_failure()
        if self._worker is None:
            raise InvalidArgumentError("begin() needs the step of a loop over steps()")
        if self._local is not None:
            raise InvalidArgumentError("begin() sends a gradient for each step, and there are none with LocalSteps")
        return self._worker.begin()

    def latest(self) -> tuple[int, Any]:
        """Returns the step and the parameters that are published, as ``Parameters.latest`` does.

        Blocks until they have been fetched. The arrays are read-only.

        Raises:
            NotFoundError: nothing has been published, or the run was deleted.
        """
        version, parameters = self._required(self._published.latest())
        return self._step_of(version), parameters

    def latest_state(self) -> tuple[int, Any]:
        """Returns the step, and the state that is published for it, as ``Chief.latest_state`` does.

        Raises:
            NotFoundError: nothing has been published, or the run was deleted.
        """
        version, published = self._required(self._published.latest_state())
        return self._step_of(version), unpack_state(published)[1]

    def _step_of(self, version: int) -> int:
        return version if self._local is None else version * self._local.every

    def history(self) -> list[PastStep]:
        """Returns the steps of the run until now, with their metrics, as ``Parameters.history`` does.

        With ``LocalSteps``, there is one entry for as many steps: ``step`` is the last of them, as for ``log``.
        """
        found = self._published.history()
        if self._local is None:
            return found
        return [replace(past, step=self._step_of(past.step + 1) - 1) for past in found]

    def _required(self, found: tuple[int, Any] | None) -> tuple[int, Any]:
        if found is None:
            raise NotFoundError(f"nothing has been published under the name {shown(self.shared_name)}")
        return found

    def keep(self, value: Any) -> None:
        """Keeps a small value of your program, such as the best accuracy, and replaces the one kept before.

        It is sent with the next gradient of this process (``apply``, ``skip`` or ``commit``), and published with the
        step that the gradient is in, in the same instant as the parameters. So both belong to the same step, also in
        checkpoints and after all processes were killed. If several processes keep something in the same step, the value
        of the lowest number counts.

        Args:
            value: None, True, False, a number, a text, or lists and dicts of these, whose keys are texts. At most 1024
                bytes as JSON.

        Raises:
            InvalidArgumentError: the value is something else, and the message says where; or this process only leads.
        """
        text = kept_text(value)
        if self._worker is None:
            raise InvalidArgumentError("keep() needs a process that works, because a gradient brings the value")
        self._worker._keep_text(text)

    def kept(self) -> Any:
        """Returns the value that this process will send next, or else the one that came with the parameters.

        Call this in the loop over ``steps()``, where it sends nothing. Before the loop, a run that continues with
        a checkpoint has no value yet. Outside of the loop, this blocks for a round trip.

        Returns:
            The value, which you may change; only ``keep`` publishes the change. None if there is none.

        Raises:
            NotFoundError: the run was deleted.
            ServerUnavailableError: no server answers.
        """
        worker = self._worker
        if worker is not None and worker._step is not None and not self._stops.is_set():
            # A worker that is late has parameters of an earlier step than those that are published.
            return parse_kept(worker._pending or worker._parameters._reader.kept)
        record = self._published._reader.poll()
        return None if record is None else parse_kept(record.kept)

    def finish(self) -> None:
        """Ends the run: the loops of all processes end, within a second. A round that is complete still counts.

        `redisacc finish` does the same.

        Raises:
            NotFoundError: nothing has been published, or the run was deleted.
        """
        self._published.finish()

    def delete(self) -> None:
        """Deletes the run, with its gradients and parameters. Other processes get an error."""
        self._stop_leading()
        with suppress(NotFoundError), open_existing(Keys(self.shared_name), redis=self._redis) as gradients:
            gradients.delete()
        self._published.delete()
        for more in (REST, SNAPSHOT):
            with suppress(NotFoundError), Parameters(self.shared_name + more, redis=self._redis, create=False) as found:
                found.delete()

    def close(self) -> None:
        """Stops leading and working. Another process leads within a second. The run can be continued.

        Blocks for up to 10 seconds if the thread that leads is in the middle of a request.
        """
        self._stop_leading()
        self._opened.close()

    def _stop_leading(self) -> None:
        self._stops.set()
        self._join(CLOSING)


def _local_loop(
    optimizer: Optimizer | LocalSteps | None, parameters: Any, gradients: GradientOptions, *, finite: Finite
) -> tuple[LocalLoop | None, Optimizer | None]:
    """Returns the loop of local steps, if there are any, and the optimizer of the run."""
    if not isinstance(optimizer, LocalSteps):
        return None, optimizer
    inner, outer = optimizer.optimizer, optimizer.outer or OUTER
    for name, given in (("optimizer", inner), ("outer", outer)):
        if not isinstance(given, (Optimizer, InnerModel) if name == "optimizer" else Optimizer):
            raise InvalidArgumentError(
                f"{name} of LocalSteps must be an optimizer of redisacc.optim, not {shown(type(given).__name__)}"
            )
    if gradients.get("sparse"):
        raise InvalidArgumentError("there are no local steps with sparse leaves: each step needs their rows")
    model = LocalModel(inner, parameters) if isinstance(inner, Optimizer) else inner
    return LocalLoop(model, optimizer.every, finite=finite), outer
