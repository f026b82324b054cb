"""What a leader has of a run with an optimizer: it orders and commits updates, and handles no dense arrays."""

from __future__ import annotations

import logging
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
from redisacc._protocol.parameters.publisher import schema_of
from redisacc._protocol.rounds.taker import GrantedRound
from redisacc._protocol.scripts import OF_PARAMETERS, refused
from redisacc._protocol.updates.committer import Committer
from redisacc._protocol.updates.model import check_leaves
from redisacc._protocol.updates.opening import Whole, begin_updates, publish_whole
from redisacc._protocol.updates.record import KnownVersion, UpdateRecord, parse_update_record, update_command
from redisacc._text import shown
from redisacc._training.program_weights import pack_state, read_exact
from redisacc.errors import DataLossError, InvalidArgumentError
from redisacc.optim import Optimizer

logger = logging.getLogger("redisacc")


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
        self._committer: Committer | None = None
        self._record: UpdateRecord | None = None
        # The version that was published last, as far as this process knows.
        self._known: KnownVersion | None = None
        # All of that version, if this process has published it whole.
        self._whole: Whole | None = None

    def reopen(self, accumulator: ConditionalAccumulatorBase[Any]) -> None:
        """Notes a handle on the gradients, perhaps in place of one whose accumulator the server has lost."""
        before, self._accumulator = self._committer, accumulator
        gradients, accumulator._taker.is_updated = accumulator._keys, True
        # The same partitions, so that a part of the weights lies where that part of the gradients does.
        self._keys = ParameterKeys(gradients.name, gradients.partitions)
        self._committer = Committer(accumulator._taker, self._publisher, self._snapshot, self._brings)
        if before is not None:
            self._committer.continue_from(before)

    @property
    def _commits(self) -> Committer:
        assert self._committer is not None
        return self._committer

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
        record = begin_updates(
            handle._transport,
            handle._reader,
            self._keys,
            encoding=handle._encoding,
            optimizer=self._optimizer,
            publisher=self._publisher,
            step=0 if given is not None else handle.step() or 0,
            schema=self._schema,
            # Leaves whose gradients are rows.
            tables=tuple([n for n, leaf in enumerate(self._accumulator._spec.leaves) if leaf.is_sparse]),
            # A program, or another optimizer, may have published it.
            whole=lambda: self._begun_with(*(given or read_exact(handle)[2:])),
        )
        self._learn(record)

    def _begun_with(self, tree: Any, state: Any) -> Whole:
        """Returns weights to begin with, and the state of an optimizer with the same slots, or a new one."""
        self._whole = whole = self._fitting(tree, state)
        return whole

    def _fitting(self, tree: Any, state: Any) -> Whole:
        schema, optimizer = self._schema, self._optimizer
        weights = schema.arrays_of(tree, "parameters")
        if isinstance(state, dict) and state.keys() == {*optimizer.slots, UPDATES}:
            kept = {slot: schema.arrays_of(state[slot], f"slot {slot} of the state") for slot in optimizer.slots}
            return Whole(weights, kept, validation.integer(state[UPDATES], "updates of the state", low=0))
        if state is not None:
            logger.warning(
                "%s: the state that was published does not fit %s, so the optimizer begins with a new state",
                self._keys.name,
                optimizer.name,
                extra={"accumulator": self._keys.name},
            )
        new = {slot: [optimizer.initial(slot, values) for values in weights] for slot in optimizer.slots}
        return Whole(weights, new, 0)

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
            leaves = self._commits.gather(known, self._record, check)
            whole = Whole(leaves.pop(known.model.base), leaves, known.updates)
        if is_lost:
            build = known.model.schema.structure.build
            tree, slots = build(whole.weights), {slot: build(of) for slot, of in whole.state.items()}
            state = pack_state(handle, tree, {UPDATES: np.array(known.updates), **slots})
            handle._restore(tree, known.step, state=state, kept=self.kept)
            return False
        record = publish_whole(
            handle._transport,
            handle._reader,
            # That of the record has no schedule.
            replace(known.model, optimizer=self._optimizer),
            step=known.step,
            whole=whole,
            publisher=self._publisher,
        )
        self._learn(record)
        return True

    def _learn(self, record: UpdateRecord) -> None:
        """Notes the version that was published whole: if another one was known, with the same values."""
        known = KnownVersion.of(record)
        if self._known is not None:
            self._commits.rename(self._known, known)
        self._record, self._known, self.kept = record, known, record.record.kept

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
        with handle._telemetry.observe("take", handle._worker):
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
        assert self._record is not None
        # If somebody else has used the round, nothing is known of it.
        self._commits.metrics = Means()
        if self._record.record.step != self.step:
            self.refresh()
            return True
        reply = self._commits.commit(found, self._record, self._optimizer, finished=finished)
        if reply is None:
            return False
        # From now on, this is what a server loses that loses its data.
        self._whole, self._known = None, self._version.following(self._commits.version, self._commits.updates)
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
        found = parse_update_record(self._parameters._transport, self._keys, reply, self._record)
        if found is None:
            raise refused(OF_PARAMETERS["missing"], self._keys)
        if found.record.step < self.step:
            # What this process has is newer, and must not be forgotten.
            raise DataLossError(
                f"parameters {shown(self._keys.name)}: the server has lost step {self.step}, and is at step "
                f"{found.record.step}"
            )
        self._whole = None
        self._record, self._known, self.kept = found, KnownVersion.of(found), found.record.kept
