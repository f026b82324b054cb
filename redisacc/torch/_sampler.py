"""The order in which the processes of a run see their data: a function of the step and the worker's number."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch.utils.data

from redisacc._arrays import validation
from redisacc._text import shown
from redisacc.data import Batches
from redisacc.errors import InvalidArgumentError

logger = logging.getLogger("redisacc")


# How many steps a loader may be ahead when it begins a pass.
AHEAD = 2


class Progress:
    """Where a process is in its run, and the schedulers that it keeps there.

    Attributes:
        at: the step of the weights in the model; -1: they are not the run's yet.
        jumped: how many steps this process has left out so far, because others made them without it.
        finished: whether the run is finished.
        is_late: whether this process has made steps.
    """

    def __init__(self) -> None:
        self.at, self.jumped, self.finished, self.is_late = -1, 0, False, False
        self._schedulers: list[Any] = []
        # Whether it is known that schedulers, if there are any, are at the step of the run.
        self._is_checked = False

    @property
    def step(self) -> int:
        """The step whose gradient this process computes next."""
        return max(self.at, 0)

    def follow(self, before: int) -> None:
        """Brings everything from the step before to the one that is reached."""
        self.is_late = self.is_late or 0 <= before < self.at
        # A scheduler that was made before the training had begun is at step 0.
        missed = self.at - (0 if before < 0 else before + 1)
        if not self.finished:
            self.jumped += missed
            for scheduler in self._schedulers:
                for _ in range(missed):
                    scheduler.step()

    def check(self, name: str, groups: Iterable[Mapping[str, Any]]) -> None:
        """Warns before the first step of this process if it is not the run's, and a scheduler probably begins at 0."""
        # Schedulers note the rate with which they begin.
        if not self._is_checked and self.at > 0 and any("initial_lr" in group for group in groups):
            logger.warning(
                "%s: the run is at step %d, and the optimizer has a scheduler. Unless you have brought it there, this "
                "process sends the learning rate of an earlier step: call optimizer.resume(scheduler)",
                name,
                self.at,
            )
        self._is_checked = True

    def keep(self, scheduler: Any, steps: int | None) -> None:
        """Steps a scheduler as often as given, or brings it to the step of the run, and keeps it there."""
        self._is_checked = True
        for _ in range(self.step if steps is None else steps):
            scheduler.step()
        if steps is None:
            self._schedulers.append(scheduler)


class Sampler(torch.utils.data.Sampler[int]):
    """Yields the indices of this process's examples, for a DataLoader: ``Optimizer.sampler`` returns one.

    ``redisacc.data.Batches`` chooses the examples of a step, ``batch_size`` for each worker. So each example is used
    once per epoch, all batches are full, and all workers have the same number of batches.

    Pass number k, from 0, yields the rest of epoch k, which is empty if the run had finished that epoch before this
    process restarted. So a loop over epochs continues where the run is.

    Args:
        data: the examples.
        batch_size: how many of them this worker uses in each step.
        number: the number of the worker.
        workers: the number of all workers.
        shuffle: whether each epoch has its own order.
        seed: determines the orders, together with the number of the epoch.
        progress: where this process is. If it has made steps, epoch 0 is hardly the one that comes next.

    Raises:
        InvalidArgumentError: an argument is invalid, or this worker has no share.
    """

    def __init__(
        self,
        data: Sized,
        batch_size: int,
        *,
        number: int,
        workers: int,
        shuffle: bool,
        seed: int,
        progress: Progress,
    ) -> None:
        if not len(data):
            raise InvalidArgumentError(f"data must have at least one example, unlike {shown(type(data).__name__)} here")
        if number >= workers:
            raise InvalidArgumentError(
                f"this is worker {number}, and the data is shared among {workers} workers, 0 to {workers - 1}: start "
                "all processes with more workers="
            )
        self._batch_size = validation.integer(batch_size, "batch_size", low=1)
        self._batches = Batches(len(data), self._batch_size * workers, seed=seed, shuffle=shuffle)
        self._number = number
        self._workers = workers
        self._progress = progress
        self._is_late = progress.is_late
        self._epoch = 0
        # The step behind the last pass that was yielded to its end.
        self._yielded = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}(epoch={self._epoch}, batch_size={self._batch_size})"

    @property
    def epoch(self) -> int:
        """The number of the epoch that the next pass yields."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the epoch that the next pass yields. Without it, passes count from 0."""
        self._epoch = validation.integer(epoch, "epoch", low=0)
        self._is_late = False

    def steps(self, epoch: int) -> range:
        """Returns the steps of an epoch."""
        return range(self._batches.steps(epoch), self._batches.steps(epoch + 1))

    def __len__(self) -> int:
        """Returns how many examples a whole pass over the next epoch has."""
        return len(self.steps(self._epoch)) * self._batch_size

    def __iter__(self) -> Iterator[int]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self._pass(self.steps(epoch))

    def _pass(self, steps: range) -> Iterator[int]:
        now = self._progress
        at, jumped = now.step, now.jumped
        # A loader that reads ahead begins a pass before the last step of the one before is made.
        step = max(at, steps.start)
        if self._is_late and at >= steps.stop:
            logger.warning(
                "a pass over a sampler yields nothing: it is one over an epoch that ended before step %d. Create the "
                "sampler once, before the loop over epochs, or call its set_epoch()",
                at,
            )
        if at < self._yielded - AHEAD:
            raise self._out_of_step(self._yielded, at)
        while True:
            # Others have made steps without this process. What a DataLoader has read ahead is for them.
            step, jumped = step + now.jumped - jumped, now.jumped
            if now.step > step and not now.finished:
                raise self._out_of_step(step, now.step)
            if step >= steps.stop or now.finished:
                self._yielded = 0 if now.finished else step
                return
            yield from self._batches.indices(step, self._number, self._workers).tolist()
            step += 1

    def _out_of_step(self, yielded: int, made: int) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"the sampler has given the examples of {yielded} steps, but step {made} is reached: the sampler's "
            f"batch_size is {self._batch_size}, which has to be what each step() uses in this process, so the "
            "DataLoader's batch_size times the batches whose gradients are accumulated. For a batch that is left out, "
            "call the optimizer's skip()"
        )
