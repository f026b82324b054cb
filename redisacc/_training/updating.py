"""What a chief does with an optimiser: it orders and commits updates, and handles no dense arrays."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from redisacc._data import validation
from redisacc._format.keys import ParameterKeys
from redisacc._format.leaves import Schema
from redisacc._format.parameter_record import UPDATES
from redisacc._handles.base import ConditionalAccumulatorBase, host_and_process
from redisacc._handles.options import Mean
from redisacc._handles.parameters import Parameters
from redisacc._handles.updating import Rounds
from redisacc._protocol.parameters.publisher import schema_of
from redisacc._protocol.rounds.taker import GrantedRound
from redisacc._protocol.scripts import OF_PARAMETERS, refused
from redisacc._protocol.updates.gathering import KnownVersion
from redisacc._protocol.updates.model import check_leaves
from redisacc._protocol.updates.opening import Whole, begin_updates, publish_whole
from redisacc._protocol.updates.record import UpdateRecord, read_update_record
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError
from redisacc.optim import Optimizer

logger = logging.getLogger("redisacc")


def check_optimizer(optimizer: object, parameters: object, *, state: object, mean: Mean | None) -> None:
    """Checks what a chief with an optimiser cannot have.

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
    """Makes updates of the rounds of a training.

    Args:
        parameters: the handle on its parameters.
        accumulator: the handle on its gradients.
        optimizer: the optimiser.
    """

    def __init__(
        self, parameters: Parameters, accumulator: ConditionalAccumulatorBase[Any], optimizer: Optimizer
    ) -> None:
        self._parameters = parameters
        self._rounds = Rounds(accumulator)
        self._optimizer = optimizer
        self._publisher = f"chief {host_and_process(os.getpid())}"
        gradients = self._rounds.keys
        # The same partitions, so that a part of the weights lies where that part of the gradients does.
        self._keys = ParameterKeys(gradients.name, gradients.partitions)
        self._committer = self._rounds.committer(self._publisher)
        self._record: UpdateRecord | None = None
        # The version that was published last, as far as this process knows.
        self._known: KnownVersion | None = None

    @property
    def step(self) -> int:
        """The step of the version that the next update begins with."""
        assert self._known is not None
        return self._known.step

    def begin(self, parameters: Any, step: int, whole: Callable[[], tuple[Any, Any]]) -> None:
        """Makes sure that the published version can be updated.

        Args:
            parameters: the parameters that the chief was given.
            step: the step that is published; 0 if none is.
            whole: returns the tree to begin with if what is published cannot be updated as it is, or nothing is; and
                the state that was published with it, or None.
        """
        schema, _ = schema_of(parameters, "parameters")
        handle = self._parameters
        record = begin_updates(
            handle._transport,
            handle._reader,
            self._keys,
            encoding=handle._encoding,
            optimizer=self._optimizer,
            publisher=self._publisher,
            step=step,
            schema=schema,
            tables=self._rounds.tables,
            whole=lambda: self._whole(schema, *whole()),
        )
        self._learn(record)

    def _whole(self, schema: Schema, tree: Any, state: Any) -> Whole:
        """Returns weights to begin with, and the state of an optimiser with the same slots, or a new one."""
        weights, optimizer = schema.arrays_of(tree, "parameters"), self._optimizer
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

    def reopened(self, accumulator: ConditionalAccumulatorBase[Any]) -> Updating:
        """Returns the same for another accumulator, in place of one that the server has lost."""
        other = Updating(self._parameters, accumulator, self._optimizer)
        other._record, other._known = self._record, self._known
        other._committer.continue_from(self._committer)
        return other

    @property
    def optimizer(self) -> Optimizer:
        """The optimiser."""
        return self._optimizer

    @property
    def metrics(self) -> dict[str, float]:
        """The means of the metrics of the last round that was used."""
        return self._committer.metrics

    @property
    def like(self) -> Any:
        """A tree with the shapes and dtypes of the parameters, which takes no memory."""
        assert self._known is not None
        schema = self._known.model.schema
        return schema.structure.build([np.broadcast_to(leaf.given.type(0), leaf.shape) for leaf in schema.leaves])

    def gathered(self, check: Callable[[], object]) -> tuple[Any, Any]:
        """Returns the parameters and the state of the version that the server has lost.

        Blocks until they are there: from this process, from the nodes, and from reducers.

        Args:
            check: raises an error if this process is no longer the chief.

        Raises:
            DataLossError: nobody has some of the parts.
        """
        known = self._known
        assert known is not None
        leaves = self._committer.gather(known, self._record, check)
        build = known.model.schema.structure.build
        weights = build(leaves.pop(known.model.base))
        return weights, {UPDATES: np.array(known.updates), **{slot: build(of) for slot, of in leaves.items()}}

    def recover(self) -> GrantedRound | None:
        """Returns a round that was granted and not used, None if there is none."""
        return self._rounds.recover()

    def grant(self, **options: Any) -> GrantedRound:
        """Blocks until a round is granted. The arguments are those of ``Rounds.grant``."""
        return self._rounds.grant(**options)

    def discard(self, found: GrantedRound) -> None:
        """Removes a round that has been used."""
        self._committer.discard(found)

    def commit(self, found: GrantedRound, *, finished: bool) -> bool:
        """Updates the parameters with a round. Returns False if somebody else has published a version.

        May be called again after an error.

        Args:
            found: the round.
            finished: whether the new version is the last one.
        """
        before = self._record
        assert before is not None
        assert self._known is not None
        # If somebody else has used the round, nothing is known of it.
        self._committer.metrics = {}
        if before.record.step == found.granted.global_step == self._known.step:
            if not self._committer.commit(found, before, self._optimizer, finished=finished):
                return False
            # From now on, this is what a server loses that loses its data.
            self._known = self._known.following(self._committer.version)
        self.refresh()
        return bool(self.step == found.granted.global_step + 1)

    def refresh(self) -> None:
        """Reads the version that is published.

        Raises:
            NotFoundError: there is none.
        """
        found = read_update_record(self._parameters._transport, self._keys, self._record)
        if found is None:
            raise refused(OF_PARAMETERS["missing"], self._keys)
        self._record, self._known = found, KnownVersion.of(found)

    def publish_again(self, check: Callable[[], object]) -> None:
        """Publishes the version again whose parts the server has lost. Blocks until they are gathered.

        Args:
            check: raises an error if this process is no longer the chief.

        Raises:
            DataLossError: nobody has some of the parts.
        """
        known = self._known
        assert known is not None
        leaves = self._committer.gather(known, self._record, check)
        weights = leaves.pop(known.model.base)
        record = publish_whole(
            self._parameters._transport,
            self._parameters._reader,
            known.model,
            step=known.step,
            whole=Whole(weights, leaves, known.updates),
            publisher=self._publisher,
        )
        self._learn(record)

    def _learn(self, record: UpdateRecord) -> None:
        """Notes the version that was published whole: if another one was known, with the same values."""
        known = KnownVersion.of(record)
        if self._known is not None:
            self._committer.rename(self._known, known)
        self._record, self._known = record, known
