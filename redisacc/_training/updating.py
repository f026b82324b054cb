"""What a leader has of a run with an optimizer: it orders and commits updates, and handles no dense arrays."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from redisacc._arrays import validation
from redisacc._arrays.metrics import Means
from redisacc._arrays.validation import Array
from redisacc._format.keys import ParameterKeys
from redisacc._format.leaves import Schema
from redisacc._format.parameter_record import UPDATES
from redisacc._format.quorum import Quorum
from redisacc._handles.base import ConditionalAccumulatorBase, host_and_process
from redisacc._handles.options import Mean
from redisacc._handles.parameters import Parameters
from redisacc._log import warn
from redisacc._protocol.parameters.publisher import schema_of
from redisacc._protocol.rounds.taker import GrantedRound
from redisacc._protocol.scripts import OF_PARAMETERS, refused
from redisacc._protocol.updates.committer import Committer
from redisacc._protocol.updates.model import UpdateModel, check_leaves
from redisacc._protocol.updates.opening import Whole, begin_updates, publish_whole
from redisacc._protocol.updates.record import KnownVersion, UpdateRecord, parse_update_record, update_command
from redisacc._protocol.updates.values import VersionValues
from redisacc._text import shown
from redisacc._training.program_weights import pack_state, read_exact
from redisacc.errors import DataLossError, InvalidArgumentError
from redisacc.optim import Optimizer


def check_optimizer(optimizer: object, parameters: object, *, state: object, mean: Mean | None) -> None:
    """Checks what a chief with an optimizer cannot have.

    Raises:
        InvalidArgumentError: ``optimizer`` is none, or does not go together with another argument.
    """
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer):
        raise InvalidArgumentError(
            f"optimizer must be one of redisacc.optim, such as redisacc.optim.AdamW(1e-3), or None, not "
            f"{shown(type(optimizer).__name__)}"
        )
    slots = {*optimizer.slots, UPDATES}
    if state is not None and not (isinstance(state, Mapping) and state.keys() == slots):
        raise InvalidArgumentError(
            f"state must be None with an optimizer, which keeps its own state, or a dict of {sorted(slots)} as "
            "latest_state() returns it"
        )
    if mean is not None and mean.missing not in (None, "zero"):
        raise InvalidArgumentError(f"mean.missing must be 'zero' with an optimizer, not {shown(mean.missing)}")
    check_leaves(schema_of(parameters, "parameters")[0], optimizer)


class Updating:
    """The version that an optimizer updates, as the leader knows it without the server.

    Args:
        parameters: the handle on its parameters.
        optimizer: the optimizer.
        schema: the leaves.
        snapshot, brings: as for ``Committer``.
    """

    def __init__(
        self,
        parameters: Parameters,
        optimizer: Optimizer,
        schema: Schema,
        snapshot: Callable[[], int | None],
        brings: Callable[[str, int, Array], None] | None,
    ) -> None:
        self._parameters, self._optimizer, self._schema, self._snapshot = parameters, optimizer, schema, snapshot
        self._brings = brings
        self._publisher = f"chief {host_and_process(os.getpid())}"
        self._accumulator: ConditionalAccumulatorBase[Any]
        self._keys: ParameterKeys
        self._commits: Committer
        # The version that was published last, as far as this process knows; and what is in memory of it.
        self._known: KnownVersion | None = None
        self._values = VersionValues(parameters._transport)
        # All of that version, if this process has published it whole.
        self._whole: Whole | None = None

    def reopen(self, accumulator: ConditionalAccumulatorBase[Any]) -> None:
        """Notes a handle on the gradients, perhaps in place of one whose accumulator the server has lost."""
        self._accumulator = accumulator
        gradients, accumulator._taker.is_updated = accumulator._keys, True
        # The same partitions, so that a part of the weights lies where that part of the gradients does.
        self._keys = ParameterKeys(gradients.name, gradients.partitions)
        self._commits = Committer(accumulator._taker, self._values, self._publisher, self._snapshot, self._brings)

    @property
    def _version(self) -> KnownVersion:
        assert self._known is not None
        return self._known

    @property
    def step(self) -> int:
        """The step of the version that the next update begins with."""
        return self._version.step

    @property
    def metrics(self) -> Means:
        """The means of the metrics of the last round that was used."""
        return self._commits.metrics

    def learn(self, given: tuple[Any, Any] | None = None) -> None:
        """Makes sure that what is published can be updated: its form, the optimizer, and its state.

        Args:
            given: the weights to begin with, and the state of an optimizer or None, if nothing is published.
        """
        handle = self._parameters
        self._whole = None
        # Leaves whose gradients are rows.
        tables = tuple([n for n, leaf in enumerate(self._accumulator._spec.leaves) if leaf.is_sparse])
        model = UpdateModel.new(self._schema, self._optimizer, self._keys, handle._encoding, tables)
        step = 0 if given is not None else handle.step() or 0

        def begun() -> Whole:
            # A program, or another optimizer, may have published it.
            self._whole = self._fitting(model, step, *(given or read_exact(handle)[2:]))
            return self._whole

        self._learn(begin_updates(handle._transport, handle._reader, model, begun, self._publisher))

    def _fitting(self, model: UpdateModel, step: int, tree: Any, state: Any) -> Whole:
        """Returns weights to begin with, and the state of an optimizer with the same slots, or a new one."""
        schema, optimizer = model.schema, model.optimizer
        weights = schema.arrays_of(tree, "parameters")
        if isinstance(state, dict) and state.keys() == {*optimizer.slots, UPDATES}:
            kept = {slot: schema.arrays_of(state[slot], f"slot {slot} of the state") for slot in optimizer.slots}
            updates = validation.integer(state[UPDATES], "updates of the state", low=0)
            return Whole(model, step, weights, kept, updates)
        if state is not None:
            warn(
                self._keys.name,
                "the state that was published does not fit %s, so the optimizer begins with a new state",
                optimizer.name,
            )
        new = {slot: [optimizer.initial(slot, values) for values in weights] for slot in optimizer.slots}
        return Whole(model, step, weights, new, 0)

    def publish_again(self, check: Callable[[], object], *, is_lost: bool) -> bool:
        """Publishes the version again whose parts, or which itself, the server has lost.

        Blocks until they are there: from this process, from the nodes, and from reducers.

        Args:
            check: raises an error if this process is no longer the chief.
            is_lost: whether the server has nothing at all.

        Returns:
            Whether it has the form that is updated. If not, ``learn`` has to follow.

        Raises:
            DataLossError: nobody has some of the parts.
        """
        known, handle = self._version, self._parameters
        if (whole := self._whole) is None:
            leaves = self._values.gather(known, check)
            whole = Whole(known.model, known.step, leaves.pop(known.model.base), leaves, known.updates)
        if is_lost:
            build = known.model.schema.structure.build
            tree, slots = build(whole.weights), {slot: build(of) for slot, of in whole.state.items()}
            state = pack_state(handle, tree, {UPDATES: np.array(known.updates), **slots})
            handle._restore(tree, known.step, state=state, kept=self.kept)
            return False
        # The optimizer of the record has no schedule.
        whole = replace(whole, model=replace(known.model, optimizer=self._optimizer))
        self._learn(publish_whole(handle._transport, handle._reader, whole, self._publisher))
        return True

    def _learn(self, record: UpdateRecord) -> None:
        """Notes the version that was published whole: if another one was known, with the same values."""
        if self._known is not None:
            self._values.rename(self._known, record)
        self._known, self.kept = record, record.record.kept

    def recover(self) -> GrantedRound | None:
        """Returns a round that was granted and not used, None if there is none."""
        handle = self._accumulator
        handle._records.read()
        return handle._taker.grant_again(None, name=handle._worker)

    def grant(
        self, *, min_weight: float | None, cancel: Callable[[], bool], describe: Callable[[], str]
    ) -> GrantedRound:
        """Blocks until a round is granted. The arguments are those of ``take``."""
        handle = self._accumulator
        handle._lifetime.check()
        with handle._observe("take", handle._worker):
            return handle._taker.grant(
                Quorum(min_weight=min_weight),
                deadline=math.inf,
                name=handle._worker,
                label=handle._own_label,
                describe=describe,
                cancel=cancel,
            )

    def step_of(self, found: GrantedRound) -> int:
        """Returns the step of a round."""
        return int(found.granted.global_step)

    def discard(self, found: GrantedRound) -> None:
        """Removes a round that has been used."""
        self._commits.discard(found)

    def commit(self, found: GrantedRound, *, finished: bool) -> bool:
        """Updates the parameters with the round of the version that is known.

        May be called again after an error. If ``step`` has grown, the version was published.

        Args:
            found: the round.
            finished: whether the new version is the last one.

        Returns:
            False if somebody else has published a version, so that nothing changed.
        """
        # If somebody else has used the round, nothing is known of it.
        self._commits.metrics = Means()
        before = self._version
        if not isinstance(before, UpdateRecord):
            self.refresh()
            return True
        made = self._commits.commit(found, before, self._optimizer, finished=finished)
        if made is None:
            return False
        # From now on, this is what a server loses that loses its data.
        self._known, reply = made
        self._whole = None
        self.kept = self._commits.metrics.kept or self.kept
        self._note(reply)
        return True

    def refresh(self) -> None:
        """Reads the version that is published.

        Raises:
            NotFoundError: there is none.
            DataLossError: it is older than what is known.
        """
        self._note(self._parameters._transport.call(*update_command(self._keys)))

    def _note(self, reply: object) -> None:
        found = parse_update_record(self._parameters._transport, self._keys, reply, self._known)
        if found is None:
            raise refused(OF_PARAMETERS["missing"], self._keys)
        if found.step < self.step:
            # What this process has is newer, and must not be forgotten.
            raise DataLossError(
                f"parameters {shown(self._keys.name)}: the server has lost step {self.step}, and is at step "
                f"{found.step}"
            )
        self._whole = None
        self._known, self.kept = found, found.record.kept
