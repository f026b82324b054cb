"""How a leader looks at what there is, and does the first thing that is missing. ``decision.py`` says what that is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from redisacc._arrays.trees import as_arrays
from redisacc._arrays.validation import Array
from redisacc._checkpoints.file import Checkpoint
from redisacc._clock import clock, durations
from redisacc._format.keys import ParameterKeys
from redisacc._handles.environment import Place
from redisacc._handles.tree import TreeAccumulator
from redisacc._log import inform
from redisacc._protocol.parameters.marks import whereabouts
from redisacc._protocol.parameters.publisher import schema_of
from redisacc._protocol.parameters.reader import ParameterReader
from redisacc._protocol.rounds.take_wait import end_takes
from redisacc._protocol.scripts import StaleSequenceError
from redisacc._protocol.waiting.wait import WaitLog
from redisacc._text import shown
from redisacc._training.checkpointer import Checkpointer
from redisacc._training.decision import ENDS, Action, View, next_action, source_of
from redisacc._training.gradients import has_no_gradients
from redisacc._training.loss import Inquiry, give_up
from redisacc._training.options import Checkpoints, GradientOptions
from redisacc._training.participant import Participant
from redisacc._training.program_weights import ProgramWeights, pack_state
from redisacc._training.quorum import CrewQuorum, QuorumKeeper
from redisacc._training.updating import Updating
from redisacc.errors import (
    CancelledError,
    ConflictError,
    DataLossError,
    NotFoundError,
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
        optimizer: the optimizer; None means the program updates the weights.
        quorum: what a step waits for.
        gradients: the options of the accumulator.
        checkpoint: where checkpoints are written, None means nowhere.
        encoding: how the weights travel to workers.
        redis: the way to the server.
        patience: for how many seconds to wait for a silent server; None means forever.
        standby: whether to wait while another process leads.
        here: the place of this process in a run.
        stops: whether this process is to lead no longer.
        own: returns the step and the weights that the worker in this process has, and what has read them; or None.
        has_seen: whether this process has seen a version of this run, so that another one has led.
        snapshot: with mean gradients as versions, returns the step since which they are kept; None means not known.
        saved: returns what the run continues with if the server has nothing newer; unless ``checkpoint`` is given.
        brings: gets each part of a version that is computed here: the version, the number, and its bytes; or None.
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
    own: Callable[[], tuple[int, Any, ParameterReader] | None] = field(default=lambda: None)
    has_seen: Callable[[], bool] = field(default=lambda: False)
    snapshot: Callable[[], int | None] = field(default=lambda: None)
    saved: Callable[[], Checkpoint | None] = field(default=lambda: None)
    brings: Callable[[str, int, Array], None] | None = None


class Reconciliation(Participant):
    """Makes what there is of a run what there should be.

    Args:
        shared_name: the name of the run.
        options: what the leader is told.
    """

    _quorum: QuorumKeeper

    def __init__(self, shared_name: str, options: LeadOptions) -> None:
        gradients = options.gradients
        super().__init__(
            "chief",
            shared_name,
            options.here,
            redis=options.redis,
            patience=options.patience,
            encoding=options.encoding,
            partitions=gradients.get("partitions"),
            min_replicas=gradients.get("min_replicas", 0),
        )
        self._keys = ParameterKeys(self.shared_name)
        self._schema, _ = schema_of(options.parameters, "parameters")
        self._parameters._reader.note_given("tree", self._schema.structure)
        if options.state is not None:
            self._parameters._reader.note_given("state", schema_of(options.state, "state")[0].structure)
        # What to begin with, until something is published.
        self._given: tuple[Any, Any] | None = options.parameters, options.state
        self._state = options.state
        self._options = replace(options, parameters=None, state=None)
        # The weights that this process has, and how they are updated.
        self._weights = self._unknown_weights()
        # Whether the step that is published is declared the last one; whether the body of the program's loop has the
        # round; and the step with which the loop ends.
        self._is_finished = self._is_with_program = False
        self._last: int | None = None
        # What is known; replies keep it current, and after a surprise, it is to be looked at again.
        self._view, self._must_look = View(lease="none"), True
        self._accumulator: TreeAccumulator | None = None
        # The round that this process has.
        self._found: Any = None
        # Whether the accumulator was there after the weights had been published, so that no loss took it alone.
        self._has_seen_both = False
        self._follows = self._is_rescued = False
        # How often the lease had run out when the weights were seen last.
        self._gaps = 0
        # Why something is gone.
        self._error: RedisAccError | None = None
        self._lost: DataLossError | None = None
        self._inquiry = Inquiry(self._transport, self._crew, self.shared_name)
        self._checkpointer: Checkpointer | None = None
        self._saved: Checkpoint | None = None
        self._looks_for_saved, self._find_saved = True, options.saved
        if options.checkpoint is not None:
            with self._closed_on_failure():
                self._checkpointer = checkpointer = Checkpointer(self._transport, self.shared_name, options.checkpoint)
                self._find_saved = lambda: next(checkpointer.folder.valid(), None)
                self._opened.callback(checkpointer.close)

    def _unknown_weights(self) -> ProgramWeights | Updating:
        options, parameters = self._options, self._parameters
        if options.optimizer is not None:
            return Updating(parameters, options.optimizer, self._schema, options.snapshot, options.brings)
        return ProgramWeights(parameters)

    # The loop

    def _make(self, attempt: Callable[[], Value], what: str) -> Value:
        """Returns the result of an attempt, which is made once nothing is missing, and again after whatever goes wrong.

        Args:
            attempt: may be repeated without harm.
            what: its purpose, for log records, as in "to publish step 7".
        """
        return self._patience.call(lambda: self._reconciled(attempt), what, in_steps=True)

    def _reconciled(self, attempt: Callable[[], Value]) -> Value:
        before: tuple[Action, View] | None = None
        pause, log = FIRST_PAUSE, WaitLog(clock.now())
        while True:
            action = self._decided()
            if action in ENDS:
                self._must_look = True
                raise self._ending(action)
            now = action, replace(self._view)
            if now != before:
                before, pause = now, FIRST_PAUSE
            elif action not in PATIENT:
                if log.is_due(clock.now()):
                    self._warn("still trying to %s: %s", action.value, self._error)
                self._transport.waits.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            try:
                if action is Action.PROCEED:
                    return attempt()
                self._must_look = True
                getattr(self, f"_{action.name.lower()}")()
            except SURPRISES as error:
                self._note(error)
            except RedisAccError:
                self._must_look = True
                raise

    def _decided(self) -> Action:
        """Looks if that is necessary, and returns what to do next."""
        while True:
            if self._options.stops():
                raise CancelledError(f"this process no longer stands by to lead {shown(self.shared_name)}")
            try:
                if self._must_look and self._view.lease == "held":
                    self._look()
                self._check_that_it_leads()
                return next_action(self._view)
            except SURPRISES as error:
                self._note(error)
                self._transport.waits.sleep(FIRST_PAUSE)

    def _check_that_it_leads(self) -> None:
        if self._view.lease == "none":
            return
        try:
            self._lease.check()
        except ConflictError as error:
            self._error, self._view.lease = error, "lost"
            if self._options.standby and self._view.memory is None:
                self._warn("%s; standing by", error)
                self._view.lease = "none"

    def _note(self, error: RedisAccError) -> None:
        """Notes that something is not as it was seen."""
        logger.debug("%s: %s", self.shared_name, error)
        self._error, self._must_look = error, True
        if not isinstance(error, DataLossError):
            return
        if error.part is None:
            if isinstance(self._weights, Updating):
                # Perhaps the round. If the server still has it, it is found again.
                self._hold(None)
                self._view.may_be_left = True
        elif error.gradient is None:
            # A part of the version, which a look may not notice.
            self._view.is_complete = self._must_look = False
        else:
            self._view.is_useless = True

    # The look

    def _look(self) -> None:
        """Looks at what there is."""
        view = self._view
        self._look_at_weights(view)
        if view.is_deleted or view.lease == "lost":
            return
        self._look_at_gradients(view)
        known = view.memory or 0
        if view.published is None or view.published < known or view.gradients > known:
            # The lease is lost as well, or older, and another process may have taken it since.
            self._lease.take_again()
        if view.published is not None:
            self._gaps, self._inquiry = self._lease.gaps, Inquiry(self._transport, self._crew, self.shared_name)
        view.has_led_throughout = self._lease.gaps == self._gaps
        if view.memory is None or not view.has_led_throughout:
            self._look_for_sources(view)
        view.has_lost = self._lost is not None or self._inquiry.asked is not None
        self._must_look = False

    def _look_at_weights(self, view: View) -> None:
        reader = self._parameters._reader
        try:
            record = reader.poll()
        except NotFoundError as error:
            found = whereabouts(self._transport, self._keys, reader.incarnation)
            if found == "there":
                # Since the first read, somebody has published again what was lost.
                raise
            if found == "deleted":
                self._error, view.is_deleted = error, True
                return
            record = None if found == "lost" else ParameterReader(self._transport, self._keys).poll()
            if view.memory is not None and record is not None and record.step >= view.memory:
                self._error, view.lease = ConflictError(f"{error}; they are at step {record.step}"), "lost"
                return
            if record is not None:
                # Another training has taken the place of one that was lost while this process stood by; or the server
                # has older data, of the processes before those that have continued with a checkpoint.
                self._parameters._forget()
                record = self._parameters._reader.poll()
        view.published = None if record is None else record.step
        if record is not None:
            if self._given is not None:
                # Another model may be trained under this name.
                self._parameters.check(self._given[0], state=self._given[1])
            # Most records are read once: only one with partitions that lacks a part may have been replaced meanwhile.
            is_complete = self._parameters._reader.is_complete(record) or self._parameters.is_complete()
            self._is_finished, view.is_complete = record.finished, is_complete

    def _look_at_gradients(self, view: View) -> None:
        handle, view.is_open = self._accumulator, False
        if handle is None:
            return
        try:
            record = handle._records.read()
        except NotFoundError as error:
            # Both are in one slot, so a server loses both, and older data have one of their own.
            if view.published is None or not (
                self._has_seen_both and has_no_gradients(self._transport, self.shared_name, alone=True)
            ):
                self._close_gradients()
            else:
                self._error, view.is_deleted = error, True
            return
        self._has_seen_both = view.published is not None
        view.is_open, view.gradients, view.is_empty = True, record.global_step, record.num_accumulated == 0
        view.has_quorum = view.has_quorum and record.quorum.least is not None

    def _close_gradients(self) -> None:
        if self._accumulator is not None:
            self._accumulator.close()
        self._accumulator = None
        if not self._is_with_program:
            self._hold(None)

    def _hold(self, found: Any) -> None:
        """Notes the round that this process has."""
        self._found = found
        self._view.round = None if found is None else self._weights.step_of(found)

    def _look_for_sources(self, view: View) -> None:
        """Looks for weights that this process does not know yet."""
        if self._looks_for_saved:
            self._saved, self._looks_for_saved = self._find_saved(), False
        own, inquiry = self._options.own(), self._inquiry
        view.saved, view.own = self._saved.step if self._saved else None, own[0] if own else None
        view.claimed = None
        if view.published is not None:
            view.may_be_rescued = not view.is_complete and bool(own or self._crew.workers())
            return
        had = view.memory is not None or self._lost is not None
        view.may_be_lost = inquiry.may_be_lost(is_lost=had, follows=self._follows)
        if view.may_be_lost:
            view.has_asked = inquiry.has_asked()
            view.claimed = inquiry.wanted.step if view.has_asked and inquiry.wanted else None

    # The actions

    def _stand_by(self) -> None:
        crew, stops, inquiry = self._crew, self._options.stops, self._inquiry
        led = self._options.has_seen() or bool(self._parameters._reader.incarnation)
        if self._options.standby and not led:
            # Meanwhile, a process that has led takes its lease again: it alone has the state.
            while self._parameters.step() is None and inquiry.may_be_lost(is_lost=False, follows=False):
                if inquiry.has_asked():
                    break
                inquiry.ask()
        follows = crew.stand_by("chief", stops, follows=led) if self._options.standby else crew.wait_for("chief")
        if follows:
            # Another process has led meanwhile, so earlier answers no longer hold.
            self._follows, self._inquiry = True, Inquiry(self._transport, self._crew, self.shared_name)
        self._keep("chief")
        self._view.lease = "held"

    def _open(self) -> None:
        gradients: Any = {**self._options.gradients}
        sparse = gradients.pop("sparse", None) or ()
        if gradients.get("order") is None and has_no_gradients(self._transport, self.shared_name):
            gradients["order"] = "worker"
        self._accumulator = handle = self._opened.enter_context(
            TreeAccumulator.like(
                self._schema.stand_in(),
                self.shared_name,
                sparse=sparse,
                redis=self._options.redis,
                worker="chief",
                once_per_worker=True,
                **gradients,
            )
        )
        self._weights.reopen(handle)
        self._quorum = QuorumKeeper(self._options.quorum, handle, self._crew, self._transport, self.shared_name)
        self._quorum.until = self._last
        # This process has the chief's lease, so they are of predecessors.
        end_takes(handle._transport, handle._keys, handle._scripts)
        self._view.has_quorum, self._view.may_be_left = False, True

    def _ask(self) -> None:
        self._inquiry.ask()

    def _hand_over(self) -> None:
        self._is_rescued = True
        self._inquiry.hand_over()

    def _give_up(self) -> None:
        self._warn("%s. Continuing from what workers have, or from a checkpoint", self._lost)
        # The parameters go first: a worker that finds no accumulator looks for them.
        give_up(self._transport, self._keys)
        self._replace()

    def _restore(self) -> None:
        """Publishes what this process has: the server has lost it, has an older version, or has lost a part of it."""
        view, step, source = self._view, self._weights.step, "the memory of the chief"
        self._begin_anew()
        if view.published is None:
            source += " and of reducers" if isinstance(self._weights, Updating) else ""
            self._warn(
                "the server has lost this run: it was flushed, or restarted without its data. Restoring step %d "
                "from %s; workers apply their gradients of this step again",
                step,
                source,
            )
        elif view.published == step:
            self._warn("a node has lost a part of the parameters of step %d; publishing them again", step)
        else:
            self._warn(
                "the server has lost the parameters of step %d, and is at step %d; publishing them again",
                step,
                view.published,
            )
        self._know(lambda: self._weights.publish_again(self._check_lease, is_lost=view.published is None))

    def _know(self, attempt: Callable[[], bool]) -> bool:
        """Makes an attempt that needs all parts of a version. If nobody has them all, others may have something."""
        try:
            self._view.is_learned = attempt()
        except DataLossError as error:
            self._lost = self._error = error
            self._hold(None)
            self._view.memory, self._looks_for_saved = None, True
            self._weights = self._unknown_weights()
            if self._accumulator is not None:
                self._weights.reopen(self._accumulator)
            return False
        return True

    def _begin_anew(self) -> None:
        """Prepares for weights that are published for the first time, or again."""
        self._check_lease()
        # The server may lose the accumulator before it gets them.
        self._has_seen_both = self._view.has_quorum = False
        self._view.may_be_left = True

    def _publish(self, tree: Any, step: int, state: Any, kept: str) -> None:
        self._begin_anew()
        self._parameters._restore(tree, step, state=pack_state(self._parameters, tree, state), kept=kept)

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
        self._publish(saved.parameters, saved.step, saved.state, saved.kept)

    def _restore_own(self) -> None:
        own, self._is_rescued = self._options.own(), True
        if own is not None:
            step, tree, reader = own
            # The other workers go on with what they have seen, in the same partitions, and not with another training.
            self._parameters._reader.learn(reader.incarnation, reader.keys, self._schema)
            self._publish(tree, step, None, reader.kept)

    def _begin(self) -> None:
        assert self._given is not None
        tree, state = self._given
        if self._parameters._reader.incarnation:
            self._parameters._forget()
        self._inquiry.end()
        self._begin_anew()
        if isinstance(self._weights, Updating):
            self._weights.learn((tree, state))
        else:
            tree, state = as_arrays(tree, "parameters"), as_arrays(state, "state")
            self._parameters.publish(tree, 0, state=pack_state(self._parameters, tree, state))
            self._weights.keep(0, tree, state, "")
        self._has_learned()

    def _learn(self) -> None:
        def learned() -> bool:
            self._weights.learn()
            return True

        if not self._know(learned):
            return
        if self._is_rescued:
            self._inquiry.end()
            if isinstance(self._weights, ProgramWeights):
                # Workers have none.
                self._weights.state = as_arrays(self._state, "state")
            self._warn(
                "the server has lost this run; continuing at step %s with the parameters of a living worker. The "
                "state of the chief, such as the optimizer's, is lost, and begins as it was given",
                self._weights.step,
            )
        elif self._view.memory is None:
            step = self._weights.step
            inform(self.shared_name, "continuing at step %d", step, step=step)
        self._has_learned()

    def _has_learned(self) -> None:
        """Notes that this process has what is published."""
        self._view.memory, self._view.is_learned = self._weights.step, True
        self._is_rescued, self._lost, self._given, self._saved = False, None, None, None

    def _set_step(self) -> None:
        """Sets the step before the weights are there: no worker uses the accumulator yet."""
        source, handle = source_of(self._view), self._accumulator
        assert source is not None
        assert handle is not None
        self._check_lease()
        handle.set_global_step(source[0] + (self._view.round == source[0]))

    def _catch_up(self) -> None:
        """Brings the accumulator from an earlier step to the step of the parameters, with an empty round.

        Its gradients may belong to earlier steps, and were used before. If a gradient of the current step is thrown
        away with them, its worker applies it again.
        """
        handle, view, step = self._accumulator, self._view, self._weights.step
        assert handle is not None
        self._check_lease()
        # If the take raises, its round is left.
        view.has_quorum, view.may_be_left = False, True
        if view.gradients < step - 1:
            handle.set_global_step(step - 1)
        for timeout in (0.0, durations.taker_lease):
            with suppress(TakeTimeoutError):
                # Takes whatever is there and ends the step in one operation, so that nothing can be added to it.
                with handle.take(1, timeout=timeout) as taken:
                    self._warn(
                        "number of gradients that may be older than step %d, and are dropped: %d; workers apply those "
                        "of this step again",
                        step,
                        taken.num_accumulated,
                    )
                return
            handle.set_global_step(step)
            if handle.num_accumulated() == 0:
                return
            # They arrived between the two commands, so they may be of an earlier step. Or a take of this process that
            # ended long ago is back with the older data, and is the first in the queue until its lease ends.
            handle.set_global_step(step - 1)

    def _replace(self) -> None:
        """Replaces an accumulator whose gradients nobody can use. Their workers apply them again."""
        view, handle = self._view, self._accumulator
        self._check_lease()
        if view.published is not None and view.memory is not None:
            reason = self._error if view.is_useless else f"step {view.gradients} has begun without its parameters"
            self._warn("%s. Beginning step %d again: its workers apply their gradients again", reason, view.memory)
        # First, so that another one is opened if this ends early.
        self._accumulator, view.is_useless = None, False
        self._hold(None)
        if handle is not None:
            with suppress(NotFoundError):
                handle.delete()
            handle.close()

    def _recover(self) -> None:
        view = self._view
        self._hold(self._weights.recover())
        view.may_be_left = False
        # If there is none although its step has begun, a predecessor may have published what follows since the look.
        self._must_look = view.round is None and view.gradients != view.memory

    def _discard(self) -> None:
        found, self._view.may_be_left = self._found, True
        self._hold(None)
        self._weights.discard(found)

    def _store_quorum(self) -> None:
        self._quorum.store()
        self._view.has_quorum = True

    # The ends

    def _ending(self, action: Action) -> RedisAccError:
        """Returns the error that says why nothing helps."""
        view = self._view
        if action in (Action.END_DELETED, Action.END_SUPERSEDED) and self._error is not None:
            return self._error
        if action is Action.END_LOST:
            return self._nobody_has_it()
        # Its lease may have been given back since, so that it is this process's again.
        return ConflictError(
            f"{self.shared_name}: another process has published step {view.published}, while the chief in this "
            f"process was at step {view.memory}: this process or the server stood still, and another one was the "
            f"chief meanwhile. This process can no longer be the chief; one that is started again continues with "
            f"step {view.published}"
        )

    def _nobody_has_it(self) -> RedisAccError:
        asked = self._inquiry.asked
        if self._lost is not None or asked is None:
            return self._lost or DataLossError(f"{shown(self.shared_name)}: the server has lost a part of what it had")
        return DataLossError(
            f"{shown(self.shared_name)}: the server has lost this run, and {asked.place} had step {asked.step} of "
            "its parameters, but has not published them: it has died, or its user may not publish. Start the chief "
            "again with a checkpoint; or, to begin again at step 0, stop the workers first"
        )
