"""The order in which the processes of a training see their data: a function of the step and the worker's number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import NamedTuple

import numpy as np
import torch.utils.data

from redisacc._data import validation
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError


class Progress(NamedTuple):
    """Where a process is.

    Attributes:
        step: the step whose gradient it computes next.
        jumped: how many steps it has left out so far, because others made them without it.
        finished: whether the training is finished.
    """

    step: int
    jumped: int
    finished: bool


class Sampler(torch.utils.data.Sampler[int]):
    """Yields the indices of this process's examples, for a DataLoader: ``Optimizer.sampler`` returns one.

    The data is one endless sequence: all examples in the order of epoch 0, then all in that of epoch 1, and so on.
    Step s uses the next ``batch_size`` examples for each worker. So each example is used once in an epoch, all batches
    are full, and all workers have as many. The last batch of an epoch may have the first examples of the next one.

    Pass number k, from 0, yields what is left of epoch k: nothing if the training has passed it before this process
    was started again. So a loop over epochs continues where the training is.

    Args:
        size: the number of examples.
        batch_size: how many of them this worker uses in each step.
        number: the number of the worker.
        workers: the number of all workers.
        shuffle: whether each epoch has an order of its own.
        seed: what the orders depend on, besides the number of the epoch.
        progress: returns where this process is.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        number: int,
        workers: int,
        shuffle: bool,
        seed: int,
        progress: Callable[[], Progress],
    ) -> None:
        self._size = size
        self._batch_size = batch_size
        self._number = number
        self._all = batch_size * workers
        self._shuffle = shuffle
        self._seed = seed
        self._progress = progress
        self._epoch = 0
        self._order: tuple[int, np.ndarray] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(epoch={self._epoch}, batch_size={self._batch_size})"

    @property
    def epoch(self) -> int:
        """The number of the epoch that the next pass yields."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the epoch that the next pass yields. Without it, passes count from 0."""
        self._epoch = validation.integer(epoch, "epoch", low=0)

    def steps(self, epoch: int) -> range:
        """Returns the steps of an epoch."""
        return range(-(-epoch * self._size // self._all), -(-(epoch + 1) * self._size // self._all))

    def __len__(self) -> int:
        """Returns how many examples a whole pass over the next epoch has."""
        return len(self.steps(self._epoch)) * self._batch_size

    def __iter__(self) -> Iterator[int]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self._pass(self.steps(epoch).stop)

    def _pass(self, stop: int) -> Iterator[int]:
        step, jumped, _ = self._progress()
        while True:
            now = self._progress()
            # Others have made steps without this process. What a DataLoader has read ahead is for them.
            step, jumped = step + now.jumped - jumped, now.jumped
            if step >= stop or now.finished:
                return
            first = step * self._all + self._number * self._batch_size
            for place in range(first, first + self._batch_size):
                yield self._index(place)
            step += 1

    def _index(self, place: int) -> int:
        epoch, at = divmod(place, self._size)
        if not self._shuffle:
            return at
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(self._size)
        return int(self._order[1][at])


def sampler(
    data: Sized,
    batch_size: int,
    *,
    number: int,
    workers: int,
    shuffle: bool,
    seed: int,
    progress: Callable[[], Progress],
) -> Sampler:
    """Returns a sampler of some data.

    Raises:
        InvalidArgumentError: an argument is invalid, or this worker has no share.
    """
    size = len(data)
    if not size:
        raise InvalidArgumentError(f"data must have at least one example, unlike {shown(type(data).__name__)} here")
    if number >= workers:
        raise InvalidArgumentError(
            f"this is worker {number}, and the data is cut among {workers} workers, 0 to {workers - 1}. If there are "
            "spare ones, pass the number of all: sampler(…, workers=)"
        )
    return Sampler(
        size,
        validation.integer(batch_size, "batch_size", low=1),
        number=number,
        workers=workers,
        shuffle=validation.flag(shuffle, "shuffle"),
        seed=validation.integer(seed, "seed", low=0),
        progress=progress,
    )
