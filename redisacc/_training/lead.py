"""The leading half of a training: it makes what is there what should be there, and lets the program do the rest.

``decision.py`` says what is missing. Here is how a leader looks, and what it does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from redisacc._checkpoints.file import Checkpoint
from redisacc._clock import clock, durations
from redisacc._data.results import Round
from redisacc._data.tree.arrays import as_arrays
from redisacc._format.history_entries import PastStep, history_text
from redisacc._format.keys import ParameterKeys
from redisacc._handles import exit_code
from redisacc._handles.base import ConditionalAccumulatorBase
from redisacc._handles.environment import WORKERS, Place
from redisacc._handles.parameters import Parameters
from redisacc._protocol.parameters.conclusion import conclude
from redisacc._protocol.parameters.marks import deleted_incarnations, is_lost
from redisacc._protocol.parameters.publisher import schema_of
from redisacc._protocol.parts.sweep import sweep_quietly
from redisacc._protocol.scripts import StaleSequenceError
from redisacc._protocol.waiting.wait_log import WaitLog
from redisacc._text import shown
from redisacc._training.checkpointer import Checkpointer
from redisacc._training.crew_text import crew_text
from redisacc._training.decision import ENDS, Action, View, next_action, source_of
from redisacc._training.gradients import has_no_gradients, open_gradients
from redisacc._training.loss import Inquiry, give_up
from redisacc._training.options import Checkpoints, GradientOptions
from redisacc._training.participant import Participant
from redisacc._training.program_weights import ProgramWeights
from redisacc._training.quorum import CrewQuorum, QuorumKeeper
from redisacc._training.updating import Updating
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

# What tells that something is not as it was seen.
SURPRISES = (NotFoundError, DataLossError, StaleSequenceError)

# The first pause before the same action on the same view, and the longest, in seconds. Each is twice as long as the one
# before.
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0
# Actions that wait by themselves.
PATIENT = (Action.STAND_BY, Action.ASK, Action.HAND_OVER)


@dataclass(frozen=True)
class LeadOptions:
    """What a leader is told.

    Attributes:
        parameters: the weights to begin with.
        state: the state to begin with.
        optimizer: the optimiser; None: the program updates the weights.
        quorum: what a step waits for.
        gradients: the options of the accumulator.
        checkpoint: where checkpoints are written, None: nowhere.
        encoding: how the weights travel to workers.
        redis: the way to the server.
        patience: for how many seconds to wait for a silent server; None: forever.
        standby: whether to wait while another process leads.
        here: the place of this process in a run.
        stops: whether this process is to lead no longer.
        own: returns the step and the weights that the worker in this process has, or None.
    """

    parameters: Any
    state: Any
    optimizer: Optimizer | None
    quorum: CrewQuorum
    gradients: GradientOptions
    checkpoint: Checkpoints | None
    encoding: Literal["float32", "bfloat16"] | None
    redis: object
    patience: float | None
    standby: bool
    here: Place
    stops: Callable[[], bool] = field(default=lambda: False)
    own: Callable[[], tuple[int, Any] | None] = field(default=lambda: None)


class Lead(Participant):
    """Leads a training. The constructor blocks until this process leads, and everything is there for the first round.

    Args:
        shared_name: the name of the training.
        options: what it is told.

    Attributes:
        weights: what this process has of the weights, and how they are updated.
        is_finished: whether the step that is published is declared the last one.
        is_with_program: whether the body of the program's loop has the round.
        last: the step with which the loop ends.
    """

    def __init__(self, shared_name: str, options: LeadOptions) -> None:
        super().__init__(
            "chief",
            shared_name,
            options.here,
            redis=options.redis,
            patience=options.patience,
            encoding=options.encoding,
            partitions=options.gradients.get("partitions"),
            min_replicas=options.gradients.get("min_replicas", 0),
        )
        self._keys = ParameterKeys(self.shared_name)
        schema, _ = schema_of(options.parameters, "parameters")
        if options.state is not None:
            schema_of(options.state, "state")
        # A tree with the shapes and dtypes of the weights, which takes no memory.
        self._like = schema.structure.build([np.broadcast_to(leaf.given.type(0), leaf.shape) for leaf in schema.leaves])
        self._given: tuple[Any, Any] | None = options.parameters, options.state
        self._state = options.state
        self._options = replace(options, parameters=None, state=None)
        parameters, optimizer = self._parameters, options.optimizer
        self._fresh: Callable[[], ProgramWeights | Updating] = (
            partial(ProgramWeights, parameters, is_rounded=options.encoding == "bfloat16")
            if optimizer is None
            else partial(Updating, parameters, optimizer, schema)
        )
        self.weights = self._fresh()
        self.is_finished = self.is_with_program = False
        self.last: int | None = None
        self._accumulator: ConditionalAccumulatorBase[Any] | None = None
        # The round that this process has.
        self._found: Any = None
        # What is known between two looks.
        self._has_memory = self._is_learned = self._has_quorum = self._is_useless = self._is_damaged = False
        self._may_be_left = self._must_look = True
        self._view = View(lease="none")
        # Whether the accumulator was there after the weights had been published, so that no loss took it alone.
        self._has_seen_both = False
        self._follows = self._is_rescued = False
        # How often the lease had run out when the weights were seen last.
        self._gaps = 0
        self._next_look = 0.0
        self._is_disturbed = False
        # Why something is gone.
        self._error: RedisAccError | None = None
        self._lost: DataLossError | None = None
        self._inquiry = Inquiry(self._transport, self._crew, self.shared_name)
        self._saved: Checkpoint | None = None
        self._has_looked_for_saved = False
        self._lease_is_taken = False
        self._checkpointer: Checkpointer | None = None
        with self._closed_on_failure():
            if options.checkpoint is not None:
                self._checkpointer = Checkpointer(self._transport, self.shared_name, options.checkpoint)
                self._opened.callback(self._checkpointer.close)
            self.make(lambda: None, "to begin the training")
            workers, there = options.quorum.workers or options.quorum.least, options.here.workers
            if there is not None and workers > there:
                self._warn(
                    "%d workers are expected, and %s says that there are only %d. Leave workers= out, and the data is "
                    "shared among those",
                    workers,
                    WORKERS,
                    there,
                )

    @property
    def parameters(self) -> Parameters:
        """The handle on what is published."""
        return self._parameters

    @property
    def step(self) -> int:
        """The step of the weights."""
        return self.weights.step

    @property
    def metrics(self) -> dict[str, float]:
        """The means of the metrics of the last round that an optimiser has used."""
        return dict(self.weights.metrics) if isinstance(self.weights, Updating) else {}

    @property
    def workers(self) -> int:
        """How many workers there are, as this process last announced it."""
        return self._quorum.workers

    # The loop

    def make(self, attempt: Callable[[], Value], what: str) -> Value:
        """Returns the result of an attempt, which is made once nothing is missing, and again after whatever goes wrong.

        Args:
            attempt: may be repeated without harm.
            what: its purpose, for log records, as in "to publish step 7".
        """
        return self._patience.call(lambda: self._make(attempt), what, in_steps=True)

    def _make(self, attempt: Callable[[], Value]) -> Value:
        before: tuple[Action, View] | None = None
        pause, log = FIRST_PAUSE, WaitLog(clock.now())
        while True:
            action, view = self._look_and_decide()
            if before == (action, view) and action not in PATIENT:
                if log.is_due(clock.now()):
                    self._warn("still trying to %s: %s", action.value, self._error)
                self._transport.waits.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                before, pause = (action, view), FIRST_PAUSE
            try:
                if action is Action.PROCEED:
                    return attempt()
                _ACTIONS[action](self)
            except SURPRISES as error:
                self._note(error)
            except RedisAccError:
                self._must_look = True
                raise

    def _look_and_decide(self) -> tuple[Action, View]:
        while True:
            if self._options.stops():
                raise CancelledError(f"this process no longer stands by to lead {self.shared_name!r}")
            try:
                if self._lease_is_taken:
                    self._lease.check()
                if self._must_look:
                    self._view = self._look()
            except ConflictError as error:
                if self._has_memory or not self._options.standby:
                    raise
                self._warn("%s; standing by", error)
                self._lease_is_taken = False
                continue
            except SURPRISES as error:
                self._note(error)
                self._transport.waits.sleep(FIRST_PAUSE)
                continue
            view = self._current()
            action = next_action(view)
            if action in ENDS:
                raise self._ending(action, view)
            return action, view

    def _current(self) -> View:
        """Returns what was seen, with what this process knows by itself."""
        found = self._found
        return replace(
            self._view,
            lease="held" if self._lease_is_taken else "none",
            memory=self.step if self._has_memory else None,
            is_learned=self._is_learned,
            is_useless=self._is_useless,
            has_quorum=self._has_quorum,
            may_be_left=self._may_be_left,
            has_lost=self._lost is not None or self._inquiry.asked is not None,
            round=None if found is None else self.weights.step_of(found),
            is_with_program=self.is_with_program,
        )

    def _note(self, error: RedisAccError) -> None:
        """Notes that something is not as it was seen."""
        logger.debug("%s: %s", self.shared_name, error)
        self._error, self._must_look = error, True
        if not isinstance(error, DataLossError):
            return
        if error.gradient and not self._updates:
            # The program decides what becomes of the round.
            raise error
        self._is_useless = self._is_useless or error.gradient is not None
        if self._found is not None and not self.is_with_program:
            self._is_damaged = error.part is not None and error.gradient is None
            self._found = None

    @property
    def _updates(self) -> bool:
        return isinstance(self.weights, Updating)

    # The look

    def _look(self) -> View:
        """Looks at what there is."""
        if not self._lease_is_taken:
            return View(lease="none")
        seen = self._look_at_weights()
        if seen.is_deleted:
            return seen
        if seen.published is not None:
            self._gaps, self._inquiry = self._lease.gaps, Inquiry(self._transport, self._crew, self.shared_name)
        else:
            # The lease is lost as well, and another process may have taken it since.
            self._lease.take_again()
            self._lease.check()
            seen = replace(seen, has_led_throughout=self._lease.gaps == self._gaps)
        seen = self._look_at_gradients(seen)
        if not (seen.is_deleted or (self._has_memory and seen.has_led_throughout)):
            seen = self._look_for_sources(seen)
        self._must_look = False
        return seen

    def _look_at_weights(self) -> View:
        try:
            record = self._parameters._reader.poll()
        except NotFoundError as error:
            incarnation = self._parameters._reader.incarnation
            was_deleted = incarnation in deleted_incarnations(self._transport, self._keys)
            if not was_deleted and is_lost(self._transport, self._keys, incarnation):
                record = None
            elif self._has_memory or was_deleted:
                self._error = error
                return View(is_deleted=True)
            else:
                # While this process stood by, another training has taken the place of one that was lost.
                self._parameters._forget()
                record = self._parameters._reader.poll()
        if record is None:
            return View()
        if self._given is not None:
            # Another model may be trained under this name.
            self._parameters.check(self._given[0], state=self._given[1])
        self.is_finished = record.finished
        return View(published=record.step, is_complete=not self._is_damaged and self._parameters.is_complete())

    def _look_at_gradients(self, seen: View) -> View:
        handle = self._accumulator
        if handle is None:
            return seen
        try:
            record = handle._records.read()
        except NotFoundError as error:
            if seen.published is None or not self._has_seen_both or self._parameters._reader.poll() is None:
                self._close_gradients()
                return seen
            # Both are in one slot, so a server loses both.
            self._error = error
            return replace(seen, is_deleted=True)
        self._has_seen_both = seen.published is not None
        self._has_quorum = self._has_quorum and record.quorum.least is not None
        return replace(seen, is_open=True, gradients=record.global_step, is_empty=record.num_accumulated == 0)

    def _look_for_sources(self, seen: View) -> View:
        """Looks for weights that this process does not know yet."""
        if not self._has_looked_for_saved and self._checkpointer is not None:
            self._saved = next(self._checkpointer.valid(), None)
        self._has_looked_for_saved = True
        own, inquiry = self._options.own(), self._inquiry
        seen = replace(seen, saved=self._saved.step if self._saved else None, own=own[0] if own else None)
        if seen.published is not None:
            return seen if seen.is_complete else replace(seen, may_be_rescued=bool(own or self._crew.workers()))
        is_known = self._has_memory or self._lost is not None
        if not inquiry.may_be_lost(is_lost=is_known, follows=self._follows):
            return seen
        has_asked = inquiry.has_asked()
        claimed = inquiry.wanted.step if has_asked and inquiry.wanted else None
        return replace(seen, may_be_lost=True, has_asked=has_asked, claimed=claimed)

    # The actions

    def _stand_by(self) -> None:
        crew, stops = self._crew, self._options.stops
        follows = crew.stand_by("chief", stops) if self._options.standby else crew.wait_for("chief")
        self._follows = follows or self._follows
        self._keep("chief")
        self._lease_is_taken = self._must_look = True

    def _open(self) -> None:
        gradients = self._options.gradients
        if gradients.get("order") is None and has_no_gradients(self._transport, self.shared_name):
            gradients = {**gradients, "order": "worker"}
        handle = self._opened.enter_context(
            open_gradients(
                self.shared_name,
                self._like,
                gradients,
                redis=self._options.redis,
                worker="chief",
                once_per_worker=True,
            )
        )
        self._accumulator = handle
        self.weights.reopen(handle)
        self._quorum = QuorumKeeper(self._options.quorum, handle, self._crew, self._transport, self.shared_name)
        self._quorum.until = self.last
        # This process has the chief's lease, so they are of predecessors.
        handle._end_takes()
        self._has_quorum, self._may_be_left, self._must_look = False, True, True

    def _close_gradients(self) -> None:
        if self._accumulator is not None:
            self._accumulator.close()
        self._accumulator = None
        if not self.is_with_program:
            self._found = None

    def _ask(self) -> None:
        self._must_look = True
        self._inquiry.ask()

    def _hand_over(self) -> None:
        self._must_look = self._is_rescued = True
        self._inquiry.hand_over()

    def _give_up(self) -> None:
        self._must_look = True
        self._warn("%s. Continuing from what workers have, or from a checkpoint", self._lost or self._error)
        # The parameters go first: a worker that finds no accumulator looks for them.
        give_up(self._transport, self._keys)
        self._replace()

    def _restore(self) -> None:
        """Publishes what this process has: the server has lost it, has an older version, or has lost a part of it."""
        view, step = self._view, self.step
        self._must_look, self._has_quorum, self._may_be_left = True, False, True
        try:
            self._is_damaged = False
            if view.published == step:
                self._warn("a node has lost a part of the parameters of step %d; publishing them again", step)
                self.weights.publish_again(self._lease.check)
                return
            source = "the chief and of reducers" if self._updates else "the chief"
            if view.published is None:
                self._warn(
                    "the server has lost this training: it was flushed, or restarted without its data. Restoring step "
                    "%d from the memory of %s; workers apply their gradients of this step again",
                    step,
                    source,
                )
            else:
                self._warn(
                    "the server has lost the parameters of step %d, and is at step %d; publishing them again",
                    step,
                    view.published,
                )
                if self._updates:
                    self.weights.publish_again(self._lease.check)
                    return
            tree, state = self.weights.whole(self._lease.check)
        except DataLossError as error:
            # Nobody has it. Others may have something.
            self._lost, self._error = error, error
            self._forget_memory()
            return
        self._publish(tree, step, state)
        self._is_learned = not self._updates

    def _publish(self, tree: Any, step: int, state: Any) -> None:
        self._lease.check()
        # The server may lose the accumulator before it gets them.
        self._has_seen_both = False
        self._parameters._restore(tree, step, state=self.weights.packed(tree, state))

    def _forget_memory(self) -> None:
        self._has_memory = self._has_looked_for_saved = False
        self._found = None
        self.weights = self._fresh()
        if self._accumulator is not None:
            self.weights.reopen(self._accumulator)

    def _restore_saved(self) -> None:
        saved, published = self._saved, self._view.published
        assert saved is not None
        if published is not None:
            self._parameters.check(saved.parameters, state=saved.state)
        self._warn(
            "the server has %s; continuing from the checkpoint of step %d. Later steps, if there were any, are lost",
            "nothing" if published is None else f"step {published}, which is older",
            saved.step,
        )
        self._must_look = True
        self._publish(saved.parameters, saved.step, saved.state)

    def _restore_own(self) -> None:
        own = self._options.own()
        self._must_look = self._is_rescued = True
        if own is not None:
            self._publish(own[1], own[0], None)

    def _begin(self) -> None:
        if self._parameters._reader.incarnation:
            self._parameters._forget()
        self._inquiry.end()
        assert self._given is not None
        tree, state = self._given
        self._lease.check()
        if isinstance(self.weights, Updating):
            self.weights.learn((tree, state))
        else:
            tree, state = as_arrays(tree, "parameters"), as_arrays(state, "state")
            self._parameters.publish(tree, 0, state=self.weights.packed(tree, state))
            self.weights.keep(0, tree, state)
        self._has_learned()

    def _learn(self) -> None:
        self._must_look = True
        try:
            self.weights.learn()
        except DataLossError as error:
            self._lost, self._error = error, error
            self._forget_memory()
            return
        if isinstance(self.weights, ProgramWeights) and self._is_rescued:
            # Workers have none.
            self.weights.state = as_arrays(self._state, "state")
        if self._is_rescued:
            self._warn(
                "the server has lost this training; continuing at step %s with the parameters of a living worker. The "
                "state of the chief, such as the optimiser's, is lost, and begins as it was given",
                self.step,
            )
        elif not self._has_memory:
            logger.info(
                "%s: continuing at step %d",
                self.shared_name,
                self.step,
                extra={"accumulator": self.shared_name, "step": self.step},
            )
        self._has_learned()

    def _has_learned(self) -> None:
        """Notes that this process has what is published."""
        self._has_memory = self._is_learned = self._must_look = True
        self._is_rescued, self._lost, self._given, self._saved = False, None, None, None

    def _set_step(self) -> None:
        """Sets the step before the weights are there: no worker uses the accumulator yet."""
        view = self._current()
        source, self._must_look = source_of(view), True
        assert self._accumulator is not None
        assert source is not None
        self._lease.check()
        self._accumulator.set_global_step(source[0] + (view.round == source[0]))

    def _catch_up(self) -> None:
        """Brings the accumulator from an earlier step to the step of the parameters, with an empty round.

        Its gradients may belong to earlier steps, and were used before. If a gradient of the current step is thrown
        away with them, its worker applies it again.
        """
        handle, step = self._accumulator, self.step
        assert handle is not None
        self._must_look, self._has_quorum = True, False
        self._lease.check()
        # Of a take that raises, the round is left.
        self._may_be_left = True
        if self._view.gradients < step - 1:
            handle.set_global_step(step - 1)
        for timeout in (0.0, durations.taker_lease):
            try:
                # Takes whatever is there and ends the step in one operation, so that nothing can be added to it.
                with handle.take(1, timeout=timeout) as taken:
                    self._warn(
                        "number of gradients that may be older than step %d, and are dropped: %d; workers apply those "
                        "of this step again",
                        step,
                        taken.num_accumulated,
                    )
                return
            except TakeTimeoutError:
                pass
            handle.set_global_step(step)
            if handle.num_accumulated() == 0:
                return
            # They arrived between the two commands, so they may be of an earlier step. Or a take of this process that
            # ended long ago is back with the older data, and is the first in the queue until its lease ends.
            handle.set_global_step(step - 1)

    def _replace(self) -> None:
        """Replaces an accumulator whose gradients nobody can use. Their workers apply them again."""
        handle = self._accumulator
        self._lease.check()
        if self._is_useless:
            self._warn("%s. Beginning step %d again: its workers apply their gradients again", self._error, self.step)
        # First, so that what is missing is opened if this ends early.
        self._must_look, self._accumulator, self._found, self._is_useless = True, None, None, False
        if handle is not None:
            with suppress(NotFoundError):
                handle.delete()
            handle.close()

    def _recover(self) -> None:
        self._found = self.weights.recover()
        self._may_be_left = False

    def _discard(self) -> None:
        found, self._found, self._may_be_left = self._found, None, True
        try:
            self.weights.discard(found)
        except ConflictError as error:
            # It was used nevertheless.
            self._warn("%s", error)

    def _store_quorum(self) -> None:
        self._quorum.store()
        self._has_quorum = True

    # The ends

    def _ending(self, action: Action, view: View) -> RedisAccError:
        """Returns the error that says why nothing helps."""
        self._must_look = True
        if action is Action.END_DELETED and self._error is not None:
            return self._error
        if action is Action.END_LOST:
            return self._nobody_has_it()
        if action is Action.END_LATER:
            # Its lease may have been given back since, so that it is this process's again.
            return ConflictError(
                f"{self.shared_name}: another process has published step {view.published}, while the chief in this "
                f"process was at step {self.step}: this process or the server stood still, and another one was the "
                f"chief meanwhile. This process can no longer be the chief; one that is started again continues with "
                f"step {view.published}"
            )
        step = view.gradients if view.round is None else view.round
        return DataLossError(
            f"{self.shared_name}: step {step} has begun, but the parameters are at step {self.step}: "
            "a round in between was taken by another process, or the server has lost a version of the parameters. "
            f"Publish the parameters of step {step} with Parameters.publish() if you have them, or delete the training"
        )

    def _nobody_has_it(self) -> RedisAccError:
        if self._lost is not None:
            return self._lost
        asked = self._inquiry.asked
        if asked is not None:
            return DataLossError(
                f"{shown(self.shared_name)}: the server has lost this training, and {asked.place} had step "
                f"{asked.step} of its parameters, but has not published them: it has died, or its user may not "
                "publish. Start the chief again with a checkpoint; or, to begin again at step 0, stop the workers first"
            )
        try:
            self._parameters.latest()
        except DataLossError as error:
            return error
        return DataLossError(f"{shown(self.shared_name)}: the server has lost a part of the parameters")

    # Rounds

    def rounds(self, until: int | None) -> Iterator[Round[Any]]:
        """Yields the round of each step, for a loop that publishes what follows."""
        self._aim(until)
        while (found := self._round()) is not None:
            self._found, self.is_with_program = found, True
            try:
                yield found.round
                if self.is_with_program:
                    raise RedisAccError(
                        f"{self.shared_name}: the parameters that follow from the round of step {self.step} were not "
                        "published. Call publish() once in the body of the loop"
                    )
            finally:
                if self.is_with_program:
                    # The next round may be this one.
                    self._found, self.is_with_program = None, False
                    self._may_be_left = self._must_look = True
        self._end()

    def updates(self, until: int | None) -> Iterator[int]:
        """Yields the step after each update that the optimiser makes."""
        self._aim(until)
        while (found := self._round()) is not None:
            if self._commit(found):
                yield self.step
        self._end()

    def _aim(self, last: int | None) -> None:
        """Begins a loop. If the training is finished, but its last step is to be a later one, continues it.

        Args:
            last: the step with which the loop ends; None: nobody knows.
        """
        self.last, self._must_look = last, True

        def begin() -> None:
            if self.is_finished and last is not None and self.step < last:
                self._parameters.finish(False)
                self.is_finished = False

        self.make(begin, "to read the parameters")
        self.make(lambda: self._quorum.aim(last), "to announce the last step")

    @property
    def is_over(self) -> bool:
        """Whether the loop has reached its end."""
        return self.is_finished or (self.last is not None and self.step >= self.last)

    def _round(self) -> Any:
        """Returns the round of the step. Blocks until it is complete; None: the training is finished."""
        what = f"to take the round of step {self.step}"
        while not self.is_over:
            self.make(self._grant, what)
            # The wait may have been long, and another process may have led, or the round may be one that was used.
            found = self.make(lambda: self._found, what)
            if found is not None:
                return found
        return None

    def _grant(self) -> None:
        """Takes a round, unless this process has one."""
        if self._found is not None:
            return
        # Whatever goes wrong from here on.
        self._may_be_left, self._must_look, self._is_disturbed = True, True, False
        self._next_look = clock.now() + durations.look_every
        self._quorum.follow()
        try:
            self._found = self.weights.grant(
                min_weight=self._options.quorum.quorum.min_weight,
                cancel=self._is_disturbed_now,
                describe=lambda: crew_text(self._crew),
            )
        except InvalidArgumentError:
            if not self._quorum.restore():
                raise
        except CancelledError:
            if not self._is_disturbed:
                raise
        else:
            self._may_be_left = self._must_look = False

    def _is_disturbed_now(self) -> bool:
        """Looks, once a second, whether waiting for the round still makes sense, and for how many gradients."""
        if self._options.stops():
            return True
        self._quorum.follow()
        now = clock.now()
        if now < self._next_look:
            return False
        self._next_look, self._may_be_left = now + durations.look_every, False
        try:
            self._view = self._look()
            self._is_disturbed = (
                self.is_finished or self._lease.lost or next_action(self._current()) is not Action.PROCEED
            )
        except SURPRISES as error:
            self._is_disturbed, self._error = True, error
        self._may_be_left = self._must_look = True
        return self._is_disturbed

    def publish(self, tree: Any, changed: Mapping[str, Any] | None, state: Any, *, finished: bool) -> None:
        """Publishes what follows from the round that the program has, and acknowledges it."""
        weights, found, step = self.weights, self._found, self.step + 1
        assert isinstance(weights, ProgramWeights)
        # In one request: between two, the workers would compute one more gradient, in vain.
        is_last = finished or step == self.last
        # As after a restart, so that no program breaks only then.
        tree, state = as_arrays(tree, "parameters"), as_arrays(state, "state")
        stored, taken = weights.packed(tree, state), found.round
        past = history_text(self.step, taken.num_accumulated, taken.metrics)
        # If the network was away for longer than the lease, a successor may have published this step and later ones.
        self.make(
            lambda: self._parameters._publish(tree, step, changed, stored, is_last, past=past),
            f"to publish step {step}",
        )
        weights.keep(step, tree, state)
        self._advance(finished=is_last)
        self._found, self.is_with_program = None, False
        try:
            self._patience.call(lambda: weights.discard(found), f"to acknowledge the round of step {step - 1}")
        except (NotFoundError, DataLossError, ConflictError) as error:
            # The round was used nevertheless. What else the server has lost, the next look shows.
            self._warn("%s", error)
            self._may_be_left = self._must_look = True

    def _commit(self, found: Any) -> bool:
        """Updates the weights with a round. Returns False if the step has to begin again."""
        step, is_last = self.step, self.step + 1 == self.last

        def attempt() -> bool:
            weights = self.weights
            assert isinstance(weights, Updating)
            if self._has_memory and weights.step == step and self._found is found:
                if not weights.commit(found, finished=is_last):
                    # Somebody has published a version.
                    self._is_learned, self._must_look = False, True
                self._found = None
            return weights.step == step + 1

        try:
            is_published = self.make(attempt, f"to publish step {step + 1}")
        except NotReplicatedError:
            # It is published, and another loop continues with the next step.
            weights = self.weights
            assert isinstance(weights, Updating)
            self._found = None
            self._patience.call(weights.refresh, "to read the parameters")
            raise
        if is_published:
            self._advance(finished=is_last)
        return is_published

    def _advance(self, *, finished: bool) -> None:
        """Notes that the next step has begun."""
        step = self.step
        self._view = replace(self._view, published=step, gradients=step)
        self.is_finished = self.is_finished or finished
        exit_code.advanced()
        if self._checkpointer is not None:
            self._checkpointer.note(step, last=finished)

    # Endings

    def _end(self) -> None:
        """Makes sure that the server has the last step, that it is declared the last, and that no round is left."""
        self._may_be_left = self._must_look = True
        self.make(self._declare_end, "to finish the training")

    def _declare_end(self) -> None:
        handle = self._accumulator
        assert handle is not None
        if self._found is not None:
            raise self._ending(Action.END_AHEAD, self._current())
        if handle._keys.partitions:
            # A predecessor may have died before it removed what its last round had there.
            sweep_quietly(self._transport, handle._keys, min_replicas=handle._scripts.min_replicas)
        # Usually the last publication has declared it. But a loop that was to continue may have published that step, or
        # the server may have lost the declaration.
        self._declare_finished()

    def finish(self) -> None:
        """Declares that the step that is published is the last one."""
        self.make(self._declare_finished, "to finish the training")

    def _declare_finished(self) -> None:
        if self._options.here.run_id is not None:
            # Also if it is finished already: the workers of this run, which may have begun a moment ago, cannot know
            # yet that this chief does not continue it.
            conclude(self._transport, self._keys, self._options.here.run_id)
        elif not self._parameters.finished():
            self._parameters.finish()
        self.is_finished = True

    def read(self, read: Callable[[], tuple[int, Any] | None], what: str) -> tuple[int, Any]:
        """Returns what is published, as ``read`` does."""
        while (found := self.make(read, what)) is None:
            self._must_look = True
        return found

    def history(self) -> list[PastStep]:
        """Returns the steps until now."""
        return self._patience.call(self._parameters.history, "to read the history")

    def delete(self) -> None:
        """Removes the training for everybody."""
        if self._accumulator is not None:
            self._patience.call(self._accumulator.delete, "to delete the gradients")
        self._patience.call(self._parameters.delete, "to delete the parameters")


_ACTIONS: Mapping[Action, Callable[[Lead], None]] = {
    Action.STAND_BY: Lead._stand_by,
    Action.OPEN: Lead._open,
    Action.ASK: Lead._ask,
    Action.RESTORE: Lead._restore,
    Action.RESTORE_SAVED: Lead._restore_saved,
    Action.RESTORE_OWN: Lead._restore_own,
    Action.HAND_OVER: Lead._hand_over,
    Action.GIVE_UP: Lead._give_up,
    Action.BEGIN: Lead._begin,
    Action.LEARN: Lead._learn,
    Action.SET_STEP: Lead._set_step,
    Action.CATCH_UP: Lead._catch_up,
    Action.REPLACE: Lead._replace,
    Action.RECOVER: Lead._recover,
    Action.DISCARD: Lead._discard,
    Action.STORE_QUORUM: Lead._store_quorum,
}
