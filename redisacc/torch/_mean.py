"""Steps that each process makes itself, with torch's own optimizer and the mean gradient of all processes.

What the run publishes are mean gradients (``redisacc.optim``'s ``MeanGradient``). Every now and then, the
process that leads publishes a snapshot under a name of its own: weights and buffers, and the state of the optimizer.
Mean gradients since the last one are kept, so a process that starts, or that has missed some, reads the snapshot and
makes the steps that follow it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from redisacc._arrays.trees import flatten_arrays
from redisacc._arrays.validation import Array, integer
from redisacc._checkpoints.file import Checkpoint
from redisacc._format.buffered import PartMissingError
from redisacc._format.keys import SNAPSHOT
from redisacc._format.parameter_record import TRAINING
from redisacc._handles.parameters import Parameters
from redisacc._protocol.parameters.reader import RETIRED, ParameterReader
from redisacc._protocol.waiting.wait import until
from redisacc._training.checkpointer import Checkpointer, training_of
from redisacc._training.training import Training
from redisacc.errors import CorruptDataError, InvalidArgumentError, NotFoundError, RedisAccError
from redisacc.optim.base import positive
from redisacc.torch._groups import OPTIONS, Groups, digest_of
from redisacc.torch._state import as_array, check, plain, state_in_tree, state_tree, write

logger = logging.getLogger("redisacc")

# After so many steps a snapshot is published, and before mean gradients have so many bytes, unless a snapshot has even
# more: this part of them.
EVERY, LOG_BYTES, SHARE = 100, 64 * 2**20, 0.25

# How many looks, one each second, a process that does not lead leaves a lost snapshot to the one that does.
LOOKS = 3

# How often a process looks for a snapshot that is not there yet, in seconds.
LOOK_EVERY = 0.1

# What is done, for log records.
LOOK = "to look for a snapshot"


class MeanSteps:
    """The steps of a run in this process.

    Args:
        optimizer: torch's optimizer.
        model: the model.
        tensors: the parameters of the optimizer, by name.
        every: after how many steps a snapshot is published.
        clip_norm: the largest norm of mean gradients; None means they are not clipped.

    Raises:
        InvalidArgumentError: an argument is invalid, or the optimizer draws random numbers.

    Attributes:
        step: how many steps the weights have seen; -1: they are not the run's yet.
        clip_norm: the largest norm of the next mean gradient; 0: it is not clipped.
        every: after how many steps a snapshot is published.
        is_stepping: whether this is making a step, so that the optimizer may move the weights.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        tensors: Mapping[str, torch.Tensor],
        every: int,
        clip_norm: float | None,
    ) -> None:
        if any(
            isinstance(each, torch.Generator)
            for of in (vars(optimizer), *optimizer.param_groups)
            for each in of.values()
        ):
            raise InvalidArgumentError(
                f"optimizer must draw no random numbers with fused=False, unlike {type(optimizer).__name__}, which has "
                "a torch.Generator: each process would make another step"
            )
        self._clip_norm = 0.0 if clip_norm is None else positive(clip_norm, "clip_norm")
        self._optimizer, self._model, self._tensors = optimizer, model, tensors
        self.every = integer(every, "snapshot_every", low=1)
        self._groups = Groups(optimizer.param_groups, len(tensors))
        self.step = -1
        self.clip_norm = self._clip_norm
        # The places of the numbers that the optimizer itself changes.
        self._moved: set[int] = set()
        self.is_stepping = self._leads = self._differs = False
        # The digest of the weights with which this process has computed its gradient, if it was sent.
        self._digest: Array | None = None
        # How many looks in a row have found no usable snapshot.
        self._lacking = 0
        self._bytes = sum([each.nbytes for each in tensors.values()])
        self._snapshot_bytes = 0
        # The training that the last snapshot is of; and parameters that never change, as it has them.
        self._incarnation = ""
        # The value that the program keeps with the weights of this step, as text.
        self._kept = ""
        self._frozen: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self._training: Training
        self._snapshots: Parameters
        self._checkpointer: Checkpointer | None = None
        # The checkpoint that the leader in this process has read.
        self._file: Checkpoint | None = None

    def open(self, training: Training, redis: object) -> None:
        """Notes the run, and opens its snapshots, which are what its checkpoints hold."""
        self._training, options = training, training._options
        others = training.meanwhile

        def meanwhile() -> None:
            others()
            self.meanwhile()

        training.meanwhile = meanwhile
        name = training.shared_name + SNAPSHOT
        self._snapshots = training._patience.call(
            lambda: Parameters(name, redis=redis, partitions="auto"), LOOK, in_steps=True
        )
        if (wanted := options.checkpoint) is not None:
            transport = self._snapshots._transport.blocking
            self._checkpointer = Checkpointer(transport, training.shared_name, wanted)
            # Not the step of the first snapshot that this process publishes, which may be later than the first due one.
            self._checkpointer._last_step = 0
            if isinstance(wanted.every, int):
                self.every = min(self.every, wanted.every)
        training._options = replace(options, checkpoint=None, saved=self.saved)

    def saved(self) -> Checkpoint | None:
        """Returns what the run continues with if the server has nothing newer: mean gradients of 0 at a step.

        It is the step of the newest checkpoint, or of the snapshot that `redisacc restore` has published.
        """
        training, file, restored = self._training, self._newest(), self.restored()
        # Number 0 publishes it in a moment.
        self._file = file if training.number == 0 else None
        steps = [restored] if restored else []
        steps += [(file.step, file.kept)] if file else []
        if not steps:
            return None
        step, kept = max(steps)
        return Checkpoint(training.shared_name, step, self.gradients(), None, kept)

    def restored(self) -> tuple[int, str] | None:
        """Returns the step of what `redisacc restore` has published for a new run, and what is kept; or None."""
        if self._training._published.step() is not None:
            return None
        found = ParameterReader(self._snapshots._transport.blocking, self._snapshots._keys).latest(state=True)
        return (found[0].step, found[0].kept) if found is not None and not training_of(found[2]) else None

    def _newest(self) -> Checkpoint | None:
        """Returns the newest checkpoint."""
        if self._checkpointer is None:
            return None
        found = next(self._checkpointer.folder.valid(), None)
        if found is not None:
            if training_of(found.state) is None:
                raise InvalidArgumentError(
                    f"the checkpoint of step {found.step} was written with fused=True: give that, or a new folder"
                )
            check({**self._tensors, **self._others()}, found.parameters, found.name)
        return found

    def gradients(self) -> dict[str, Any]:
        """Returns the tree that a run begins with."""
        zeros = {name: np.zeros_like(as_array(each)) for name, each in self._tensors.items()}
        return {**zeros, OPTIONS: np.zeros(self._groups.size)}

    def options(self) -> Any:
        """Returns what is sent with the gradients of this process."""
        every = self._tensors.values()
        self._digest = None if self.step % self.every else digest_of(every)
        return self._groups.leaf([each.grad is not None for each in every], self.clip_norm, self._digest)

    # Steps

    def follow(self, step: int, mean: Any, *, finished: bool = False, keeps: bool = False) -> bool:
        """Makes the steps up to one.

        Args:
            step: the step.
            mean: its mean gradient.
            finished: whether it is the last one.
            keeps: whether it stays in the model.

        Returns:
            Whether the weights are now those of this step. If not, they are of a later one.

        Raises:
            InvalidArgumentError: processes disagree on the options of this step, which changes no weights.
        """
        self._leads = self._training.leads or (finished and (self._leads or self._training.number == 0))
        worker = self._training._worker
        assert worker is not None
        self._kept = (self._training._published if finished else worker._parameters)._reader.kept
        if self.step < 0 or not step - 1 <= self.step <= step:
            self._catch_up(step)
        if self.step < step:
            self._make(step, mean)
            if not keeps:
                self._forget_gradients()
            if self._differs:
                self._return_to_equal_weights()
        if self.step == step and self._leads:
            self._publish_if_due(finished=finished)
        return self.step == step

    def _return_to_equal_weights(self) -> None:
        self._differs = False
        logger.warning(
            "%s: at step %d, this process and another one had weights that differ: their processors or versions of "
            "torch round differently, or the optimizer draws random numbers. All processes continue with the weights "
            "of the one that leads",
            self._training.shared_name,
            self.step - 1,
        )
        self._load(self.step, self.step)

    def _catch_up(self, step: int) -> None:
        """Makes the steps before one, or loads a snapshot of a later one."""
        if not 0 <= self.step < step:
            self._load(step, -1)

        def replay() -> None:
            for number, mean in self._reader.log(self.step):
                if number == self.step + 1 < step:
                    self._replay(number, mean)

        while self.step < step - 1:
            try:
                self._training._patience.call(replay, "to read mean gradients", in_steps=True)
            except PartMissingError:
                self._load(step, self.step + 1)

    def _replay(self, step: int, mean: Any) -> None:
        try:
            self._make(step, mean)
        except InvalidArgumentError as error:
            logger.warning("%s: step %d has changed no weights: %s", self._training.shared_name, step - 1, error)
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        """The next backward pass must not add to them."""
        for each in self._tensors.values():
            each.grad = None

    def _make(self, step: int, mean: Any) -> None:
        """Makes a step of the optimizer with a mean gradient."""
        self.step, groups = step, self._groups
        digest, self._digest = self._digest, None
        how = groups.read(mean[OPTIONS], self.clip_norm)
        self.clip_norm = self._clip_norm
        if how is None:
            return
        self._differs = digest is not None and how.differs(digest)
        for has, (name, tensor) in zip(how.has, self._tensors.items(), strict=True):
            tensor.grad = torch.from_numpy(np.array(mean[name])).to(tensor.device) if has else None
        if how.clip_norm:
            torch.nn.utils.clip_grad_norm_(self._tensors.values(), how.clip_norm)
        own = groups.numbers()
        others = groups.differing(own, how.numbers)
        groups.set(others, how.numbers)
        self.is_stepping = True
        try:
            self._optimizer.step()
        finally:
            self.is_stepping = False
        self._moved.update(groups.differing(how.numbers, groups.numbers()))
        groups.set([place for place in others if place not in self._moved], own)

    # Snapshots

    @property
    def _reader(self) -> Any:
        worker = self._training._worker
        assert worker is not None
        return worker._parameters._reader

    def _publish_if_due(self, *, finished: bool) -> None:
        new = self.step - (self._training.snapshot or 0)
        is_large = new * self._bytes > max(LOG_BYTES, self._snapshot_bytes / SHARE)
        if finished:
            self._publish_now(self.step, finished=True)
            if self._checkpointer is not None:
                self._checkpointer.close()
        elif (new >= self.every or is_large) and (self._thread is None or not self._thread.is_alive()):
            arguments = self.step, *self._copied()
            self._thread = threading.Thread(target=self._publish, args=arguments, name="redisacc-snapshot", daemon=True)
            self._thread.start()

    def _publish_now(self, step: int, *, finished: bool = False) -> None:
        """Publishes the weights as a snapshot of a step, after one that is on its way."""
        self._wait()
        self._publish(step, *self._copied(), finished=finished)

    def reload(self) -> None:
        """Has the weights that worker 0 has now be those of the next step: it publishes them, and all load them."""
        if self._training.number == 0:
            self._publish_now(self.step + 1)
        self.step = -1

    def close(self) -> None:
        """Waits until a snapshot and a checkpoint that are on their way have been written."""
        self._wait()
        self._training.meanwhile = lambda: None
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def meanwhile(self) -> None:
        """Publishes a snapshot if the server has lost the last one, or mean gradients after it.

        The process that leads does it at once. It may be a new one, without weights, so others do it some looks later.
        """
        if self.step < 0:
            return
        record, last = self._reader.poll(RETIRED), self._last()
        if record is None or record.step != self.step:
            return
        log = record.manifest(self._reader.schema()).log
        is_lacking = last is None or last < record.step - len(log) - 1
        self._lacking = self._lacking + 1 if is_lacking else 0
        if is_lacking and (self._training.leads or self._lacking > LOOKS):
            self._publish_now(self.step)

    def _last(self) -> int | None:
        """Returns the step of the last snapshot; None if this run has none."""
        with suppress(NotFoundError):
            if self._incarnation == self._reader.incarnation:
                return self._snapshots.step()
        return None

    def _others(self) -> dict[str, torch.Tensor]:
        """Returns the frozen parameters and the buffers, as far as they are saved with the model."""
        every = {plain(name): each for name, each in self._model.state_dict(keep_vars=True).items()}
        trained = {*self._tensors.values()}
        return {name: each for name, each in every.items() if isinstance(each, torch.Tensor) and each not in trained}

    def _copied(self) -> tuple[dict[str, Any], Any, str, dict[str, int]]:
        """Returns a snapshot of this moment: weights and buffers; the state; what is kept; and what never changes."""
        others = self._others()
        tree = {name: as_array(each).copy() for name, each in {**self._tensors, **others}.items()}
        frozen = {
            name: each._version for name, each in others.items() if each.ndim and isinstance(each, torch.nn.Parameter)
        }
        state = {
            "optimizer": state_tree(self._optimizer),
            "numbers": np.array(self._groups.numbers()),
            "moved": np.array(sorted(self._moved), np.int64),
            TRAINING: self._marker(),
        }
        self._snapshot_bytes = self._bytes + sum([each.nbytes for each in flatten_arrays(state, "state")[1]])
        return tree, state, self._kept, frozen

    def _marker(self) -> Array:
        return np.frombuffer(self._reader.incarnation.encode(), np.uint8)

    def _publish(
        self, step: int, tree: dict[str, Any], state: Any, kept: str, frozen: dict[str, int], *, finished: bool = False
    ) -> None:
        snapshots, incarnation = self._snapshots, self._reader.incarnation
        try:
            last = self._last()
            if last is None:
                # What is there is another training's, which had this name.
                snapshots._forget()
                snapshots.delete()
                snapshots._forget()
                self._frozen = {}
            if last is None or last < step:
                same: dict[str, Any] = {
                    name: [] for name, version in frozen.items() if self._frozen.get(name) == version
                }
                snapshots._publish(tree, step, same, state, False, kept=kept)
            self._incarnation, self._frozen = incarnation, frozen
            self._training.snapshot = max(step, last or 0)
            if self._checkpointer is not None:
                self._checkpointer.note(step, last=finished)
        except RedisAccError as error:
            logger.warning(
                "%s: cannot publish a snapshot of step %d, so mean gradients are kept until the next one: %s",
                self._training.shared_name,
                step,
                error,
            )

    def _load(self, step: int, least: int) -> None:
        """Loads the last snapshot. Blocks until there is one.

        Args:
            step: the step of the run. If it has just begun, number 0 publishes the first snapshot.
            least: the lowest step that it may have.
        """
        training, worker = self._training, self._training._worker
        assert worker is not None
        file, self._file = self._file, None
        if training.number == 0 and (file is None or file.step != step):
            file = self._newest()
        if file is not None and self._checkpointer is not None:
            self._checkpointer._last_step = file.step

        def look() -> tuple[int, Any, Any] | None:
            self._snapshots._forget()
            found = self._snapshots._reader.latest(state=True)
            if found is not None and found[0].step >= least:
                state = _loaded(found[2], self._snapshots.shared_name)
                if training_of(found[2]) in ("", self._reader.incarnation):
                    return found[0].step, found[1], state
            if file is not None and file.step == step:
                self._publish(step, file.parameters, {**file.state, TRAINING: self._marker()}, file.kept, {})
            elif training.number == 0 and step == 0:
                self.step = 0
                self._publish_now(0)
            elif self.step == step and (self._leads or training.leads):
                # This process has what all wait for.
                self._publish_now(self.step)
            return None

        found = until(
            self._snapshots._transport.waits,
            lambda: training._patience.call(look, LOOK, in_steps=True),
            every=LOOK_EVERY,
            check=worker._check_lease,
            describe=lambda: (
                f"{training.shared_name}: still waiting for "
                + (
                    "worker 0, with whose weights the run begins"
                    if step == 0
                    else f"a snapshot from a process that has the weights of step {step}. If all of these were killed "
                    "after the server had lost its data, the weights are lost: end this, call `redisacc rm "
                    f"{training.shared_name}`, and begin again"
                )
            ),
            name=training.shared_name,
        )
        assert found is not None
        step, tree, state = found
        write({**self._tensors, **self._others()}, tree, training.shared_name)
        self._set_state(state)
        self._snapshots._forget()
        self.step, self._incarnation = step, self._reader.incarnation
        training.snapshot = step

    def _set_state(self, state: Any) -> None:
        """Gives the optimizer the state of a snapshot. Its groups stay as the program has set them."""
        optimizer, groups, own = self._optimizer, self._optimizer.param_groups, self._optimizer.state
        optimizer.load_state_dict({"state": state["optimizer"], "param_groups": optimizer.state_dict()["param_groups"]})
        optimizer.param_groups = groups
        own.clear()
        own.update(optimizer.state)
        optimizer.state = own
        self._moved = set(state["moved"])
        self._groups.set(self._moved, state["numbers"])
        every = [each for group in groups for each in group["params"]]
        for number, saved in state["optimizer"].items():
            # Torch converts them to the dtype of the parameter.
            of = optimizer.state[every[number]]
            of.update({key: each.to(of[key].device) for key, each in saved.items() if isinstance(each, torch.Tensor)})


def _loaded(state: Any, name: str) -> Any:
    """Returns the state in a snapshot, which any client may have written."""
    try:
        return {
            "optimizer": state_in_tree(state["optimizer"]),
            "numbers": state["numbers"].tolist(),
            "moved": state["moved"].tolist(),
        }
    except Exception as error:
        raise CorruptDataError(f"parameters {name}: their state is none of an optimizer of torch: {error}") from error
