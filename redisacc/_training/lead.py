"""The leading half of a training: it takes the rounds, and publishes the parameters that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from redisacc._arrays.results import Round
from redisacc._arrays.trees import as_arrays
from redisacc._arrays.weights import is_nothing
from redisacc._clock import clock, durations
from redisacc._format.history_entries import PastStep, history_text
from redisacc._handles import exit_code
from redisacc._handles.environment import WORKERS
from redisacc._handles.parameters import Parameters
from redisacc._protocol.parameters.conclusion import conclude
from redisacc._protocol.parts.sweep import sweep_quietly
from redisacc._training.crew_text import crew_text
from redisacc._training.decision import Action, next_action
from redisacc._training.exact_parameters import pack_state
from redisacc._training.program_weights import ProgramWeights
from redisacc._training.reconciliation import SURPRISES, LeadOptions, Reconciliation
from redisacc._training.updating import Updating
from redisacc.errors import (
    CancelledError,
    InvalidArgumentError,
    NotReplicatedError,
    RedisAccError,
)


class Lead(Reconciliation):
    """Leads a training. The constructor blocks until this process leads, and everything is there for the first round.

    Args:
        shared_name: the name of the training.
        options: what it is told.
    """

    def __init__(self, shared_name: str, options: LeadOptions) -> None:
        super().__init__(shared_name, options)
        self._next_look = 0.0
        self._is_disturbed = False
        with self._closed_on_failure():
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
    def metrics(self) -> dict[str, float]:
        """The means of the metrics of the last round that an optimizer has used."""
        return dict(self.weights.metrics) if isinstance(self.weights, Updating) else {}

    @property
    def workers(self) -> int:
        """How many workers there are, as this process last announced it."""
        return self._quorum.workers

    # The loops

    def rounds(self, until: int | None) -> Iterator[Round[Any]]:
        """Yields the round of each step, for a loop that publishes what follows."""
        view = self._view
        self._aim(until)
        while (found := self._round()) is not None:
            self.is_with_program = True
            try:
                if is_nothing(found.round.num_accumulated, found.round.total_weight):
                    assert isinstance(self.weights, ProgramWeights)
                    self.publish(self.weights.tree, None, self.weights.state, finished=False)
                    continue
                yield found.round
                if self.is_with_program:
                    raise RedisAccError(
                        f"{self.shared_name}: the parameters that follow from the round of step {view.memory} were not "
                        "published. Call publish() once in the body of the loop"
                    )
            finally:
                if self.is_with_program:
                    # The next round may be this one.
                    self._hold(None)
                    self.is_with_program, view.may_be_left, self._must_look = False, True, True
        self._end()

    def updates(self, until: int | None) -> Iterator[int]:
        """Yields the step after each update that the optimizer makes."""
        self._aim(until)
        while (found := self._round()) is not None:
            if self._commit(found):
                yield self.weights.step
        self._end()

    def _aim(self, last: int | None) -> None:
        """Begins a loop. If the training is finished, but its last step is to be a later one, continues it."""
        self.last, self._must_look = last, True

        def begin() -> None:
            if self.is_finished and last is not None and self.weights.step < last:
                self._parameters.finish(False)
                self.is_finished = False
            self._quorum.aim(last)

        self.make(begin, "to announce the last step")

    def _round(self) -> Any:
        """Returns the round of the step. Blocks until it is complete; None means the training is finished."""
        while not self.is_finished and (self.last is None or self.weights.step < self.last):
            what = f"to take the round of step {self.weights.step}"
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
        self._view.may_be_left, self._must_look, self._is_disturbed = True, True, False
        self._next_look = clock.now() + durations.look_every
        self._quorum.follow()
        try:
            found = self.weights.grant(
                min_weight=self._options.quorum.quorum.min_weight,
                cancel=self._looks_disturbed,
                describe=lambda: crew_text(self._crew),
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
            self._is_disturbed = self.is_finished or next_action(self._view) is not Action.PROCEED
        except SURPRISES as error:
            self._is_disturbed, self._error = True, error
        self._view.may_be_left = self._must_look = True
        return self._is_disturbed

    # Steps

    def publish(self, tree: Any, changed: Mapping[str, Any] | None, state: Any, *, finished: bool) -> None:
        """Publishes what follows from the round that the program has, which ends in the same instant."""
        weights, found, step = self.weights, self._found, self.weights.step + 1
        assert isinstance(weights, ProgramWeights)
        # In one request: between two, the workers would compute one more gradient, in vain.
        is_last = finished or step == self.last
        # As after a restart, so that no program breaks only then.
        tree, state = as_arrays(tree, "parameters"), as_arrays(state, "state")
        stored, taken, ended = pack_state(self._parameters, tree, state), found.round, found.ended
        ended.past = history_text(step - 1, taken.num_accumulated, taken.metrics)
        # If the network was away for longer than the lease, a successor may have published this step and later ones.
        self.make(
            lambda: self._parameters._publish(tree, step, changed, stored, is_last, ended=ended),
            f"to publish step {step}",
        )
        weights.keep(step, tree, state)
        self._advance(finished=is_last)
        self.is_with_program = False
        if not ended.has_ended:
            # The server has lost the round, or the reply was lost. What else is lost, the next look shows.
            self._view.may_be_left = self._must_look = True

    def _commit(self, found: Any) -> bool:
        """Updates the weights with a round. Returns False if the step has to begin again."""
        step = self.weights.step
        is_last = step + 1 == self.last

        def attempt() -> bool:
            weights = self.weights
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
            is_published = self.make(attempt, f"to publish step {step + 1}")
        except NotReplicatedError:
            # It is published, and another loop continues with the next step.
            assert isinstance(self.weights, Updating)
            self._patience.call(self.weights.refresh, "to read the parameters")
            self._advance(finished=is_last)
            raise
        if is_published:
            self._advance(finished=is_last)
        return is_published

    def _advance(self, *, finished: bool) -> None:
        """Notes that the next step has begun."""
        view, step = self._view, self.weights.step
        view.published = view.memory = view.gradients = step
        self._hold(None)
        self.is_finished = self.is_finished or finished
        exit_code.advanced()
        if self._checkpointer is not None:
            self._checkpointer.note(step, last=finished)

    # Endings

    def _end(self) -> None:
        """Makes sure that the server has the last step, that it is declared the last, and that no round is left."""
        self._view.may_be_left = self._must_look = True
        self.make(self._conclude, "to finish the training")

    def _conclude(self) -> None:
        handle = self._accumulator
        assert handle is not None
        if self._found is not None:
            raise self._ending(Action.END_AHEAD)
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
